"""Comparing runs, on runs' folders written by hand."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import yaml
from handmade import compared, make_run
from matplotlib import pyplot

from cory.errors import UserError
from cory.run.folder import write_bytes
from cory.run.plots import COLOURS, colours
from cory.run.report import run_page
from study import plots
from study.caveats import caveats
from study.compare import command_line, comparison_page, write
from study.comparison import (
    ends,
    ends_by_agent,
    ends_by_role,
    frontiers,
    labels,
    settings,
)
from study.frame import BASE, held_out_rows, of_records, read_study, write_study
from study.groups import find, names
from study.held_out import held_out, held_out_by_agent, held_out_by_seed
from study.plots import plot_bars
from study.records import read


def row_of(rows, name):
    """The row of a table whose first cell is a name."""
    (row,) = (row for row in rows if next(iter(row.values())) == name)
    return row


def sizes(study):
    """The groups, and how many runs each has."""
    return [(name, int((study.runs["group"] == name).sum())) for name in study.groups]


def test_groups_final_values_and_differences(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"ppo{seed}", seed, reward=1.0 + seed)
        make_run(tmp_path / f"cory{seed}", seed, agents=2, reward=2.0 + seed)
    study = compared(tmp_path)
    assert study.groups == ["CORY", "PPO"] and study.baseline == "PPO" and not caveats(study)
    assert {row["agent"] for row in ends_by_agent(study)} == {"PPO", "CORY agent_1", "CORY agent_2"}
    last = statistics.fmean(0.1 * k for k in range(2, 12))
    ppo = study.final[study.final["group"] == "PPO"]
    assert ppo["task_reward"].tolist() == pytest.approx([1 + last, 2 + last, 3 + last])
    second = study.final[(study.final["group"] == "CORY") & (study.final["agent"] == "agent_2")]
    assert second["combined_reward"].tolist() == pytest.approx(
        [3 + last - 0.3, 4 + last - 0.3, 5 + last - 0.3]
    )
    row = row_of(ends(study), "CORY")
    assert row["n"] == "3" and row["collapsed"] == "0 of 3"
    # each seed of CORY, mean over agents, is 1.5 above PPO's
    assert (
        row["difference"] == "+1.50 (+1.50 to +1.50)"
        and row_of(ends(study), "PPO")["difference"] == ""
    )
    assert row["task reward"] == f"{3.5 + last:.2f} ± {4.3027 / math.sqrt(3):.2f}"
    roles = {(row["agent"], row["role"]) for row in ends_by_role(study)}
    assert ("CORY agent_1", "observer") in roles and ("CORY agent_2", "pioneer") in roles


@pytest.mark.usefixtures("drawn_figures")
def test_everything_is_written_and_read_again(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "r" / f"ppo{seed}", seed, model__name="some/gpt")
        make_run(
            tmp_path / "r" / f"cory{seed}",
            seed,
            agents=2,
            ppo__learning_rate=5e-4,
            model__name="/a/b/c/gpt",
        )
    study = compared(tmp_path / "r")
    text = write(study, tmp_path / "out", "A title", "A question?").read_text()
    assert text.startswith("# A title\n") and "A question?" in text
    assert (
        "| ppo.learning_rate | 0.0005 | 0.0001 |" in text
    )  # an unfair comparison is visible at a glance
    assert "| model.name | c/gpt | some/gpt |" in text  # no path of a machine
    assert "was &#96;good&#96;&#124;" in text  # a model's text is no Markdown
    assert (tmp_path / "out/curves.png").stat().st_size > 100 and not list(
        (tmp_path / "out").glob("*.svg")
    )
    again = read_study(tmp_path / "out")
    assert ends(again) == ends(study) and ends_by_role(again) == ends_by_role(study)
    assert settings(again) == settings(study) and caveats(again) == caveats(study)
    command_line([str(tmp_path / "out"), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again/curves.png").read_bytes() == (
        tmp_path / "out/curves.png"
    ).read_bytes()


def test_groups_whose_names_look_like_numbers_or_missing_values_keep_their_rows(tmp_path):
    groups = ["None", "NA", "2", "4.0"]
    rows = []
    for seed, family in enumerate(groups):
        make_run(tmp_path / "runs" / family, reward=seed, ppo__lam=0.1 * seed)
        rows.append({"name": f"{family}/agent_1", "task_reward": 0.5})
    runs = [read(tmp_path / "runs" / family) for family in groups]
    study = of_records(runs, families=groups)
    study.held_out = held_out_rows(rows, {family: (family, 0) for family in groups})
    (tmp_path / "files").mkdir()
    write_study(study, tmp_path / "files")
    stored = read_study(tmp_path / "files")
    for frame in (stored.runs, stored.metrics, stored.final, stored.held_out):
        assert list(frame["group"].unique()) == groups
    assert ends(stored) == ends(study)


def test_a_full_disk_leaves_no_run_with_a_row_alone(tmp_path, monkeypatch):
    """A row in runs.csv says that a run's numbers are written."""
    make_run(tmp_path / "run")
    study = of_records([read(tmp_path / "run")], families=["PPO"])
    for name in ("metrics.csv.gz", "final.csv"):

        def full(path, content, name=name):
            if path.name == name:
                raise OSError(28, "No space left on device")
            write_bytes(path, content)

        monkeypatch.setattr("study.frame.write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            write_study(study, tmp_path)
        assert not (tmp_path / "runs.csv").exists()


def test_files_of_240_runs_stay_small(tmp_path):
    rows = [
        {"iteration": k, "agent": "agent_1", "role": "pioneer", "task_reward": k / 7, "kl": k / 3,
         "distinct_2": 0.123456789, "response_tokens": 15.87654321, "explained_variance": 0.123456789,
         "gradient_norm": k / 9, "dropped_steps": k % 2}
        for k in range(100)
    ]  # fmt: skip
    run = make_run(tmp_path / "r/a", iterations=100)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"combined_reward": 0.0}) + "\n" for row in rows)
    )
    write_study(compared(tmp_path / "r"), tmp_path)
    study = read_study(tmp_path)
    (values,) = study.final.to_dict("records")
    assert values["gradient_norm"] == pytest.approx(94.5 / 9, rel=1e-5)
    assert values["dropped_steps"] == 0.5
    (row,) = ends(study, ["gradient_norm"])
    assert row["gradient_norm"] == f"{94.5 / 9:.2f}"
    # 12 arms of 20 seeds, most of them with a row for each of two roles
    assert (tmp_path / "metrics.csv.gz").stat().st_size * 2 * 240 < 2e6


