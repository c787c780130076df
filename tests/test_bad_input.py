"""Bad input is refused before training, with one line that names the setting and the mistake."""

import json
import shutil
import time

import datasets
import httpx
import pytest
import torch
from accelerate import PartialState
from conftest import PROMPTS, count_good, make_gpt2, make_trainer, run_iteration, sentences
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DistilBertForSequenceClassification

from cory.build import make_agents
from cory.config import ModelConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.models.load import load_policy
from cory.parallel import distributed
from cory.parallel.devices import choose_device
from cory.rewards import load_classifier
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbTaskConfig
from imdb_train.task import queries


def refuses(message):
    return pytest.raises(UserError, match=message)


def task_of(prompts):
    return Task.from_prompts(prompts, count_good, PROMPTS)


# Models


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_model_is_refused_quickly_if_the_hub_is_unreachable(offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    # No server listens on this port.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with refuses(r"^model.name: .*'some/model'"):
        load_policy(ModelConfig("some/model"))
    assert sum(waits) < 10  # seconds


def test_the_hubs_reason_for_refusing_a_model_is_shown(monkeypatch):
    def refuse(*args, **kwargs):
        request = httpx.Request("GET", "http://127.0.0.1")
        raise GatedRepoError("the reason", response=httpx.Response(403, request=request))

    monkeypatch.setattr(HfApi, "repo_info", refuse)
    with refuses("^model.name: .*'some/x'.*'man'.*the reason"):
        load_policy(ModelConfig("some/x", revision="man"))


def test_a_local_folder_has_no_revision(policy_folder):
    with refuses("^model.revision: .*null.*'v1'"):
        load_policy(ModelConfig(str(policy_folder), revision="v1"))


def change_weights(folder, change, file="model.safetensors"):
    """Applies `change` to a folder's {name: tensor} and saves the result."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def lacks(name):
    return lambda folder: change_weights(folder, lambda tensors: tensors.pop(name))


def reshaped(name):
    wrong = {name: torch.zeros(5)}
    return lambda folder: change_weights(folder, lambda tensors: tensors.update(wrong))


def in_shards(folder):
    """Saves the model in shards and deletes one of them."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink()
    load_policy(ModelConfig(str(folder)))
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def without_tokenizer(folder):
    """Deletes the tokenizer. For some models, transformers would use an empty one instead."""
    for file in folder.glob("tokenizer*"):
        file.unlink()


def without_vocabulary(folder):
    (folder / "tokenizer.json").unlink()


def narrowed(folder):
    """Saves a model with fewer embeddings than its tokenizer has ids."""
    make_gpt2(range(300)).save_pretrained(folder)


def headless(folder):
    """Saves the classifier without its head, which transformers would initialise randomly."""
    model = DistilBertForSequenceClassification.from_pretrained(folder)
    model.distilbert.save_pretrained(folder)


# By case: the model, a change to its folder, a pattern for the error.
FOLDERS = {
    "no folder": ("policy", shutil.rmtree, ""),
    "no model": ("policy", lambda folder: [file.unlink() for file in folder.iterdir()], ""),
    "no tensor": ("policy", lacks("transformer.h.1.mlp.c_fc.weight"), r"h\.1\.mlp\.c_fc\.weight"),
    "other shape": ("policy", reshaped("transformer.ln_f.bias"), r"ln_f\.bias"),
    "no head": ("llama", lacks("lm_head.weight"), r"lm_head\.weight"),
    "no shard": ("policy", in_shards, r"model-00002"),
    "no tokenizer": ("policy", without_tokenizer, "tokenizer"),
    "no vocabulary": ("llama", without_vocabulary, "tokenizer"),
    "more ids": ("policy", narrowed, "300"),
    "classifier without tokenizer": ("classifier", without_tokenizer, "tokenizer"),
    "classifier without head": ("classifier", headless, r"pre_classifier\.weight"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_broken_model_is_refused(name, request, tmp_path):
    kind, change, match = FOLDERS[name]
    folder = shutil.copytree(request.getfixturevalue(f"{kind}_folder"), tmp_path / "model")
    change(folder)
    if kind == "classifier":
        with refuses(rf"^task.reward_model: .*{match}"):
            load_classifier(str(folder), "POSITIVE")
    else:
        with refuses(rf"^model.name: .*{match}"):
            load_policy(ModelConfig(str(folder)))


def test_base_model_with_a_tied_head_is_complete(policy_folder, tmp_path):
    """As on the Hub, GPT-2 is saved without the head, which is tied to the embedding, and without name prefixes."""
    shutil.copytree(policy_folder, tmp_path / "model")
    policy, _ = load_policy(ModelConfig(str(policy_folder)))
    assert policy.lm_head.weight is policy.transformer.wte.weight
    policy.transformer.save_pretrained(tmp_path / "model")
    assert not any(
        "lm_head" in name or "transformer" in name
        for name in load_file(tmp_path / "model/model.safetensors")
    )
    loaded, _ = load_policy(ModelConfig(str(tmp_path / "model")))
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


@pytest.fixture
def adapter_folder(llama_folder, tmp_path):
    """A LoRA adapter without zero weights, saved together with a whole output layer."""
    base, _ = load_policy(ModelConfig(str(llama_folder)))
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


def add_a_layer(tensors):
    tensors |= {
        name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in tensors.items()
    }


ADAPTERS = {
    "lora_B": (lambda tensors: tensors.pop(f"{LAYER}.lora_B.weight"), "lora_B"),
    "head": (lambda tensors: tensors.pop("base_model.model.lm_head.weight"), "lm_head"),
    "deeper base": (add_a_layer, r"layers\.2"),
    "other shape": (
        lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.zeros(8, 5)}),
        "lora_A",
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_does_not_fit_its_base_is_refused(adapter_folder, name):
    change, match = ADAPTERS[name]
    load_policy(ModelConfig(str(adapter_folder)))
    change_weights(adapter_folder, change, "adapter_model.safetensors")
    with refuses(rf"^model.name: .*{match}"):
        load_policy(ModelConfig(str(adapter_folder)))


def test_a_tokenizer_without_a_pad_token_pads_with_the_end_token(policy_folder, config, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    config.model.name = str(tmp_path / "model")
    trainer = make_trainer(config)
    assert trainer.agents[0].tokenizer.pad_token == trainer.agents[0].tokenizer.eos_token
    padded = run_iteration(trainer, 0)
    config.model.name = str(policy_folder)
    assert padded == run_iteration(make_trainer(config), 0)


# Devices


@pytest.mark.parametrize("device", ["gpu", "cuda:7", "mps", "meta", "cuda:01"])
@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="this machine has the device")
def test_a_device_that_does_not_exist_is_refused(device):
    with refuses(rf"^device: .*{device}"):
        choose_device(device)


def test_wrong_environment_variables_of_torchrun_are_refused(monkeypatch):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in {**variables, "MASTER_PORT": "abc"}.items():
        monkeypatch.setenv(name, value)
    PartialState._reset_state()
    with refuses("^processes: .*'abc'"):
        distributed.start(torch.device("cpu"))
    PartialState._reset_state()


@pytest.mark.parametrize(("device", "processes"), [("cuda:0", 2), ("cuda", 3)])
def test_processes_that_would_share_a_gpu_are_refused(monkeypatch, device, processes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", str(processes - 1))
    with refuses("^device: "):
        choose_device(device)


def test_each_process_gets_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert choose_device("auto") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto") == torch.device("cuda:1")
    # With torchrun --virtual-local-rank, each process sees one GPU and has local rank 0.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert choose_device("auto") == torch.device("cuda:0")


# Data and prompts


def test_reviews_that_are_not_texts_or_too_short_are_refused(reviews, tokenizer, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"stars": 1}\n{"stars": 2}\n')
    settings = ImdbTaskConfig(dataset=str(data), text_column="stars", min_chars=0)
    with refuses(r"^task\.text_column: .*row 1"):
        queries(settings, "train", tokenizer, 0)
    with refuses("^dataset: .*5000"):
        queries(ImdbTaskConfig(dataset=str(reviews), min_chars=5000), "train", tokenizer, 0)


@pytest.mark.parametrize(
    ("columns", "prompts", "match"),
    [
        ({"prompt": ["good", ""]}, PROMPTS, "'prompt', row 2"),
        ({"prompt": ["good", None]}, PROMPTS, "'prompt', row 2"),
        ({"text": ["a"]}, PROMPTS, "'prompt'.*'text'"),
        # Only columns that a template names must have values.
        (
            {"prompt": ["a", "b"], "hint": ["x", None], "other": [None, 1]},
            RolePrompts("{prompt}{hint}"),
            "'hint', row 2",
        ),
    ],
)
def test_rows_without_a_value_are_refused(columns, prompts, match):
    with refuses(rf"^dataset.*{match}"):
        Task(datasets.Dataset.from_dict(columns), count_good, prompts)


@pytest.mark.parametrize(
    ("words", "longest", "match"),
    [
        (95, 6, r"1 of 9 rows .*task\.max_prompt_tokens"),
        (50, 6, r"1 of 9 rows"),  # the prompt fits once, but the observer reads it twice
        (1, 90, "9 of 9 rows"),
    ],
)
def test_prompts_longer_than_the_context_are_refused(config, words, longest, match):
    rows = sentences(9)
    rows[5] = "good " * words
    config.sampling.max_new_tokens = longest
    with refuses(rf"^dataset: .*{match}"):
        CoryTrainer(config, make_agents(config), task_of(rows))


def test_the_error_names_the_longest_prompt_that_fits(config):
    rows = sentences(9)
    rows[5] = "good " * 2000
    agents = make_agents(config)
    with pytest.raises(UserError) as error:
        CoryTrainer(config, agents, task_of(rows))
    second = sorted(len(ids) for ids in agents[0].encode(rows))[-2]
    assert f"at most {second} tokens fit" in str(error.value)


@pytest.mark.parametrize(
    ("pioneer", "observer"),
    [
        ("{question}", "{prompt}{response}"),
        ("{prompt}", "{prompt}"),
        ("{prompt}", "{response}"),
        ("{prompt}{response}", "{prompt}{response}"),
        ("{prompt", "{prompt}{response}"),
        ("{prompt.__class__}", "{prompt}{response}"),
        ("{prompt!r}", "{prompt}{response}"),
        ("{prompt}", "{prompt}{response:.3}"),
    ],
)
def test_bad_templates_are_refused(pioneer, observer):
    role = "observer" if pioneer == "{prompt}" else "pioneer"
    with refuses(f"^{role} prompt: "):
        RolePrompts(pioneer, observer)


# Runs


@pytest.mark.parametrize(
    ("key", "use"),
    [
        (
            "cory.num_agents",
            lambda config: CoryTrainer(config, make_agents(config)[:1], task_of(sentences(8))),
        ),
        ("dataset", lambda config: CoryTrainer(config, make_agents(config), task_of(sentences(7)))),
        ("cory.credit", lambda _: assign_credit([torch.ones(4)] * 2, "polynomial")),
    ],
)
def test_mistakes_in_python_code_are_refused_by_their_key(config, key, use):
    with refuses(rf"^{key}: "):
        use(config)
