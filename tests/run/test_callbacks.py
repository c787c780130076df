"""Callbacks written by users: the values that they can read, and how they act on a run."""

import contextlib
import io
import json
import re

from conftest import ROOT, make_trainer

from cory import Callback
from cory.run.folder import read_rows


def test_the_python_code_of_own_task_md_runs(policy_folder, tmp_path, monkeypatch):
    page = (ROOT / "docs/own_task.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(blocks)
    for documented, shortened in (
        ("imdb_train/weights/policy", str(policy_folder)),
        ("iterations=20", "iterations=3"),
        ("bound=0.5", "bound=-1.0"),
    ):
        assert documented in code
        code = code.replace(documented, shortened)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/own_task.md", "exec"), {})
    assert "Saved: agent_1, agent_2 in runs/cory-2" in printed.getvalue()
    ended = [
        json.loads((tmp_path / f"runs/{run}/summary.json").read_text())
        for run in ("cory", "cory-2")
    ]
    assert [summary["iterations"] for summary in ended] == [3, 1]  # a callback stops the second run
    assert list(tmp_path.glob("runs/evaluation-*/evaluation.json"))


def test_a_callback_reads_records_and_samples_and_can_add_metrics(config):
    seen = []

    class Watch(Callback):
        def on_iteration_end(self, trainer, iteration):
            assert len(trainer.run.history) == 2 * iteration.index
            for record in iteration.records:
                record["mine"] = iteration.index
            seen.append(iteration)

    run = make_trainer(config, callbacks=[Watch()]).train()
    assert [iteration.index for iteration in seen] == [0, 1, 2, 3]
    assert [record for iteration in seen for record in iteration.records] == run.history
    rows = read_rows(run.folder / "metrics.jsonl")
    assert rows == run.history and rows[-1]["mine"] == 3
    samples = [sample for iteration in seen for sample in iteration.samples]
    assert samples == read_rows(run.folder / "samples.jsonl")
