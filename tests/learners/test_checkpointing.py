"""Gradient checkpointing without dropout, also in layers whose own code checks for training mode."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cory.config import Config, PPOConfig
from cory.errors import UserError
from cory.learners.group import GroupLearner
from cory.learners.memory import recompute_in_eval
from cory.models import window
from cory.models.window import WindowPolicy

IDS = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    | {"word_embed_proj_dim": 32, "dropout": 0.1, "layerdrop": 0.5},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"ffn_hidden_size": 48, "hidden_dropout": 0.1},
}


def make_learner(name, tokenizer, checkpointing):
    """Returns a learner with a tiny random model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **IDS, **MODELS[name]))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ppo = PPOConfig(batch_size=4, mini_batch_size=4)
    config = Config(device="cpu", algorithm="grpo", group_size=2, ppo=ppo)
    return GroupLearner(WindowPolicy(model), None, tokenizer, config, torch.device("cpu"))


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_without_dropout_changes_no_number(name, tokenizer):
    queries, responses = (torch.arange(3, 27).view(4, 6) + start for start in (0, 100))
    batch = window.pack(list(queries), list(responses), 0)
    results = []
    for checkpointing in (False, True):
        learner = make_learner(name, tokenizer, checkpointing)
        learner._switch_dropout_off()
        calls = []
        linear = next(m for m in learner.policy.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(lambda *args, calls=calls: calls.append(args))
        logprobs = learner.forward(batch).logprobs
        logprobs.sum().backward()
        gradients = [p.grad for p in learner.model_params if p.grad is not None]
        results.append((logprobs, torch.cat([gradient.flatten() for gradient in gradients])))
        assert len(calls) == 1 + checkpointing  # the backward pass recomputes the layer
    (plain, gradient), (checkpointed, recomputed) = results
    assert torch.equal(checkpointed, plain)
    assert gradient.any() and torch.equal(recomputed, gradient)


def test_a_model_with_custom_checkpointing_code_is_refused():
    """Custom code recomputes only in training mode, but learners run the model in evaluation mode."""
    model = torch.nn.Linear(2, 2)
    assert recompute_in_eval(model) == []
    model.gradient_checkpointing = True
    with pytest.raises(UserError, match=r"model.gradient_checkpointing"):
        recompute_in_eval(model)
