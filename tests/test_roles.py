"""Roles of their own: names, templates, limits, and what is refused."""

import json
from dataclasses import replace

import datasets
import pytest
from conftest import run_iteration, sentences
from test_trainer import PROMPTS, count_good, make_trainer

from cory.agent import make_agents
from cory.command import load
from cory.config import Config, CoryConfig, PPOConfig, RoleConfig
from cory.errors import UserError
from cory.roles import RolePrompts, fit_responses
from cory.task import Task
from cory.trainer import CoryTrainer

ROLES = [
    RoleConfig(name="writer", max_new_tokens=4),
    RoleConfig(name="critic", prompt="{writer} is it good? {prompt}", stop=["a"]),
    RoleConfig(prompt="{responses}|{response}|{critic}|{label}", max_new_tokens=9),
]
THREE = CoryConfig(num_agents=3, exchange_period=1)


@pytest.fixture
def three(config):
    """A chain of three roles on a dataset with labels, and what its reward function was told."""
    seen = []

    def reward(prompts, completions, role):
        seen.extend(role)
        return count_good(prompts, completions)

    rows = {
        "prompt": [" ".join(text.split()[:4]) for text in sentences(20)],
        "label": list(range(20)),
    }
    config = replace(config, cory=THREE, roles=ROLES)
    return CoryTrainer(
        config, make_agents(config), Task(datasets.Dataset.from_dict(rows), reward, PROMPTS)
    ), seen


def test_each_role_reads_writes_and_is_called_what_its_settings_say(three):
    trainer, seen = three
    iteration = trainer.iteration(1)
    writer, critic, last = iteration.rollouts
    assert [rollout.role for rollout in iteration.rollouts] == ["writer", "critic", "observer_2"]
    assert seen == ["writer"] * 8 + ["critic"] * 8 + ["observer_2"] * 8
    queries, labels = iteration.batch.columns["prompt"], iteration.batch.columns["label"]
    assert writer.prompts == queries
    assert critic.prompts == [
        f"{w} is it good? {q}" for w, q in zip(writer.completions, queries, strict=True)
    ]
    chains = zip(writer.completions, critic.completions, labels, strict=True)
    assert last.prompts == [f"{w}\n\n{c}|{c}|{c}|{label}" for w, c, label in chains]
    longest = [max(map(len, rollout.response_ids)) for rollout in iteration.rollouts]
    # The critic's is drawn, between 3 and 6.
    assert longest[0] == 4 and 3 <= longest[1] <= 6 and longest[2] == 9
    assert not any("a" in text for text in critic.completions) and any(
        "a" in text for text in last.completions
    )


