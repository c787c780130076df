"""Output folders: one writer at a time, nothing half written under its final name, nothing of another kind replaced."""

import json
import os
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from test_evaluation import held_out, make_run, settings
from test_finished import content, ended, finished
from test_resume import after, count_good, interrupt, make_trainer, one, same, whole

from cory import evaluate
from cory.agent import Agent
from cory.command import main
from cory.errors import UserError
from cory.resume import checkpoint
from cory.run import folder
from cory.run.output import filled, new_folder
from cory.run.signals import Interrupted

__all__ = ["ended", "finished", "held_out", "one", "whole"]  # fixtures


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
    write = folder.replace_text

    def slow(path, text):
        if path.name == "config.yaml" and not said:
            said.append("the second one trained")
            with pytest.raises(
                UserError, match="expected a folder that no other process is writing"
            ) as refused:
                make_trainer(replace(one, seed=7)).train()
            said.append(str(refused.value))
        write(path, text)

    monkeypatch.setattr(folder, "replace_text", slow)
    run = make_trainer(replace(one, iterations=2)).train()
    assert len(said) == 2
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2 * 2


def test_a_run_that_ends_while_another_process_resumes_it_is_not_cut(one, monkeypatch):
    """What the run holds is read under the lock: else the state of before would be put over its end."""
    with pytest.raises(Interrupted):
        make_trainer(one, after(count_good, 3 + 2, interrupt)).train()
    resumed = replace(one, output=None, resume=one.output)
    load = checkpoint.load
    tried = []

    def slow(*args):
        if not tried:
            tried.append(1)
            with pytest.raises(
                UserError, match="expected a folder that no other process is writing"
            ):
                make_trainer(resumed).train()
        load(*args)

    monkeypatch.setattr(checkpoint, "load", slow)
    make_trainer(resumed).train()
    assert tried


def test_killed_before_it_wrote_its_settings_a_run_starts_again(one, whole, tmp_path, monkeypatch):
    again = replace(one, output=str(tmp_path / "again"))

    def start():
        # The settings are written, and not yet under their name.
        monkeypatch.setattr(Path, "replace", kill)
        make_trainer(again).train()

    killed(start)
    assert list((tmp_path / "again").iterdir()) and only(tmp_path / "again") == set()
    make_trainer(again).train()
    same(whole, tmp_path / "again")
    assert not list((tmp_path / "again").rglob(".partial-*"))


def test_killed_while_its_agents_are_saved_a_run_has_the_old_ones_or_none(
    finished, tmp_path, monkeypatch
):
    """An extended run keeps the agents of its finished iterations until all of the new ones are written."""
    config, run = finished
    before = content(run)
    save = Agent.save

    def stopped(agent, target):
        save(agent, target)
        if agent.name == "agent_1":
            raise KeyboardInterrupt  # between the first agent and the second

    with monkeypatch.context() as patched:
        patched.setattr(Agent, "save", stopped)
        with pytest.raises(KeyboardInterrupt):
            make_trainer(replace(config, iterations=6)).train()
        with pytest.raises(KeyboardInterrupt):
            make_trainer(
                replace(config, resume=None, iterations=2, output=str(tmp_path / "new"))
            ).train()
    now = content(run)
    kept = [name for name in before if name.startswith(("agent_", "summary", "curves"))]
    assert len(kept) > 4 and [name for name in kept if now[name] != before[name]] == []
    assert not any(name.startswith("agent_") for name in only(tmp_path / "new"))


