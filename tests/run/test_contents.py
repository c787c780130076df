"""What a report shows of runs and evaluations, and what a run stores for it."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import sentences
from transformers import AutoModelForCausalLM
from written import write_evaluation, write_run

from cory.agent import make_agents
from cory.errors import UserError
from cory.roles import RolePrompts
from cory.run.report import evaluation_page, render, run_page
from cory.task import Task
from cory.trainer import CoryTrainer
from study.report import command_line, make_page

PROMPTS = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


def make_trainer(config):
    return CoryTrainer(
        config, make_agents(config), Task.from_prompts(sentences(16), count_good, PROMPTS)
    )


def test_the_kl_of_a_response_is_that_of_a_plain_loop(config):
    """Token by token with transformers alone, after an update."""
    trainer = make_trainer(
        replace(config, ppo=replace(config.ppo, kl_penalty="kl", learning_rate=1e-2))
    )
    trainer.iteration(0)
    agent = trainer.agents[0]
    rollout = agent.respond(sentences(3), 5, torch.Generator())
    base = AutoModelForCausalLM.from_pretrained(config.model.name).eval()
    for query, response, kl in zip(
        rollout.prompt_ids, rollout.response_ids, agent.response_kls(rollout), strict=True
    ):
        with torch.no_grad():
            ids = torch.cat([query, response])[None]
            new, old = (
                model(ids).logits[0].log_softmax(-1) for model in (agent.policy.eval(), base)
            )
        log_ratios = [
            (new[t - 1, ids[0, t]] - old[t - 1, ids[0, t]]).item()
            for t in range(len(query), len(ids[0]))
        ]
        assert max(map(abs, log_ratios)) > 0.01 and kl == pytest.approx(sum(log_ratios), abs=1e-3)
    assert trainer.iteration(1).samples == []  # config.sample_every is 2


def test_a_run_stores_what_each_role_read_and_writes_its_report(config):
    run = make_trainer(replace(config, iterations=3)).train()
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    pioneer, observer = (
        [s for s in samples if s["iteration"] == 0 and s["role"] == r]
        for r in ("pioneer", "observer")
    )
    for first, second in zip(pioneer, observer, strict=True):
        assert (
            second["prompt"] == f'Improve "{first["query"]}{first["completion"]}": {first["query"]}'
        )
        assert first["prompt"] == first["query"] == second["query"]
        assert first["kl"] == 0.0  # before the first update the policy is the reference
    assert any(s["kl"] for s in samples if s["iteration"] == 2)
    summary = json.loads((run.folder / "summary.json").read_text())["samples"]
    assert [s["role"] for s in summary["after"]["chain"]] == ["pioneer"] * 4 + ["observer"] * 4
    assert "CORY with 2 agents" in (run.folder / "report.html").read_text()


def test_curves_that_cannot_be_drawn_are_a_warning(config, monkeypatch):
    """Such as where MPLBACKEND names none; what was learnt is saved."""
    from cory.run import plots

    def fail(*args, **_):
        raise ValueError("'Qt4Agg' is not a valid value for backend")

    monkeypatch.setattr(plots, "plot_curves", fail)
    with (
        pytest.warns(UserWarning, match=r"curves.png could not be drawn \('Qt4Agg'"),
        pytest.warns(UserWarning, match=r"report.html could not be written \(ValueError: 'Qt4Agg'"),
    ):
        run = make_trainer(replace(config, iterations=1)).train()
    assert (run.folder / "agent_1").is_dir() and (run.folder / "summary.json").exists()
    assert not (run.folder / "curves.png").exists()


def test_a_report_that_fails_is_a_warning(config, monkeypatch):
    from cory.run import report

    def fail(*args):
        raise OSError(28, "No space left")

    monkeypatch.setattr(report, "render", fail)
    with pytest.warns(UserWarning, match=r"report.html could not be written \("):
        run = make_trainer(replace(config, iterations=1)).train()
    assert (run.folder / "summary.json").exists() and not (run.folder / "report.html").exists()


def titles(page):
    """The titles of a page's chains, by query."""
    return {query: [title for title, _ in chains] for query, chains in page.completions.items()}


