"""Bad input: an error that names what was expected, what came and where, before training time is spent."""

import json
import shutil
import time
from typing import get_args, get_type_hints

import datasets
import httpx
import pytest
import torch
from conftest import make_gpt2, run_iteration, sentences
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DistilBertForSequenceClassification

from cory.agent import make_agents
from cory.config import CoryConfig, ModelConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.models.load import load_policy
from cory.parallel.devices import choose_device
from cory.rewards import Classifier, load_classifier
from cory.roles import RolePrompts, RoleSchedule
from cory.task import Task
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbTaskConfig
from imdb_train.task import queries

PROMPTS = RolePrompts(observer="{prompt}{response} {prompt}")


def refuses(message):
    return pytest.raises(UserError, match=message)


def trainer(config, reward=lambda prompts, completions: [0.0] * len(prompts), prompts=None):
    return CoryTrainer(
        config, make_agents(config), Task.from_prompts(prompts or sentences(10), reward, PROMPTS)
    )


# Models


def test_missing_model_folder():
    with refuses(r"model.name: expected a Hub id or an existing local folder, got './nowhere'"):
        load_policy(ModelConfig("./nowhere"))


@pytest.mark.parametrize("offline", [True, False])
def test_unreachable_hub(offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    # Nobody listens there.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with refuses(r"model.name: expected a local folder or a model on the Hub, got 'some/model'"):
        load_policy(ModelConfig("some/model"))
    assert sum(waits) < 10  # seconds


@pytest.mark.parametrize("error", [GatedRepoError, RevisionNotFoundError])
def test_a_model_that_the_hub_refuses(error, monkeypatch):
    def refuse(*args, **kwargs):
        request = httpx.Request("GET", "http://127.0.0.1")
        raise error("the reason", response=httpx.Response(403, request=request))

    monkeypatch.setattr(HfApi, "repo_info", refuse)
    with refuses("model.name: .*'some/x' at revision 'man'.*the reason"):
        load_policy(ModelConfig("some/x", revision="man"))


def test_folder_that_holds_no_model(tmp_path):
    with refuses(r"model.name: expected a causal language model, got '.*'"):
        load_policy(ModelConfig(str(tmp_path)))


def change_weights(folder, change, file="model.safetensors"):
    """Rewrites a folder's weights after `change`, which gets them by name."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def test_policy_that_lacks_a_tensor(policy_folder, config, tmp_path):
    """transformers trains such a model on random weights."""
    config.model.name = str(shutil.copytree(policy_folder, tmp_path / "model"))
    change_weights(
        tmp_path / "model", lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight")
    )
    with refuses(
        r"model.name: expected all weights of a GPT2LMHeadModel in '.*model', got none for "
        r"transformer.h.1.mlp.c_fc.weight$"
    ):
        make_agents(config)


def test_policy_that_lacks_many_tensors_names_a_few(policy_folder, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "model")
    change_weights(
        tmp_path / "model",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".h.1." in name],
    )
    with refuses(r"got none for transformer.h.1.attn.c_attn.bias, .* and 7 more$"):
        load_policy(ModelConfig(str(tmp_path / "model")))


def test_policy_with_a_tensor_of_another_shape(policy_folder, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "model")
    change_weights(
        tmp_path / "model",
        lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(5)}),
    )
    with refuses(
        r"got other shapes than config.json has: transformer.ln_f.bias \(5,\), not \(32,\)$"
    ):
        load_policy(ModelConfig(str(tmp_path / "model")))


def test_head_that_is_not_tied_must_be_saved(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "model")
    change_weights(tmp_path / "model", lambda tensors: tensors.pop("lm_head.weight"))
    with refuses(r"got none for lm_head.weight$"):
        load_policy(ModelConfig(str(tmp_path / "model")))


def test_base_model_with_a_tied_head_is_complete(policy_folder, tmp_path):
    """As the Hub's GPT2: saved without the head, whose weights are the embedding's, and without its prefix."""
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


def test_missing_shard(policy_folder, tokenizer, tmp_path):
    policy, _ = load_policy(ModelConfig(str(policy_folder)))
    policy.save_pretrained(tmp_path, max_shard_size="40KB")
    tokenizer.save_pretrained(tmp_path)
    load_policy(ModelConfig(str(tmp_path)))
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with refuses(rf"model.name: expected a causal language model, got .*{lost.name}"):
        load_policy(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("kept", [[], ["tokenizer_config.json"]])
@pytest.mark.parametrize("kind", ["policy", "llama", "classifier"])
def test_missing_tokenizer(kind, kept, request, tmp_path):
    """transformers makes up an empty tokenizer for some models."""
    shutil.copytree(request.getfixturevalue(f"{kind}_folder"), tmp_path / "model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        if file.name not in kept:
            file.unlink()
    what = "task.reward_model" if kind == "classifier" else "model.name"
    with refuses(
        rf"{what}: expected a model with its tokenizer, got '.*model', (which has no|whose) tokenizer"
    ):
        if kind == "classifier":
            load_classifier(str(tmp_path / "model"), "POSITIVE", what)
        else:
            load_policy(ModelConfig(str(tmp_path / "model")))


def test_classifier_without_its_head(classifier_folder, tmp_path):
    """A plain DistilBERT, whose config.json has labels: transformers makes up the head."""
    shutil.copytree(classifier_folder, tmp_path / "model")
    classifier = DistilBertForSequenceClassification.from_pretrained(classifier_folder)
    classifier.distilbert.save_pretrained(tmp_path / "model")
    with refuses(
        r"task.reward_model: expected all weights of a DistilBertForSequenceClassification in '.*model', got none for "
        r"classifier.bias, classifier.weight, pre_classifier.bias, pre_classifier.weight$"
    ):
        Classifier(str(tmp_path / "model"), "POSITIVE")


@pytest.fixture
def adapter_folder(llama_folder, tmp_path):
    """A LoRA adapter, none of whose weights is 0, and an output layer that is saved whole beside it."""
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


@pytest.mark.parametrize("lost", [f"{LAYER}.lora_B.weight", "base_model.model.lm_head.weight"])
def test_adapter_that_lacks_a_tensor(adapter_folder, lost):
    load_policy(ModelConfig(str(adapter_folder)))
    change_weights(adapter_folder, lambda tensors: tensors.pop(lost), "adapter_model.safetensors")
    with refuses(
        rf"expected an adapter that fits its base '.*', got '.*adapter', which lacks .*{lost}"
    ):
        load_policy(ModelConfig(str(adapter_folder)))


def test_adapter_of_a_deeper_base(adapter_folder):
    def add_a_layer(tensors):
        tensors |= {
            name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in tensors.items()
        }

    change_weights(adapter_folder, add_a_layer, "adapter_model.safetensors")
    with refuses(
        "which has tensors without a place in the base: "
        + LAYER.replace("1", "2")
        + ".lora_A.weight"
    ):
        load_policy(ModelConfig(str(adapter_folder)))


def test_adapter_with_a_tensor_of_another_shape(adapter_folder):
    wrong = {f"{LAYER}.lora_A.weight": torch.zeros(8, 5)}
    change_weights(
        adapter_folder, lambda tensors: tensors.update(wrong), "adapter_model.safetensors"
    )
    with refuses(
        r"expected an adapter that fits its base .*size mismatch for .*layers.1.self_attn.q_proj.lora_A"
    ):
        load_policy(ModelConfig(str(adapter_folder)))


def test_tokenizer_larger_than_the_embedding(tokenizer, tmp_path):
    make_gpt2(tokenizer, vocab_size=300).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    largest = len(tokenizer) - 1
    with refuses(rf"expected a tokenizer of at most 300 ids.*got ids up to {largest}"):
        load_policy(ModelConfig(str(tmp_path)))


def test_tokenizer_without_a_pad_token_is_handled(policy_folder, config, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    config.model.name = str(tmp_path / "model")
    one = trainer(config)
    assert one.agents[0].tokenizer.pad_token == one.agents[0].tokenizer.eos_token
    padded = run_iteration(one, 0)
    config.model.name = str(policy_folder)
    assert padded == run_iteration(trainer(config), 0)


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="this machine has the device")
def test_absent_device(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with refuses(rf"device: expected a device of this machine, which has \d+ GPUs, got '{device}'"):
        choose_device(device)


@pytest.mark.parametrize(
    ("device", "processes", "said"),
    [
        ("cuda:0", 2, "expected auto or cuda with 2 processes on this machine, .*, got 'cuda:0'"),
        ("cuda", 3, "expected at most as many processes as this machine has GPUs, 2, got 3"),
    ],
)
def test_processes_that_would_share_a_gpu(monkeypatch, device, processes, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", str(processes - 1))
    with refuses(f"device: {said}"):
        choose_device(device)


def test_each_process_has_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert choose_device("auto") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto") == torch.device("cuda:1")
    # torchrun --virtual-local-rank: each process sees one GPU, and has the number 0.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert choose_device("auto") == torch.device("cuda:0")


def test_unknown_device():
    with refuses("device: expected auto, cpu, cuda or cuda:N, got 'gpu'"):
        choose_device("gpu")


@pytest.mark.parametrize("labels", [{0: "NEGATIVE", 1: "GOOD"}, {0: "POSITIVE"}])
def test_classifier_without_two_labels_one_of_them_positive(classifier_folder, tmp_path, labels):
    model = DistilBertForSequenceClassification.from_pretrained(classifier_folder)
    shutil.copytree(classifier_folder, tmp_path / "model")
    settings = model.config.to_dict() | {
        "id2label": labels,
        "label2id": {v: k for k, v in labels.items()},
    }
    (tmp_path / "model/config.json").write_text(json.dumps(settings))
    with refuses(
        r"task.reward_model: expected a classifier with the label POSITIVE among two or more, got \{0:"
    ):
        load_classifier(str(tmp_path / "model"), "POSITIVE", "task.reward_model")


# Data


def test_reviews_that_are_no_texts(tokenizer, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"stars": 1}\n{"stars": 2}\n')
    settings = ImdbTaskConfig(dataset=str(data), text_column="stars", min_chars=0)
    with refuses("task.text_column: expected texts, got 1 in row 1 of 'stars'"):
        queries(settings, "train", tokenizer, 0)


def test_no_review_is_long_enough(reviews, tokenizer):
    with refuses("dataset: expected reviews of at least 5000 characters, got none"):
        queries(ImdbTaskConfig(dataset=str(reviews), min_chars=5000), "train", tokenizer, 0)


def test_dataset_smaller_than_a_batch(config):
    with refuses(r"dataset: expected at least .*= 8 rows, got 7"):
        trainer(config, prompts=sentences(7))


@pytest.mark.parametrize("rows", [["good", ""], ["good", None]])
def test_empty_prompt(rows):
    with refuses(r"dataset, column 'prompt', row 2: .*, got (''|None)"):
        Task.from_prompts(rows, len, PROMPTS)


def test_dataset_without_prompts():
    with refuses(r"dataset: expected a column 'prompt', got \['text'\]"):
        Task(datasets.Dataset.from_dict({"text": ["a"]}), len, PROMPTS)


@pytest.mark.parametrize("words", [95, 50])  # 50 fit once, but the observer reads them twice
def test_prompt_longer_than_the_context(config, words):
    rows = sentences(9)
    rows[5] = "good " * words
    with refuses(r"^dataset: .*1 of 9 rows .*context of 96.*task\.max_prompt_tokens"):
        trainer(config, prompts=rows)


def test_a_context_that_no_prompt_fits(config):
    config.sampling.max_new_tokens = 90
    with refuses(r"^dataset: .*9 of 9 rows .*max_new_tokens"):
        trainer(config, prompts=sentences(9))


# Prompts


@pytest.mark.parametrize(
    ("pioneer", "observer", "message"),
    [
        (
            "{question}",
            "{prompt}{response}",
            r"pioneer prompt: .* got '\{question\}'",
        ),
        (
            "{prompt}",
            "{prompt}",
            r"observer prompt: .* got '\{prompt\}'",
        ),
        ("{prompt}", "{response}", r"observer prompt: .* got '\{response\}'"),
        ("{prompt}{response}", "{prompt}{response}", r"pioneer prompt: .* got '\{prompt\}"),
        ("{prompt", "{prompt}{response}", "pioneer prompt: expected a template with placeholders"),
        (
            "{prompt.__class__}",
            "{prompt}{response}",
            r"pioneer prompt: expected plain names in braces",
        ),
        ("{prompt[0]}", "{prompt}{response}", r"pioneer prompt: expected plain names in braces"),
        ("{}", "{prompt}{response}", r"pioneer prompt: expected plain names in braces"),
        ("{prompt!r}", "{prompt}{response}", r"expected plain names in braces, got \{prompt!r\}"),
        ("{prompt}", "{prompt}{response:.3}", r"plain names in braces, got \{response:.3\}"),
    ],
)
def test_bad_templates(pioneer, observer, message):
    with refuses(message):
        RolePrompts(pioneer, observer)


def test_template_over_a_missing_column():
    with refuses(
        r"observer prompt: expected placeholders among .*'prompt', 'response'.*got \{hint\}"
    ):
        Task.from_prompts(["a"], len, RolePrompts(observer="{prompt}{response}{hint}"))


def test_column_of_a_template_without_a_value():
    rows = datasets.Dataset.from_dict(
        {"prompt": ["a", "b"], "hint": ["x", None], "other": [None, 1]}
    )
    with refuses("dataset, column 'hint', row 2: expected a value for a role's prompt, got null"):
        Task(rows, len, RolePrompts("{prompt}{hint}"))


# Runs


def test_output_that_holds_a_run(config, tmp_path):
    trainer(config).train()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with refuses("output: expected a new or empty folder"):
        trainer(config).train()
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    }


def test_runs_without_an_output_get_folders_of_their_own(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config.output, config.iterations = None, 1
    assert [str(trainer(config).train().folder) for _ in range(2)] == ["runs/cory", "runs/cory-2"]


def test_agents_that_do_not_match_the_configuration(config):
    agents = make_agents(config)[:1]
    with refuses(r"cory.num_agents: expected the number of agents, 1, got 2"):
        CoryTrainer(config, agents, Task.from_prompts(sentences(8), len, PROMPTS))


# Names given from Python, where no command line has checked them


@pytest.mark.parametrize(
    ("where", "known", "use"),
    [
        ("cory.credit", CoryConfig, lambda name: assign_credit([torch.ones(4)] * 2, name)),
        ("cory.exchange", CoryConfig, lambda name: RoleSchedule(2, 5, exchange=name)),
    ],
)  # fmt: skip
def test_unknown_names_are_refused_with_the_known_ones(where, known, use):
    """A name of another setting, or one mistyped, is not taken for one of the others."""
    with refuses(rf"^{where}: expected one of .+, got 'polynomial'") as error:
        use("polynomial")
    named = set(str(error.value).split("expected one of ")[1].split(", got ")[0].split(", "))
    assert named == set(get_args(get_type_hints(known)[where.split(".")[-1]]))
