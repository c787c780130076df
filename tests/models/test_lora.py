"""LoRA agents: adapters on one shared base, saved adapters, and runs that start from them."""

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from conftest import make_gpt2, make_trainer, run_iteration
from transformers import AutoModelForCausalLM

from cory.build import make_agents
from cory.config import Config, LoraConfig, ModelConfig
from cory.errors import UserError
from cory.identity import policy_models
from cory.models.load import load_policy


def lora(config: Config, **changes) -> Config:
    return replace(config, lora=LoraConfig(rank=4, **changes))


def adapters(agent) -> dict[str, torch.Tensor]:
    policy = agent.learner.policy
    state = peft.get_peft_model_state_dict(policy, adapter_name=agent.name)
    return {name: value.clone() for name, value in state.items()}


def base(agent) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in agent.learner.policy.named_parameters() if "lora" not in n}


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_agents_share_one_base_and_train_their_adapters_alone(config):
    """The shared base without adapters serves as the reference."""
    trainer = make_trainer(lora(config))
    first, second = trainer.agents
    assert first.learner.policy is second.learner.policy and first.learner.reference is None
    frozen = base(first)
    for agent, other in ((first, second), (second, first)):

        def spy(*args, agent=agent, other=other, learn=agent.learn):
            before, other_before = adapters(agent), adapters(other)
            stats = learn(*args)
            assert not equal(adapters(agent), before) and equal(adapters(other), other_before)
            return stats

        agent.learn = spy
    kls = [[record["kl"] for record in run_iteration(trainer, k)] for k in range(4)]
    assert kls[0] == pytest.approx([0, 0], abs=1e-6)
    assert all(kl > 1e-3 for kl in kls[-1])
    assert equal(base(first), frozen)
    groups = [agent.learner.optimizer.param_groups for agent in trainer.agents]
    sizes = [sum(len(group["params"]) for group in agent_groups) for agent_groups in groups]
    trained = {id(p) for agent_groups in groups for group in agent_groups for p in group["params"]}
    assert len(trained) == sum(sizes)  # no parameter is in both optimizers
    for size, agent in zip(sizes, trainer.agents, strict=True):
        assert size == len(adapters(agent)) + 2  # the value head has a weight and a bias


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_a_saved_adapter_can_be_loaded_and_trained_further(config):
    trainer = make_trainer(replace(lora(config), iterations=2))
    folder, ids = trainer.train().folder, torch.arange(3, 12)[None]
    plain = AutoModelForCausalLM.from_pretrained(config.model.name)
    for agent in trainer.agents:  # loaded with PEFT alone
        fresh = AutoModelForCausalLM.from_pretrained(config.model.name)
        model = peft.PeftModel.from_pretrained(fresh, folder / agent.name)
        agent.activate()
        expected = logits(agent.learner.policy, ids)
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(expected, logits(plain, ids), rtol=1e-3, atol=1e-3)

    adapter = ModelConfig(str(folder / "agent_1"))
    for start in (config, lora(config)):  # the adapter is part of the reference, so the KL is 0
        started = make_trainer(replace(start, model=adapter, output=None))
        kls = [record["kl"] for record in run_iteration(started, 0)]
        assert kls == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_agent_that_starts_from_an_adapter_trains_all_weights(config, algorithm, tmp_path):
    """Without `lora.rank`, the adapter is merged into its base and all weights are trained."""
    make_agents(lora(config))[0].save(tmp_path)
    agents = [{}, {"model": {"name": str(tmp_path)}}]
    trainer = make_trainer(replace(config, algorithm=algorithm, group_size=4, agents=agents))
    policies = [agent.learner.policy for agent in trainer.agents]
    before = [{n: p.clone() for n, p in policy.named_parameters()} for policy in policies]
    run_iteration(trainer, 0)
    assert all(record["kl"] > 1e-3 for record in run_iteration(trainer, 1))
    for policy, weights in zip(policies, before, strict=True):
        assert not any(torch.equal(p, weights[n]) for n, p in policy.named_parameters())


