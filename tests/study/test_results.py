"""Where results go: not over those of another kind, not half, and not by two processes at once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from handmade import compared, make_run

from cory.errors import UserError
from study import claims, compare, experiment, report
from study.compare import write
from study.frame import held_out_rows, read_study


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_comparison_is_written_at_once_and_again(tmp_path, monkeypatch):
    make_run(tmp_path / "runs/a")
    study = compared(tmp_path / "runs")
    write(study, tmp_path / "out", "First")
    before = content(tmp_path / "out")
    assert {
        "comparison.md",
        "curves.png",
        "runs.csv",
        "metrics.csv.gz",
        "final.csv",
        "report.html",
    } <= before.keys()

    def failing(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(report, "write_comparison_page", failing)
        with pytest.raises(KeyboardInterrupt):
            write(study, tmp_path / "out", "Second")
    assert content(tmp_path / "out") == before
    write(study, tmp_path / "out", "Third")
    assert content(tmp_path / "out")["comparison.md"].startswith(b"# Third")


def test_a_comparison_leaves_no_file_of_an_earlier_one(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"over/{seed}", ppo__init_kl_coef=0.1 + seed)
    make_run(tmp_path / "runs/a")
    out = tmp_path / "out"
    study = compared(tmp_path / "over", over="ppo.init_kl_coef")
    rows = [{"name": "0/agent_1", "task_reward": 0.5, "combined_reward": 0.4}]
    study.held_out = held_out_rows(rows, {"0": (study.groups[0], 0)})
    write(study, out)
    outdated = {"held_out.csv", "held_out.png", "over.png", "frontier.png"}
    for name in ("README.md", "runs.png"):
        (out / name).write_text("mine")
    assert outdated < content(out).keys()
    before = content(out).keys()
    write(compared(tmp_path / "runs"), out)
    assert content(out).keys() == before - outdated

    write(read_study(out), out)  # again without the runs, which the report needs
    assert (out / "report.html").exists()
    make_run(tmp_path / "runs/b", seed=1)
    other = compared(tmp_path / "runs")
    other.records = []
    write(other, out)
    assert not (out / "report.html").exists()


def test_a_comparison_keeps_the_figures_of_results_that_it_did_not_write(tmp_path):
    """As those of the repository's, which have no comparison.md."""
    make_run(tmp_path / "runs/a")
    study = compared(tmp_path / "runs")
    write(study, tmp_path / "out")
    (tmp_path / "out/comparison.md").unlink()
    study.metrics = study.metrics[:0]
    write(study, tmp_path / "out")
    assert (tmp_path / "out/curves.png").exists()
    assert not (tmp_path / "out/metrics.csv.gz").exists()


def test_frozen_results_are_replaced_by_no_comparison(tmp_path):
    make_run(tmp_path / "runs/a")
    out = tmp_path / "out"
    compare.command_line([str(tmp_path / "runs/a"), "--out", str(out)])
    (out / "README.md").write_text("# Old\n\n<!-- frozen: c0f7e9e -->\n")
    before = content(out)
    for runs in (tmp_path / "runs/a", out):
        with pytest.raises(UserError, match=r"not frozen, got .*, frozen at c0f7e9e"):
            compare.command_line([str(runs), "--out", str(out)])
    assert content(out) == before


def test_an_earlier_result_file_is_replaced(tmp_path):
    run, page, table = (tmp_path / name for name in ("runs/a", "new/report.html", "new/claims.md"))
    make_run(run)
    report.command_line([str(run), "--out", str(page)])
    claims.command_line(["--results", str(tmp_path), "--out", str(table)])
    first_page, first_table = page.read_text(), table.read_text()

    page.write_text(first_page + "<p>earlier</p>")
    table.write_text(first_table + "earlier")
    report.command_line([str(run), "--out", str(page)])
    claims.command_line(["--results", str(tmp_path), "--out", str(table)])
    assert (page.read_text(), table.read_text()) == (first_page, first_table)


SLOW = """
import sys
from pathlib import Path
from study.experiment import Engine, run_all
from study.planned import Planned
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
run = Planned("x", Path(sys.argv[1]) / "run", {"model": {"name": "x"}}, [sys.executable, "-c", code], 0.0)
run_all([run], Engine())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends them nowhere else")
def test_runs_end_with_an_experiment_that_is_killed(tmp_path):
    """Else the same command, started again, would find its runs being written."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], cwd=ROOT)
    log = tmp_path / "run.log"
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.05)
        assert process.poll() is None
    run = int(log.read_text())
    process.kill()
    process.wait()
    for _ in range(100):
        if (
            not os.path.exists(f"/proc/{run}")
            or "\nState:\tZ" in open(f"/proc/{run}/status").read()
        ):
            return
        time.sleep(0.05)
    os.kill(run, signal.SIGKILL)
    pytest.fail("the run outlived its experiment")


def test_an_experiment_is_run_by_one_process_at_a_time(tmp_path, monkeypatch):
    """The second one would count the runs of the first as failed, and compare what is there so far."""
    argv = [
        str(ROOT / "configs/experiments/imdb_curves.yaml"),
        "--scale",
        "tiny",
        "--runs",
        str(tmp_path),
    ]
    refused = []

    def run_all(*args):
        if not refused:
            refused.append(1)
            with pytest.raises(
                UserError, match="expected a folder that no other process is writing"
            ):
                experiment.command_line(argv)
        return []

    monkeypatch.setattr(experiment, "run_all", run_all)
    with pytest.raises(UserError, match="no run has ended"):
        experiment.command_line(argv)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="--runs: expected a folder that can be written"):
        experiment.command_line([*argv[:-1], str(tmp_path / "file")])
    assert refused and json.dumps((tmp_path / "file").read_text()) == '"mine"'