@pytest.mark.usefixtures("drawn_figures")
def test_held_out_comes_first_under_the_same_names(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "r" / f"ppo{seed}", seed)
        make_run(tmp_path / "r" / f"cory{seed}", seed, agents=2)
    study = compared(tmp_path / "r")
    values = {"base": 0.0, "base after itself": 0.1, "other/agent_1": 9.0}
    for seed in range(2):
        values |= {f"ppo{seed}/agent_1": 0.5 + seed, f"ppo{seed}/agent_1 after itself": 0.9 + seed}
        values |= {f"cory{seed}/agent_1": 0.2 + seed, f"cory{seed}/agent_2": 0.4 + seed}
        values |= {
            f"cory{seed}/agent_2 after agent_1": 1.0 + seed,
            f"cory{seed}/agent_1 after agent_2": 1.4 + seed,
        }
    rows = [
        {"name": name, "combined_reward": value, "combined_reward_ci": 9.0}
        for name, value in values.items()
    ]
    groups = {
        f"{name}{seed}": (name.upper(), seed) for name in ("ppo", "cory") for seed in range(2)
    }
    study.held_out = held_out_rows(rows, groups)
    text = write(study, tmp_path / "out").read_text()
    held_out, training = text.split("## End of training\n")
    assert "| base (untrained) |  | 0.00 |  | 0.10 |  |" in held_out
    assert re.search(r"\| PPO \| 2 \| 1.00 ± \S+ \|  \| 1.40 ± \S+ \|  \|", held_out)
    # at either seed the agents' mean is 0.2 below PPO's agent, and that of the chains 0.3 above PPO after itself
    differences = r"\| -0.20 \(-0.20 to -0.20\) \| 1.70 ± \S+ \| \+0.30 \(\+0.30 to \+0.30\) \|"
    assert (
        re.search(r"\| CORY \| 2 \| 0.80 ± \S+ " + differences, held_out)
        and "| CORY | 2 |" in training
    )
    assert (tmp_path / "out/held_out.png").exists()
    assert "## KL at equal task reward\n" in training and (tmp_path / "out/paths.png").exists()
    assert read_study(tmp_path / "out").held_out["seed"].isna().sum() == 2


def test_of_a_pair_with_fixed_roles_only_the_order_of_training_counts(tmp_path):
    make_run(tmp_path / "r" / "fixed", agents=2, cory__exchange_period=0)
    make_run(tmp_path / "r" / "exchanged", agents=2)
    study = compared(tmp_path / "r")
    rows = []
    for run in ("fixed", "exchanged"):
        for order, value in (("agent_2 after agent_1", 1.0), ("agent_1 after agent_2", 0.0)):
            rows.append({"name": f"{run}/{order}", "combined_reward": value})
    groups = {
        Path(run).name: (group, 0)
        for run, group in zip(study.runs["run"], study.runs["group"], strict=True)
    }
    study.held_out = held_out_rows(rows, groups)
    by_seed = held_out_by_seed(study, "combined_reward", 2).loc[0]
    assert by_seed[groups["fixed"][0]] == 1.0 and by_seed[groups["exchanged"][0]] == 0.5


def test_a_run_that_diverged_counts_in_no_table(tmp_path):
    """Nor held out, where the tables of training beside it leave it out."""
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 1, kl=math.nan)
    study = compared(tmp_path)
    rows = [{"name": name, "combined_reward": 0.5} for name in ("base", "a/agent_1", "b/agent_1")]
    study.held_out = held_out_rows(rows, {"a": ("PPO", 0), "b": ("PPO", 1)})
    assert row_of(ends(study), "PPO")["n"] == row_of(held_out(study), "PPO")["n"] == "1"
    (base, ppo) = held_out_by_agent(study, ["combined_reward"])
    assert (base["group"], ppo["n"]) == (BASE, "1")


