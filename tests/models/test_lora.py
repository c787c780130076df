"""LoRA agents: one base, adapters that learn apart, and what starts from or is saved as an adapter."""

import json
import shutil
from dataclasses import replace

import peft
import pytest
import torch
from conftest import make_gpt2, run_iteration, sentences
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cory.agent import make_agents
from cory.config import Config, LoraConfig, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.answer import Answerer
from cory.identity import policy_models
from cory.models.load import attach, load_policy
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer

PROMPTS = RolePrompts(observer="{prompt}{response} {prompt}")


def lora(config: Config, **changes) -> Config:
    return replace(config, lora=LoraConfig(rank=4, **changes))


def make_trainer(config) -> CoryTrainer:
    def reward(prompts, completions):
        return [len(completion) / 20 for completion in completions]

    return CoryTrainer(
        config, make_agents(config), Task.from_prompts(sentences(16), reward, PROMPTS)
    )


def adapters(agent) -> dict[str, torch.Tensor]:
    policy = agent.learner.policy
    state = peft.get_peft_model_state_dict(policy, adapter_name=agent.name)
    return {name: value.clone() for name, value in state.items()}


def base(agent) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in agent.learner.policy.named_parameters() if "lora" not in n}


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_agents_share_one_base_and_train_their_adapters_alone(config):
    config = lora(config)
    config.cory.exchange_period = 3
    trainer = make_trainer(config)
    first, second = trainer.agents
    assert first.learner.policy is second.learner.policy and first.learner.reference is None
    frozen = base(first)
    for k in range(20):
        before = {agent.name: adapters(agent) for agent in trainer.agents}
        for agent in trainer.agents:
            other = second if agent is first else first
            learn = agent.learn

            def spy(*args, agent=agent, other=other, learn=learn):
                mine, theirs = adapters(agent), adapters(other)
                stats = learn(*args)
                assert not equal(adapters(agent), mine) and equal(adapters(other), theirs)
                return stats

            agent.learn = spy
        trainer.iteration(k)
        for agent in trainer.agents:
            del agent.learn
            assert not equal(adapters(agent), before[agent.name])
    assert equal(base(first), frozen)
    trained = {
        id(p) for a in trainer.agents for g in a.learner.optimizer.param_groups for p in g["params"]
    }
    sizes = [
        sum(len(g["params"]) for g in a.learner.optimizer.param_groups) for a in trainer.agents
    ]
    assert len(trained) == sum(sizes)  # no parameter in both optimizers
    assert all(
        size == len(adapters(a)) + 2 for size, a in zip(sizes, trainer.agents, strict=True)
    )  # and the value head


def test_shared_base_equals_separate_copies(config, tmp_path):
    """Agents with devices of their own have copies."""
    results = []
    for shared in (True, False):
        agents = [] if shared else [{"device": "cpu"}, {"device": "cpu"}]
        trainer = make_trainer(replace(lora(config), agents=agents))
        records = [record for k in range(4) for record in run_iteration(trainer, k)]
        results.append((records, [adapters(agent) for agent in trainer.agents]))
        assert (trainer.agents[0].learner.policy is trainer.agents[1].learner.policy) == shared
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == (
                pytest.approx(b[key], rel=1e-5) if isinstance(a[key], float) else b[key]
            )
    for a, b in zip(results[0][1], results[1][1], strict=True):
        for key in a:
            assert torch.allclose(a[key], b[key], rtol=1e-5, atol=1e-8)


def test_reference_is_the_base_with_adapters_off(config):
    trainer = make_trainer(lora(config))
    first = run_iteration(trainer, 0)
    assert [record["kl"] for record in first] == pytest.approx([0, 0], abs=1e-6)
    later = [run_iteration(trainer, k) for k in range(1, 4)][-1]
    assert all(record["kl"] > 1e-3 for record in later)


def test_saved_adapters_open_without_trl_and_answer_alike(config):
    trainer = make_trainer(lora(config))
    run = trainer.train()
    for agent in trainer.agents:
        folder = run.folder / agent.name
        base = AutoModelForCausalLM.from_pretrained(config.model.name)
        model = peft.PeftModel.from_pretrained(base, folder)
        ids = torch.tensor([agent.tokenizer(sentences(1)[0])["input_ids"]])
        agent.activate()
        with torch.no_grad():
            expected = agent.learner.policy.eval()(input_ids=ids).logits
            got = model.eval()(input_ids=ids).logits
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
        plain = AutoModelForCausalLM.from_pretrained(config.model.name)(input_ids=ids).logits
        assert not torch.allclose(got, plain, rtol=1e-3, atol=1e-3)