def test_the_page_of_a_run(tmp_path):
    flags = {1: ["kl"], 2: ["kl"], 5: ["collapse"]}
    folder = write_run(tmp_path / "a", iterations=6, texts=["one", "two"], flags=flags)
    page = run_page(folder, "CORY")
    assert page.facts == ["CORY", "6 of 6 iterations", "seed 0"]
    assert page.notes == [
        "agent_1: flag kl in 2 iterations",
        "agent_1: flag collapse in 1 iteration",
    ]
    (table,) = page.tables
    assert table.rows[0][""] == "as pioneer"
    assert table.rows[0]["task reward"] == "0.100 → 0.733"
    assert titles(page) == {
        "the film": ["CORY · before training", "CORY · after training"],
        "query 0": ["CORY · iteration 0"],
        "query 1": ["CORY · iteration 1"],
    }
    ((_, chain),) = page.completions["query 1"]
    assert [(step["role"], step["completion"]) for step in chain] == [
        ("pioneer", "two"),
        ("observer", "two"),
    ]
    html = render(page)
    assert "reward +0.10 · KL 1.25" in html and "Better than &#34;query 1&#34;: query 1" in html


def test_the_page_of_an_evaluation(tmp_path):
    page = evaluation_page(write_evaluation(tmp_path / "e"))
    (table,) = page.tables
    assert table.note.startswith("e: 2 queries.")
    joint = "run/agent_2 after run/agent_1"
    cells = {"task reward": "0.500 ± 0.100", "KL": "0.200 ± 0.000"}
    assert table.rows[1] == {"model": "run/agent_1", **cells, "calls": "1"}
    assert table.rows[3] == {"model": joint, **cells, "calls": "2"}
    assert titles(page)["query 0"] == ["base", "run/agent_1", "run/agent_2", joint]
    _, (response,) = page.completions["query 1"][-1]
    assert response["completion"] == f"bad by {joint}" and response["prompt"] == "after: bad"
    assert "team reward" not in render(page)


def test_runs_and_evaluations_on_one_page(tmp_path):
    write_run(tmp_path / "cory0", texts=["one"])
    write_run(tmp_path / "ppo0", agents=1, texts=["two"])
    page = make_page([tmp_path / "cory0", tmp_path / "ppo0", write_evaluation(tmp_path / "e")])
    assert len(page.figures) == 2
    tables = [table.title for table in page.tables]
    assert tables == ["cory0: Start and end", "ppo0: Start and end", "e: Held-out evaluation"]
    # Side by side.
    evaluated = ["base", "run/agent_1", "run/agent_2", "run/agent_2 after run/agent_1"]
    assert titles(page)["query 0"] == ["cory0 · iteration 0", "ppo0 · iteration 0", *evaluated]


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a", texts=["one"], ended=False)
    write_run(tmp_path / "runs/b", seed=1)
    command_line(["runs/a"])  # a run that has not ended
    page = (tmp_path / "runs/a/report.html").read_text()
    assert "20 of 20 iterations" in page
    write_evaluation(tmp_path / "runs/e")
    command_line(["runs/e"])
    for name in ("evaluation.md", "evaluation.png", "report.html"):
        assert (tmp_path / "runs/e" / name).exists()
    command_line(["runs/a", "runs/b", "runs/e", "--out", "new/all.html"])
    page = (tmp_path / "new/all.html").read_text()
    assert "b: Start and end" in page and "e: Held-out evaluation" in page
    for argv in (["runs/none"], ["runs/a", "--nope"], []):
        with pytest.raises(UserError):
            command_line(argv)


@pytest.mark.usefixtures("drawn_figures")
def test_the_page_of_a_long_run_is_small(tmp_path):
    """Of 2,100 iterations with long texts in a thousand of them, from all of the run."""
    folder = write_run(tmp_path / "a", iterations=2100, texts=["a long text " * 300] * 1000)
    page = run_page(folder, "CORY")
    assert len(page.figures[0]) < 300_000 and len(render(page)) < 1_000_000
    queries = list(page.completions)
    assert queries[:2] == ["the film", "query 0"] and queries[-1] == "query 984"
    assert len(queries) == 26


def test_a_prompt_of_chat_messages_is_shown(tmp_path):
    folder = write_run(tmp_path / "a", texts=["one"])
    (line, *_) = (folder / "samples.jsonl").read_text().splitlines()
    messages = [{"role": "system", "content": "be <good>"}, {"role": "user", "content": "query 0"}]
    (folder / "samples.jsonl").write_text(json.dumps(json.loads(line) | {"prompt": messages}))
    assert "system: be &lt;good&gt;" in render(run_page(folder, "CORY"))
