"""Model cards: their Python code is executed against what a run has saved."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import sentences

from cory.agents import make_agents
from cory.config import CoryConfig, HubConfig, LoraConfig, ModelConfig, RoleConfig
from cory.models.load import load_policy
from cory.models.lora import add_adapter, save_policy
from cory.prompts import RolePrompts
from cory.push.card import agent_card
from cory.push.paths import without_paths
from cory.push.stage import stage
from cory.push.use import Source, how_to_use
from cory.task import Task
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbConfig

PROMPTS = RolePrompts('{{As is}}: "{prompt}"', 'Better than "{response}" for "{prompt}":\n')


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


def trained(config):
    config = replace(config, iterations=1, ppo=replace(config.ppo, learning_rate=0.05))
    agents = make_agents(config)
    task = Task.from_prompts(sentences(12), count_good, PROMPTS)
    return CoryTrainer(config, agents, task).train().folder, config, agents


def executed(card, replaced):
    """The names that the card's code defines, once its places are replaced by real ones."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    for place, real in replaced.items():
        assert place in code
        code = code.replace(place, str(real))
    names = {}
    exec(compile(code, "card", "exec"), names)
    return names


def same_model(loaded, agent):
    """Whether a model has the trained agent's logits."""
    ids = torch.tensor([[3, 7, 11, 19]])
    agent.activate()
    with torch.no_grad():
        expected = agent.policy.eval()(ids).logits
        return torch.allclose(loaded.eval()(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_code_of_an_agents_card_loads_it_and_asks_it_as_the_run_does(config, rank):
    run, config, agents = trained(replace(config, lora=LoraConfig(rank=rank)))
    for agent in agents:
        card = (run / agent.name / "README.md").read_text()
        names = executed(card, {f"path/to/{agent.name}": run / agent.name})
        assert same_model(names[agent.name], agent)
        assert not same_model(names[agent.name], agents[agents[0] is agent])
        row = {"prompt": sentences(12)[0]}
        assert names["query"] == row and isinstance(names["responses"][-1], str)
        assert names["pioneer_prompt"].format(**row) == PROMPTS.render(0, row)
        assert names["observer_prompt"].format(**row, response="it") == PROMPTS.render(
            1, row, ["it"]
        )
        assert ("is a local folder of the machine" in card) == (rank > 0)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_code_of_an_uploaded_card_runs_the_chain(config, tmp_path, rank):
    run, config, agents = trained(replace(config, lora=LoraConfig(rank=rank)))
    look = tmp_path / "look"
    look.mkdir()
    stage(look, run, config, HubConfig("user/pair"))
    card = (look / "README.md").read_text()
    places = {"user/pair": look}
    base = config.model.name
    if rank:
        places["path/to/gpt2"] = base
        assert "Adapters need that model" in card
    names = executed(card, places)
    assert all(same_model(names[agent.name], agent) for agent in agents)
    said = []
    heard = lambda model, tokenizer, prompt: said.append((model, prompt)) or " a good film"  # noqa: E731
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(code[code.index("responses = []") :], names | {"respond": heard})
    row = names["query"]
    assert said == [
        (names["agent_1"], PROMPTS.render(0, row)),
        (names["agent_2"], PROMPTS.render(1, row, [" a good film"])),
    ]
    again = tmp_path / "again"
    again.mkdir()
    (run / "curves.png").unlink()  # as where it could not be drawn
    stage(again, run, config, HubConfig("user/pair", base="org/base"))
    assert "curves.png" not in (again / "README.md").read_text()
    with_base = (again / "README.md").read_text()
    assert ('from_pretrained("org/base", dtype="float32")' in with_base) == (rank > 0)


def test_the_code_of_a_card_knows_the_roles(config):
    roles = [
        RoleConfig(name="writer", max_new_tokens=4),
        RoleConfig(name="critic", prompt="{writer} is it good? {prompt}", stop=["a"]),
        RoleConfig(prompt="{responses}|{response}|{prompt}"),
    ]
    own = replace(config, cory=CoryConfig(num_agents=3), roles=roles)
    fingerprint = {"prompts": {"pioneer": "{prompt}", "observer": "{prompt}{response}"}}
    samples = [{"query": "the film", "columns": {}, "prompt": "the film"}]
    card = agent_card("agent_1", own, 1, {}, fingerprint, samples)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    asked = []

    def respond(model, tokenizer, prompt, max_new_tokens=6, stop=()):
        asked.append((prompt, max_new_tokens, list(stop)))
        return f"text {len(asked)}"

    names = {"respond": respond, "agent_1": None, "tokenizer_1": None}
    exec(code[code.index("writer_prompt") :], names)
    assert asked == [
        ("the film", 4, []),
        ("text 1 is it good? the film", 6, ["a"]),
        ("text 1\n\ntext 2|text 2|the film", 6, []),
    ]


@pytest.mark.parametrize(
    ("agent", "reads", "asked"),
    [
        ("agent_1", True, ("the film", 4)),
        ("agent_2", True, ("good is it good? the film", 6)),
        ("agent_3", True, ("good\n\nyes|yes|the film", 6)),
        ("agent_2", False, ("the film", 6)),
    ],
)
def test_the_card_of_an_agent_of_one_role_asks_it_in_that_role(config, agent, reads, asked):
    chain = CoryConfig(num_agents=3, exchange="none", knowledge_transfer=reads)
    critic = "{writer} is it good? {prompt}" if reads else None
    last = "{responses}|{response}|{prompt}" if reads else None
    roles = [
        RoleConfig(name="writer", max_new_tokens=4),
        RoleConfig(name="critic", prompt=critic),
        RoleConfig(prompt=last),
    ]
    own = replace(config, cory=chain, roles=roles)
    fingerprint = {"prompts": {"pioneer": "{prompt}", "observer": "{prompt}{response}"}}
    samples = [
        {"role": role, "query": query, "columns": {}, "prompt": query, "completion": completion}
        for role, of_role in (("writer", ("good", "bad")), ("critic", ("yes", "no")))
        for query, completion in zip(("the film", "a plot"), of_role, strict=True)
    ]
    card = agent_card(agent, own, 1, {}, fingerprint, samples)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    said = []

    def respond(model, tokenizer, prompt, max_new_tokens=6):
        said.append((prompt, max_new_tokens))
        return "an answer"

    number = agent.removeprefix("agent_")
    names = {"respond": respond, agent: None, f"tokenizer_{number}": None}
    exec(code[code.rindex("\n\n\n") :], names)
    assert said == [asked] and names["responses"][-1] == "an answer"
    name = ("writer", "critic", "observer_2")[int(number) - 1]
    assert f"In the run the agent had this role alone: {name}." in card
    assert ("The code quotes what other agents" in card) == (reads and agent != "agent_1")


@pytest.mark.parametrize("reads", [True, False])
def test_a_card_says_that_others_are_read_where_they_are(config, reads):
    own = replace(config, cory=CoryConfig(knowledge_transfer=reads))
    assert (
        "an observer reads another agent's" in agent_card("agent_1", own, 1, {}, {}, [])
    ) == reads


def test_a_base_of_the_hub_is_named_with_its_commit(config):
    own = replace(config, model=ModelConfig("org/model", revision="main"), lora=LoraConfig(rank=2))
    made_of = {"models": {"model.name": {"name": "org/model", "identity": "commit:abc"}}}
    base = (
        'base = AutoModelForCausalLM.from_pretrained("org/model", revision="{}", dtype="float32")'
    )
    assert base.format("abc") in agent_card("agent_1", own, 1, {}, made_of, [])
    assert base.format("main") in agent_card("agent_1", own, 1, {}, {}, [])


@pytest.mark.parametrize("rank", [0, 2])
def test_the_code_trusts_a_models_own_code_where_the_run_did(config, rank):
    for trusts in (True, False):
        model = ModelConfig("org/model", trust_remote_code=trusts)
        own = replace(config, model=model, lora=LoraConfig(rank=rank))
        card = agent_card("agent_1", own, 1, {}, {}, [])
        loaded = re.findall(r"= Auto\w+\.from_pretrained\((.*)\)", card)
        assert len(loaded) == 2  # the model, or the adapter's base, and the tokenizer
        assert [", trust_remote_code=True" in code for code in loaded] == [trusts] * 2


def test_an_adapter_on_a_built_in_model_is_loaded_on_it(tmp_path):
    config = ImdbConfig(
        model=ModelConfig("tiny"), lora=LoraConfig(rank=2), cory=CoryConfig(num_agents=1)
    )
    base, tokenizer = load_policy(ModelConfig(config.resolve("tiny")))
    torch.manual_seed(0)
    policy = add_adapter(base, "agent_1", config.lora)
    save_policy(policy, tmp_path, "agent_1")
    tokenizer.save_pretrained(tmp_path)
    prompts = {"pioneer": "{prompt}", "observer": "{response} {prompt}"}
    samples = [{"query": "The film", "columns": {}, "prompt": "The film"}]
    card = agent_card("agent_1", config, 1, {}, {"prompts": prompts}, samples)
    names = executed(card, {"path/to/agent_1": tmp_path})
    loaded = names["agent_1"].get_input_embeddings().weight
    assert loaded.dtype == torch.float32 and torch.equal(loaded, base.get_input_embeddings().weight)
    assert "of the toy setting" in card and isinstance(names["responses"][-1], str)


def test_chat_turns_are_asked_as_turns(config, policy_folder, tmp_path):
    folder = shutil.copytree(policy_folder, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    config = replace(config, iterations=1, model=ModelConfig(str(folder)))
    prompts = [
        [{"role": "system", "content": "be good"}, {"role": "user", "content": t}]
        for t in sentences(12)
    ]
    rewards = lambda prompts, completions: [0.5] * len(completions)  # noqa: E731
    run = (
        CoryTrainer(config, make_agents(config), Task.from_prompts(prompts, rewards, PROMPTS))
        .train()
        .folder
    )
    card = (run / "agent_1/README.md").read_text()
    asked = []
    names = executed(card, {"path/to/agent_1": run / "agent_1"})
    tokenizer = names["tokenizer_1"]
    apply = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda turns, **options: (
        asked.append(turns) or apply(turns, **options)
    )
    names["respond"](names["agent_1"], tokenizer, "the film")
    assert asked == [[prompts[0][0], {"role": "user", "content": "the film"}]]


class Recorder:
    """Stands in for a tokenizer and its model, and keeps what they are asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, prompt, **options):
        self.asked.append(prompt)
        return {"input_ids": torch.zeros(1, 1)}

    def apply_chat_template(self, turns, *, add_generation_prompt, return_dict, **options):
        return self((turns, options))

    def generate(self, **options):
        return torch.zeros(1, 2)

    def decode(self, *ids, **options):
        return "a text"


@pytest.mark.parametrize("first", [False, True])
def test_each_agent_is_asked_by_its_own_chat_template(config, first):
    options = {"enable_thinking": False}
    models = [{"name": "a", "chat_template": first}, {"name": "b", "chat_template": options}]
    own = replace(config, agents=[{"model": model} for model in models])
    sources = {name: Source(f'"{name}"') for name in ("agent_1", "agent_2")}
    samples = [{"query": "the film", "columns": {}, "prompt": "the film"}]
    fingerprint = {"prompts": {"pioneer": "{prompt}", "observer": "{response}, {prompt}"}}
    (code,) = re.findall(
        r"```python\n(.*?)```", how_to_use(own, sources, fingerprint, samples), re.DOTALL
    )
    said = Recorder()
    names = dict.fromkeys(("agent_1", "tokenizer_1", "agent_2", "tokenizer_2"), said)
    exec(code[code.index("def respond") :], names)
    tensors = {"return_tensors": "pt"}
    turns = [[{"role": "user", "content": text}] for text in ("the film", "a text, the film")]
    assert said.asked == [
        (turns[0], tensors) if first else "the film",
        (turns[1], tensors | options),
    ]


def test_a_prompt_that_begins_with_a_slash_is_no_path():
    settings = {"roles": [{"prompt": "/no_think {prompt}"}], "model": {"name": "/models/gpt2"}}
    assert without_paths(settings) == {
        "roles": [{"prompt": "/no_think {prompt}"}],
        "model": {"name": "gpt2"},
    }