def test_a_head_that_an_adapter_saves_whole_is_trained(config, tmp_path):
    """The saved head is separate from the embedding, although the base ties both."""
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    base, tokenizer = load_policy(config.model)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy, _ = load_policy(ModelConfig(str(tmp_path)))
    assert policy.lm_head.weight is not policy.transformer.wte.weight
    assert all(weight.requires_grad for weight in policy.parameters())


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_agent_without_trainable_weights_is_refused(config, algorithm, monkeypatch):
    """A trainable value head alone is not enough."""

    def load_frozen(*args, **options):
        policy, tokenizer = load_policy(*args, **options)
        return policy.requires_grad_(False), tokenizer

    monkeypatch.setattr("cory.build.load_policy", load_frozen)
    with pytest.raises(UserError, match=r"^model\.name: .*trainable.*agent_1"):
        make_agents(replace(config, algorithm=algorithm, group_size=4))
    make_agents(replace(lora(config), algorithm=algorithm, group_size=4))


def test_an_adapter_that_transformers_attached_is_refused(config, monkeypatch):
    """An adapter on the Hub is recognised only after loading, when transformers has attached it and frozen its base."""
    folder = make_trainer(replace(lora(config), iterations=1)).train().folder / "agent_1"
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: path.name != "adapter_config.json" and exists(path)
    )
    with pytest.raises(
        UserError, match=r"^model\.name: expected a whole model, or the local folder"
    ):
        load_policy(ModelConfig(str(folder)))


def test_a_saved_adapter_names_the_revision_of_its_base(config, tokenizer, tmp_path, monkeypatch):
    """The base is a cached Hub model whose Git branches have different weights."""
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


def test_full_fine_tuning_in_16_bits_warns(config, recwarn):
    half = replace(config, model=replace(config.model, dtype="bfloat16"))
    for settings, expected in (
        (config, 0),
        (lora(half), 0),
        (half, 1),
    ):  # one warning for two agents
        make_agents(settings)
        assert sum("model.dtype" in str(warning.message) for warning in recwarn) == expected


@pytest.mark.parametrize(
    ("key", "case"),
    [
        ("model.name", "no JSON"),
        ("model.name", "no base"),
        ("model.name", "more tokens"),
        ("lora.target_modules", "modules that match nothing"),
        ("model.quantization", "no bitsandbytes"),
    ],
)
def test_broken_adapters_and_unusable_settings_are_refused(
    config, tokenizer, tmp_path, monkeypatch, key, case
):
    model = ModelConfig(str(tmp_path))
    (agent, _) = make_agents(lora(config))
    agent.save(tmp_path)
    load_policy(model)
    file = tmp_path / "adapter_config.json"
    if case == "no JSON":
        file.write_text("{")
    elif case == "no base":
        file.write_text('{"peft_type": "LORA"}')
    elif case == "more tokens":
        agent.tokenizer.add_special_tokens({"pad_token": "<a token of its own>"})
        agent.tokenizer.save_pretrained(tmp_path)
    elif case == "no bitsandbytes":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        model = ModelConfig(config.model.name, quantization="4bit")
    with pytest.raises(UserError, match=f"^{key}: "):
        if case == "modules that match nothing":
            make_agents(lora(config, target_modules=["q_proj"]))
        load_policy(model)


def test_adapters_are_added_to_the_target_modules(config):
    agent = make_agents(lora(config, target_modules=["c_fc", "c_proj"]))[0]
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters(agent)} == {
        "c_fc",
        "c_proj",
    }


def test_adapters_on_a_quantized_base_train(config, wide_llama):
    pytest.importorskip("bitsandbytes")
    config = replace(
        config, model=ModelConfig(str(wide_llama), quantization="4bit"), lora=LoraConfig(rank=4)
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


def test_full_fine_tuning_of_saved_quantized_weights_is_refused(config, wide_llama, tmp_path):
    pytest.importorskip("bitsandbytes")
    policy, tokenizer = load_policy(ModelConfig(str(wide_llama), quantization="4bit"))
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = replace(config, model=ModelConfig(str(tmp_path)))
    with pytest.raises(UserError, match=r"^lora\.rank: .*agent_1.*quantized"):
        make_agents(config)
    make_agents(lora(config))


def test_a_frozen_agent_on_a_quantized_base_is_saved_as_that_base(config, wide_llama, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = ModelConfig(str(wide_llama), quantization="4bit")
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


def test_gradient_checkpointing_of_adapters_changes_no_number(config):
    results = []
    for on in (False, True):
        model = replace(config.model, gradient_checkpointing=on)
        trainer = make_trainer(lora(replace(config, model=model)))
        results.append((run_iteration(trainer, 0), adapters(trainer.agents[0])))
    assert results[0][0] == results[1][0] and equal(results[0][1], results[1][1])