def test_metrics_and_samples_have_the_names(three):
    trainer, _ = three
    folder = trainer.train().folder
    for name in ("metrics", "samples"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").open()]
        assert {row["role"] for row in rows} == {"writer", "critic", "observer_2"}


def test_samples_have_the_columns_that_prompts_name_and_no_solo_answers_of_later_fixed_roles(three):
    trainer, _ = three
    trainer.config = replace(trainer.config, cory=replace(THREE, exchange="none"))
    folder = trainer.train().folder
    before = json.loads((folder / "summary.json").read_text())["samples"]["before"]
    labels = trainer.task.dataset["label"][:4]
    assert set(before) == {"agent_1", "chain"}
    assert [sample["columns"] for sample in before["chain"]] == 3 * [
        {"label": label} for label in labels
    ]


def test_every_agent_answers_solo_where_roles_are_exchanged(three):
    trainer, _ = three
    before = json.loads((trainer.train().folder / "summary.json").read_text())["samples"]["before"]
    assert set(before) == {"agent_1", "agent_2", "agent_3", "chain"}


def test_unread_roles_read_their_own_prompts(three):
    """With counterfactual credit, the observers also answer without the earlier responses."""
    trainer, seen = three
    trainer.config.cory = replace(THREE, credit="counterfactual")
    prompts = []
    for agent in trainer.agents:
        respond = agent.respond
        agent.respond = lambda *args, respond=respond: prompts.append(args[0][0]) or respond(*args)
    iteration = trainer.iteration(0)
    query, label = iteration.batch.columns["prompt"][0], iteration.batch.columns["label"][0]
    assert prompts[3:] == [f" is it good? {query}", f"\n\n|||{label}"]
    assert seen[24:] == ["critic"] * 8 + ["observer_2"] * 8


def test_templates_know_every_earlier_role():
    prompts = RolePrompts(observer="{pioneer} {response} {responses} {prompt}")
    row = {"prompt": "q"}
    assert prompts.render(1, row, ["a"]) == "a a a q"
    assert prompts.render(2, row, ["a", "b"]) == "a b a\n\nb q"
    assert prompts.render(2, row) == "q"  # it answers the query alone
    assert prompts.reads(1) == [0, 0, 0] and prompts.reads(2) == [0, 1, 0, 1]
    own = RolePrompts(
        roles=(
            RoleConfig(name="a"),
            RoleConfig(prompt="{label}{x}"),
            RoleConfig(prompt="{a}{observer}"),
        )
    )
    assert own.render(2, row | {"label": 1}, ["{observer}", "two"]) == "{observer}two"
    assert own.columns() == ["label", "x"] and own.reads(1) == []


def test_without_settings_of_roles_nothing_changes(config, tmp_path):
    """Entries that set nothing give the bits of a run without them."""
    plain = make_trainer(config).train().folder
    listed = (
        make_trainer(replace(config, roles=[{}, {}], output=str(tmp_path / "listed")))
        .train()
        .folder
    )
    for name in ("metrics.jsonl", "samples.jsonl", "agent_1/model.safetensors"):
        assert (plain / name).read_bytes() == (listed / name).read_bytes()


def test_all_earlier_responses_are_shortened():
    def render(responses):
        return [" ".join(chain) for chain in zip(*responses, strict=True)]

    def encode(prompts):
        return [list(prompt) for prompt in prompts]

    chains = [["a" * 40, "a"], ["b" * 20, "b"]]
    assert fit_responses(render, chains, encode, context=40, max_new_tokens=8) == [
        "a" * 20 + " " + "b" * 10,
        "a b",
    ]


def test_a_response_is_shortened_where_a_chat_template_adds_tokens():
    def encode(prompts):
        return [[0] * 10 + list(prompt) for prompt in prompts]

    fitted = fit_responses(lambda responses: responses[0], [["a" * 30]], encode, 40, 5)
    assert fitted == ["a" * 15]


def test_a_role_that_reads_more_than_the_context_holds_is_refused(config):
    roles = [
        RoleConfig(max_new_tokens=40),
        RoleConfig(prompt="{response} {pioneer} {prompt}", max_new_tokens=20),
    ]
    with pytest.raises(
        UserError,
        match=r"^dataset: .*20 of 20 rows .*observer \+ up to 100 of .*max_new_tokens",
    ):
        make_trainer(replace(config, roles=roles))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([{}], "roles: expected an empty list, or an entry for each of 2 roles, got 1"),
        (
            [{"name": "a"}, {"name": "a"}],
            r"roles\.1\.name: ",
        ),
        (
            [{"name": "observer"}, {}],
            r"roles\.1\.name: ",
        ),
        (
            [{"name": "responses"}, {}],
            r"roles\.0\.name: ",
        ),
        (
            [{"name": "class"}, {}],
            r"roles\.0\.name: ",
        ),
        (
            [{"name": "the writer"}, {}],
            r"roles\.0\.name: ",
        ),
        (
            [{"max_new_tokens": 0}, {}],
            r"roles\.0\.max_new_tokens: ",
        ),
        ([{"stop": [""]}, {}], r"roles\.0\.stop: "),
        ([{"nam": "a"}, {}], r"roles\.0\.nam: "),
    ],
)
def test_bad_settings_of_roles_are_refused(config, roles, message):
    with pytest.raises(UserError, match=message):
        replace(config, roles=roles).check()


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            [{}, {"prompt": "{writer}"}],
            r"roles\[1\].prompt: expected placeholders among \['pioneer', 'prompt', .*writer",
        ),
        (
            [{"prompt": "{response}"}, {}],
            r"roles\[0\].prompt: expected placeholders among \['prompt'\], got {response}",
        ),
        (
            [{}, {"prompt": "{observer}"}],
            r"roles\[1\].prompt: expected placeholders .*, got {observer}",
        ),
        (
            [{}, {"prompt": "Answer."}],
            r"roles\[1\].prompt: expected placeholders among .*, got 'Answer.'",
        ),
        ([{}, {"prompt": "{prompt"}], r"roles\[1\].prompt: expected a template with placeholders"),
        ([{}, {"prompt": "{prompt.x}"}], r"roles\[1\].prompt: expected plain names in braces"),
    ],
)
def test_bad_templates_are_refused_before_training(config, roles, message):
    with pytest.raises(UserError, match=message):
        make_trainer(replace(config, roles=roles))


