"""Where cooperation pays: a chain against two calls of one agent, over what a reader reads."""

import json
import math
import shlex
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from conftest import ROOT
from handmade import compared, make_run

from cory.errors import UserError
from study import advantage
from study.experiment_file import read_experiment
from study.frame import BASE, read_study, write_study
from study.plan import plan


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the results of some groups of two seeds, and a probe."""
    monkeypatch.chdir(tmp_path)
    rows = [
        ("one", 0, "agent_1", 1, 0.5), ("one", 1, "agent_1", 1, 0.7),
        ("one", 0, "agent_1 after itself", 2, 0.9), ("one", 1, "agent_1 after itself", 2, 1.1),
        ("two", 0, "agent_2 after agent_1", 2, 1.0), ("two", 0, "agent_1 after agent_2", 2, 1.4),
        ("two", 1, "agent_2 after agent_1", 2, 1.6), ("two", 1, "agent_1 after agent_2", 2, 1.6),
        ("both", 0, "agent_1", 1, 0.3), ("both", 1, "agent_1", 1, 0.3),
        ("both", 0, "agent_1 after itself", 2, 1.2), ("both", 1, "agent_1 after itself", 2, 1.3),
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


def name_one_llm_in_both_roles(folder):
    """Adds the key `both_roles` to the setting."""
    path = folder / "settings.yaml"
    path.write_text(path.read_text().replace("single: one", "single: one, both_roles: both"))


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


@pytest.mark.usefixtures("drawn_figures")
def test_the_advantage_is_over_the_better_of_one_call_and_two(here, capsys):
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert list(setting.chain) == pytest.approx([1.2, 1.6]) and setting.untrained == 0.1
    value, low, high, *_ = setting.advantage()
    assert value == pytest.approx((1.4 - 1.0) / 0.5) and low < value < high
    value, low, high, *_ = replace(setting, untrained=1.3).advantage()
    assert value == pytest.approx(0.2) and low < value < high
    assert math.isnan(replace(setting, chain=setting.chain[:1]).advantage().low)  # one seed
    advantage.command_line(["settings.yaml", "--out", "out"])
    row = (here / "out/advantage.md").read_text().splitlines()[-1]
    assert "0.60 ± 1.27 | 1.00 ± 1.27 | 0.10 | 1.40 ± 2.54 | +0.80" in row and row.endswith(
        "| 2.00 ± 0.00 |"
    )
    assert advantage.ONE_LLM not in (here / "out/advantage.md").read_text()
    assert (here / "out/advantage.png").read_bytes().startswith(b"\x89PNG")
    assert row in capsys.readouterr().out


def test_one_llm_in_both_roles_is_one_more_rival(here):
    name_one_llm_in_both_roles(here)
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert setting.best_rival() == advantage.ONE_LLM
    assert setting.advantage().value == pytest.approx((1.4 - 1.25) / 0.5)
    assert setting.advantage_over_one_role().value == pytest.approx((1.4 - 1.0) / 0.5)

    header, _, row = advantage.table([setting]).splitlines()
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert cells[advantage.ONE_LLM] == "1.25 ± 0.64"  # 12.706 * 0.0707 / sqrt(2)
    (short,) = advantage.short_rows([setting])
    assert short["best rival"] == f"1.25 {advantage.ONE_LLM}"
    assert short["advantage"].startswith("+0.30 (")
    assert short["over rivals of one role"].startswith("+0.80 (")

    worse = setting.trained | {advantage.ONE_LLM: setting.trained[advantage.ONE_LLM] - 1}
    setting = replace(setting, trained=worse)
    assert setting.best_rival() == "one agent, after itself"
    assert setting.advantage() == setting.advantage_over_one_role()


@pytest.mark.usefixtures("drawn_figures")
def test_the_figure_shows_the_advantage_without_and_with_one_llm_in_both_roles(here, monkeypatch):
    name_one_llm_in_both_roles(here)
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(plt, "close", lambda figure: None)
        advantage.plot([setting], here / "figure.png")
    figure = plt.gcf()
    heights = [axis.containers[0].lines[0].get_ydata() for axis in figure.axes]
    plt.close(figure)
    assert [float(height) for (height,) in heights] == pytest.approx([0.8, 0.3])


def test_chain_and_rival_are_paired_by_seed(here):
    held_out = read_study(here / "results").held_out
    held_out.loc[held_out["group"] == "two", "seed"] += 1
    third = held_out[(held_out["group"] == "one") & (held_out["seed"] == 1)].assign(seed=2)
    third["combined_reward"] += 0.4
    write_results(here, pd.concat([held_out, third]))
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    # Seeds 1 and 2 have both: 1.2 and 1.6 of the chain, 1.1 and 1.5 of one agent after itself.
    assert setting.advantage().value == pytest.approx(0.1 / 0.5)
    assert advantage.short_rows([setting])[0]["n"] == "2"


def test_of_a_pair_with_fixed_roles_one_order_counts(here):
    text = (here / "settings.yaml").read_text()
    (here / "settings.yaml").write_text(
        text.replace("single: one", "single: one, order: agent_2 after agent_1")
    )
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    assert list(setting.chain) == pytest.approx([1.0, 1.6])


def test_the_better_of_two_responses_is_shown_where_two_were_drawn(here):
    held_out = read_study(here / "results").held_out
    (with_it,) = advantage.read_settings_file(here / "settings.yaml")
    write_results(here, held_out.drop(columns="best_of_2"))
    (without,) = advantage.read_settings_file(here / "settings.yaml")
    assert "best of 2" not in advantage.table([without])
    header, _, first, second = advantage.table([with_it, without]).splitlines()
    assert header.endswith("| best of 2, task reward |")
    assert first.endswith("| 2.00 ± 0.00 |") and second.endswith("|  |")


def test_the_largest_vote_of_one_agent_is_shown_and_is_no_rival(here):
    held_out = read_study(here / "results").held_out.drop(columns="best_of_2")
    of_one = held_out["group"] == "one"
    in_one_call = of_one & (held_out["calls"] == 1)
    votes = {"maj@2": 5.0, "maj@10": 6.0 + in_one_call, "maj@4": 5.0}
    write_results(here, held_out.assign(**votes))
    (setting,) = advantage.read_settings_file(here / "settings.yaml")
    header, _, row = advantage.table([setting]).splitlines()
    assert header.endswith("| vote of 10, task reward |") and row.endswith("| 7.00 ± 0.00 |")
    assert set(setting.rivals()) == {*advantage.CALLS, advantage.UNTRAINED}


@pytest.mark.parametrize(
    ("file", "votes"),
    [
        ("configs/experiments/imdb_credit.yaml", False),
        ("configs/experiments/gsm8k_credit.yaml", True),
        ("examples/lookout/weather_experiment.yaml", False),
    ],
)
def test_the_experiments_measure_every_rival(file, votes, tmp_path):
    experiment = read_experiment(ROOT / file)
    for name, scale in experiment.scales.items():
        settings = {
            item.label: item.settings for item in plan(experiment, name, {}, tmp_path / "runs")
        }
        roles = {
            label: (
                of["cory"]["num_agents"],
                of["cory"]["chain_length"] or of["cory"]["num_agents"],
            )
            for label, of in settings.items()
        }
        assert roles["PPO"] == (1, 1) and roles[advantage.ONE_LLM] == (1, 2)
        assert {"collective", "causal"} <= {
            of["cory"]["credit"] for label, of in settings.items() if roles[label] == (2, 2)
        }
        options = shlex.split(scale.evaluate)
        assert int(options[options.index("--samples") + 1]) >= 2
        if votes:  # of more than two, as a vote of two is the first response
            assert max(json.loads(options[options.index("--ks") + 1])) > 2


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
            r"It, chain: expected one of \['both', 'one', 'other', 'two'\], got 'three'",
        ),
        (
            "single: one",
            "single: one, both_roles: three",
            r"It, both_roles: expected one of \['both', 'one', 'other', 'two'\], got 'three'",
        ),
        (
            "single: one",
            "single: one, both_roles: two",
            "It, both_roles: expected a group of one agent that answers after itself, got 'two'",
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
