"""A full disk ends a run with an error and does not damage saved files."""

import errno
from dataclasses import replace

import pytest
from conftest import make_trainer
from run_files import same

from cory.agent import Agent
from cory.config import CheckpointConfig
from cory.run import checkpoint, folder


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def short(config):
    """Settings for three iterations, with checkpoints after the second and the last."""
    return replace(config, iterations=3, checkpoint=CheckpointConfig(save_every=2))


def half_a_line(path, rows):
    with open(path, "a") as file:
        file.write('{"iter')
    no_space()


def fail_at(what, trainer, patched):
    """Makes the disk full when the last iteration writes the given kind of file."""
    add, save_file, save = folder.Run.add, checkpoint.save_file, Agent.save

    def add_iteration(self, iteration):
        if iteration.index == 2:
            half_a_line(self.folder / "metrics.jsonl", iteration.records)
        add(self, iteration)

    def save_checkpoint(tensors, path):
        if trainer.state.iteration == 3:
            path.write_bytes(b"part of it")
            no_space()
        save_file(tensors, path)

    def save_agent(self, target):
        save(self, target)
        if self.name == "agent_2":
            (target / "model.safetensors").write_bytes(b"part of it")
            no_space()

    patched.setattr(*{
        "metrics": (folder.Run, "add", add_iteration),
        "checkpoint": (checkpoint, "save_file", save_checkpoint),
        "agent": (Agent, "save", save_agent),
        "summary": ("cory.run.callbacks.write_text", no_space),
    }[what])  # fmt: skip


@pytest.mark.parametrize("what", ["metrics", "checkpoint", "agent", "summary"])
def test_the_run_ends_with_an_error_and_can_be_resumed(short, tmp_path, monkeypatch, what):
    whole = make_trainer(short).train().folder
    run = tmp_path / "full"
    full = replace(short, output=str(run), resume="auto")
    trainer = make_trainer(full)
    with monkeypatch.context() as patched:
        fail_at(what, trainer, patched)
        with pytest.raises(OSError, match="No space left on device") as error:
            trainer.train()
    saved = "iter-000002" if what in ("metrics", "checkpoint") else "iter-000003"
    assert f"{run}/checkpoints/{saved}" in "".join(error.value.__notes__)
    assert not (run / "summary.json").exists()
    assert what != "agent" or not list(run.glob("agent_*"))
    make_trainer(full).train()
    same(whole, run)


def test_a_run_that_fails_at_the_start_leaves_its_folder_usable(short, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("cory.run.checkpoint.write_text", no_space)
        with pytest.raises(OSError, match="No space"):
            make_trainer(short).train()
    assert (make_trainer(short).train().folder / "summary.json").exists()
