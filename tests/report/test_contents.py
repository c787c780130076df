"""What a report shows of runs and evaluations, and what a run stores for it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, sentences
from transformers import AutoModelForCausalLM
from written import write_evaluation, write_run

from cory.agent import make_agents
from cory.errors import UserError
from cory.prompts import RolePrompts
from cory.report.completions import Step
from cory.report.contents import evaluation_page, run_page
from cory.report.page import render
from cory.task import Task
from cory.trainer import CoryTrainer
from study.page import make_page
from study.records import read
from study.report import command_line

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
    from cory.report import plots

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


@pytest.mark.parametrize(
    "error", [MemoryError("full"), OSError(28, "No space left"), KeyError("flags")]
)
def test_a_report_that_fails_is_a_warning(config, monkeypatch, error):
    from cory.report import page

    def fail(*args):
        raise error

    monkeypatch.setattr(page, "write_page", fail)
    with pytest.warns(UserWarning, match=r"report.html could not be written \("):
        run = make_trainer(replace(config, iterations=1)).train()
    assert (run.folder / "summary.json").exists() and not (run.folder / "report.html").exists()


def titles(page):
    """The titles of a page's chains, by query."""
    return {query: [chain.title for chain in chains] for query, chains in page.completions.items()}


def test_the_page_of_a_run(tmp_path):
    flags = {1: ["kl"], 2: ["kl"], 5: ["collapse"]}
    folder = write_run(tmp_path / "a", iterations=6, texts=["one", "two"], flags=flags)
    page = run_page(folder, "CORY")
    assert page.facts == ["CORY", "model tiny", "6 of 6 iterations", "seed 0"]
    assert page.notes[0].startswith(
        "agent_1, 2 iterations from 1 on: KL 0.1 is above guards.kl_bound"
    )
    assert page.notes[1].startswith("agent_1, 1 iteration from 5 on: distinct-2")
    (table,) = page.tables
    assert table.rows[0] == ["as pioneer: task reward", "0.100", "0.733", "0.633"]
    # The agents' solo responses are those with which the chain begins, so they are not shown again.
    assert titles(page) == {
        "the film": ["CORY · before training", "CORY · after training"],
        "query 0": ["CORY · iteration 0"],
        "query 1": ["CORY · iteration 1"],
    }
    (chain,) = page.completions["query 1"]
    assert chain.steps == [
        Step("pioneer · agent_1", "reward +0.10 · KL 1.25", None, "two"),
        Step(
            "observer · agent_2", "reward +0.10 · KL 1.25", 'Better than "query 1": query 1', "two"
        ),
    ]


def test_the_page_of_an_evaluation(tmp_path):
    page = evaluation_page(write_evaluation(tmp_path / "e"))
    assert page.facts == ["2 queries"]
    assert [table.title for table in page.tables] == ["Held-out evaluation", "Cost of a query"]
    assert page.tables[0].rows[1] == ["run/agent_1", "0.500 ± 0.100", "0.200 ± 0.000"]
    joint = "run/agent_2 after run/agent_1"
    assert titles(page)["query 0"] == ["base", "run/agent_1", "run/agent_2", joint]
    steps = page.completions["query 1"][-1].steps  # of the first response, after what it read
    assert steps == [
        Step("run/agent_1", "reward +0.50 · KL 0.50", None, "bad by run/agent_1"),
        Step("observer · run/agent_2", "reward +0.50 · KL 0.50", "after: bad", f"bad by {joint}"),
    ]


