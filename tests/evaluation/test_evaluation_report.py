"""What the page of an evaluation shows."""

import json

from written import write_evaluation

from cory.evaluation.plots import CORY, PPO, evaluation_colours
from cory.evaluation.report import evaluation_page


def test_the_page_of_an_evaluation(tmp_path):
    page = evaluation_page(write_evaluation(tmp_path / "e"))
    (table,) = page.tables
    joint = "run/agent_2 after run/agent_1"
    cells = {"task reward": "0.500 ± 0.100", "KL": "0.200 ± 0.000"}
    assert table.rows[1] == {"model": "run/agent_1", **cells, "calls": "1"}
    assert table.rows[3] == {"model": joint, **cells, "calls": "2"}
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
