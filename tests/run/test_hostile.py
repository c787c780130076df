"""Files from untrusted sources: they run no code and raise errors with a message instead of a traceback."""

import json
import pickle
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cory.build import make_agents
from cory.command import load
from cory.config import Config, LoraConfig, ModelConfig
from cory.data import load_dataset
from cory.errors import UserError
from cory.models.load import load_policy
from cory.rewards import load_classifier
from cory.trainer import CoryTrainer

FUZZ = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=40, derandomize=True
)


class Bomb:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.write_text, (self.marker, "executed"))


@pytest.fixture
def bomb(tmp_path):
    """The bytes of the pickle. The test fails if anything has unpickled them."""
    marker = tmp_path / "marker"
    content = pickle.dumps(Bomb(marker))
    pickle.loads(content)
    assert marker.exists()  # unpickling does write the file
    marker.unlink()
    yield content
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_model_weights_are_refused(bomb, policy_folder, classifier_folder, tmp_path, name):
    for folder, read in (
        (policy_folder, lambda path: load_policy(ModelConfig(name=path))),
        (classifier_folder, lambda path: load_classifier(path, "POSITIVE")),
    ):
        copy = shutil.copytree(folder, tmp_path / folder.name)
        (copy / "model.safetensors").unlink()
        (copy / name).write_bytes(bomb)
        with pytest.raises(UserError):
            read(str(copy))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_pickled_adapter_weights_are_refused(bomb, config, tmp_path, name):
    agent = make_agents(replace(config, lora=LoraConfig(rank=2)))[0]
    agent.save(tmp_path / "adapter")
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / name).write_bytes(bomb)
    with pytest.raises(UserError):
        load_policy(ModelConfig(name=str(tmp_path / "adapter")))


def load_reward_model(model):
    return load_classifier(model.name, None)


@pytest.mark.parametrize("load", [load_policy, load_reward_model])
def test_code_beside_a_model_does_not_run(policy_folder, tmp_path, monkeypatch, load):
    """transformers does not even ask whether it may run the code. Here, `input` would answer yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    copy = shutil.copytree(policy_folder, tmp_path / "model")
    settings = json.loads((copy / "config.json").read_text())
    settings |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (copy / "config.json").write_text(json.dumps(settings))
    (copy / "code.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').write('executed')")
    with pytest.raises(UserError):
        load(ModelConfig(name=str(copy)))
    assert not (tmp_path / "marker").exists()


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a completed run."""
    return shutil.copytree(finished.folder, tmp_path / "copy")


def resume(finished, run):
    config = replace(finished.config, resume=str(run), iterations=3)
    CoryTrainer(config, make_agents(config), finished.task).train()


@pytest.mark.parametrize("name", ["agent_1.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint_is_refused(bomb, finished, run, name):
    (run / "checkpoints/iter-000002" / name).write_bytes(bomb)
    with pytest.raises(UserError, match="iter-000002"):
        resume(finished, run)


def test_a_checkpoint_cannot_truncate_files_outside_its_run(finished, run):
    other = run.parent / "other.jsonl"
    other.write_text("kept")
    file = run / "checkpoints/iter-000002/state.json"
    state = json.loads(file.read_text())
    state["lengths"]["../other.jsonl"] = 0
    file.write_text(json.dumps(state))
    resume(finished, run)
    assert other.read_text() == "kept"


def test_an_extended_run_keeps_other_files_and_the_targets_of_links(finished, run):
    other = run.parent / "other.txt"
    other.write_text("kept")
    (run / "notes.jsonl").write_text("kept")
    (run / "link.jsonl").symlink_to(other)
    resume(finished, run)
    assert other.read_text() == "kept" and (run / "notes.jsonl").read_text() == "kept"


def test_metrics_that_are_not_json_are_refused(bomb, finished, run):
    length = (run / "metrics.jsonl").stat().st_size
    (run / "metrics.jsonl").write_bytes((bomb * 99)[:length])
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        resume(finished, run)


TEXT = yaml.safe_dump(asdict(Config()))  # a configuration with every key


@FUZZ
@given(st.data())
def test_a_configuration_with_a_random_line_loads_or_is_refused(tmp_path_factory, data):
    lines = TEXT.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    key = lines[at].split(":")[0]
    value = data.draw(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(["-1", "1e999", "nan", "[]", "{}", "null", "2**9"]),
        )
    )
    lines[at] = data.draw(st.sampled_from([f"{key}: {value}", value, f"{lines[at]}{value}"]))
    file = tmp_path_factory.mktemp("fuzz") / "config.yaml"
    file.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        load(Config, file, [])
    except UserError as error:
        assert str(error)


@settings(FUZZ, max_examples=25)
@given(st.binary(max_size=300), st.sampled_from(["jsonl", "csv", "parquet"]))
def test_a_data_set_of_random_bytes_loads_or_is_refused(tmp_path_factory, content, kind):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / f"train.{kind}").write_bytes(content)
    try:
        load_dataset(str(folder), "train", ["text"])
    except UserError as error:
        assert str(error)
