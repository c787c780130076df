"""Bad input: an error that names what was expected, what came and where, before training time is spent."""

import json
import math
import shutil
import time
from typing import get_args, get_type_hints

import datasets
import pytest
import torch
from conftest import make_gpt2, run_iteration, sentences
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DistilBertForSequenceClassification

from cory.agents import make_agents
from cory.config import Config, CoryConfig, ModelConfig, PPOConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.learners import losses
from cory.learners.algorithms import wrapper
from cory.learners.optimizer import learning_rate_factor
from cory.models.load import load_policy
from cory.parallel.devices import choose_device
from cory.prompts import RolePrompts
from cory.schedule import RoleSchedule
from cory.task import Task, load_dataset
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbTaskConfig
from imdb_train.task import PositiveLogit, load_classifier, queries
from study.experiment import Engine

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
    with refuses(r"the Hub cannot be reached to load 'some/model'.*local folder.*toy setting"):
        load_policy(ModelConfig("some/model"))
    assert sum(waits) < 10  # seconds


def test_gated_model(monkeypatch):
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    def refuse(*args, **kwargs):
        raise GatedRepoError(
            "gated", response=httpx.Response(403, request=httpx.Request("GET", "http://127.0.0.1"))
        )

    monkeypatch.setattr(HfApi, "repo_info", refuse)
    with refuses(
        r"model.name: 'meta-llama/x' is gated. Accept its terms on the Hub, then run `hf auth login`"
    ):
        load_policy(ModelConfig("meta-llama/x"))


def test_a_revision_that_the_hub_lacks(monkeypatch):
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    def refuse(*args, **kwargs):
        raise RevisionNotFoundError(
            "none", response=httpx.Response(404, request=httpx.Request("GET", "http://127.0.0.1"))
        )

    monkeypatch.setattr(HfApi, "repo_info", refuse)
    with refuses("model.name: expected a branch, tag or commit of 'some/x' on the Hub, got 'man'"):
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
        PositiveLogit(str(tmp_path / "model"), 8, torch.device("cpu"))


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


def test_missing_dataset():
    with refuses(r"dataset: expected an existing file, got '/nowhere/data.csv'"):
        load_dataset("/nowhere/data.csv", "train", [])


def test_cached_dataset_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refuses(r"dataset: the Hub cannot be reached to load 'some/data'"):
        load_dataset("some/data", "train", [])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "some___data").mkdir()
    monkeypatch.setattr(
        datasets, "load_dataset", lambda **arguments: datasets.Dataset.from_dict({"text": ["a"]})
    )
    assert load_dataset("some/data", "train", ["text"])["text"][0] == "a"


def test_missing_column_and_split(reviews):
    with refuses(r"dataset: expected a column 'review' in '.*', got \['text'\]"):
        load_dataset(str(reviews), "train", ["review"])
    with refuses(
        r"dataset: expected a file validation.parquet.*got \['test.jsonl', 'train.jsonl'\]"
    ):
        load_dataset(str(reviews), "validation", ["text"])


def test_unreadable_and_empty_files(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with refuses("dataset: expected '.*bad.parquet' to be readable, got"):
        load_dataset(str(tmp_path / "bad.parquet"), "train", [])
    (tmp_path / "empty.csv").write_text("text\n")
    with refuses("dataset: expected"):
        load_dataset(str(tmp_path / "empty.csv"), "train", ["text"])
    (tmp_path / "notes.txt").write_text("text")
    with refuses(r"dataset: expected files of one kind among .*'.csv'.*got \['notes.txt'\]"):
        load_dataset(str(tmp_path / "notes.txt"), "train", ["text"])


@pytest.mark.parametrize("ending", ["csv", "jsonl", "json", "parquet"])
def test_formats_that_are_read(tmp_path, ending):
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "label": [0, 1]})
    path = str(tmp_path / f"train.{ending}")
    {"csv": rows.to_csv, "parquet": rows.to_parquet}.get(ending, rows.to_json)(path)
    assert list(load_dataset(path, "train", ["text"])["text"]) == ["one", "two"]
    assert list(load_dataset(str(tmp_path), "train", ["text"])["text"]) == ["one", "two"]


def test_texts_of_json_stay_texts_and_columns_may_begin_late(tmp_path):
    rows = [{"text": "2026-01-31", "at": None}, {"text": "007", "at": "2026-01-31T10:00:00Z"}]
    rows.append({"text": "a\u2028b", "at": "", "stars": 2})
    (tmp_path / "lines.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    )
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    for name in "lines.jsonl", "list.json":
        read = load_dataset(str(tmp_path / name), "train", ["text"])
        assert read.to_list() == [{"stars": None, **row} for row in rows]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl, line 3: Expecting value"),
        ("a.jsonl", '{"text": "x"}\n7\n', "a.jsonl, line 2: expected an object, got 7"),
        ("a.json", '[{"text": "x"}, "y"]', "a.json, row 2: expected an object, got 'y'"),
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": null}\n{"text": ["x"]}',
            r"column 'text': 'x' in row 1 and \['x'\] in row 3 are of different kinds",
        ),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path, name, text, place):
    (tmp_path / name).write_text(text)
    with refuses(f"dataset: expected .*{name}' to be readable, got ValueError: {place}"):
        load_dataset(str(tmp_path / name), "train", ["text"])


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
    with refuses(r"dataset: expected at least ppo.batch_size = 8 rows, got 7"):
        trainer(config, prompts=sentences(7))


