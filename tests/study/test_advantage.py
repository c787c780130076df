"""Where cooperation pays: a chain against two calls of one agent, over what a reader reads."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
from handmade import compared, make_run

from cory.errors import UserError
from study import advantage
from study.frame import BASE, read_study, write_study


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the results of two groups of two seeds, and a probe."""
    monkeypatch.chdir(tmp_path)
    rows = [
        ("one", 0, "agent_1", 1, 0.5), ("one", 1, "agent_1", 1, 0.7),
        ("one", 0, "agent_1 after itself", 2, 0.9), ("one", 1, "agent_1 after itself", 2, 1.1),
        ("two", 0, "agent_2 after agent_1", 2, 1.0), ("two", 0, "agent_1 after agent_2", 2, 1.4),
        ("two", 1, "agent_2 after agent_1", 2, 1.6), ("two", 1, "agent_1 after agent_2", 2, 1.6),
        ("other", 0, "agent_2 after agent_1", 2, 9.0), (BASE, None, "base", 1, 0.0),
        (BASE, None, "base after itself", 2, 0.1),
    ]  # fmt: skip
    held_out = pd.DataFrame(rows, columns=["group", "seed", "answers", "calls", "combined_reward"])
    write_results(tmp_path, held_out.assign(agent="agent_1", best_of_2=2.0))
    probe = {
        "spread": 0.5,
        "readings": [{"dependence": [0.3, 0.2, 0.4], "slope": [0.1, -0.1, 0.2]}],
    }
    (tmp_path / "observer.json").write_text(json.dumps(probe))
    entry = "{label: It, results: results, observer: observer.json, chain: two, single: one}"
    (tmp_path / "settings.yaml").write_text(f"- {entry}")
    return tmp_path


def write_results(folder, held_out):
    """The folder `results` with one run and these rows of held_out.csv."""
    study = compared_run(folder)
    study.held_out = held_out.astype({"seed": "Int64"})
    (folder / "results").mkdir(exist_ok=True)
    write_study(study, folder / "results")


def compared_run(folder):
    if not (folder / "runs").exists():
        make_run(folder / "runs/one")
    return compared(folder / "runs")


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
    assert "0.60 ± 1.27 | 1.00 ± 1.27 | 0.10 | 1.40 ± 2.54 | +0.80" in row and row.endswith(
        "| 2.00 ± 0.00 |"
    )
    assert (here / "out/advantage.png").read_bytes().startswith(b"\x89PNG")
    assert row in capsys.readouterr().out


def test_of_a_pair_with_fixed_roles_one_order_counts(here):
    text = (here / "settings.yaml").read_text()
    (here / "settings.yaml").write_text(
        text.replace("single: one", "single: one, order: agent_2 after agent_1")
    )
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert setting.chain == pytest.approx([1.0, 1.6])


def test_the_better_of_two_responses_is_shown_where_two_were_drawn(here):
    held_out = read_study(here / "results").held_out
    write_results(here, held_out.drop(columns="best_of_2"))
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert setting.best_of_2 == [] and advantage.table([setting]).splitlines()[-1].endswith("|  |")


def test_results_without_the_rivals_are_explained(here):
    held_out = read_study(here / "results").held_out
    for missing in ("agent_1 after itself", "base after itself"):
        write_results(here, held_out[held_out["answers"] != missing])
        with pytest.raises(
            UserError, match="It: expected 'one' and the base after themselves, got no such rows"
        ):
            advantage.read_settings_file(here / "settings.yaml")


def test_an_observer_whose_reward_never_varied_has_no_dependence(here):
    probe = {"spread": 0.5, "readings": [{"dependence": [None] * 3, "slope": [0.0, 0.0, 0.0]}]}
    (here / "observer.json").write_text(json.dumps(probe))
    advantage.command_line(["settings.yaml", "--out", "out"])
    assert "| It | 2 | nan | 0.00 (0.00 to 0.00) |" in (here / "out/advantage.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "chain: two",
            "chain: three",
            r"It, chain: expected one of \['one', 'other', 'two'\], got 'three'",
        ),
        (
            "results: results",
            "results: none",
            "expected a folder of results, with a runs.csv, got 'none'",
        ),
        (
            "observer.json",
            "none.json",
            "It: expected what observer.py --out has written, got 'none.json'",
        ),
        (
            "single: one",
            "one: one",
            "setting 1: expected the keys chain, label, observer, results, single",
        ),
        (
            "single: one",
            "single: one, order: agent_2",
            "It, order: expected a chain of 'two', such as",
        ),
    ],
)
def test_mistakes_are_explained(here, old, new, message):
    path = here / "settings.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        advantage.read_settings_file(path)