def test_unequal_incomplete_crashed_and_damaged_runs_are_named(tmp_path):
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 1, iterations=30)
    make_run(tmp_path / "c", 2, iterations=5, planned=12)
    make_run(tmp_path / "d", 3, iterations=0, planned=12)
    make_run(tmp_path / "e", 4, kl=math.nan)
    damaged = make_run(tmp_path / "f", 5, planned=12)
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 12, "agent"')
    study = compared(tmp_path)
    assert row_of(ends(study), "PPO")["n"] == "2"
    notes = "\n".join(caveats(study))
    assert "PPO, c: incomplete: 5 of 12 iterations" in notes and "PPO, e: diverged" in notes
    assert (
        "PPO, d: no iteration is recorded" in notes
        and "line 13 of metrics.jsonl is damaged" in notes
    )
    assert "unequal length in iterations (PPO 12, 30)" in notes
    write(study, tmp_path / "out")  # whole nonetheless
    counts = study.metrics.groupby("iteration")["seed"].nunique()
    assert counts[0] == 4 and counts[29] == 1


def test_seeds_of_one_group_alone_are_named(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"ppo-seed{seed}", seed)
        make_run(tmp_path / f"cory-seed{seed + 1}", seed + 1, agents=2)
    study = compared(tmp_path)
    note = "CORY, PPO: seeds differ; their differences are unpaired, over all seeds of both"
    assert caveats(study) == [note]
    make_run(tmp_path / "ppo-seed2", 2)
    note = "CORY, PPO: seeds differ; their differences are over [1, 2]"
    assert caveats(compared(tmp_path)) == [note]


def test_without_a_run_of_the_baseline_nothing_is_compared(tmp_path):
    make_run(tmp_path / "cory", agents=2)
    study = compared(tmp_path)
    study.runs["baseline"] = False
    with pytest.raises(
        UserError, match=r"a run of it that has ended, got only those of \['CORY'\]"
    ):
        write(study, tmp_path / "out")


def test_another_baseline_leaves_the_study_as_it_is(tmp_path):
    make_run(tmp_path / "ppo", kl=1.0)
    make_run(tmp_path / "cory", agents=2, kl=1.0, ppo__init_kl_coef=0.5)
    study = compared(tmp_path)
    before = study.final["combined_reward"].tolist()
    after = study.against("CORY").final["combined_reward"].tolist()
    assert study.final["combined_reward"].tolist() == before != after


def test_folders_of_one_name_are_refused(tmp_path):
    for parent in "old", "new":
        make_run(tmp_path / parent / "run", 0)
    with pytest.raises(UserError, match=r"different names, got '.*new/run' and '.*old/run'"):
        of_records([read(path) for path in find([str(tmp_path / "*/*")])])


def test_one_seed_and_identical_runs(tmp_path):
    make_run(tmp_path / "a", 0)
    study = compared(tmp_path)
    assert caveats(study) == ["PPO: a single run, so there is no interval"]
    write(study, tmp_path / "out")
    make_run(tmp_path / "b", 0)
    study = compared(tmp_path)
    assert sizes(study) == [("PPO", 2)]
    assert any("seed 0 occurs more than once" in line for line in caveats(study))


def test_the_rows_of_one_seed_are_those_of_one_folder_that_has_ended(tmp_path):
    make_run(tmp_path / "a", iterations=5, planned=12)
    make_run(tmp_path / "b", iterations=12, reward=1.0)
    make_run(tmp_path / "c", iterations=20, reward=2.0)
    metrics = compared(tmp_path).metrics
    assert list(metrics["iteration"]) == list(range(12))
    assert metrics["task_reward"].iloc[0] == 1.0


def test_collapse_is_seen(tmp_path):
    make_run(tmp_path / "fine", 0, distinct=0.6)
    make_run(tmp_path / "alike", 1, distinct=0.4)
    make_run(tmp_path / "far", 2, kl=51.0)
    collapsed = compared(tmp_path).final.set_index("seed")["collapsed"]
    assert collapsed.sort_index().tolist() == [False, True, True]


@pytest.mark.usefixtures("drawn_figures")
def test_values_of_a_key_make_a_family_and_a_frontier(tmp_path):
    for seed in range(2):
        for eta, reward, kl in ((0.1, 3.0, 5.0), (0.3, 2.0, 2.0), (1.0, 1.0, 3.0)):
            make_run(tmp_path / f"p{eta}{seed}", seed, reward=reward, kl=kl, ppo__init_kl_coef=eta)
            make_run(
                tmp_path / f"c{eta}{seed}",
                seed,
                agents=2,
                reward=reward,
                kl=kl / 2,
                ppo__init_kl_coef=eta,
            )
    study = compared(tmp_path, over="ppo.init_kl_coef")
    assert {"PPO, init_kl_coef 0.1", "CORY, init_kl_coef 1.0"} <= set(study.groups)
    rows = {row["family"]: row for row in frontiers(study)}
    assert rows["PPO"]["points"] == "3" and set(rows["PPO"]["not dominated"].split(", ")) == {
        "0.1",
        "0.3",
    }
    assert float(rows["CORY"]["hypervolume"]) > float(rows["PPO"]["hypervolume"]) > 0
    for eta, kl in (
        (0.1, 5.0),
        (0.3, 2.0),
        (1.0, 3.0),
    ):  # against PPO at the same eta, each with its own
        row = row_of(ends(study), f"CORY, init_kl_coef {eta}")
        assert row["difference"].startswith(f"{0.5 + eta * kl / 2:+.2f} ")
    write(study, tmp_path / "out")
    assert (tmp_path / "out/frontier.png").exists() and (tmp_path / "out/over.png").exists()
    again = read_study(tmp_path / "out")
    assert frontiers(again) == frontiers(study) and ends(again) == ends(study)