def test_runs_and_evaluations_on_one_page(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"cory{seed}", seed, texts=["one"])
        write_run(tmp_path / f"ppo{seed}", seed, agents=1, texts=["two"])
    runs = [read(tmp_path / name) for name in ("cory0", "cory1", "ppo0", "ppo1")]
    page = make_page(runs, [write_evaluation(tmp_path / "e")], "A title")
    assert page.figures and page.facts[:2] == ["CORY: 2 of 2 runs ended", "PPO: 2 of 2 runs ended"]
    tables = {table.title: table for table in page.tables}
    assert list(tables)[:2] == ["End of training", "End of training, by agent"]
    assert list(tables)[-2:] == ["Held-out evaluation: e", "Cost of a query: e"]
    assert tables["Settings that differ between groups"].rows[0] == ["cory.num_agents", "2", "1"]
    # Of the evaluation, and of each group's first run.
    joint = "run/agent_2 after run/agent_1"
    evaluated = ["base", "run/agent_1", "run/agent_2", joint]
    assert titles(page)["query 0"] == [*evaluated, "CORY · iteration 0", "PPO · iteration 0"]


def test_long_texts_are_cut_and_say_so(tmp_path):
    page = run_page(write_run(tmp_path / "a", texts=["a" * 100_000]), "CORY")
    text = page.completions["query 0"][0].steps[0].text
    assert text.startswith("aaa") and text.endswith("… (96,000 more characters)")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a", texts=["one"], ended=False)
    write_run(tmp_path / "runs/b", seed=1, ended=False)
    command_line(["runs/a"])  # a run that has not ended
    assert (
        "incomplete: 20 of 20 iterations, and no summary.json"
        in (tmp_path / "runs/a/report.html").read_text()
    )
    command_line(["runs/*"])
    assert "0 of 2 runs ended" in (tmp_path / "runs/report.html").read_text()
    write_evaluation(tmp_path / "runs/e")
    command_line(["runs/e"])
    assert (tmp_path / "runs/e/evaluation.md").exists() and (
        tmp_path / "runs/e/report.html"
    ).exists()
    command_line(["runs/*", "--out", "new/all.html"])
    assert "Held-out evaluation" in (tmp_path / "new/all.html").read_text()
    for argv, message in (
        (["runs/none"], "runs: expected folders of runs .* got 'runs/none', which matches none"),
        (["runs/a", "--nope"], "unknown key 'nope'"),
        ([], "folders"),
    ):
        with pytest.raises(UserError, match=message):
            command_line(argv)
    (tmp_path / "runs/e/evaluation.json").unlink()
    with pytest.raises(UserError, match="expected the folder of an evaluation that has ended"):
        command_line(["runs/e"])
    command_line(["runs/*"])
    assert (
        "e: the evaluation has not ended, and is left out"
        in (tmp_path / "runs/report.html").read_text()
    )
    (tmp_path / "runs/e/evaluation.json").write_text("[]")
    with pytest.raises(
        UserError,
        match=r"expected runs and evaluations that can be read, got \['runs/\*'\] \(TypeError",
    ):
        command_line(["runs/*"])


@pytest.mark.usefixtures("drawn_figures")
def test_the_page_of_a_long_run_is_small(tmp_path):
    """Of 2,100 iterations with long texts in a thousand of them, from all of the run."""
    folder = write_run(tmp_path / "a", iterations=2100, texts=["a long text " * 300] * 1000)
    page = run_page(folder, "CORY")
    assert len(page.figures[0]) < 300_000 and len(render(page)) < 1_000_000
    queries = list(page.completions)
    assert queries[:2] == ["the film", "query 0"] and queries[-1] == "query 960"
    assert len(queries) == 26


def test_a_file_cut_short_by_a_kill(tmp_path):
    folder = write_run(tmp_path / "a", texts=["one", "two"])
    for name in ("metrics", "samples"):
        text = (folder / f"{name}.jsonl").read_text()
        (folder / f"{name}.jsonl").write_text(text[:-40])
    page = run_page(folder, "CORY")
    assert page.facts[2] == "20 of 20 iterations"
    chains = [chain for chains in page.completions.values() for chain in chains]
    assert [len(chain.steps) for chain in chains] == [2, 2, 2, 1]


def test_importing_the_package_is_light():
    code = "import sys, cory.report; print([m for m in ('torch', 'jinja2', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
