"""What a run sends to each tracker: metrics, and sample texts as a table."""

import importlib.util
import json
import re
import shutil
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, sentences
from markdown_it import MarkdownIt

from cory.agent import make_agents
from cory.callbacks.trackers import COLUMNS
from cory.config import TRACKER_PACKAGES, CheckpointConfig
from cory.errors import UserError
from cory.prompts import RolePrompts
from cory.report.tables import markdown_table
from cory.task import Task
from cory.train import announce
from cory.trainer import CoryTrainer

HOSTILE = "| `x` **b** <script>alert(1)</script> [l](https://example.org) \n# h $y$ \x1b[31m \\"


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


def train(config, **changes):
    """A run of three iterations with samples of the first and the third; returns its folder and those samples."""
    config = replace(config, **{"iterations": 3, **changes})
    task = Task.from_prompts(sentences(12), count_good, RolePrompts())
    folder = CoryTrainer(config, make_agents(config), task).train().folder
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (
        folder,
        samples,
        {(row["iteration"], row["agent"]): row["task_reward"] for row in metrics},
    )


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_tracker_without_its_package_is_refused_before_anything_is_written(
    config, monkeypatch, name
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda n, *p: None if name in n.lower() else find_spec(n, *p)
    )
    install = "wandb" if name == "wandb" else f"-e '.[{name}]'"
    expected = f"tracker: expected the package {name}, which is not installed: pip install -c constraints.txt {install}"
    for begin in (
        lambda: train(config, tracker=name),
        lambda: announce(replace(config, tracker=name), "run"),
    ):
        with pytest.raises(UserError) as refused:
            begin()
        assert str(refused.value) == expected
    assert not Path(config.output).exists()
    monkeypatch.undo()
    train(config)  # the folder is free


def test_the_command_that_installs_a_tracker_names_an_extra_that_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for packages, command in TRACKER_PACKAGES.values():
        for extra in re.findall(r"\[(\w+)\]", command):
            assert any(requirement.startswith(packages[0]) for requirement in extras[extra])


def cells(html):
    rows = re.findall(r"<tr>\n(.*?)</tr>", html, re.DOTALL)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def test_tensorboard_gets_metrics_and_texts(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, samples, rewards = train(config, tracker="tensorboard")
    # Settings lie deeper.
    file = min(folder.glob("**/events.out.tfevents*"), key=lambda path: len(path.parts))
    events = EventAccumulator(str(file.parent))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("agent_1/task_reward")}
    assert logged == pytest.approx(
        {k: value for (k, agent), value in rewards.items() if agent == "agent_1"}
    )
    texts = {
        e.step: e.tensor_proto.string_val[0].decode()
        for e in events.Tensors("completions/text_summary")
    }
    assert sorted(texts) == [0, 2]
    for step, text in texts.items():
        head, *rows = cells(MarkdownIt("commonmark").enable("table").render(text))
        assert head == list(COLUMNS)
        expected = [row for row in samples if row["iteration"] == step]
        assert [row[1:3] for row in rows] == [[each["agent"], each["role"]] for each in expected]


def test_a_text_in_a_markdown_table_is_shown_as_it_is():
    page = (
        MarkdownIt("commonmark")
        .enable("table")
        .render(markdown_table(["a", "b"], [[HOSTILE, "end"]]))
    )
    shown = (
        HOSTILE.replace("\n", "\\n")
        .replace("\x1b", "\\x1b")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    assert cells(page)[1] == [shown.strip(), "end"]


def test_wandb_gets_metrics_and_texts_offline(config, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, samples, _ = train(config, tracker="wandb")
    files, until = [], time.monotonic() + 60  # wandb's own process writes them
    while len(files) < 2 and time.monotonic() < until:
        files = sorted(
            folder.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
        )
        time.sleep(0.1)
    tables = [json.loads(file.read_text()) for file in files]
    assert all(table["columns"] == list(COLUMNS) for table in tables)
    rows = sorted((row for table in tables for row in table["data"]), key=lambda row: row[0])
    assert rows == [[each[column] for column in COLUMNS] for each in samples]


def repeat(folder, iterations):
    """Makes a finished run one that was killed, with an earlier checkpoint as its newest."""
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if path.name > f"iter-{iterations:06d}":
            shutil.rmtree(path)


def test_tensorboard_shows_repeated_iterations_of_a_resumed_run_once(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    every = CheckpointConfig(save_every=1)
    folder, *_ = train(config, tracker="tensorboard", checkpoint=every)
    repeat(folder, 2)
    *_, rewards = train(
        config,
        tracker="tensorboard",
        checkpoint=every,
        resume=str(folder),
        iterations=4,
    )
    files = {file.parent for file in folder.glob("**/events.out.tfevents*")}
    events = EventAccumulator(str(min(files, key=lambda path: len(path.parts))))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("agent_1/task_reward")]
    assert logged == [(k, pytest.approx(rewards[k, "agent_1"])) for k in range(4)]


def test_trackio_gets_metrics_and_texts_and_goes_on_with_a_resumed_run(
    config, monkeypatch, tmp_path
):
    trackio = pytest.importorskip("trackio", reason="no trackio: pip install -e '.[trackio]'")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (utils, __import__("trackio.sqlite_storage", fromlist=["x"]), trackio):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    settings = {
        "tracker": "trackio",
        "sample_every": 1,
        "checkpoint": CheckpointConfig(save_every=1),
    }
    folder, samples, rewards = train(config, iterations=2, **settings)
    assert SQLiteStorage.get_runs("cory") == [folder.name]
    repeat(folder, 1)
    train(config, iterations=3, resume=str(folder), **settings)
    assert SQLiteStorage.get_runs("cory") == [folder.name]
    logged = SQLiteStorage.get_logs("cory", folder.name)
    values = [
        (row["step"], row["agent_2/task_reward"]) for row in logged if "agent_2/task_reward" in row
    ]
    assert [step for step, _ in values] == [0, 1, 2]
    assert values[:2] == [(k, pytest.approx(rewards[k, "agent_2"])) for k in range(2)]
    for kind in ("time/seconds_total", "completions"):
        assert [row["step"] for row in logged if kind in row] == [0, 1, 2]
    tables = {row["step"]: row["completions"] for row in logged if "completions" in row}
    assert tables[0]["_type"] == "trackio.table"
    assert tables[0]["_value"] == [
        {c: each[c] for c in COLUMNS} for each in samples if each["iteration"] == 0
    ]
