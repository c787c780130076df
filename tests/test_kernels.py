"""cory/kernels.py: the same numbers as the modules it replaces."""

import copy

import pytest
import torch
from conftest import make_gpt2
from test_lora import llama_folder  # noqa: F401
from transformers import AutoModelForCausalLM

from cory import kernels, processes


@pytest.fixture(params=["tied", "untied"])
def model(request, tokenizer, llama_folder):  # noqa: F811
    if request.param == "tied":
        return make_gpt2(tokenizer, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    assert not model.config.tie_word_embeddings
    return model


def gradients(model, ids, times=2):
    """After several backward passes, with and without a gradient there already."""
    model.zero_grad()
    for part in ids.split(len(ids) // times):
        model(part).logits.log_softmax(-1)[..., 3].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_are_those_of_the_plain_modules(model, tokenizer):
    plain = copy.deepcopy(model)
    kernels.lean(model)
    assert type(model.get_input_embeddings()) is kernels.Embedding
    assert list(model.state_dict()) == list(plain.state_dict())
    ids = torch.randint(len(tokenizer), (4, 11), generator=torch.Generator().manual_seed(0))
    ids[0] = ids[0, 0]  # a token many times
    expected = gradients(plain, ids)
    ours = gradients(model, ids)
    assert ours.keys() == expected.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)
    again = gradients(model, ids)
    assert all(torch.equal(again[name], grad) for name, grad in ours.items())


def test_what_is_frozen_gets_no_gradient(model, tokenizer):
    kernels.lean(model)
    model.get_input_embeddings().weight.requires_grad_(False)
    model(torch.arange(6)[None]).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is None


def test_several_processes_keep_the_plain_embedding(model, monkeypatch):
    """They exchange gradients where autograd computes them."""
    kernels.lean(model)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(kernels._Lookup, "apply", lambda *args: pytest.fail("not here"))
    model(torch.arange(6)[None]).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None


def test_a_copy_looks_up_its_own_weights(model):
    kernels.lean(model)
    other = copy.deepcopy(model)
    other(torch.arange(6)[None]).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is None
    assert other.get_input_embeddings().weight.grad is not None
