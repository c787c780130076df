"""Metrics and samples that a run sends to each tracker, and trackers that fail."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.tracking import TensorBoardTracker, WandBTracker
from conftest import make_trainer

from cory.command import read_config
from cory.config import CheckpointConfig, Config
from cory.errors import UserError
from cory.run.folder import Run, read_rows
from cory.run.trackers import COLUMNS, wandb_options


def train(config, **changes):
    """Trains for three iterations, of which the first and the third save samples; returns the run's folder."""
    return make_trainer(replace(config, **{"iterations": 3, **changes})).train().folder


def rewards(folder, agent):
    """Returns an agent's task rewards by iteration."""
    rows = read_rows(folder / "metrics.jsonl")
    return {row["iteration"]: row["task_reward"] for row in rows if row["agent"] == agent}


def in_tensorboard(folder, name):
    """Returns the steps and values of a curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The metrics have the shortest path, since TensorBoard stores settings in deeper folders.
    file = min(folder.glob("**/events.out.tfevents*"), key=lambda path: len(path.parts))
    events = EventAccumulator(str(file.parent))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def fail(*arguments, **options):
    raise ConnectionError("no\nserver")


def test_wandb_gets_metrics_and_sample_texts_offline(config, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = {}
    log = WandBTracker.log

    def record_and_log(self, values, step):
        logged.setdefault(step, {}).update(values)
        log(self, values, step=step)

    monkeypatch.setattr(WandBTracker, "log", record_and_log)
    folder = train(config, tracker="wandb")
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert {k: row["agent_1/task_reward"] for k, row in logged.items()} == rewards(
        folder, "agent_1"
    )
    samples = read_rows(folder / "samples.jsonl")
    tables = [row["completions"] for row in logged.values() if "completions" in row]
    assert [row for table in tables for row in table.data] == [
        [sample[column] for column in COLUMNS] for sample in samples
    ]


def test_wandb_gets_a_shortened_name(tmp_path):
    run = Run(tmp_path / ("x" * 150), {}, writes=True)
    run.folder.mkdir()
    assert wandb_options(run)["name"] == "x" * 128


def test_a_resumed_run_is_continued_in_its_tracker(config):
    """The run was killed in its third iteration and is resumed to the fourth."""
    config.checkpoint = CheckpointConfig(save_every=1)
    folder = train(config, tracker="tensorboard")
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "iter-000003")
    train(config, tracker="tensorboard", iterations=4, resume=str(folder))
    logged = in_tensorboard(folder, "agent_1/task_reward")
    assert [step for step, _ in logged] == [0, 1, 2, 3]
    assert dict(logged) == pytest.approx(rewards(folder, "agent_1"))


def test_trackio_gets_metrics(config, monkeypatch, tmp_path):
    trackio = pytest.importorskip("trackio", reason="no trackio: pip install -e '.[trackio]'")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (utils, __import__("trackio.sqlite_storage", fromlist=["x"]), trackio):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    folder = train(config, tracker="trackio")
    logged = {row["step"]: row for row in SQLiteStorage.get_logs("cory", folder.name)}
    values = {step: row["agent_2/task_reward"] for step, row in logged.items()}
    assert values == pytest.approx(rewards(folder, "agent_2"))


def test_a_tracker_that_is_not_installed_is_refused_before_models_load(monkeypatch):
    monkeypatch.setattr("cory.command.find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"^tracker: "):
        read_config(Config, argv=["--tracker", "trackio"])


def test_a_tracker_that_cannot_start_ends_the_run_before_an_iteration(config, monkeypatch):
    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    with pytest.raises(UserError, match=r"tracker: .*no server"):
        train(config, tracker="tensorboard")
    assert not Path(config.output, "metrics.jsonl").exists()

    train(config, resume="auto")  # without a tracker, in the same folder
    assert len(rewards(Path(config.output), "agent_1")) == 3


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_fails_later_is_dropped_with_a_warning(config, monkeypatch, capsys, method):
    attempts = []

    def fail_here(self, *arguments, **options):
        attempts.append(method)
        fail()

    monkeypatch.setattr(TensorBoardTracker, method, fail_here)
    folder = train(config, tracker="tensorboard")
    assert len(attempts) == 1
    assert "tensorboard" in capsys.readouterr().err
    assert len(rewards(folder, "agent_1")) == 3
    assert (folder / "agent_2").is_dir()