def test_a_key_of_the_method_does_not_concern_ppo(tmp_path):
    make_run(tmp_path / "p", 0)
    for coef in (1.0, -1.0):
        make_run(tmp_path / f"c{coef}", 0, agents=2, cory__weight=coef)
    study = compared(tmp_path, over="cory.weight")
    values = dict(zip(study.runs["group"], study.runs["value"], strict=True))
    assert values == {"PPO": "", "CORY, weight 1.0": "1.0", "CORY, weight -1.0": "-1.0"}
    row = row_of(frontiers(study), "PPO")
    assert (row["points"], row["not dominated"]) == ("1", "")
    assert row_of(ends(study), "CORY, weight 1.0")["difference"] == "+0.50"
    write(study, tmp_path / "out")


def test_a_value_at_which_no_run_of_the_baseline_ended_has_no_difference(tmp_path):
    for rate, kl in ((1e-5, 1.0), (1e-3, math.nan)):
        make_run(tmp_path / f"p{rate}", 0, ppo__learning_rate=rate, kl=kl)
        make_run(tmp_path / f"c{rate}", 0, agents=2, ppo__learning_rate=rate)
    study = compared(tmp_path, over="ppo.learning_rate")
    assert row_of(ends(study), "CORY, learning_rate 1e-05")["difference"] == "+0.50"
    assert row_of(ends(study), "CORY, learning_rate 0.001")["difference"] == ""
    note = "CORY, learning_rate 0.001: no run of the baseline PPO ended at this value, so no difference"
    assert note in caveats(study)
    write(study, tmp_path / "out")
    study = compared(
        tmp_path, over="ppo.learning_rate", baseline="PPO, learning_rate 1e-05"
    )  # for all values
    assert all(
        row["group"].startswith("PPO") or row["difference"] == "+0.50" for row in ends(study)
    )


def test_a_family_of_which_one_value_is_left_is_no_baseline_of_other_values(tmp_path):
    """As where the others' runs failed, so that they have no rows."""
    make_run(tmp_path / "p", 0, ppo__learning_rate=1e-5)
    for rate in (1e-5, 1e-3):
        make_run(tmp_path / f"c{rate}", 0, agents=2, ppo__learning_rate=rate)
    study = compared(tmp_path, over="ppo.learning_rate", baseline="PPO")
    assert row_of(ends(study), "CORY, learning_rate 1e-05")["difference"] == "+0.50"
    assert row_of(ends(study), "CORY, learning_rate 0.001")["difference"] == ""
    assert any("no run of the baseline PPO ended at this value" in note for note in caveats(study))


def test_held_out_rewards_have_the_eta_of_training_unless_the_evaluation_names_one(tmp_path):
    rows = [{"name": "base", "task_reward": 0.0, "chain_kl": 0.0, "combined_reward": 0.0}]
    runs = {}
    for number, eta in enumerate((0.03, 1.0)):
        make_run(tmp_path / f"r/{number}", ppo__init_kl_coef=eta)
        runs[f"{number}"] = (f"PPO, init_kl_coef {eta}", 0)
        # as evaluated with the first one's
        values = {"task_reward": 1.0, "chain_kl": 5.0, "combined_reward": 0.85}
        rows.append({"name": f"{number}/agent_1", **values})
    study = compared(tmp_path / "r", over="ppo.init_kl_coef")
    study.held_out = held_out_rows(rows, runs)
    write_study(study, tmp_path)
    assert read_study(tmp_path).held_out["combined_reward"].tolist() == [0.0, 0.85, -4.0]
    study.runs["evaluation"] = "imdb_train/evaluate.py --kl_coef 0.03"
    write_study(study, tmp_path)
    assert read_study(tmp_path).held_out["combined_reward"].tolist() == [0.0, 0.85, 0.85]


def test_results_are_compared_with_another_baseline(tmp_path, capsys):
    make_run(tmp_path / "r/ppo", reward=0.5)
    make_run(tmp_path / "r/cory", agents=2)
    write(compared(tmp_path / "r"), tmp_path / "results")
    out = ["--out", str(tmp_path / "out")]
    command_line([str(tmp_path / "results"), "--baseline", "CORY", *out])
    assert "to CORY" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--baseline: expected one of \['CORY', 'PPO'\], got 'no"):
        command_line([str(tmp_path / "results"), "--baseline", "nobody", *out])
    with pytest.raises(UserError, match="--over: expected null for a folder of results"):
        command_line([str(tmp_path / "results"), "--over", "ppo.gamma", *out])
    study = read_study(tmp_path / "results")
    study.runs["baseline"] = False
    with pytest.raises(UserError, match="baseline: expected a run of it that has ended"):
        comparison_page(study, "", "", "")