def test_a_saved_adapter_names_the_revision_of_its_base(config, tokenizer, tmp_path, monkeypatch):
    """A model of the Hub, whose branches have different weights, in the local cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache/models--user--name"
    (repository / "refs").mkdir(parents=True)
    for seed, (branch, commit) in enumerate({"main": "a" * 40, "v1": "b" * 40}.items()):
        torch.manual_seed(seed)
        make_gpt2(tokenizer).save_pretrained(repository / "snapshots" / commit)
        tokenizer.save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / branch).write_text(commit)

    config = lora(replace(config, model=ModelConfig("user/name", revision="v1")))
    trainer = make_trainer(config)
    run = trainer.train()

    ids = torch.randint(3, 300, (2, 7))
    with torch.no_grad():
        agent = trainer.agents[1]
        agent.learner.policy.set_adapter("agent_2")
        expected = agent.learner.policy.eval()(input_ids=ids).logits
        saved = str(run.folder / "agent_2")
        policy, _ = load_policy(ModelConfig(saved))
        with_peft = peft.AutoPeftModelForCausalLM.from_pretrained(saved)
        for loaded in (policy, with_peft):
            logits = loaded.eval()(input_ids=ids).logits
            assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)

    started_from = replace(config, model=ModelConfig(saved), output=None)
    base = policy_models(started_from)["model.name (base)"]
    assert base == {"name": "user/name", "identity": f"commit:{'b' * 40}"}


def test_an_adapter_to_start_from_is_part_of_the_reference(config, tmp_path):
    run = make_trainer(lora(config)).train()
    adapter = run.folder / "agent_2"
    merged, _ = load_policy(ModelConfig(str(adapter)))
    assert not isinstance(merged, peft.PeftModel)
    for start in (config, lora(config)):
        start = replace(start, model=ModelConfig(str(adapter)), output=None)
        trainer = make_trainer(start)
        assert [record["kl"] for record in run_iteration(trainer, 0)] == pytest.approx(
            [0, 0], abs=1e-5
        )


def test_an_adapter_is_read_without_asking_for_a_gpu(config, tmp_path, monkeypatch):
    """PEFT would choose the first GPU, also for a base on the CPU or on another."""
    agent = make_agents(replace(config, lora=LoraConfig(rank=4)))[0]
    agent.save(tmp_path)
    monkeypatch.setattr(peft.peft_model, "infer_device", lambda: pytest.fail("chose a device"))
    base = AutoModelForCausalLM.from_pretrained(config.model.name)
    assert attach(base, tmp_path).device.type == "cpu"


@pytest.mark.parametrize(
    ("text", "said"), [("{", ""), ('{"peft_type": "LORA"}', " whose .* names its base")]
)
def test_a_damaged_adapter(tmp_path, text, said):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"model.name: expected an adapter{said}, got"):
        load_policy(ModelConfig(str(tmp_path)))


def test_adapter_whose_base_differs(config, tokenizer, tmp_path):
    run = make_trainer(lora(config)).train()
    other = tmp_path / "other"
    make_gpt2(tokenizer, n_embd=16).save_pretrained(other)
    tokenizer.save_pretrained(other)
    adapter = tmp_path / "adapter"
    shutil.copytree(run.folder / "agent_1", adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(other)})
    )
    with pytest.raises(
        UserError, match=r"model.name: expected an adapter that fits its base '.*other'"
    ):
        load_policy(ModelConfig(str(adapter)))


def test_adapters_are_evaluated_beside_their_base(config):
    run = make_trainer(lora(config)).train()
    policy, tokenizer = load_policy(ModelConfig(str(run.folder / "agent_1")), merge=False)
    assert isinstance(policy, peft.PeftModel)
    base, _ = load_policy(config.model)
    answers = Answerer(policy, base, tokenizer).respond(sentences(6), SamplingConfig(4, 4))
    assert len(answers.completions) == 6 and min(answers.kl) > 0
    merged, _ = load_policy(ModelConfig(str(run.folder / "agent_1")))
    again = Answerer(merged, base, tokenizer).respond(sentences(6), SamplingConfig(4, 4))
    assert again.completions == answers.completions and again.kl == pytest.approx(
        answers.kl, rel=1e-3
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_full_fine_tuning_in_16_bits_warns(config, tokenizer, tmp_path, dtype):
    name = config.model.name
    if dtype == "auto":
        name = str(tmp_path / "half")
        make_gpt2(tokenizer).to(torch.float16).save_pretrained(name)
        tokenizer.save_pretrained(name)
    config = replace(config, model=ModelConfig(name, dtype=dtype))
    kind = "float16" if dtype == "auto" else "bfloat16"
    with pytest.warns(
        UserWarning, match=rf"in {kind} \(model.dtype: {dtype}\).*--model.dtype float32"
    ) as warned:
        make_agents(config)
    assert sum("model.dtype" in str(warning.message) for warning in warned) == 1  # of two agents


def test_adapters_on_a_base_in_16_bits_do_not_warn(config, recwarn):
    make_agents(lora(replace(config, model=replace(config.model, dtype="bfloat16"))))
    make_agents(config)
    assert not any("model.dtype" in str(warning.message) for warning in recwarn)


def test_target_modules_that_match_nothing(config):
    with pytest.raises(
        UserError, match=r"lora.target_modules: expected modules of .* among \['c_attn', 'c_fc'"
    ):
        make_agents(lora(config, target_modules=["q_proj"]))


def test_target_modules_are_those_asked_for(config):
    agent = make_agents(lora(config, target_modules=["c_fc", "c_proj"]))[0]
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters(agent)} == {
        "c_fc",
        "c_proj",
    }


def test_an_adapters_tokenizer_has_no_more_tokens_than_its_base(config, tmp_path):
    (agent, _) = make_agents(lora(config))
    agent.save(tmp_path)
    load_policy(ModelConfig(str(tmp_path)))
    agent.tokenizer.add_special_tokens({"pad_token": "<a token of its own>"})
    agent.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"model.name: expected a tokenizer of at most .* ids, the rows"
    ):
        load_policy(ModelConfig(str(tmp_path)))


@pytest.fixture(scope="session")
def llama_folder(tokenizer, tmp_path_factory):
    """A random Llama of 4 layers, with a context long enough for GSM8K's prompts."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    settings = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4
    )
    settings |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    LlamaForCausalLM(
        LlamaConfig(**settings, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_quantized_base_with_lora(config, llama_folder):
    pytest.importorskip("bitsandbytes")
    config = replace(
        config, model=ModelConfig(str(llama_folder), quantization="4bit"), lora=LoraConfig(rank=4)
    )
    config.ppo.mini_batch_size, config.ppo.gradient_accumulation_steps = 2, 4
    trainer = make_trainer(config)
    kinds = {type(module).__name__ for module in trainer.agents[0].learner.policy.modules()}
    assert "Linear4bit" in kinds
    before = [adapters(agent) for agent in trainer.agents]
    records = run_iteration(trainer, 0)
    assert [record["kl"] for record in records] == pytest.approx([0, 0], abs=1e-4)
    assert not any(
        equal(a, adapters(agent)) for a, agent in zip(before, trainer.agents, strict=True)
    )


def test_a_frozen_agent_on_a_quantized_base_is_saved_as_that_base(config, llama_folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = ModelConfig(str(llama_folder), quantization="4bit")
    config = replace(lora(config), model=model, agents=[{}, {"trained": False}])
    frozen = make_trainer(config).agents[1]
    frozen.save(tmp_path / "frozen")
    policy = frozen.policy
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), policy.disable_adapter():
        before = policy(ids).logits
    assert policy.get_base_model().is_quantized
    saved, _ = load_policy(replace(model, name=str(tmp_path / "frozen")))
    with torch.no_grad():
        assert torch.equal(saved.eval()(ids).logits, before)


def test_quantization_that_cannot_be_had(config, monkeypatch):
    with pytest.raises(
        UserError, match=r"model.quantization: expected lora.rank above 0 with 4bit, got 0"
    ):
        replace(config, model=ModelConfig("x", quantization="4bit")).check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"model.quantization: expected bitsandbytes to be installed for 4bit"
    ):
        load_policy(ModelConfig(config.model.name, quantization="4bit"))


@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_recomputes_and_changes_no_number(config, rank):
    results = []
    for on in (False, True):
        changed = replace(
            config,
            model=replace(config.model, gradient_checkpointing=on),
            lora=LoraConfig(rank=rank),
        )
        trainer = make_trainer(changed)
        calls = []
        block = trainer.agents[0].learner.policy.get_submodule(
            "transformer.h.0" if not rank else "base_model.model.transformer.h.0"
        )
        block.ln_1.register_forward_hook(
            lambda *args, calls=calls: calls.append(torch.is_grad_enabled())
        )
        results.append((run_iteration(trainer, 0), sum(calls)))
    assert results[0][0] == results[1][0]
    assert results[1][1] == 2 * results[0][1] > 0
