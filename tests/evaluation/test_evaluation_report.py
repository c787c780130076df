"""An evaluation's report page: tables, completions, row labels and colours."""

import itertools
import json

import matplotlib.pyplot as plt
import pytest
from written import write_evaluation

from cory.evaluation.plots import CORY, PPO, evaluation_colours, plot_bars
from cory.evaluation.report import evaluation_page, row_labels


def test_the_page_has_tables_notes_and_completions(tmp_path):
    page = evaluation_page(write_evaluation(tmp_path / "e"))
    table, costs = page.tables
    assert page.notes == ["a caveat"]
    joint = "run/agent_2 after run/agent_1"
    cells = {"task reward": "0.500 ± 0.100", "KL": "0.200 ± 0.000"}
    assert table.rows[1] == {"model": "run/agent_1", **cells}
    assert table.rows[3] == {"model": joint, **cells}
    assert costs.rows[3] == {"model": joint, "calls": "2"}
    assert [title for title, _ in page.completions["query 0"]] == [
        "base",
        "run/agent_1",
        "run/agent_2",
        joint,
    ]
    _, (first, response) = page.completions["query 1"][-1]
    assert first["completion"] == "bad by run/agent_1"
    assert response["completion"] == f"bad by {joint}" and response["prompt"] == "after: bad"


def test_the_page_shows_as_many_queries_as_were_asked_for(tmp_path):
    folder = write_evaluation(tmp_path / "e", texts=["good", "bad", "fair"])
    evaluation = json.loads((folder / "evaluation.json").read_text())
    evaluation["settings"]["shown"] = 2
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    assert list(evaluation_page(folder).completions) == ["query 0", "query 1"]


def test_rows_of_an_evaluation_have_the_colour_of_their_run():
    names = ["base", "pair/agent_1", "pair/agent_2", "one/agent_1", "base of one/agent_1"]
    names += ["base after itself", "pair/agent_2 after agent_1", "one/agent_1 after itself"]
    base, *others = evaluation_colours(names)
    assert others == [CORY, CORY, PPO, base, base, CORY, PPO] and base not in (PPO, CORY)


COMMON = "-name=gpt2-imdb-small-batch_size=16-mini_batch_size=16-dataset=train.parquet"


def test_rows_of_an_evaluation_are_labelled_by_their_runs_differences():
    pair, causal = f"imdb_cory_tiny{COMMON}", f"imdb_cory_tiny-credit=causal{COMMON}"
    labels = {
        "base": "base",
        f"{pair}/agent_1": "imdb_cory_tiny/agent_1",
        f"{causal}/agent_2 after agent_1": "credit=causal/agent_2 after agent_1",
        f"base of {causal}/agent_2": "base of credit=causal/agent_2",
        "org/model": "org/model",
    }
    assert row_labels(list(labels)) == labels


@pytest.mark.usefixtures("drawn_figures")
def test_labels_leave_room_for_the_panels_and_titles_do_not_overlap(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    names = row_labels(
        [f"{run}{COMMON}/agent_2 after agent_1" for run in ("pair", "pair-credit=causal")]
    )
    metrics = {metric: f"a rather long title {metric}" for metric in "abcd"}
    rows = [{"name": name} | dict.fromkeys(metrics, 1.0) for name in names.values()]
    plot_bars(rows, metrics, tmp_path / "bars.png", ["red", "blue"])
    (figure,) = figures
    assert figure.axes[0].get_position().x0 < 0.3
    titles = [axis.title.get_window_extent() for axis in figure.axes]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(titles))
