"""Output folders: one writer at a time, nothing half written under its final name, nothing of another kind replaced."""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from test_evaluation import held_out, make_run, settings
from test_resume import content, make_trainer, one

from cory import evaluate
from cory.command import main
from cory.errors import UserError
from cory.evaluation.answer import Answerer
from cory.run import checkpoint
from cory.run.folder import filled, new_folder, write_text

__all__ = ["held_out", "one"]  # fixtures


def killed(work) -> None:
    """Does something in a process of its own, in which it must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def only(path: Path) -> set[str]:
    """The names in a folder that a user sees."""
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}


def test_two_runs_started_at_once_into_one_folder_do_not_mix(one, monkeypatch):
    """The second starts while the first has found the folder empty and is about to write its settings."""
    said = []
    write = checkpoint.write_text

    def slow(path, text):
        if path.name == "config.yaml" and not said:
            said.append("the second one trained")
            with pytest.raises(
                UserError, match="expected a folder that no other process is writing"
            ) as refused:
                make_trainer(replace(one, seed=7)).train()
            said.append(str(refused.value))
        write(path, text)

    monkeypatch.setattr(checkpoint, "write_text", slow)
    run = make_trainer(replace(one, iterations=2)).train()
    assert len(said) == 2
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2 * 2


def test_an_evaluation_that_was_killed_begins_anew(config, held_out, tmp_path):
    run = make_run(config, 1, iterations=1)

    def dies(prompts, completions):
        kill()

    killed(lambda: evaluate([run], replace(held_out, reward=dies), settings(tmp_path)))
    left = tmp_path / "evaluation"
    assert list(left.glob(".unfinished*")) and only(left) == set()
    evaluate([run], held_out, settings(tmp_path))
    assert (left / "evaluation.json").exists() and not list(left.glob(".unfinished*"))


def test_an_evaluation_that_another_process_writes_is_left_alone(
    config, held_out, tmp_path, monkeypatch
):
    run = make_run(config, 1, iterations=1)
    respond = Answerer.respond
    tried = []

    def slow(*args, **kwargs):
        if not tried:
            tried.append(1)
            with pytest.raises(
                UserError, match="expected a folder that no other process is writing"
            ):
                evaluate([run], held_out, settings(tmp_path))
        return respond(*args, **kwargs)

    monkeypatch.setattr(Answerer, "respond", slow)
    done = evaluate([run], held_out, settings(tmp_path))
    lines = [
        json.loads(line)
        for line in (done.folder / "responses.jsonl").read_text().splitlines()
        if line
    ]
    assert tried and len({(row["model"], row["query"]) for row in lines}) == len(lines)


@pytest.mark.parametrize("kind", ["another kind", "a file"])
def test_a_run_and_an_evaluation_do_not_take_each_others_folders(config, held_out, tmp_path, kind):
    run = make_run(config, 1, iterations=1)
    evaluation = evaluate([run], held_out, settings(tmp_path)).folder
    if kind == "a file":
        run_place, evaluation_place = run / "config.yaml", evaluation / "evaluation.json"
    else:
        run_place, evaluation_place = run, evaluation
    before = content(tmp_path)
    with pytest.raises(UserError, match="output: expected a"):
        evaluate([run], held_out, replace(settings(tmp_path), output=str(run_place)))
    with pytest.raises(UserError, match="output: expected a"):
        make_run(config, 1, iterations=1, output=str(evaluation_place))
    with pytest.raises(UserError, match="resume: expected auto, or the folder of a run"):
        make_run(config, 1, iterations=1, resume=str(evaluation_place))
    assert content(tmp_path) == before


def test_a_link_that_leads_nowhere_is_no_folder_for_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="a folder that can be written"):
        new_folder(None, "run")


def test_names_are_given_when_all_is_filled(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/agent").write_text("old")
    with pytest.raises(ZeroDivisionError), filled(tmp_path) as new:
        (new / "best").mkdir()
        raise ZeroDivisionError
    assert (tmp_path / "best/agent").read_text() == "old"
    with filled(tmp_path) as new:  # what was left there is gone
        assert list(new.iterdir()) == []
        (new / "best").mkdir()
        (new / "best/agent").write_text("new")
        (new / "page.md").write_text("new")
        assert (tmp_path / "best/agent").read_text() == "old"
    assert (tmp_path / "best/agent").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"best", "page.md"}


def test_a_text_is_replaced_or_stays(tmp_path, monkeypatch):
    write_text(tmp_path / "page.md", "old")
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text(tmp_path / "page.md", "new")
    assert (tmp_path / "page.md").read_text() == "old"


@pytest.mark.parametrize("there", ["a user's files", "a file"])
def test_models_do_not_go_where_something_is(tmp_path, monkeypatch, capsys, there):
    from gsm8k_train import make_weights
    from study.small_models import cached

    target = tmp_path / "mine"
    if there == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "policy").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(UserError, match="output: expected a"):
        cached(target, lambda partial: (partial / "config.json").write_text("{}"))
    monkeypatch.setattr(sys, "argv", ["make_weights.py", str(target)])
    with pytest.raises(SystemExit):
        main(make_weights.command_line)
    assert content(tmp_path) == before


def test_an_empty_folder_is_no_model(tmp_path):
    from study.small_models import cached

    (tmp_path / "model").mkdir()
    cached(tmp_path / "model", lambda partial: (partial / "config.json").write_text("{}"))
    assert only(tmp_path / "model") == {"config.json"} and only(tmp_path) == {"model"}