def test_settings_of_no_block_are_listed_too(tmp_path):
    make_run(tmp_path / "a")
    path = make_run(tmp_path / "b") / "config.yaml"
    path.write_text(path.read_text().replace("algorithm: ppo", "algorithm: rloo"))
    rows = settings(compared(tmp_path))
    assert row_of(rows, "algorithm") == {"setting": "algorithm", "PPO": "ppo", "RLOO": "rloo"}


def test_a_difference_of_single_seeds_has_no_interval(tmp_path):
    make_run(tmp_path / "p", 0, reward=1.0)
    make_run(tmp_path / "c", 0, agents=2, reward=0.25)
    assert row_of(ends(compared(tmp_path)), "CORY")["difference"] == "-0.25"
    make_run(tmp_path / "p1", 1, reward=1.1)
    make_run(tmp_path / "c1", 1, agents=2, reward=0.25)
    # -0.25 and -0.35: t(0.975, 1) = 12.7 standard errors of 0.05
    assert row_of(ends(compared(tmp_path)), "CORY")["difference"] == "-0.30 (-0.94 to +0.34)"


def test_populations_are_compared_though_their_seeds_drew_others(tmp_path):
    for seed, others in ((0, {}), (1, {"agent_2": "agent_10"})):
        run = make_run(tmp_path / f"p{seed}", seed, agents=2)
        changed(run, others, num_agents=12, chain_length=2)
    study = compared(tmp_path)
    drawn = {row["agent"]: row["n"] for row in ends_by_agent(study)}
    kind = "12 agents in 2 roles"
    assert drawn == {
        f"CORY agent_1, {kind}": "2",
        f"CORY agent_2, {kind}": "1",
        f"CORY agent_10, {kind}": "1",
    }
    assert list(labels(study).values()) == list(drawn)
    write(study, tmp_path / "out")


@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize(("methods", "agents"), [(5, 1), (1, 2)])
def test_methods_have_the_palette_in_order_and_agents_of_a_single_one_too(
    tmp_path, monkeypatch, methods, agents
):
    for number in range(methods):
        make_run(tmp_path / f"r{number}", 0, agents=agents, ppo__learning_rate=0.1 + number)
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.extend(figure.axes[0].lines))
    plots.plot_curves(compared(tmp_path, over="ppo.learning_rate"), tmp_path / "curves.png")
    assert [line.get_color() for line in drawn] == list(COLOURS[: methods * agents])


@pytest.mark.usefixtures("drawn_figures")
def test_ppo_has_the_same_colour_in_curves_and_paths(tmp_path, monkeypatch):
    records = [
        read(make_run(tmp_path / name, 0, agents=agents, iterations=20))
        for name, agents in (("c", 2), ("p", 1))
    ]
    study = of_records(records)
    assert list(study.groups) == ["CORY", "PPO"]
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    plots.plot_curves(study, tmp_path / "curves.png")
    plots.plot_paths(study, tmp_path / "paths.png")
    for figure in drawn:
        lines, names = figure.axes[0].get_legend_handles_labels()
        colour = {
            name.split()[0]: line.get_color() for line, name in zip(lines, names, strict=True)
        }
        assert [colour["PPO"], colour["CORY"]] == list(COLOURS[:2])


@pytest.mark.usefixtures("drawn_figures")
def test_small_multiples_have_the_baseline_first_and_a_panel_for_each_setting(
    tmp_path, monkeypatch
):
    changes = {"": {}, "restart": {"cory__reset_every": 5}, "eta": {"ppo__init_kl_coef": 0.4}}
    for agents in (1, 2):
        for number, keys in enumerate(changes.values()):
            make_run(tmp_path / f"r{agents}{number}", 0, agents=agents, iterations=20, **keys)
    make_run(tmp_path / "r23", 0, agents=2, iterations=20, ppo__learning_rate=0.5)
    names = {"r10": "PPO", "r20": "CORY", "r23": "CORY, fast"}
    names |= {"r11": "PPO, restart", "r21": "CORY, restart", "r12": "PPO, eta", "r22": "CORY, eta"}
    records = [read(tmp_path / folder) for folder in names]
    study = of_records(records, families=list(names.values()), baseline="PPO")
    of_panel = [
        ["PPO", "CORY"],
        ["CORY, fast"],
        ["PPO, restart", "CORY, restart"],
        ["PPO, eta", "CORY, eta"],
    ]
    assert plots.panels(study, study.groups) == of_panel

    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    plots.plot_paths(study, tmp_path / "paths.png")
    plots.plot_curves(study, tmp_path / "curves.png")  # of eleven agents
    paths, curves = drawn
    shown = [axis.get_legend_handles_labels()[1] for axis in paths.axes]
    assert shown == [[f"{name} (n = 1)" for name in panel] for panel in of_panel]
    first_panel, second_panel = (
        axis.get_legend_handles_labels()[1] for axis in curves.axes[::3][:2]
    )
    assert first_panel[0] == "PPO (n = 1)" and len(first_panel) == 3
    assert second_panel[:2] == ["PPO, as above", "CORY, as above"]