def test_a_role_is_not_called_as_a_column_is(config):
    rows = datasets.Dataset.from_dict({"prompt": ["a"] * 8, "label": [1] * 8})
    with pytest.raises(
        UserError, match=r"roles\[0\].name: expected another name than .*'label'.*, got 'label'"
    ):
        Task(rows, count_good, PROMPTS).with_roles([RoleConfig(name="label"), RoleConfig()])


def test_without_knowledge_transfer_a_role_has_no_prompt_of_its_own(config):
    config = replace(
        config, cory=CoryConfig(knowledge_transfer=False), roles=[{}, {"prompt": "{prompt}"}]
    )
    with pytest.raises(UserError, match=r"roles\.1\.prompt: "):
        config.check()


def test_a_single_agent_takes_the_first_role(config, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text("branches: 2\nroles: [{name: writer}, {name: critic, stop: [a]}]\n")
    two = load(Config, path, [])
    one = load(Config, path, [], single_agent=True)
    assert [role.name for role in two.roles] == ["writer", "critic"] and two.branches == 2
    assert [role.name for role in one.roles] == ["writer"] and one.branches == 1
    config = replace(config, cory=CoryConfig(num_agents=1), roles=one.roles)
    assert [record["role"] for record in run_iteration(make_trainer(config), 0)] == ["writer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"branches": 3},
            r"ppo.batch_size: expected a multiple of group_size \* branches = 1 \* 3 = 3, got 8",
        ),
        (
            {"branches": 4, "group_size": 4},
            r"expected a multiple of group_size \* branches = 4 \* 4 = 16, got 8",
        ),
        ({"branches": 2, "cory": THREE}, "branches: expected 1 in a chain of 3 roles, .*, got 2"),
        (
            {"branches": 2, "cory": CoryConfig(num_agents=1)},
            "branches: expected 1 in a chain of 1 roles, .*, got 2",
        ),
        (
            {"branches": 2, "cory": CoryConfig(knowledge_transfer=False)},
            "branches: expected 1 with cory.knowledge_transfer: false, got 2",
        ),
        (
            {"branches": 8},
            "branches: expected at most ppo.batch_size / 2 = 4, .* the pioneer has 2 responses, got 8",
        ),
        (
            {
                "branches": 4,
                "ppo": PPOConfig(batch_size=8, mini_batch_size=1, gradient_accumulation_steps=4),
            },
            "branches: expected at most ppo.batch_size / 4 = 2, .* the pioneer has 4 responses, got 4",
        ),
        ({"branches": 0}, "branches: "),
    ],
)
def test_branches_that_do_not_fit_are_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        replace(config, **changes).check()


def test_rendering_prompts_makes_no_settings(monkeypatch):
    """Pydantic would validate them for every prompt."""
    monkeypatch.setattr("cory.roles.RoleConfig", None)
    assert RolePrompts().render(1, {"prompt": "a"}, ["b"]) == "ab\na"