@pytest.mark.parametrize("rows", [["good", ""], ["good", None]])
def test_empty_prompt(rows):
    with refuses(r"dataset, column 'prompt', row 2: expected text or chat messages, got (''|None)"):
        Task.from_prompts(rows, len, PROMPTS)


def test_dataset_without_prompts():
    with refuses(r"dataset: expected a column 'prompt', got \['text'\]"):
        Task(datasets.Dataset.from_dict({"text": ["a"]}), len, PROMPTS)


def test_prompt_longer_than_the_context(config):
    rows = sentences(9)
    rows[5] = "good " * 95
    with refuses(
        r"prompt in row 6: expected at most 96 tokens, the model's context, got \d+ of the prompt \+ 6 of the"
    ):
        trainer(config, prompts=rows)


def test_observer_prompt_longer_than_the_context(config):
    rows = sentences(9)
    rows[3] = "good " * 50  # fits once, but the observer reads it twice
    with refuses(r"prompt in row 4: expected at most 96 tokens"):
        trainer(config, prompts=rows)


# Prompts


@pytest.mark.parametrize(
    ("pioneer", "observer", "message"),
    [
        (
            "{question}",
            "{prompt}{response}",
            r"pioneer prompt: expected the placeholder \{prompt\}, got '\{question\}'",
        ),
        (
            "{prompt}",
            "{prompt}",
            r"observer prompt: expected the placeholder \{response\}, got '\{prompt\}'",
        ),
        ("{prompt}", "{response}", r"observer prompt: expected the placeholder \{prompt\}"),
        ("{prompt}{response}", "{prompt}{response}", r"pioneer prompt: expected no \{response\}"),
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


# Rewards


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda prompts, completions: [0.0], r"expected 16 rewards, one per completion, got 1"),
        (lambda prompts, completions: None, r"expected a list of numbers, got NoneType"),
        (
            lambda prompts, completions: ["good"] * 16,
            r"expected a finite number, got 'good' in row 1 of the batch, prompt '.*",
        ),
        (
            lambda prompts, completions: [0.0] * 9 + [math.nan] * 7,
            r"expected a finite number, got nan in row 10",
        ),
        (
            lambda prompts, completions: [0.0] * 3 + [math.inf] * 13,
            r"expected a finite number, got inf in row 4",
        ),
        (
            lambda prompts, completions: [10**400] * 16,
            r"expected a finite number, got a huge integer in row 1",
        ),
        (
            lambda prompts, completions: (text + 1 for text in completions),
            r"TypeError: .* raised at test_bad_input.py, line \d+, in row 1",
        ),
    ],
)
def test_bad_rewards(config, reward, message):
    reward.__name__ = "my_reward"
    one = trainer(config, reward=reward)
    before = [p.clone() for p in one.agents[0].learner.model.parameters()]
    with refuses(f"reward function my_reward: {message}"):
        one.iteration(0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, one.agents[0].learner.model.parameters(), strict=True)
    )


def test_rewards_may_be_tensors_or_numpy(config):
    import numpy as np

    for kind in (
        lambda n: torch.ones(n),
        lambda n: np.ones(n),
        lambda n: [torch.tensor(1)] * n,
        lambda n: [True] * n,
        lambda n: np.arange(n) >= 0,
        lambda n: np.ones((n, 1)),
    ):
        one = trainer(config, reward=lambda prompts, completions, kind=kind: kind(len(prompts)))
        assert run_iteration(one, 0)[0]["task_reward"] == 1.0


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


def kl_of(kind):
    return losses.kl_penalty(kind, torch.zeros(1, 1), torch.zeros(1, 1))


def group_losses_of(algorithm):
    rows = torch.ones(4, 2)
    tensors = ("logprobs", "entropies", "old_logprobs", "ref_logprobs", "advantages", "mask")
    return losses.group_losses(
        **dict.fromkeys(tensors, rows),
        weights=rows[:, 0],
        algorithm=algorithm,
        cliprange=0.2,
        max_new_tokens=2,
        kl_coef=0.0,
    )


@pytest.mark.parametrize(
    ("where", "known", "use"),
    [
        ("cory.credit", CoryConfig, lambda name: assign_credit([torch.ones(4)] * 2, name)),
        ("cory.exchange", CoryConfig, lambda name: RoleSchedule(2, 5, exchange=name)),
        ("algorithm", Config, lambda name: wrapper(name)),
        ("algorithm", Config, lambda name: losses.group_advantages(torch.ones(8), name, 4)),
        ("algorithm", Config, lambda name: group_losses_of(name)),
        ("ppo.kl_penalty", PPOConfig, lambda name: kl_of(name)),
        ("ppo.schedule", PPOConfig, lambda name: learning_rate_factor(name, 2, 10, 0)),
        ("--engine", Engine, lambda name: Engine(name)),
    ],
)  # fmt: skip
def test_unknown_names_are_refused_with_the_known_ones(where, known, use):
    """A name of another setting, or one mistyped, is not taken for one of the others."""
    with refuses(rf"^{where}: expected one of .+, got 'polynomial'") as error:
        use("polynomial")
    named = set(str(error.value).split("expected one of ")[1].split(", got ")[0].split(", "))
    if known is Engine:
        assert named == {"local", "ray"}
        return
    choices = set(get_args(get_type_hints(known)[where.split(".")[-1]]))
    others = choices - named  # what a setting offers besides, and this function is never given
    assert named <= choices and others <= {"ppo", "auto"}
