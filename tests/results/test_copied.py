"""The share of an answer's four-grams that also occur in the earlier answer that its writer read."""

import csv
import json

import pytest

from results.copied import by_group, command_line, share_copied


def test_the_share_of_four_grams_that_were_copied():
    assert share_copied("one two three four five", "one two three four five") == 1
    assert share_copied("one two three four five", "zero one two three four") == 0.5
    assert share_copied("four three two one", "one two three four") == 0
    assert share_copied("one two three", "one two three") is None


def test_a_group_has_the_mean_of_its_runs():
    chain = {"answers": "agent_2 after agent_1"}
    rows = [
        {"run": "CORY-seed0", "copied_four_grams": "0.25"} | chain,
        {"run": "PPO-seed0", "copied_four_grams": "0.1"} | chain,
        {"run": "CORY-seed1", "copied_four_grams": "0.75"} | chain,
    ]
    cory, ppo = by_group(rows)
    assert (cory["group"], cory["n"], ppo["group"], ppo["n"]) == ("CORY", "2", "PPO", "1")
    assert cory["copied four-grams"] == "0.50" and cory["smallest, largest run"] == "0.25, 0.75"


def test_each_chain_has_a_row_which_is_kept_when_its_responses_are_deleted(tmp_path):
    run = tmp_path / "evaluation" / "CORY-seed0"
    run.mkdir(parents=True)
    first = {"model": "CORY-seed0/agent_1", "query": 0, "read": None, "prompt": "q"}
    first["completions"] = ["a b c d", "e f g h"]
    chain = {"model": "CORY-seed0/agent_2 after agent_1", "query": 0, "read": first["model"]}
    chain |= {"prompt": "better", "completions": ["a b c d", "h g f e"]}
    text = "".join(json.dumps(record) + "\n" for record in (first, chain))
    (run / "responses.jsonl").write_text(text)
    out = tmp_path / "copied.csv"
    command_line([str(run.parent), "--out", str(out)])
    (row,) = csv.DictReader(out.open())
    assert (row["run"], row["answers"]) == ("CORY-seed0", "agent_2 after agent_1")
    assert float(row["copied_four_grams"]) == pytest.approx(0.5) and row["responses"] == "2"
    (example,) = map(json.loads, (tmp_path / "texts.jsonl").read_text().splitlines())
    assert (example["query"], example["read"], example["wrote"]) == ("q", "a b c d", "a b c d")
    (run / "responses.jsonl").unlink()
    command_line([str(run.parent), "--out", str(out)])
    assert list(csv.DictReader(out.open())) == [row]
