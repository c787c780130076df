"""What a report shows of runs and evaluations, and what a run stores for it."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, sentences
from transformers import AutoModelForCausalLM
from written import write_evaluation, write_run

from cory import report
from cory.agents import make_agents
from cory.errors import UserError
from cory.models.tokens import token_texts
from cory.prompts import RolePrompts
from cory.report import payload
from cory.task import Task
from cory.trainer import CoryTrainer
from study.page import make_payload
from study.records import read
from study.report import command_line

PROMPTS = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


def make_trainer(config):
    return CoryTrainer(
        config, make_agents(config), Task.from_prompts(sentences(16), count_good, PROMPTS)
    )


def test_log_ratios_are_those_of_a_plain_loop(config):
    """By `explain`, and token by token with transformers alone, after an update."""
    trainer = make_trainer(
        replace(config, ppo=replace(config.ppo, kl_penalty="kl", learning_rate=1e-2))
    )
    trainer.iteration(0)
    agent = trainer.agents[0]
    rollout = agent.respond(sentences(3), 5, torch.Generator())
    base = AutoModelForCausalLM.from_pretrained(config.model.name).eval()
    for query, response, said in zip(
        rollout.prompt_ids, rollout.response_ids, agent.explain(rollout), strict=True
    ):
        with torch.no_grad():
            ids = torch.cat([query, response])[None]
            new, old = (
                model(ids).logits[0].log_softmax(-1) for model in (agent.policy.eval(), base)
            )
        expected = [
            (new[t - 1, ids[0, t]] - old[t - 1, ids[0, t]]).item()
            for t in range(len(query), len(ids[0]))
        ]
        assert (
            said["log_ratios"] == pytest.approx(expected, abs=2e-3)
            and max(map(abs, expected)) > 0.01
        )
        assert said["kl"] == pytest.approx(sum(expected), abs=1e-3)
        assert len(said["token_texts"]) == len(response)
    assert trainer.iteration(1).samples == []  # config.sample_every is 2


def test_tokens_are_the_text(tokenizer):
    ids = torch.tensor(tokenizer("the film was naïve – 映画 👍🏽 good")["input_ids"])
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids) and len(texts) == len(ids) and "" in texts
    for seed in range(50):  # bytes that are no character
        torch.manual_seed(seed)
        assert len(token_texts(tokenizer, torch.randint(len(tokenizer), (30,)))) == 30


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
        # Before the first update the policy is the reference.
        assert set(first["log_ratios"]) == {0.0}
    assert any(ratio for s in samples if s["iteration"] == 2 for ratio in s["log_ratios"])
    summary = json.loads((run.folder / "summary.json").read_text())["samples"]
    assert [s["role"] for s in summary["after"]["chain"]] == ["pioneer"] * 4 + ["observer"] * 4
    assert "CORY with 2 agents" in (run.folder / "report.html").read_text()


def test_curves_that_cannot_be_drawn_are_a_warning(config, monkeypatch):
    """Such as where MPLBACKEND names none; what was learnt is saved."""
    from cory.report import plots

    def fail(*args):
        raise ValueError("'Qt4Agg' is not a valid value for backend")

    monkeypatch.setattr(plots, "plot_curves", fail)
    with pytest.warns(UserWarning, match=r"curves.png could not be drawn \('Qt4Agg'"):
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


def test_curves_flags_and_numbers_that_are_not_finite(tmp_path):
    folder = write_run(
        tmp_path / "a",
        iterations=6,
        flags={1: ["kl"], 2: ["kl"], 5: ["collapse"]},
        entropy=math.nan,
        flag=1.0,  # a metric of the task may have any name
    )
    shown = payload.of_run(folder, "CORY")
    (points,) = shown["points"]
    assert shown["agents"] == ["agent_1", "agent_2"] and shown["roles"] == ["pioneer", "observer"]
    assert points["iteration"] == [k for k in range(6) for _ in range(2)]
    assert points["agent"] == [0, 1] * 6 and points["role"] == [0, 1] * 5 + [1, 0]
    assert points["values"]["task_reward"] == pytest.approx(
        [0.1 * k + a for k in range(6) for a in range(2)]
    )
    assert points["values"]["entropy"] == [None] * 12
    found = [(flag["agent"], flag["flag"], flag["iterations"]) for flag in shown["flags"]]
    assert found == [("agent_1", "kl", [1, 2]), ("agent_1", "collapse", [5])]
    assert shown["flags"][0]["meaning"].startswith("KL 0.1 is above guards.kl_bound")
    json.dumps(shown, allow_nan=False)


def test_long_runs_are_averaged(tmp_path, monkeypatch):
    monkeypatch.setattr(payload, "NUMBERS", 200)
    folder = write_run(tmp_path / "a", agents=1, iterations=120)
    shown = payload.of_run(folder, "PPO")
    (points,) = shown["points"]
    assert shown["every"] == 3 and points["iteration"] == list(range(0, 120, 3))
    assert points["values"]["task_reward"][:2] == pytest.approx([0.1, 0.4])
    assert sum(map(len, points["values"].values())) <= 200


def test_chains(tmp_path):
    folder = write_run(tmp_path / "a", texts=["one", "two"])
    shown = payload.of_run(folder, "CORY")
    chains = [(c["method"], c["stage"], [s["role"] for s in c["steps"]]) for c in shown["chains"]]
    both = ["pioneer", "observer"]
    # The agents' solo responses are those with which the chain begins, so they are not shown again.
    assert chains == [
        ("CORY", "before", both),
        ("CORY", "after", both),
        ("CORY", 0, both),
        ("CORY", 1, both),
    ]
    first = shown["chains"][2]["steps"]
    assert shown["queries"][shown["chains"][2]["query"]] == "query 0"
    assert first[0]["prompt"] is None and first[1]["prompt"] == 'Better than "query 0": query 0'
    assert (
        first[1]["tokens"] == ["one", ""]
        and first[1]["ratios"] == [2.0, -0.75]
        and first[1]["kl"] == 1.25
    )


def test_folders_of_older_versions(tmp_path):
    shown = payload.of_run(write_run(tmp_path / "a", texts=["one"], old=True), "CORY")
    before, _, during = shown["chains"]
    assert before["method"] == "CORY, agent_1 solo" and before["steps"][0]["kl"] is None
    assert [step["text"] for step in during["steps"]] == ["one", "one"] and during["steps"][1][
        "tokens"
    ] == []
    shown = payload.of_evaluation(write_evaluation(tmp_path / "e", old=True))
    assert [len(chain["steps"]) for chain in shown["chains"]] == [1] * 8
    report.write_evaluation_report(tmp_path / "e")
    assert (tmp_path / "e/report.html").exists()


def test_a_chain_of_an_evaluation_has_what_was_read(tmp_path):
    shown = payload.of_evaluation(
        write_evaluation(tmp_path / "e", ("base", "cory-seed0/agent_1", "cory-seed0/agent_2"))
    )
    last = shown["chains"][-1]
    assert last["method"] == "cory/agent_2 after cory/agent_1" and last["seed"] == 0
    assert [step["text"] for step in last["steps"]] == [
        "bad by cory-seed0/agent_1", "bad by cory-seed0/agent_2 after cory-seed0/agent_1",
    ]  # fmt: skip
    assert [step["reward"] for step in last["steps"]] == [0.5, 0.5]  # of the first response
    assert last["steps"][1]["prompt"] == "after: bad" and last["steps"][1]["ratios"] == [-0.25]


def test_runs_and_evaluations_in_one_report(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"cory{seed}", seed, texts=["one"])
        write_run(tmp_path / f"ppo{seed}", seed, agents=1, texts=["two"])
    runs = [read(tmp_path / name) for name in ("cory0", "cory1", "ppo0", "ppo1")]
    shown = make_payload(runs, [write_evaluation(tmp_path / "e")], "A title")
    assert shown["groups"] == ["CORY", "PPO"] and [run["group"] for run in shown["runs"]] == [
        0,
        0,
        1,
        1,
    ]
    titles = [table["title"] for table in shown["tables"]]
    assert titles[:2] == ["End of training", "End of training, by agent"]
    assert titles[-2:] == ["Held-out evaluation: e", "Cost of a query: e"]
    assert shown["settings"]["rows"][0] == ["cory.num_agents", "2", "1"]
    query = shown["queries"].index("query 0")  # of training at iteration 0, and of the evaluation
    assert {c["method"] for c in shown["chains"] if c["query"] == query} >= {
        "CORY",
        "PPO",
        "base",
        "run/agent_1",
    }


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


def test_a_long_run_is_below_the_limit_of_size(tmp_path):
    """10,000 iterations of two agents and 1,000 samples."""
    folder = write_run(tmp_path / "a", iterations=10_000, texts=["a response of some words"] * 1000)
    report.write_run_report(folder, "CORY")
    assert (folder / "report.html").stat().st_size < 5_000_000


def test_a_file_cut_short_by_a_kill(tmp_path):
    folder = write_run(tmp_path / "a", texts=["one", "two"])
    for name in ("metrics", "samples"):
        text = (folder / f"{name}.jsonl").read_text()
        (folder / f"{name}.jsonl").write_text(text[:-40])
    shown = payload.of_run(folder, "CORY")
    assert len(shown["points"][0]["iteration"]) == 39
    assert [len(chain["steps"]) for chain in shown["chains"]] == [2, 2, 2, 1]


def test_importing_the_package_is_light():
    code = "import sys, cory.report; print([m for m in ('torch', 'jinja2', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
