"""The formulas of benchmarks/fits.py against what tiny runs allocate, and the tables of docs/scaling.md."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from statistics import mean

import pytest
import torch
from conftest import ROOT, make_gpt2
from test_trainer import make_trainer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import fits, parallel
from cory.agents import make_agents
from cory.config import Config, LoraConfig, ModelConfig, SamplingConfig
from cory.learners import head
from cory.models.load import load_policy

LLAMA = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
ARGUMENTS = {"batch": 4, "response": 4, "epochs": 1, "iterations": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def model(folder):
    return parallel.make_model(folder, width=64, layers=2, vocabulary=512)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "ways, rank",
    [
        (["one"], 0),
        (["one"], 4),
        (["data", "shard"], 0),
        (["data", "shard"], 4),
        (["devices"], 0),
        (["devices"], 4),
    ],
)
def test_formulas_are_what_processes_hold(folder, model, ways, rank):
    """Bytes of weights, Adam's state, gradients and exchange buffers, summed over the tensors of each process."""
    options = Namespace(**ARGUMENTS, lora=rank)
    if parallel.WAYS[ways[0]][0] == 1:
        measured = {ways[0]: [parallel.measure(ways[0], folder, options)]}
    else:
        flags = [f"--{name}={value}" for name, value in vars(options).items()]
        measured = parallel.run(ways, folder, [*flags, "--what=time"])
    for way, each in measured.items():
        expected = parallel.formula(way, model, options)
        assert len(each) == parallel.WAYS[way][0]
        # The mean, as a value head is one row, which is in one of the shards.
        for name in parallel.PARTS:
            found = mean(process[name] for process in each)
            assert found == pytest.approx(expected[name], rel=0.01, abs=64), (way, name)


@pytest.mark.parametrize("rank", [0, 4])
def test_checkpoints_have_the_size_by_formula(config, rank):
    config = replace(config, lora=LoraConfig(rank=rank))
    model = fits.Model.of(AutoModelForCausalLM.from_pretrained(config.model.name))
    trainer = make_trainer(config)
    trainer.iteration(0)
    tensors = [tensor for agent in trainer.agents for tensor in agent.state()[0].values()]
    found = sum(tensor.nbytes for tensor in tensors)
    # Adam also counts its steps, for each parameter.
    assert found == pytest.approx(fits.checkpoint(config, model), abs=4 * len(tensors))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_4_bit_weights_and_adapters_by_formula(config, kind, tmp_path, tokenizer, llama_folder):
    pytest.importorskip("bitsandbytes")
    name = config.model.name if kind == "gpt2" else str(llama_folder)
    model = fits.Model.of(AutoModelForCausalLM.from_pretrained(name))
    config = replace(config, model=ModelConfig(name, quantization="4bit"), lora=LoraConfig(rank=4))
    (policy,) = {agent.learner.policy for agent in make_agents(config)}
    heads = 2 * 4 * (model.width + 1)
    scales = [p.quant_state.absmax for p in policy.parameters() if hasattr(p, "quant_state")]
    assert len(scales) == 2 * {"gpt2": 4, "llama": 7}[kind]
    found = parallel.size_of([*policy.parameters(), *scales]) + heads
    assert found == pytest.approx(fits.held(config, model, 1)["weights"], rel=0.001)


def kept(model) -> int:
    """Bytes that a forward pass over 4 * 32 tokens keeps for the backward pass, without the weights."""
    owned, seen = {p.data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        # Alive, so that no other gets its address.
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.ones(4, 32, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, attention_mask=ids.tril(28), use_cache=False, logits_to_keep=1)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in seen.items() if at not in owned)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_activations_of_a_layer_are_as_estimated(kind, tokenizer, tmp_path):
    found = []
    for layers in (1, 3):
        sizes = dict(
            hidden_size=64, intermediate_size=172, num_attention_heads=4, num_hidden_layers=layers
        )
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
        made = make_gpt2(tokenizer, n_embd=64, n_layer=layers) if kind == "gpt2" else llama
        made.save_pretrained(tmp_path / f"{layers}")
        tokenizer.save_pretrained(tmp_path / f"{layers}")
        policy = load_policy(ModelConfig(str(tmp_path / f"{layers}")))[0].eval()
        found.append(kept(policy))
    estimate = 4 * 4 * 32 * fits.SAVED * fits.Model.of(policy).features
    assert (found[1] - found[0]) / 2 == pytest.approx(estimate, rel=0.2)


def test_sizes_of_llamas_are_those_of_the_published_models():
    counts = [fits.llama(*sizes).parameters for sizes in fits.LLAMAS.values()]
    assert counts == [1_100_048_384, 6_738_415_616, 13_015_864_320, 68_976_648_192]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arrays_over_the_vocabulary_follow_the_rule_of_the_learner(device, model, monkeypatch):
    """By formula they are a chunk's where a learner with this micro-batch makes chunks."""
    monkeypatch.setattr(head, "ends_with_output_layer", lambda model, device: True)
    config = Config(device=device, lora=LoraConfig(rank=4), sampling=SamplingConfig())
    policy = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=model.vocabulary))
    chunk = 4 * fits.VOCABULARIES * head.CHUNK[device]
    first = head.WHOLE[device] // model.vocabulary + 1  # of a single row, the shortest in chunks
    for longest in (first - 1, first):
        config.sampling.max_new_tokens = longest
        needed = fits.over_vocabulary(config, model, rows=1)
        place = torch.device(device)
        positions = head.positions_at_a_time(policy, place, 1, longest, head.WHOLE)
        assert (positions is not None) == (needed == chunk) == (longest == first)

    config.lora.rank = 0  # then the output layer has a gradient
    gradient = 4 * model.vocabulary * model.width
    assert fits.over_vocabulary(config, model, rows=1) == chunk + gradient
    config.parallel.shard = "full"
    whole = 4 * fits.VOCABULARIES * first * model.vocabulary
    assert fits.over_vocabulary(config, model, rows=1) == whole


def test_tables_of_the_page_are_those_of_the_script(command):
    printed = command(ROOT / "benchmarks/fits.py").out
    rows = [line for line in printed.splitlines() if line.startswith("| ") and "---" not in line]
    page = (ROOT / "docs/scaling.md").read_text()
    assert len(rows) > 20 and [row for row in rows if row not in page] == []


def test_measured_memory_on_the_page_is_that_of_results():
    page = (ROOT / "docs/scaling.md").read_text()
    for name in ("parallel_memory", "parallel_memory_lora"):
        text = (ROOT / f"results/speed/{name}.md").read_text()
        rows = text.split("\n\n")[1].strip().splitlines()
        # One way was measured that there is no more.
        assert [row for row in rows if "gather: layer" not in row and row not in page] == []
        assert json.loads((ROOT / f"results/speed/{name}.json").read_text())["ways"]
