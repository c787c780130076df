"""Where cooperation pays: a chain against two calls of one agent, over what a reader reads."""

import json
import math
from dataclasses import replace

import pytest

from cory.errors import UserError
from study import advantage


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the evaluation of two groups of two seeds, and a probe."""
    monkeypatch.chdir(tmp_path)
    values = {
        "one-seed0/agent_1": 0.5, "one-seed1/agent_1": 0.7,
        "one-seed0/agent_1 after itself": 0.9, "one-seed1/agent_1 after itself": 1.1,
        "two-seed0/agent_2 after agent_1": 1.0, "two-seed0/agent_1 after agent_2": 1.4,
        "two-seed1/agent_2 after agent_1": 1.6, "two-seed1/agent_1 after agent_2": 1.6,
        "two-x=1-seed0/agent_2 after agent_1": 9.0, "base": 0.0, "base after itself": 0.1,
    }  # fmt: skip
    rows = [{"name": name, "combined_reward": value, "best_of_2": 2.0} for name, value in values.items()]
    (tmp_path / "evaluation.json").write_text(json.dumps({"rows": rows}))
    probe = {"spread": 0.5, "readings": [{"dependence": [0.3, 0.2, 0.4], "slope": [0.1, -0.1, 0.2]}]}
    (tmp_path / "observer.json").write_text(json.dumps(probe))
    entry = "{label: It, evaluation: evaluation.json, observer: observer.json, chain: two, single: one}"
    (tmp_path / "settings.yaml").write_text(f"- {entry}")
    return tmp_path


def test_the_advantage_is_over_the_better_of_one_call_and_two(here, capsys):
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert setting.chain == pytest.approx([1.2, 1.6]) and setting.untrained == 0.1
    value, low, high, _ = setting.advantage()
    assert value == pytest.approx((1.4 - 1.0) / 0.5) and low < value < high
    value, low, high, _ = replace(setting, untrained=1.3).advantage()
    assert value == pytest.approx(0.2) and low < value < high
    assert math.isnan(
        replace(setting, one=setting.one[:1], chain=setting.chain[:1]).advantage().low
    )  # one seed has no spread
    advantage.command_line(["settings.yaml", "--out", "out"])
    row = (here / "out/advantage.md").read_text().splitlines()[-1]
    assert "0.60 ± 1.27 | 1.00 ± 1.27 | 0.10 | 1.40 ± 2.54 | +0.80" in row and row.endswith("| 2.00 ± 0.00 |")
    assert (here / "out/advantage.png").read_bytes().startswith(b"\x89PNG")
    assert row in capsys.readouterr().out


def test_of_a_pair_with_fixed_roles_one_order_counts(here):
    text = (here / "settings.yaml").read_text()
    (here / "settings.yaml").write_text(text.replace("single: one", "single: one, order: agent_2 after agent_1"))
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert setting.chain == pytest.approx([1.0, 1.6])


def test_the_better_of_two_responses_is_shown_where_two_were_drawn(here):
    evaluation = json.loads((here / "evaluation.json").read_text())
    rows = [{key: value for key, value in row.items() if key != "best_of_2"} for row in evaluation["rows"]]
    (here / "evaluation.json").write_text(json.dumps({"rows": rows}))
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert setting.best_of_2 == [] and advantage.table([setting]).splitlines()[-1].endswith("|  |")


def test_an_evaluation_of_another_kind_is_explained(here):
    evaluation = json.loads((here / "evaluation.json").read_text())
    for key, message in (
        ("combined_reward", "expected combined_reward in each row"),
        ("name", "It: expected an evaluation.json and what observer.py --out has written, got files without 'name'"),
    ):
        rows = [{k: v for k, v in row.items() if k != key} for row in evaluation["rows"]]
        (here / "evaluation.json").write_text(json.dumps({"rows": rows}))
        with pytest.raises(UserError, match=message):
            advantage.read_settings_file(here / "settings.yaml")
    rows = [row for row in evaluation["rows"] if row["name"] != "one-seed1/agent_1 after itself"]
    (here / "evaluation.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(UserError, match=r"expected as many runs of 'one' alone as after itself, got \[2, 1\]"):
        advantage.read_settings_file(here / "settings.yaml")
    rows = [row for row in evaluation["rows"] if row["name"] != "base after itself"]
    (here / "evaluation.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(UserError, match="expected a row 'base after itself': evaluate the runs again"):
        advantage.read_settings_file(here / "settings.yaml")


def test_an_observer_whose_reward_never_varied_has_no_dependence(here):
    probe = {"spread": 0.5, "readings": [{"dependence": [None] * 3, "slope": [0.0, 0.0, 0.0]}]}
    (here / "observer.json").write_text(json.dumps(probe))
    advantage.command_line(["settings.yaml", "--out", "out"])
    assert "| It | 2 | nan | 0.00 (0.00 to 0.00) |" in (here / "out/advantage.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("chain: two", "chain: three", "chain: expected the name of runs in evaluation.json, got 'three'"),
        ("evaluation.json", "none.json", "expected a file of results, got 'none.json'"),
        ("single: one", "one: one", "setting 1: expected the keys chain, evaluation, label, observer, single"),
        ("single: one", "single: one, order: agent_2", "order: expected a chain of 'two' in evaluation.json, such as"),
    ],
)
def test_mistakes_are_explained(here, old, new, message):
    path = here / "settings.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        advantage.read_settings_file(path)
