"""Every shipped configuration starts: its model by published sizes, and its memory by formula."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT

from benchmarks import configurations, fits
from benchmarks.published import PUBLISHED, on_meta
from cory.config import LoraConfig
from cory.models.load import quantization
from cory.models.lora import add_adapter
from cory.prompts import RolePrompts

# As the models' pages, or the papers with them, state; tied weights once.
PARAMETERS = {
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,
}
# GiB of the hardware that a file, README or docs/scaling.md names for a configuration.
HARDWARE = {
    "gsm8k/qwen2_5_0_5b": 24,
    "gsm8k/llama2_7b": 24,
    "gsm8k/llama2_13b": 80,
    "imdb/smollm2_135m_cpu": 9,
}


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


files = pytest.mark.parametrize("file", configurations.FILES, ids=name_of)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_published_parameters(name):
    assert fits.count(on_meta(PUBLISHED[name]).parameters()) == PARAMETERS[name]


@files
def test_model_prompts_adapters_and_quantization_are_accepted(file):
    config = configurations.read(file)
    assert config.model.name in (*PUBLISHED, "tiny")

    # Each role reads the query, the observer also the response.
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    assert "Q1" in prompts.render(0, {"prompt": "Q1"}, None)
    read = prompts.render(1, {"prompt": "Q1"}, ["R1"])
    assert "Q1" in read and "R1" in read

    if config.lora.rank:
        model = on_meta(PUBLISHED[config.model.name])
        layers = model.config.num_hidden_layers
        adapted = add_adapter(model, "agent_1", LoraConfig(rank=config.lora.rank))
        weights = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
        assert all(any(f".{layer}." in name for name in weights) for layer in range(layers))

    if config.model.quantization != "none":
        pytest.importorskip("bitsandbytes")
        options = quantization(config.model, torch.device("cuda"))
        assert options["quantization_config"].load_in_4bit
        assert options["device_map"] == {"": torch.device("cuda")}


@files
def test_memory_by_formula_fits_the_hardware_that_is_named(file):
    config = configurations.read(file)
    assert configurations.largest_micro_batch(file, config, 80)
    gpu = HARDWARE.get(name_of(file))
    if gpu is not None:
        assert configurations.needed(file, config)["peak"] <= (1 - fits.FREE) * gpu * fits.GIB


def test_the_tables_of_the_page_are_those_of_the_formulas():
    page = (ROOT / "docs/gpu.md").read_text()
    assert page.count("<!-- formula: ") == 2
    assert configurations.written(page) == page, "python -m benchmarks.configurations --write"
