"""The contents of a run's report, and the samples that a run stores for it."""

import json
from dataclasses import replace

import pytest
from conftest import make_trainer
from written import write_run

from cory.run.folder import read_rows
from cory.run.report import render, run_page


def test_a_run_stores_each_roles_prompts_and_writes_its_report(finished):
    run = finished.folder
    samples = read_rows(run / "samples.jsonl")
    by_role = {role: [s for s in samples if s["role"] == role] for role in ("pioneer", "observer")}
    for first, second in zip(*by_role.values(), strict=True):
        query = first["query"]
        assert first["prompt"] == query == second["query"]
        assert second["prompt"] == f'Improve "{query}{first["completion"]}": {query}'
        # Before the first update the policy is the reference.
        assert (first["kl"] == 0) == (first["iteration"] == 0)
    shown = json.loads((run / "summary.json").read_text())["samples"]
    assert [s["role"] for s in shown["after"]["chain"]] == ["pioneer"] * 4 + ["observer"] * 4
    kl = [max(s["kl"] for s in shown[stage]["chain"]) for stage in ("before", "after")]
    assert kl[0] == 0 < kl[1]
    assert samples[0]["query"] in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ["report.render", "plots.plot_curves"])
def test_a_figure_or_report_that_fails_is_a_warning(config, monkeypatch, name):
    """The trained agents are saved nevertheless."""

    def fail(*args, **_):
        raise OSError(28, "No space left")

    monkeypatch.setattr(f"cory.run.{name}", fail)
    with pytest.warns(UserWarning, match=r"report\.html"):
        run = make_trainer(replace(config, iterations=1)).train()
    assert (run.folder / "summary.json").exists() and (run.folder / "agent_1").is_dir()
    assert not (run.folder / "report.html").exists()


def test_the_page_of_a_run_has_rewards_flags_and_chains(tmp_path):
    flags = {1: ["kl"], 2: ["kl"], 5: ["collapse"]}
    folder = write_run(tmp_path / "a", agents=2, iterations=6, texts=["one", "two"], flags=flags)
    page = run_page(folder, "CORY")
    (table,) = page.tables
    assert table.rows[0]["task reward"] == "0.100 → 0.733"  # the pioneers' row
    assert any("kl in 2 " in note for note in page.notes)
    assert list(page.completions) == ["the film", "query 0", "query 1"]
    ((_, chain),) = page.completions["query 1"]
    steps = [(step["role"], step["completion"]) for step in chain]
    assert steps == [("pioneer", "two"), ("observer", "two")]
    html = render(page)
    assert "reward +0.10 · KL 1.25" in html and "Better than &#34;query 1&#34;: query 1" in html


@pytest.mark.usefixtures("drawn_figures")
def test_the_page_of_a_long_run_is_small(tmp_path):
    """2,100 iterations, 1,000 of them with long texts. The shown samples span the whole run."""
    texts = ["a long text " * 300] * 1000
    folder = write_run(tmp_path / "a", agents=2, iterations=2100, texts=texts)
    page = run_page(folder, "CORY")
    assert 0 < len(page.figure) < 300_000 and len(render(page)) < 1_000_000
    queries = list(page.completions)
    assert queries[:2] == ["the film", "query 0"] and queries[-1] == "query 984"
    assert len(queries) == 26