def test_killed_while_it_writes_its_first_checkpoint_a_run_begins_again(
    one, whole, tmp_path, monkeypatch
):
    """The iteration is recorded, and its checkpoint is not complete."""
    begun = replace(one, output=str(tmp_path / "begun"))

    def stopped(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_complete", stopped)
        with pytest.raises(KeyboardInterrupt):
            make_trainer(begun).train()
    assert (tmp_path / "begun/metrics.jsonl").read_text() and not list(
        (tmp_path / "begun/checkpoints").glob("iter-*")
    )
    make_trainer(replace(begun, resume="auto")).train()
    same(whole, tmp_path / "begun")


def test_killed_before_its_report_a_finished_run_gets_one(finished):
    config, run = finished
    before = content(run)
    (run / "report.html").unlink()
    make_trainer(config).train()
    assert content(run) == before


def test_a_checkpoint_that_was_half_written_is_removed_by_the_next_start(one):
    with pytest.raises(Interrupted):
        make_trainer(one, after(count_good, 3 + 2, interrupt)).train()
    run = Path(one.output)
    left = run / "checkpoints/.partial-0123abcd-checkpoint"
    left.mkdir()
    (left / "agent_1.safetensors").write_bytes(b"half")
    make_trainer(replace(one, output=None, resume=str(run))).train()
    assert not left.exists()


def test_an_evaluation_that_was_killed_begins_anew(config, held_out, tmp_path):
    run = make_run(config, 1, iterations=1)

    def dies(prompts, completions):
        kill()

    killed(lambda: evaluate([run], replace(held_out, reward=dies), settings(tmp_path)))
    left = tmp_path / "evaluation"
    assert list(left.glob(".partial-*")) and only(left) == set()
    evaluate([run], held_out, settings(tmp_path))
    assert (left / "evaluation.json").exists() and not list(left.glob(".partial-*"))


def test_an_evaluation_that_another_process_writes_is_left_alone(
    config, held_out, tmp_path, monkeypatch
):
    from cory.evaluation import evaluator

    run = make_run(config, 1, iterations=1)
    answer = evaluator.answer
    tried = []

    def slow(*args, **kwargs):
        if not tried:
            tried.append(1)
            with pytest.raises(
                UserError, match="expected a folder that no other process is writing"
            ):
                evaluate([run], held_out, settings(tmp_path))
        return answer(*args, **kwargs)

    monkeypatch.setattr(evaluator, "answer", slow)
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
    with pytest.raises(UserError, match="output: expected a new or empty folder"):
        evaluate([run], held_out, replace(settings(tmp_path), output=str(run_place)))
    for resume in (None, "auto"):
        with pytest.raises(UserError, match="output: expected a new or empty folder"):
            make_run(config, 1, iterations=1, output=str(evaluation_place), resume=resume)
    with pytest.raises(UserError, match="resume: expected auto, or the folder of a run"):
        make_run(config, 1, iterations=1, resume=str(evaluation_place))
    assert content(tmp_path) == before


@pytest.mark.parametrize("when", ["between the renames", "before the old one is deleted"])
def test_killed_while_a_folder_is_replaced_there_is_the_old_one_or_the_new_one(
    tmp_path, monkeypatch, when
):
    from cory.run import output

    (tmp_path / "best").mkdir()
    (tmp_path / "best/agent").write_text("old")
    rename = Path.rename

    def killed_at_the_new(path, target):
        if (path / "agent").read_text() == "new":
            kill()
        return rename(path, target)

    def replace_best():
        if when == "between the renames":
            monkeypatch.setattr(Path, "rename", killed_at_the_new)
        else:
            monkeypatch.setattr(output.shutil, "rmtree", kill)
        with output.staged(tmp_path) as new:
            (new / "best").mkdir()
            (new / "best/agent").write_text("new")

    killed(replace_best)
    output.remove_partial(tmp_path)
    expected = "old" if when == "between the renames" else "new"
    assert (tmp_path / "best/agent").read_text() == expected
    assert only(tmp_path) == {"best"} and not list(tmp_path.glob(".replaced-*"))


def test_a_link_that_leads_nowhere_is_no_folder_for_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(tmp_path / "nowhere")
    with ExitStack() as locks, pytest.raises(UserError, match="a folder that can be written"):
        new_folder(None, "run", locks)


def test_a_folder_that_is_filled_is_complete_or_absent(tmp_path):
    from cory.run.output import filled

    target = tmp_path / "it"

    def fill():
        with filled(target) as partial:
            (partial / "first").write_text("1")
            kill()

    killed(fill)
    assert not target.exists() and len(list(tmp_path.glob(".partial-*-it"))) == 1
    target.mkdir()  # an empty folder counts as none
    with filled(target) as partial:
        # That of the dead process is removed.
        assert list(tmp_path.glob(".partial-*-it")) == [partial]
        (partial / "first").write_text("1")
    assert only(target) == {"first"} and only(tmp_path) == {"it"}
    with pytest.raises(UserError, match="expected a new or empty folder"), filled(target):
        pass
    with (
        pytest.raises(UserError, match="expected a folder that can be made"),
        filled(target / "first/below"),
    ):
        pass


def test_what_a_living_process_fills_is_left_alone(tmp_path):
    from cory.run.output import filled

    with pytest.raises(UserError, match="already exists"), filled(tmp_path / "it") as mine:
        (mine / "a").write_text("mine")
        with filled(tmp_path / "it") as other:
            (other / "b").write_text("other's")
        assert (mine / "a").exists() and only(tmp_path / "it") == {"b"}
    assert only(tmp_path) == {"it"}


def test_replaced_by_two_at_once_a_file_is_one_of_theirs(tmp_path):
    """Each writes under a name of its own."""
    from cory.run.output import replacing

    file = tmp_path / "report.html"
    with replacing(file) as first:
        first.write_text("first")
        with replacing(file) as second:
            second.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first" and only(tmp_path) == {"report.html"}
    with pytest.raises(ZeroDivisionError), replacing(file) as third:
        third.write_text("half")
        raise ZeroDivisionError
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("there", ["a user's files", "a file"])
def test_models_and_uploads_do_not_go_where_something_is(tmp_path, monkeypatch, capsys, there):
    from gsm8k_train import make_weights
    from study.small_models import cached

    target = tmp_path / "mine"
    if there == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "policy").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(UserError, match="expected a new or empty folder"):
        cached(target, lambda partial: (partial / "config.json").write_text("{}"))
    monkeypatch.setattr(sys, "argv", ["make_weights.py", str(target)])
    with pytest.raises(SystemExit):
        main(make_weights.command_line)
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_an_empty_folder_is_no_model(tmp_path):
    from study.small_models import cached

    (tmp_path / "model").mkdir()
    cached(tmp_path / "model", lambda partial: (partial / "config.json").write_text("{}"))
    assert only(tmp_path / "model") == {"config.json"}


def test_others_may_read_weights_as_they_may_read_other_files(tmp_path):
    with filled(tmp_path / "agent") as partial:
        for name in ("model.safetensors", "config.json"):
            (partial / name).write_text("")
        (partial / "model.safetensors").chmod(0o600)  # as safetensors makes them
    modes = {path.stat().st_mode for path in (tmp_path / "agent").iterdir()}
    assert len(modes) == 1
