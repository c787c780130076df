"""What users' callbacks see of a run, and what they can do to it."""

import contextlib
import io
import json
import re

import pytest
import torch
from conftest import ROOT
from test_resume import count_good, make_trainer

from cory import Callback


def train(config, *callbacks):
    return make_trainer(config, callbacks=callbacks).train()


def test_the_python_of_the_page_about_own_tasks_runs(policy_folder, tmp_path, monkeypatch):
    page = (ROOT / "docs/own_task.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(blocks)
    for there, here in (
        ("imdb_train/weights/policy", str(policy_folder)),
        ("iterations=20", "iterations=3"),
        ("bound=0.5", "bound=-1.0"),
    ):
        assert there in code
        code = code.replace(there, here)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/own_task.md", "exec"), {})
    assert "Saved: agent_1, agent_2 in runs/cory-2" in printed.getvalue()
    ended = [
        json.loads((tmp_path / f"runs/{run}/summary.json").read_text())
        for run in ("cory", "cory-2")
    ]
    assert [summary["iterations"] for summary in ended] == [3, 1]  # the callback ends the second
    assert list(tmp_path.glob("runs/evaluation-*/evaluation.json"))


def test_an_iteration_holds_what_happened(config):
    seen = []

    class Watch(Callback):
        def on_iteration_end(self, trainer, iteration):
            assert len(trainer.run.history) == 2 * iteration.index
            for record in iteration.records:
                record["mine"] = iteration.index
            seen.append(iteration)

    run = train(config, Watch())
    assert [iteration.index for iteration in seen] == [0, 1, 2, 3]
    for iteration in seen:
        pioneer, observer = iteration.rollouts
        queries = iteration.batch.columns["prompt"]
        pairs = zip(queries, pioneer.completions, strict=True)
        assert pioneer.prompts == queries
        assert observer.prompts == [
            f'Improve "{query}{response}": {query}' for query, response in pairs
        ]
        expected = torch.tensor(
            [count_good(None, rollout.completions) for rollout in iteration.rollouts]
        )
        assert torch.allclose(torch.stack(list(iteration.task_rewards)), expected)
        assert torch.allclose(iteration.rewards[0], expected.sum(0))
        assert all(len(ids) <= iteration.batch.max_new_tokens for ids in pioneer.response_ids)
        roles = {record["agent"]: record["role"] for record in iteration.records}
        assert roles == {iteration.chain[0].name: "pioneer", iteration.chain[1].name: "observer"}
        assert {"seconds_generate", "seconds_learn", "seconds_total"} < iteration.timings.keys()
    assert [record for iteration in seen for record in iteration.records] == run.history
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert lines == run.history and lines[-1]["mine"] == 3
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert [sample for iteration in seen for sample in iteration.samples] == samples


def test_events_come_in_their_order(config):
    events = []

    class Watch(Callback):
        def on_train_begin(self, trainer, run):
            events.append("train begins")

        def on_iteration_begin(self, trainer, k):
            events.append(f"{k} begins")

        def on_iteration_end(self, trainer, iteration):
            events.append(f"{iteration.index} ends")

        def on_train_end(self, trainer, run):
            saved = {path.name for path in run.folder.iterdir()}
            assert {"agent_1", "agent_2", "summary.json", "curves.png", "report.html"} < saved
            events.append("train ends")

    config.iterations = 2
    train(config, Watch())
    iterations = [f"{k} {event}" for k in range(2) for event in ("begins", "ends")]
    assert events == ["train begins", *iterations, "train ends"]


class FailsAt(Callback):
    def __init__(self, event: str, k: int = 0) -> None:
        self.k = k
        setattr(type(self), event, FailsAt.fail)

    def fail(self, trainer, argument):
        if getattr(argument, "index", self.k) == self.k:
            raise ZeroDivisionError("the callback's own fault")


@pytest.mark.parametrize(
    ("event", "done"), [("on_train_begin", 0), ("on_iteration_end", 2), ("on_train_end", 4)]
)
def test_a_callback_that_fails_names_the_newest_checkpoint(config, tmp_path, event, done):
    whole = train(config)
    failing = type("Failing", (FailsAt,), {})(event, 2)
    config.output = str(tmp_path / "failed")
    config.checkpoint.save_every = 2
    with pytest.raises(ZeroDivisionError, match="own fault") as error:
        train(config, failing)
    (note,) = error.value.__notes__
    assert f"iter-{done:06d}" in note if done else "No checkpoint" in note
    config.resume = "auto"
    assert train(config, Callback()).history == whole.history
