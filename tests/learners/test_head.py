"""The output layer in chunks against the whole one: equal numbers, smaller arrays."""

import numpy as np
import pytest
import torch
from conftest import make_gpt2
from test_ppo import ragged, rollout_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from cory.config import Config, LoraConfig, PPOConfig, SamplingConfig
from cory.learners import head
from cory.learners.group import GroupLearner, WindowPolicy
from cory.learners.ppo import PPOLearner
from cory.learners.trl_parts import PolicyWithValueHead
from cory.models.lora import add_adapter

CPU = torch.device("cpu")
CHUNK = 2000  # elements: a few positions


@pytest.fixture
def double(monkeypatch):
    """Computes in double precision what is otherwise float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def with_own_head(model):
    """The model with an output layer that is not its embedding, and has biases."""
    torch.manual_seed(3)
    model.lm_head = torch.nn.Linear(model.config.n_embd, model.config.vocab_size)
    return model


def with_adapters(model):
    """The model with adapters that change its logits, also one on the output layer."""
    lora = LoraConfig(rank=2, target_modules=["c_attn", "lm_head"])
    adapted = add_adapter(model, "agent_1", lora)
    torch.manual_seed(4)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def make(tokenizer, kind="tied", algorithm="ppo", precision="fp32", **settings):
    """A learner whose reference differs from its policy."""
    model, reference = make_gpt2(tokenizer), make_gpt2(tokenizer, seed=1)
    if kind == "own head":
        model, reference = with_own_head(model), with_own_head(reference)
    if kind == "adapters":
        model, reference = with_adapters(with_own_head(model)), None
    dtype = torch.get_default_dtype()
    ppo = PPOConfig(**{"batch_size": 8, "mini_batch_size": 8, "init_kl_coef": 0.5} | settings)
    config = Config(
        device="cpu",
        precision=precision,
        algorithm=algorithm,
        group_size=4,
        ppo=ppo,
        sampling=SamplingConfig(max_new_tokens=12),
    )
    wrapper = PolicyWithValueHead if algorithm == "ppo" else WindowPolicy
    learner = PPOLearner if algorithm == "ppo" else GroupLearner
    torch.manual_seed(5)
    policy = wrapper(model).to(dtype)
    if reference is not None:
        reference = wrapper(reference).to(dtype).requires_grad_(False)
    return learner(policy, reference, tokenizer, config, CPU)


def make_both(monkeypatch, tokenizer, *arguments, **settings):
    """The same learner with a whole output layer, and with one in chunks."""
    whole = make(tokenizer, *arguments, **settings)
    monkeypatch.setattr(head, "CHUNK", {"cpu": CHUNK})
    monkeypatch.setattr(head, "WHOLE", {"cpu": CHUNK})
    with pytest.warns(UserWarning, match="chunks"):
        chunked = make(tokenizer, *arguments, **settings)
    assert whole.pass_size.positions_at_a_time is None
    assert chunked.pass_size.positions_at_a_time == CHUNK // len(tokenizer)
    return whole, chunked


def gradients(learner):
    """Of the first optimizer step: the batch under the old policy, the losses, and the gradients by name."""
    queries, responses, scores = ragged()
    numbers = {}
    compute = learner._gradients

    def first_step(experience, indices):
        step = compute(experience, indices)
        if not numbers:
            for name in ("kl", "logprobs", "ref_logprobs"):
                numbers[name] = getattr(experience.old, name) * experience.mask
            numbers["terms"] = step.terms[0].vector()
            numbers.update({name: p.grad.clone() for name, p in learner._trained().items()})
        return step

    learner._gradients = first_step
    rollout = rollout_of(queries, responses)
    learner.update([rollout], [scores.float()], np.random.default_rng(0))
    return numbers


@pytest.mark.parametrize(
    "kind, algorithm, settings",
    [
        ("tied", "ppo", {"kl_penalty": "full"}),
        ("own head", "ppo", {"kl_penalty": "kl"}),
        ("adapters", "grpo", {"micro_batch": 3}),
    ],
)
def test_numbers_are_those_of_the_whole_output_layer(
    double, monkeypatch, tokenizer, kind, algorithm, settings
):
    whole, chunked = make_both(monkeypatch, tokenizer, kind, algorithm, **settings)
    expected, given = gradients(whole), gradients(chunked)
    assert expected["kl"].abs().max() > 0.1
    for name, tensor in expected.items():
        assert torch.allclose(given[name], tensor, rtol=1e-6, atol=1e-9), name
        assert tensor.dtype == torch.float64 and tensor.abs().max() > 1e-3, name


class Memory(TorchDispatchMode):
    """Runs out where an array (..., vocabulary), but for weights, has more positions than fit."""

    def __init__(self, vocabulary, width, fits):
        super().__init__()
        self.vocabulary, self.width, self.fits = vocabulary, width, fits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_array = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,)
            positions = tensor.numel() // self.vocabulary if is_array else 0
            if positions > self.fits and positions != self.width:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return result


def updated(learner):
    """Its statistics and weights after an update."""
    queries, responses, scores = ragged()
    shuffle = np.random.default_rng(0)
    (stats,) = learner.update([rollout_of(queries, responses)], [scores.float()], shuffle)
    return stats.metrics(), learner._trained()


def test_chunks_are_the_last_resort_where_memory_runs_out(double, monkeypatch, tokenizer):
    """A pass of one row is too large: its longest response has more positions than fit."""
    chunk = CHUNK // len(tokenizer)
    monkeypatch.setattr(head, "CHUNK", {"cpu": CHUNK})
    whole, limited = (make(tokenizer, kl_penalty="full") for _ in range(2))
    expected, weights = updated(whole)
    warned = pytest.warns(UserWarning, match="chunks")
    with warned, Memory(len(tokenizer), width=32, fits=chunk):
        given, given_weights = updated(limited)
    assert (limited.pass_size.micro_batch, limited.pass_size.positions_at_a_time) == (1, chunk)
    resumed = make(tokenizer, kl_penalty="full")
    resumed.load_state(*limited.save_state())
    assert (resumed.pass_size.micro_batch, resumed.pass_size.positions_at_a_time) == (1, chunk)
    assert given == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for name, tensor in weights.items():
        assert torch.allclose(given_weights[name], tensor, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize(
    ("name", "settings", "is_plain"),
    [
        ("llama", {}, True),
        ("gemma2", {"final_logit_softcapping": 30.0}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("cohere2", {"logit_scale": 0.25}, False),
        ("granite", {"logits_scaling": 8.0}, False),
    ],
)
def test_models_that_change_their_logits_keep_the_whole_output_layer(
    monkeypatch, name, settings, is_plain
):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **settings))
    monkeypatch.setattr(head, "CHUNK", {"cpu": 100})
    monkeypatch.setattr(head, "WHOLE", {"cpu": 400})
    positions = head.positions_at_a_time(model.eval(), CPU, 4, 3, head.WHOLE)
    assert positions == (2 if is_plain else None)
    assert not model.get_output_embeddings()._forward_hooks