def test_groups_whose_metrics_were_not_kept_have_no_panel(tmp_path):
    for k in range(plots.MOST_CURVES + 2):
        make_run(tmp_path / f"r/{k}", ppo__learning_rate=1e-5 * (k + 1))
    study = compared(tmp_path / "r", over="ppo.learning_rate")
    study.metrics = study.metrics[study.metrics["group"] != study.groups[0]]
    plots.plot_curves(study, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


@pytest.mark.usefixtures("drawn_figures")
def test_a_figure_of_many_metrics_has_several_rows_of_panels(tmp_path):
    metrics = {f"m{i}": f"m{i}" for i in range(8)}
    rows = [
        {"name": f"model {j}", **{m: 1.0 for m in metrics}, **{f"{m}_ci": 0.1 for m in metrics}}
        for j in range(6)
    ]
    plot_bars(rows, metrics, tmp_path / "bars.png")
    height, width, _ = pyplot.imread(tmp_path / "bars.png").shape
    assert width < 1600 and height > width / 3


@pytest.mark.usefixtures("drawn_figures")
def test_ticks_of_iterations_are_whole_numbers(tmp_path, monkeypatch):
    make_run(tmp_path / "a", iterations=6)
    ticks = []
    monkeypatch.setattr(
        plots, "save", lambda figure, path: ticks.extend(figure.axes[0].get_xticks())
    )
    plots.plot_curves(compared(tmp_path), tmp_path / "curves.png")
    assert ticks and all(tick == int(tick) for tick in ticks)


@pytest.mark.usefixtures("drawn_figures")
def test_a_mean_over_runs_ends_with_the_shortest(tmp_path, monkeypatch):
    for seed, iterations in enumerate((5, 12, 12)):
        make_run(tmp_path / f"run{seed}", seed, iterations=iterations, reward=seed)
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.extend(figure.axes[0].lines))
    plots.plot_curves(compared(tmp_path), tmp_path / "curves.png")
    assert sorted(len(line.get_xdata()) for line in drawn) == [5, 8, 8]  # two go on from the fifth


@pytest.mark.usefixtures("drawn_figures")
def test_the_curves_of_one_role(tmp_path, monkeypatch):
    make_run(tmp_path / "pair", agents=2)
    make_run(tmp_path / "alone")
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.update({path.stem: figure.axes}))
    study = compared(tmp_path)
    page = write(study, tmp_path / "out", role="observer").read_text()
    assert (
        "Of the observer. Running means" in page
        and "first reaches a task reward: the observer," in page
    )
    (curve,) = drawn["curves"][0].get_lines()  # no single agent is an observer
    observer = study.metrics[study.metrics["role"] == "observer"]
    assert list(curve.get_ydata()[:1]) == list(observer["task_reward"][:1])
    assert observer["agent"].nunique() == 2  # agents exchange roles
    assert len(drawn["paths"]) == 1
    with pytest.raises(UserError, match=r"--role: expected one of .*'observer'.*, got 'reader'"):
        write(study, tmp_path / "other", role="reader")


def test_a_run_whose_metrics_are_cut_short_is_named(tmp_path):
    folder = make_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"iterations": 12}))
    assert not read(folder).problems
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for rest in (lines[:9], lines[:5] + lines[8:]):
        (folder / "metrics.jsonl").write_text("\n".join(rest) + "\n")
        assert read(folder).problems == ["metrics.jsonl has 9 of the 12 iterations"]


def test_wrong_input_is_an_error_that_says_what(tmp_path, capsys):
    for pattern, message in (
        (str(tmp_path / "none*"), "which matches none"),
        (str(tmp_path), "expected folders of runs"),
    ):
        with pytest.raises(UserError, match=message):
            find([pattern])
    make_run(tmp_path / "a", iterations=0, planned=9)
    (tmp_path / "a.log").write_text("")
    assert find([str(tmp_path / "a"), str(tmp_path / "a.log")]) == [tmp_path / "a"]
    with pytest.raises(UserError, match=r"a\.log', which matches none"):
        find([str(tmp_path / "a.log")])
    with pytest.raises(UserError, match=r"expected at least one that ended.*no iteration"):
        compared(tmp_path)
    make_run(tmp_path / "b", 1)
    with pytest.raises(UserError, match=r"baseline: expected one of \['PPO'\], got 'CORY'"):
        compared(tmp_path, baseline="CORY")
    with pytest.raises(UserError, match="over: expected a key of the runs' settings"):
        compared(tmp_path, over="ppo.eta")
    with pytest.raises(UserError, match="nope: "):
        command_line([str(tmp_path / "b"), "--nope"])
    (tmp_path / "b/config.yaml").write_text("[1, 2")
    with pytest.raises(UserError, match=r"config\.yaml"):
        compared(tmp_path)


