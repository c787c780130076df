"""Output folders: one writer at a time, no incomplete file under its final name, no earlier output overwritten."""

import io
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_trainer
from run_files import content

from cory import evaluate
from cory.agent import Agent
from cory.chat import Chat
from cory.config import EvaluationConfig
from cory.errors import UserError
from cory.hub import write_folder
from cory.run import checkpoint
from cory.run.folder import filled, new_folder, read_rows, write_text


def killed(work) -> None:
    """Calls `work` in a forked process and asserts that SIGKILL ends it."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def visible(path: Path) -> set[str]:
    """Returns the names in a folder that are not hidden."""
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}


def test_two_runs_started_at_once_into_one_folder_do_not_mix(one, monkeypatch):
    """The second run starts when the first has found the folder empty and is about to write its settings."""
    tried = []
    write = checkpoint.write_text

    def slow(path, text):
        if path.name == "config.yaml" and not tried:
            tried.append(path)
            with pytest.raises(UserError, match=r"^output: "):
                make_trainer(replace(one, seed=7)).train()
        write(path, text)

    monkeypatch.setattr(checkpoint, "write_text", slow)
    run = make_trainer(replace(one, iterations=2)).train()
    assert tried and len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2 * 2


@pytest.fixture
def settings(tmp_path):
    return EvaluationConfig(device="cpu", queries=2, output=str(tmp_path / "evaluation"))


def test_a_killed_evaluation_starts_again_and_a_complete_one_is_kept(finished, settings):
    def dies(prompts, completions):
        kill()

    run, task = finished.folder, finished.task
    killed(lambda: evaluate([run], replace(task, reward=dies), settings))
    output = Path(settings.output)
    assert list(output.glob(".unfinished*")) and visible(output) == set()
    rows = evaluate([run], task, settings).rows
    assert not list(output.glob(".unfinished*"))
    other_folder = replace(settings, output=f"{output}-elsewhere")
    assert rows == evaluate([run], task, other_folder).rows
    before = content(output)
    with pytest.raises(UserError, match=r"^output: "):
        evaluate([run], task, settings)
    assert content(output) == before


def test_a_second_evaluation_into_the_same_folder_is_refused(finished, settings, monkeypatch):
    """The second one starts while the first is still writing."""
    respond = Agent.respond
    tried = []

    def slow(*args, **kwargs):
        if not tried:
            tried.append(1)
            with pytest.raises(UserError, match=r"^output: "):
                evaluate([finished.folder], finished.task, settings)
        return respond(*args, **kwargs)

    monkeypatch.setattr(Agent, "respond", slow)
    done = evaluate([finished.folder], finished.task, settings)
    lines = read_rows(done.folder / "responses.jsonl")
    assert tried and len({(row["model"], row["query"]) for row in lines}) == len(lines)


@pytest.mark.parametrize("file", [("", ""), ("config.yaml", "evaluation.json")])
def test_a_run_and_an_evaluation_do_not_take_each_others_folders(
    one, finished, settings, tmp_path, file
):
    run = shutil.copytree(finished.folder, tmp_path / "copy")
    evaluation = evaluate([run], finished.task, settings).folder
    run_path, evaluation_path = str(run / file[0]), str(evaluation / file[1])
    before = content(tmp_path)
    with pytest.raises(UserError, match=r"^output: "):
        evaluate([run], finished.task, replace(settings, output=run_path))
    with pytest.raises(UserError, match=r"^output: "):
        make_trainer(replace(one, output=evaluation_path)).train()
    with pytest.raises(UserError, match=r"^resume: "):
        make_trainer(replace(one, resume=evaluation_path)).train()
    assert content(tmp_path) == before


@pytest.mark.parametrize("gone", ["agent_1", "agent_2"])
def test_a_run_without_the_folder_of_an_agent_is_refused(
    finished, settings, tmp_path, monkeypatch, gone
):
    run = shutil.copytree(finished.folder, tmp_path / "copy")
    shutil.rmtree(run / gone)
    (run / gone).touch()  # a file in place of the folder does not count
    with pytest.raises(UserError, match=rf"copy: .* {gone}$"):
        evaluate([run], finished.task, settings)
    with pytest.raises(UserError, match=rf"copy: .* {gone}$"):
        Chat(run, "cpu")
    with pytest.raises(UserError, match=rf"copy: .* {gone}$"):
        write_folder(tmp_path, run, "user/name")
    assert not Path(settings.output).exists()


def test_an_evaluation_is_saved_although_its_output_is_closed(finished, settings, monkeypatch):
    """For example, `2>&1 | head` closes the output early."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    monkeypatch.setattr("sys.stderr", Closed())
    evaluate([finished.folder], finished.task, settings)
    files = {"settings.json", "evaluation.json", "responses.jsonl", "report.html"}
    assert visible(Path(settings.output)) == files


def test_an_output_without_a_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^output: .*got ''"):
        new_folder("", "name")


def test_a_folders_files_appear_under_their_names_only_when_all_are_written(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/agent").write_text("old")
    with pytest.raises(ZeroDivisionError), filled(tmp_path) as new:
        (new / "best").mkdir()
        raise ZeroDivisionError
    assert (tmp_path / "best/agent").read_text() == "old"
    with filled(tmp_path) as new:  # files from the failed attempt are gone
        assert list(new.iterdir()) == []
        (new / "best").mkdir()
        (new / "best/agent").write_text("new")
        (new / "page.md").write_text("new")
        assert (tmp_path / "best/agent").read_text() == "old"
    assert (tmp_path / "best/agent").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"best", "page.md"}


def test_a_failed_write_leaves_the_old_text(tmp_path, monkeypatch):
    write_text(tmp_path / "page.md", "old")
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text(tmp_path / "page.md", "new")
    assert (tmp_path / "page.md").read_text() == "old"
