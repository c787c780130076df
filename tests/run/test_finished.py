"""A finished run is never harmed: not by a resume, not by a kill while it is extended."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_config
from test_resume import (
    AGENTS,
    after,
    count_good,
    flip,
    interrupt,
    make_one,
    make_trainer,
    one,  # noqa: F401
    same,
)

from cory.command import load
from cory.config import CheckpointConfig
from cory.errors import UserError
from cory.own_task import OwnConfig
from cory.run.signals import Interrupted
from study.records import read as read_record

EVERY_TEN = CheckpointConfig()  # the default: no iteration of these short runs reaches `save_every`


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run, but for those that only a reader's clock changes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def ended(policy_folder, tmp_path_factory) -> Path:
    """The folder of a finished run of 4 iterations with the default checkpoints."""
    config = make_one(make_config(policy_folder, tmp_path_factory.mktemp("ended")))
    return make_trainer(replace(config, iterations=4, checkpoint=EVERY_TEN)).train().folder


@pytest.fixture
def finished(one, ended):  # noqa: F811
    """A copy of it: its settings, and its folder."""
    folder = Path(shutil.copytree(ended, one.output))
    config = replace(one, iterations=4, checkpoint=EVERY_TEN)
    return replace(config, output=None, resume=str(folder)), folder


def test_the_state_after_the_last_iteration_is_kept(finished, tmp_path):
    config, folder = finished
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["iter-000004"]
    whole = (
        make_trainer(replace(config, resume=None, iterations=6, output=str(tmp_path / "whole")))
        .train()
        .folder
    )
    make_trainer(replace(config, iterations=6)).train()
    same(whole, folder)


def test_resuming_a_finished_run_changes_nothing(finished, capsys):
    config, folder = finished
    before = content(folder)
    trainer = make_trainer(config)
    run = trainer.train()
    assert run.folder == folder and len(run.history) == 2 * 4 and trainer.run is run
    assert "is finished: all 4 iterations are done" in capsys.readouterr().out
    make_trainer(replace(config, resume="auto", output=str(folder))).train()
    assert content(folder) == before


def test_a_run_that_a_guard_has_ended_stays_so(one, capsys):  # noqa: F811
    guards = replace(one.guards, stop_at_kl=1e-9)
    config = replace(one, iterations=4, checkpoint=EVERY_TEN, guards=guards)
    folder = make_trainer(config).train().folder
    done = json.loads((folder / "summary.json").read_text())["iterations"]
    assert done < 4
    before = content(folder)
    for iterations in (4, 4 + done):
        make_trainer(
            replace(config, output=None, resume=str(folder), iterations=iterations)
        ).train()
        said = capsys.readouterr().out
        assert f"guards.stop_at_kl ended it after {done} of 4 iterations" in said
        assert f"start a new run from them (model.name: {folder}/agent_1)" in said
    other = replace(config, output=None, resume=str(folder), guards=one.guards)
    with pytest.raises(UserError, match=r"got others: guards.stop_at_kl: 1e-09 -> None"):
        make_trainer(other).train()
    assert content(folder) == before


def test_a_guard_has_ended_nothing_in_the_last_iteration(one, tmp_path):  # noqa: F811
    config = replace(one, iterations=4, guards=replace(one.guards, stop_at_kl=1e-9))
    ended = json.loads((make_trainer(config).train().folder / "summary.json").read_text())
    planned = replace(config, iterations=ended["iterations"], output=str(tmp_path / "planned"))
    folder = make_trainer(planned).train().folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["iterations"] == ended["iterations"] and ended["stopped_by"]
    assert not summary["stopped"] and "stopped_by" not in summary
    more = replace(config, resume=str(folder), output=None, iterations=ended["iterations"] + 2)
    make_trainer(more).train()
    extended = json.loads((folder / "summary.json").read_text())
    assert extended["iterations"] == ended["iterations"] + 1 and extended["stopped_by"]


def test_a_guards_verdict_outlives_a_signal(one, capsys, tmp_path):  # noqa: F811
    config = replace(one, iterations=4, guards=replace(one.guards, stop_at_kl=1e-9))
    whole = make_trainer(config).train().folder
    ended = json.loads((whole / "summary.json").read_text())
    assert ended["iterations"] < 4

    broken = stopped_after(replace(config, output=str(tmp_path / "broken")), ended["iterations"])
    assert not (broken / "summary.json").exists()
    capsys.readouterr()
    make_trainer(replace(config, resume=str(broken))).train()
    said = capsys.readouterr().out
    assert f"guards.stop_at_kl ended it after {ended['iterations']} iterations, and what" in said
    same(whole, broken)
    summary = json.loads((broken / "summary.json").read_text())
    assert summary["stopped"] and summary["stopped_by"] == "guards.stop_at_kl"


def with_printed(config, what: str, said: str):
    """The settings with those that a message has printed."""
    command = re.search(rf"{what}: .*\(as flags: (.*)\)", said).group(1)
    printed = load(OwnConfig, None, shlex.split(command))
    return replace(config, resume=printed.resume, iterations=printed.iterations)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_how_to_extend_a_finished_run_is_printed_where_it_can_be(one, capsys, schedule):  # noqa: F811
    config = replace(one, iterations=2, ppo=replace(one.ppo, schedule=schedule))
    folder = make_trainer(config).train().folder
    config = replace(config, output=None, resume=str(folder))
    make_trainer(config).train()
    said = capsys.readouterr().out
    if schedule == "linear":
        assert "It cannot be extended, as ppo.schedule: linear depends on iterations." in said
        assert "--iterations" not in said
        return
    make_trainer(with_printed(config, "To extend it", said)).train()
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 4


@pytest.mark.parametrize("resume", ["folder", "auto"])
def test_fewer_iterations_than_are_done_are_refused(finished, resume):
    config, folder = finished
    before = content(folder)
    changes = {
        "folder": {},
        "auto": {"resume": "auto", "output": str(folder)},
    }[resume]
    with pytest.raises(
        UserError, match=r"iterations: expected at least 4, as many as .* has done, got 2"
    ):
        make_trainer(replace(config, iterations=2, **changes)).train()
    assert content(folder) == before


@pytest.mark.parametrize("checkpoints", ["none", "damaged", "only older"])
def test_a_finished_run_that_cannot_continue_is_refused(one, checkpoints):  # noqa: F811
    config = replace(one, iterations=4)
    folder = make_trainer(config).train().folder
    if checkpoints == "none":
        shutil.rmtree(folder / "checkpoints")
    elif checkpoints == "damaged":
        for path in (folder / "checkpoints").iterdir():
            flip(path / "agent_1.safetensors")
    else:
        flip(folder / "checkpoints/iter-000004/agent_1.safetensors")
    before = content(folder)
    with pytest.raises(
        UserError,
        match=r"expected a checkpoint of the end of .* finished 4 iterations.*Nothing was",
    ):
        make_trainer(replace(config, resume=str(folder), iterations=12)).train()
    assert content(folder) == before


def test_an_unfinished_run_whose_checkpoints_are_all_damaged_is_refused(one):  # noqa: F811
    folder = stopped_after(one, 3)
    for path in (folder / "checkpoints").iterdir():
        flip(path / "agent_2.safetensors")
    before = content(folder)
    with pytest.raises(
        UserError,
        match=r"expected a valid checkpoint.*metrics.jsonl has 3 iterations, got 3 damaged ones",
    ):
        make_trainer(replace(one, resume=str(folder))).train()
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="has 3 iterations, got none"):
        make_trainer(replace(one, resume=str(folder))).train()
    assert content(folder) == {
        name: data for name, data in before.items() if not name.startswith("checkpoints")
    }


def stopped_after(config, iterations: int) -> Path:
    """The folder of a run that a signal has stopped."""
    # Three calls for the samples before training.
    reward = after(count_good, 3 + iterations, interrupt)
    with pytest.raises(Interrupted):
        make_trainer(config, reward).train()
    return Path(config.output)


def test_stopped_while_it_is_extended_it_is_still_finished_where_it_was(finished, tmp_path):
    """The agents, curves and summary of the finished iterations stay until there are newer ones."""
    config, folder = finished
    before = content(folder)
    longer = replace(config, iterations=8)
    with pytest.raises(Interrupted):
        make_trainer(longer, after(count_good, 2, interrupt)).train()
    now = content(folder)
    kept = [name for name in before if name.startswith("agent_") or name == "summary.json"]
    assert kept and all(now[name] == before[name] for name in kept)
    assert now["metrics.jsonl"].startswith(before["metrics.jsonl"])
    assert read_record(folder).problems == [
        "incomplete: finished after 4 iterations, then extended to 6 so far"
    ]
    make_trainer(longer).train()
    whole = (
        make_trainer(replace(longer, resume=None, output=str(tmp_path / "whole"))).train().folder
    )
    same(whole, folder)
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 8


def test_an_extension_that_lost_its_checkpoints_is_refused(finished):
    """Its finished iterations could not be computed again by what is left."""
    config, folder = finished
    longer = replace(config, iterations=8)
    with pytest.raises(Interrupted):
        make_trainer(longer, after(count_good, 1, interrupt)).train()
    shutil.rmtree(folder / "checkpoints")
    before = content(folder)
    with pytest.raises(UserError, match="expected a checkpoint of the end"):
        make_trainer(longer).train()
    assert content(folder) == before


def test_killed_before_its_first_checkpoint_a_run_begins_again(one, tmp_path):  # noqa: F811
    config = replace(one, iterations=4, checkpoint=EVERY_TEN)
    whole = make_trainer(config).train().folder
    copy = shutil.copytree(whole, tmp_path / "copy")
    for name in ("checkpoints", *AGENTS):
        shutil.rmtree(copy / name)
    (copy / "summary.json").unlink()
    make_trainer(replace(config, resume=str(copy))).train()
    same(whole, copy)


def test_a_finished_run_without_its_agents_saves_them_again(finished, tmp_path):
    config, folder = finished
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "agent_2")
    make_trainer(config).train()
    same(whole, folder)