def test_names_tell_groups_apart():
    def settings(agents, **keys):
        return {
            "cory": {"num_agents": agents, "exchange_period": keys.pop("period", 5)},
            "ppo": {"lr": 1, **keys},
        }

    assert names([settings(1), settings(2)]) == ["PPO", "CORY"]
    assert names([settings(2), settings(2, period=0), settings(1, lr=2)]) == [
        "CORY, exchange_period 5", "CORY, exchange_period 0", "PPO",
    ]  # fmt: skip
    assert names([settings(1), settings(1, period=0), settings(3)]) == [
        "PPO",
        "PPO",
        "CORY, 3 agents",
    ]


def fingerprint(seed=0, reward="a.alliteration", data=None, **changes):
    prompts = {"pioneer": "{prompt}", "observer": "{prompt}{response}"}
    made_of = {
        "reward": reward,
        "reward_sha256": reward,
        "prompts": prompts,
        "dataset_sha256": data or f"data{seed}",
    }
    return made_of | {"rows": 100 + seed, **changes}


def test_models_of_one_last_name_are_groups_of_their_own(tmp_path):
    for run in ("a", "b"):
        for seed in range(2):
            folder = tmp_path / f"{run}{seed}"
            make_run(folder, seed, model__name=f"runs/{run}/agent_1")
    make_run(tmp_path / "c", 0, model__name="runs/b/agent_2")
    assert sizes(compared(tmp_path)) == [
        ("PPO, name a/agent_1", 2),
        ("PPO, name b/agent_1", 2),
        ("PPO, name agent_2", 1),
    ]


def test_groups_of_other_rewards_are_said_not_to_compare(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"p{seed}", seed, fingerprint=fingerprint(seed, "b.letters"))
        make_run(tmp_path / f"c{seed}", seed, agents=2, fingerprint=fingerprint(seed))
    study = compared(tmp_path)
    assert study.groups == ["CORY", "PPO"]
    caveat = "groups were trained on different rewards, which do not compare: CORY on a.alliteration; PPO on b.letters"
    assert caveats(study) == [caveat]
    text = write(study, tmp_path / "out").read_text()
    assert f"**Caveats:**\n\n* {caveat}\n" in text
    assert "| fingerprint.reward | a.alliteration | b.letters |" in text
    assert "dataset" not in text and "fingerprint.rows" not in text


def test_one_reward_function_of_two_reward_models_is_said_not_to_compare(tmp_path):
    for agents, model in ((1, "some/judge"), (2, "/a/b/c/judge")):
        changes = {"task__reward_model": model, "ppo__schedule": "linear"}
        same = fingerprint(reward="imdb.PositiveLogit")
        make_run(tmp_path / str(agents), 0, agents, 11 + agents, fingerprint=same, **changes)
    study = compared(tmp_path)
    said = "PPO on imdb.PositiveLogit of some/judge; CORY on imdb.PositiveLogit of c/judge"
    assert caveats(study)[0].endswith(said)
    assert [row["setting"] for row in settings(study)].count("iterations") == 1


def test_one_method_on_two_rewards_is_two_groups(tmp_path):
    for seed in range(2):
        for number, reward in enumerate(("a.f", "b.g", "b.g")):
            changes = {"reward_sha256": f"{number}" * 16}
            make_run(
                tmp_path / f"{number}{seed}",
                seed,
                agents=2,
                fingerprint=fingerprint(seed, reward, **changes),
            )
        make_run(tmp_path / f"old{seed}", seed)  # of before there were fingerprints
    study = compared(tmp_path)
    names = ["CORY, reward a.f, reward_sha256 0000000000000000", "CORY, reward b.g, reward_sha256 1111111111111111",
             "CORY, reward b.g, reward_sha256 2222222222222222", "PPO"]  # fmt: skip
    assert study.groups == names
    said = caveats(study)[0]
    assert f"{names[0]} on a.f; {names[1]} on b.g (source 11111111); " in said
    assert "PPO" not in said


def test_data_compare_at_the_same_seed_alone(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"p{seed}", seed, fingerprint=fingerprint(seed))
        make_run(tmp_path / f"c{seed}", seed, agents=2, fingerprint=fingerprint(seed))
    study = compared(tmp_path)
    assert sizes(study) == [("CORY", 3), ("PPO", 3)]
    assert not caveats(study) and not any("finger" in row["setting"] for row in settings(study))


def test_other_data_at_the_same_seed_are_listed(tmp_path):
    make_run(tmp_path / "c1", 1, agents=2, fingerprint=fingerprint(1))
    make_run(tmp_path / "c2", 2, agents=2, fingerprint=fingerprint(2))
    make_run(tmp_path / "p2", 2, fingerprint=fingerprint(2, data="other"))
    make_run(tmp_path / "p3", 3, fingerprint=fingerprint(3))
    row = {"setting": "fingerprint.dataset_sha256 (seed 2)", "CORY": "data2", "PPO": "other"}
    assert row in settings(compared(tmp_path))
    make_run(tmp_path / "q2", 2, fingerprint=fingerprint(2))  # the same but for its data
    groups = sizes(compared(tmp_path))
    assert groups == [("CORY", 2), ("PPO", 2), ("PPO, other data", 1)]


