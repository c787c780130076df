"""The disk is full while a run's end, or its beginning, is written."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import make_trainer, same

from cory.agent import Agent
from cory.config import CheckpointConfig
from cory.errors import UserError
from cory.models.load import load_policy


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def short(config):
    """A run of three iterations whose checkpoints are after the second and the last one."""
    return replace(config, iterations=3, checkpoint=CheckpointConfig(save_every=2))


def fills_the_disk(monkeypatch, agent):
    """Saving this agent writes a part of it, then fails."""
    save = Agent.save

    def failing(self, folder):
        save(self, folder)
        if self.name == agent:
            (folder / "model.safetensors").write_bytes(b"part of it")
            no_space()

    monkeypatch.setattr(Agent, "save", failing)


@pytest.mark.parametrize("agent", ["agent_1", "agent_2"])
def test_agents_that_cannot_be_saved_leave_nothing_half_and_the_run_goes_on(
    short, tmp_path, monkeypatch, agent
):
    whole = make_trainer(short).train().folder
    full = replace(short, output=str(tmp_path / "full"))
    run = tmp_path / "full"
    with monkeypatch.context() as patch:
        fills_the_disk(patch, agent)
        with pytest.raises(UserError) as error:
            make_trainer(full).train()
    assert f"{str(run)!r}, which could not be written ([Errno 28] No space left on device)" in str(
        error.value
    )
    assert f"The last good state is {run / 'checkpoints/iter-000003'}." in str(error.value)
    assert f"--resume {run}" in str(error.value)
    assert (
        not list(run.glob("*agent_*")) + list(run.glob(".partial*"))
        and not (run / "summary.json").exists()
    )
    make_trainer(replace(full, resume=str(run))).train()
    same(whole, run)


def test_agents_of_a_finished_run_stay_when_newer_ones_cannot_be_saved(short, monkeypatch):
    run = make_trainer(short).train().folder
    before = {path: path.read_bytes() for path in run.glob("agent_*/*")}
    summary = (run / "summary.json").read_text()
    longer = replace(short, iterations=4, output=None, resume=str(run))
    with monkeypatch.context() as patch:
        fills_the_disk(patch, "agent_2")
        with pytest.raises(UserError, match=r"The last good state is .*iter-000004"):
            make_trainer(longer).train()
    assert {path: path.read_bytes() for path in run.glob("agent_*/*")} == before
    assert (run / "summary.json").read_text() == summary
    make_trainer(longer).train()
    assert {path: path.read_bytes() for path in run.glob("agent_*/*")} != before
    load_policy(replace(short.model, name=str(run / "agent_2")))


@pytest.mark.parametrize("file", ["summary.json", "curves.png", "agent_1/README.md"])
def test_results_that_cannot_be_written_leave_the_run_to_be_finished(
    short, tmp_path, monkeypatch, file
):
    whole = make_trainer(short).train().folder
    full = replace(short, output=str(tmp_path / "full"))
    run = tmp_path / "full"
    write_text = Path.write_text

    def failing(path, *args, **kwargs):
        if Path(file).name in path.name:
            write_text(path, "part of it")
            no_space()
        return write_text(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", failing)
        if file == "curves.png":
            patch.setattr("cory.report.plots.plot_curves", no_space)
        with pytest.raises(UserError, match=r"The last good state is .*iter-000003"):
            make_trainer(full).train()
    assert not (run / "summary.json").exists() and not list(run.glob(".partial*"))
    make_trainer(replace(full, resume=str(run))).train()
    assert (run / "summary.json").exists()
    same(whole, run)


def test_a_run_that_cannot_begin_leaves_its_folder_free(short, monkeypatch):
    write_text = Path.write_text
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "write_text", lambda path, text, **_: [write_text(path, "part"), no_space()]
        )
        with pytest.raises(
            UserError, match=r"output: expected a folder that can be written, .*No space left"
        ):
            make_trainer(short).train()
    assert (make_trainer(short).train().folder / "summary.json").exists()
