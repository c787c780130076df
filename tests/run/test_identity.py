"""Identities of models, rewards and data. Resume, evaluation and chat refuse another model under the same name."""

import functools
import os
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import datasets
import pytest
import yaml
from conftest import make_gpt2, make_trainer
from safetensors.torch import load_file, save_file

from cory import evaluate
from cory.build import make_agents
from cory.chat import Chat
from cory.config import AgentConfig, EvaluationConfig, LoraConfig, ModelConfig
from cory.errors import UserError
from cory.identity import (
    check_models,
    commit,
    data_hash,
    model_identity,
    policy_models,
    source_hash,
)
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbConfig, ImdbTaskConfig
from imdb_train.task import held_out_rows, make_task


def negated(folder: Path) -> None:
    """Negates a model's weights without changing the file's size or modification time."""
    file = folder / "model.safetensors"
    before = file.stat()
    save_file(
        {name: -tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    assert file.stat().st_size == before.st_size
    os.utime(file, (before.st_atime, before.st_mtime))


@pytest.fixture
def world(config, policy_folder, classifier_folder, reviews, tmp_path):
    """An IMDB run of one iteration, with copies of the policy and the reward model that a test may change."""
    policy = shutil.copytree(policy_folder, tmp_path / "policy")
    classifier = shutil.copytree(classifier_folder, tmp_path / "classifier")
    task = ImdbTaskConfig(dataset=str(reviews), reward_model=str(classifier), min_chars=1)
    model = ModelConfig(name=str(policy))
    config = ImdbConfig(**{**vars(config), "iterations": 1, "model": model, "task": task})
    return config, train(config), policy, classifier


def train(config):
    agents = make_agents(config)
    return CoryTrainer(config, agents, make_task(config)).train().folder


def test_another_model_behind_the_same_path_is_refused(world, tmp_path):
    config, folder, policy, classifier = world
    models = yaml.safe_load((folder / "config.yaml").read_text())["fingerprint"]["models"]
    names = {"model.name": str(policy), "task.reward_model": str(classifier)}
    assert models == {
        key: {"name": name, "identity": model_identity(name)} for key, name in names.items()
    }
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    chosen = EvaluationConfig(device="cpu", output=str(tmp_path / "e"), queries=2)
    for key, name in names.items():
        negated(Path(name))
        with pytest.raises(UserError, match=rf"{key}: "):
            train(replace(config, iterations=4, resume=str(folder)))
        with pytest.raises(UserError, match=rf"{key}: "):
            evaluate([folder], make_task(config, held_out_rows(config, "test")), chosen)
        with pytest.raises(UserError, match=rf"{key}: "):
            Chat(folder, device="cpu")
        negated(Path(name))  # restores the weights
    assert not (tmp_path / "e").exists()
    assert before == {path: path.read_bytes() for path in before}


def test_an_evaluation_with_another_reward_model_is_allowed_and_announced(world, tmp_path, capsys):
    config, folder, _, classifier = world
    other = shutil.copytree(classifier, tmp_path / "other")
    negated(other)
    chosen = replace(config, task=replace(config.task, reward_model=str(other)))
    task = make_task(chosen, held_out_rows(chosen, "test"))
    evaluate([folder], task, EvaluationConfig(device="cpu", output=str(tmp_path / "e"), queries=2))
    assert "another reward" in capsys.readouterr().err


def test_another_model_is_also_refused_if_the_agents_devices_change(world):
    config, folder, policy, _ = world
    negated(policy)
    devices = [AgentConfig(device="cpu"), AgentConfig(device="cpu")]
    changed = replace(config, iterations=4, resume=str(folder), agents=devices)
    with pytest.raises(UserError, match=r"model\.name: "):
        train(changed)


def test_an_adapter_is_identified_with_its_base(config, policy_folder, tmp_path):
    base = shutil.copytree(policy_folder, tmp_path / "base")
    config = replace(
        config, model=ModelConfig(name=str(base)), lora=LoraConfig(rank=2), iterations=1
    )
    adapter = make_trainer(config).train().folder / "agent_1"
    models = policy_models(replace(config, model=ModelConfig(name=str(adapter)), lora=LoraConfig()))
    assert set(models) == {"model.name", "model.name (base)"}
    negated(base)
    now = policy_models(replace(config, model=ModelConfig(name=str(adapter)), lora=LoraConfig()))
    with pytest.raises(UserError, match=r"model.name \(base\): "):
        check_models(models, now, "runs/a")


def test_a_copy_is_the_same_model_and_any_changed_tensor_makes_another(policy_folder, tmp_path):
    copy = shutil.copytree(policy_folder, tmp_path / "copy")
    assert model_identity(str(copy)) == model_identity(str(policy_folder))
    (copy / "README.md").write_text("a card")
    assert model_identity(str(copy)) == model_identity(str(policy_folder))
    identities = {model_identity(str(copy))}
    weights = load_file(copy / "model.safetensors")
    for name in list(weights):  # change each tensor's last number
        changed = dict(weights)
        changed[name] = weights[name].clone()
        changed[name].view(-1)[-1] += 1
        save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
        identities.add(model_identity(str(copy)))
    assert len(identities) == 1 + len(weights)


def test_a_hub_model_is_identified_by_its_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--user--name/snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--user--name/refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_identity("user/name") == f"commit:{commit}"
    assert model_identity("user/other") is None


def test_a_reward_is_identified_by_its_source_file():
    class Scaled:
        def __call__(self, prompts, completions):
            return [1.0] * len(completions)

    this_file = source_hash(train)
    assert this_file and this_file == source_hash(Scaled()) == source_hash(functools.partial(train))
    assert source_hash(make_gpt2) not in (this_file, "")
    typed = {}
    exec("def typed(prompts, completions): return []", typed)
    assert source_hash(typed["typed"]) == source_hash(len) == ""


def test_data_are_identified_by_their_rows():
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]})
    same = datasets.Dataset.from_list([{"prompt": p, "answer": i} for i, p in enumerate("abc", 1)])
    assert data_hash(rows) == data_hash(same)
    others = [rows.select([0, 1]), rows.select([1, 0, 2]), rows.rename_column("answer", "gold")]
    assert len({data_hash(dataset) for dataset in [rows, *others]}) == 4
    # The hash must not change, since stored results and unfinished runs have recorded it.
    assert data_hash(rows) == "02dd0082986f5efa"


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (date(2026, 1, 1), date(2026, 1, 2)),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
        (Decimal("1.1"), Decimal("1.2")),
        (b"a", b"b"),
        ([{"seen": date(2026, 1, 1)}], [{"seen": date(2026, 1, 2)}]),
        ([0.0] * 3000, [0.0] * 1500 + [1.0] + [0.0] * 1499),
    ],
)
def test_data_hashes_depend_on_values_of_any_type(value, other):
    first, second = (
        datasets.Dataset.from_dict({"prompt": ["a"], "x": [x]}) for x in (value, other)
    )
    assert data_hash(first) != data_hash(second)
    assert data_hash(first.with_format("numpy")) == data_hash(first)


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_changed_code_marks_the_commit_as_dirty_and_changed_results_do_not(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    (tmp_path / "results").mkdir()
    (tmp_path / "cory").mkdir()
    code, rows = tmp_path / "cory" / "code.py", tmp_path / "results" / "runs.csv"
    code.write_text("1")
    rows.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    unchanged = commit(code.parent)
    assert len(unchanged) == 40

    rows.write_text("2")
    (tmp_path / "cory" / "untracked.py").write_text("1")
    assert commit(code.parent) == unchanged
    code.write_text("2")
    assert commit(code.parent) == f"{unchanged}-dirty"