def test_other_prompts_are_listed(tmp_path):
    make_run(tmp_path / "p", 0, fingerprint=fingerprint())
    prompts = {"pioneer": "{prompt}", "observer": "{response} {prompt}"}
    make_run(tmp_path / "c", 0, agents=2, fingerprint=fingerprint(prompts=prompts))
    (row,) = (
        row for row in settings(compared(tmp_path)) if row["setting"].startswith("fingerprint")
    )
    assert row["setting"] == "fingerprint.prompts.observer" and row["CORY"] == "{response} {prompt}"


def test_runs_of_a_task_of_ones_own_compare_with_others(tmp_path):
    """They have no `task` block."""
    folder = make_run(tmp_path / "own", 0, agents=2, fingerprint=fingerprint())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["task"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    make_run(tmp_path / "imdb", 0, agents=2, fingerprint=fingerprint(reward="imdb.PositiveLogit"))
    study = compared(tmp_path)
    assert study.groups == ["CORY, reward imdb.PositiveLogit", "CORY, reward a.alliteration"]
    assert {row["setting"] for row in settings(study)} == {
        "fingerprint.reward",
        "fingerprint.reward_sha256",
    }


def changed(folder, names=None, **method):
    """The run with other settings of its `cory` block, and with some of its agents' names changed."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["cory"] |= method
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    text = (folder / "metrics.jsonl").read_text()
    for old, new in (names or {}).items():
        text = text.replace(f'"{old}"', f'"{new}"')
    (folder / "metrics.jsonl").write_text(text)


def test_ppo_is_the_baseline_before_other_single_agents_and_one_llm_in_two_roles_is_none(tmp_path):
    changed(
        make_run(tmp_path / "a_shared", agents=2),
        {"agent_2": "agent_1"},
        num_agents=1,
        chain_length=2,
    )
    rloo = make_run(tmp_path / "b_rloo")
    settings = yaml.safe_load((rloo / "config.yaml").read_text()) | {
        "algorithm": "rloo",
        "group_size": 4,
    }
    (rloo / "config.yaml").write_text(yaml.safe_dump(settings))
    assert compared(tmp_path).baseline == "RLOO"
    make_run(tmp_path / "c_ppo")
    study = compared(tmp_path)
    assert study.baseline == "PPO"
    assert study.groups == ["CORY, 1 agent in 2 roles", "RLOO", "PPO"]
    write(study, tmp_path / "out")


def test_many_colours_are_distinct():
    assert len({str(colour) for colour in colours(28)}) == 28 and colours(9)[:8] == list(COLOURS)


@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize("count", [1, 2])
def test_bars_of_metrics(tmp_path, count):
    metrics = dict([("task_reward", "Task reward"), ("kl", "KL")][:count])
    rows = [
        {"name": name, "task_reward": 1.0, "task_reward_ci": 0.1, "kl": 2.0, "kl_ci": 0.2}
        for name in ("a", "b")
    ]
    plot_bars(rows, metrics, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_a_team_reward_is_part_of_the_combined_reward(tmp_path):
    """Of the runs that have one; it is kept in the files."""
    make_run(tmp_path / "alone")
    team = make_run(tmp_path / "team", agents=2)
    rows = [json.loads(line) | {"team_reward": 5.0} for line in (team / "metrics.jsonl").open()]
    (team / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    study = compared(tmp_path)
    (tmp_path / "files").mkdir()
    write_study(study, tmp_path / "files")
    for frames in (study, read_study(tmp_path / "files")):
        final = frames.final.set_index(["group", "agent"])
        earned = final["combined_reward"] - (final["task_reward"] - 0.3 * final["kl"])
        assert earned["PPO", "agent_1"] == pytest.approx(0)
        assert earned["CORY", "agent_1"] == pytest.approx(5) and earned[
            "CORY", "agent_2"
        ] == pytest.approx(5)


@pytest.mark.parametrize(
    "lengths, note, by_role",
    [
        ([12, 12], "over the last 10 iterations and", "By role, over all 12 iterations"),
        ([3, 3], "over all 3 iterations and", "By role, over all 3 iterations"),
        ([1], "over the only iteration and", "By role, over the only iteration"),
        ([12, 3], "over the last 10 iterations (all of a shorter run) and", "over all iterations"),
        (
            [30, 12],
            "over the last 10 iterations and",
            "over the last 20 iterations (all of a shorter run)",
        ),
    ],
)
def test_the_page_says_how_many_iterations_are_averaged(tmp_path, lengths, note, by_role):
    for number, iterations in enumerate(lengths):
        make_run(tmp_path / f"run{number}", number, agents=2, iterations=iterations)
    study = compared(tmp_path)
    page = comparison_page(study, "Comparison", "", "")
    assert f"Means {note}" in page and by_role in page


def test_one_run_of_one_group_is_singular(tmp_path):
    make_run(tmp_path / "run", iterations=1, planned=1)
    (tmp_path / "run/summary.json").write_text('{"iterations": 1}')
    page = comparison_page(compared(tmp_path), "Comparison", "", "")
    assert "1 run of 1 group;" in page
    assert "1 of 1 iteration" in run_page(tmp_path / "run", "PPO").facts
