"""Every shipped configuration starts: its prompts, adapters and quantization, and an iteration at small width."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from sim.small_configurations import FILES, MODELS, read, small
from transformers import AutoModelForCausalLM

from cory.config import LoraConfig
from cory.models.load import quantization
from cory.models.lora import add_adapter
from cory.prompts import RolePrompts

# All but explained_variance: where the critic is bad it is a quotient of hundreds, of tiny numbers.
COMPARED = (
    "task_reward",
    "kl",
    "entropy",
    "policy_loss",
    "value_loss",
    "clip_fraction",
    "gradient_norm",
    "response_tokens",
)


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


files = pytest.mark.parametrize("file", FILES, ids=name_of)


@files
def test_model_prompts_adapters_and_quantization_are_accepted(file):
    config = read(file)
    assert config.model.name in (*MODELS, "tiny")

    # Each role reads the query, the observer also the response.
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    assert "Q1" in prompts.render(0, {"prompt": "Q1"}, None)
    observed = prompts.render(1, {"prompt": "Q1"}, ["R1"])
    assert "Q1" in observed and "R1" in observed

    if config.lora.rank:
        model = AutoModelForCausalLM.from_config(small(config.model.name, 320))
        layers = model.config.num_hidden_layers
        adapted = add_adapter(model, "agent_1", LoraConfig(rank=config.lora.rank))
        weights = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
        assert all(any(f".{layer}." in name for name in weights) for layer in range(layers))

    if config.model.quantization != "none":
        pytest.importorskip("bitsandbytes")
        options = quantization(config.model, torch.device("cuda"))
        assert options["quantization_config"].load_in_4bit
        assert options["device_map"] == {"": torch.device("cuda")}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """The records of each file's iteration by device, all from one process."""
    folder = tmp_path_factory.mktemp("configurations")
    done = subprocess.run(
        [sys.executable, ROOT / "tests/sim/simulated_configurations.py", folder],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "results.json").read_text())


@files
def test_an_iteration_on_the_simulated_accelerator_equals_one_on_the_cpu(results, file):
    for device, outcome in results[name_of(file)].items():
        assert "error" not in outcome, f"{device}: {outcome.get('error')}"
    on_cpu, on_sim = (results[name_of(file)][device]["records"] for device in ("cpu", "sim:0"))
    assert [record["role"] for record in on_sim] == ["pioneer", "observer"]
    # Rounded to bfloat16, numbers are near.
    tolerance = 1e-5 if read(file).model.dtype == "float32" else 0.02
    for record, expected in zip(on_sim, on_cpu, strict=True):
        assert expected["gradient_norm"] > 0
        for key in COMPARED:
            assert record[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance), key
