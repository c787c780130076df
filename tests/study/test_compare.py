"""Comparing runs, on runs' folders written by hand."""

import csv
import json
import math
import re
import statistics

import pytest
import yaml
from handmade import compared, make_run

from cory.errors import UserError
from cory.report.plots import COLOURS, colours
from study import plots
from study.compare import command_line, write
from study.evaluation_plots import plot_bars
from study.groups import find, names
from study.measures import collapsed, variance
from study.records import read
from study.tables import group_table


def test_groups_final_values_and_differences(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"ppo{seed}", seed, reward=1.0 + seed)
        make_run(tmp_path / f"cory{seed}", seed, agents=2, reward=2.0 + seed)
    comparison = compared(tmp_path)
    assert [(g.name, len(g.whole)) for g in comparison.groups] == [("CORY", 3), ("PPO", 3)]
    assert comparison.baseline == "PPO"
    rows = {row["name"]: row for row in comparison.final_rows()}
    assert set(rows) == {"PPO", "CORY agent_1", "CORY agent_2"}
    last = statistics.fmean(0.1 * k for k in range(2, 12))
    assert rows["PPO"]["task_reward"] == pytest.approx([1 + last, 2 + last, 3 + last])
    assert rows["CORY agent_2"]["task_reward"] == pytest.approx([3 + last, 4 + last, 5 + last])
    cory, ppo = comparison.group_rows()
    assert statistics.fmean(ppo["policy_optimality"]) == pytest.approx(2 + last - 0.3)
    change, low, high = cory["optimality_change"]
    assert change == pytest.approx(1.5 / (2 + last - 0.3)) and low < change < high
    assert cory["training_variance"] == ppo["training_variance"] == pytest.approx(1.0)
    assert "optimality_change" not in ppo and not comparison.problems()
    roles = {(row["agent"], row["role"]) for row in comparison.role_rows()}
    assert ("CORY agent_1", "observer") in roles and ("CORY agent_2", "pioneer") in roles


def test_everything_is_written(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "r" / f"ppo{seed}", seed, model__name="some/gpt")
        make_run(tmp_path / "r" / f"cory{seed}", seed, agents=2, ppo__learning_rate=5e-4, model__name="/a/b/c/gpt")
    text = write(compared(tmp_path / "r"), tmp_path / "out", "A title", "A question?").read_text()
    assert text.startswith("# A title\n") and "A question?" in text
    assert "| ppo.learning_rate | 0.0005 | 0.0001 |" in text  # an unfair comparison is visible at a glance
    assert "| model.name | c/gpt | some/gpt |" in text  # no path of a machine
    assert "was &#96;good&#96;&#124;" in text  # a model's text is no Markdown
    for name in ("curves.png", "curves.svg", "final.csv", "curves.csv"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    runs = list(csv.DictReader(open(tmp_path / "out/runs.csv")))
    assert [row["agent"] + row["seed"] for row in runs[:3]] == ["CORY agent_10", "CORY agent_20", "CORY agent_11"]
    assert float(runs[0]["task_reward"]) == pytest.approx(0.65) and runs[0]["collapsed"] == "False"
    rows = list(csv.DictReader(open(tmp_path / "out/curves.csv")))
    assert len(rows) == 36 and rows[0]["n"] == "2" and float(rows[1]["task_reward_mean"]) == pytest.approx(0.1)


def test_unequal_incomplete_crashed_and_damaged_runs_are_named(tmp_path):
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 1, iterations=30)
    make_run(tmp_path / "c", 2, iterations=5, planned=12)
    crashed = make_run(tmp_path / "d", 3, iterations=0, planned=12)
    diverged = make_run(tmp_path / "e", 4, kl=math.nan)
    damaged = make_run(tmp_path / "f", 5, planned=12)
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 12, "agent"')
    comparison = compared(tmp_path)
    (row,) = comparison.final_rows()
    assert row["n"] == 2
    said = "\n".join(comparison.problems())
    assert "PPO, c: incomplete: 5 of 12 iterations" in said and "PPO, e: diverged" in said
    assert f"PPO, {crashed.name}: no iteration is recorded" in said and "line 13 of metrics.jsonl is damaged" in said
    assert "unequal length in iterations (PPO 12, 30)" in said
    assert diverged.name in said
    write(comparison, tmp_path / "out")  # whole nonetheless
    counts = [row["n"] for row in csv.DictReader(open(tmp_path / "out/curves.csv"))]
    assert counts[:1] == ["4"] and counts[-1:] == ["1"]


def test_a_run_whose_metrics_are_cut_short_is_named(tmp_path):
    folder = make_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"iterations": 12}))
    assert read(folder).complete
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for rest in (lines[:9], lines[:5] + lines[8:]):
        (folder / "metrics.jsonl").write_text("\n".join(rest) + "\n")
        assert read(folder).problems == ["metrics.jsonl has 9 of the 12 iterations"]


def test_one_seed_and_identical_runs(tmp_path):
    make_run(tmp_path / "a", 0)
    said = compared(tmp_path).problems()
    assert said == ["PPO: a single run, so there is no spread"]
    write(compared(tmp_path), tmp_path / "out")
    make_run(tmp_path / "b", 0)
    (g,) = compared(tmp_path).groups
    assert len(g.runs) == 2
    assert any("seed 0 occurs more than once" in line for line in compared(tmp_path).problems())


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
    with pytest.raises(UserError, match="--nope"):
        command_line([str(tmp_path / "b"), "--nope"])
    (tmp_path / "b/config.yaml").write_text("[1, 2")
    with pytest.raises(UserError, match="expected the folder of a run"):
        compared(tmp_path)


def test_collapse_is_seen(tmp_path):
    make_run(tmp_path / "fine", 0, distinct=0.6)
    make_run(tmp_path / "alike", 1, distinct=0.4)
    make_run(tmp_path / "far", 2, kl=51.0)
    assert [collapsed(read(tmp_path / name)) for name in ("fine", "alike", "far")] == [False, True, True]


def test_training_variance_is_over_seeds_then_iterations(tmp_path):
    runs = [read(make_run(tmp_path / str(seed), seed, reward=seed * 2.0)) for seed in range(2)]
    assert variance(runs) == pytest.approx(2.0) and variance(runs[:1]) == 0.0


def test_values_of_a_key_make_a_family_and_a_frontier(tmp_path):
    for seed in range(2):
        for eta, reward, kl in ((0.1, 3.0, 5.0), (0.3, 2.0, 2.0), (1.0, 1.0, 3.0)):
            make_run(tmp_path / f"p{eta}{seed}", seed, reward=reward, kl=kl, ppo__init_kl_coef=eta)
            make_run(tmp_path / f"c{eta}{seed}", seed, agents=2, reward=reward, kl=kl / 2, ppo__init_kl_coef=eta)
    comparison = compared(tmp_path, over="ppo.init_kl_coef")
    assert {g.name for g in comparison.groups} >= {"PPO, init_kl_coef 0.1", "CORY, init_kl_coef 1.0"}
    rows = {row["family"]: row for row in comparison.frontier_rows()}
    assert rows["PPO"]["points"] == "3" and set(rows["PPO"]["not dominated"].split(", ")) == {"0.1", "0.3"}
    assert float(rows["CORY"]["hypervolume"]) > float(rows["PPO"]["hypervolume"]) > 0
    for row in comparison.group_rows():
        if row["name"].startswith("CORY"):  # against PPO at the same eta
            assert row["optimality_change"][0] > 0
    write(comparison, tmp_path / "out")
    assert (tmp_path / "out/frontier.png").exists() and (tmp_path / "out/over.svg").exists()


def test_a_key_of_the_method_does_not_concern_ppo(tmp_path):
    make_run(tmp_path / "p", 0)
    for coef in (1.0, -1.0):
        make_run(tmp_path / f"c{coef}", 0, agents=2, cory__weight=coef)
    comparison = compared(tmp_path, over="cory.weight")
    assert {(g.name, g.value) for g in comparison.groups} == {
        ("PPO", None), ("CORY, weight 1.0", 1.0), ("CORY, weight -1.0", -1.0)
    }  # fmt: skip
    one = next(row for row in comparison.frontier_rows() if row["family"] == "PPO")
    assert (one["points"], one["not dominated"]) == ("1", "")
    write(comparison, tmp_path / "out")


def test_a_value_at_which_no_run_of_the_baseline_ended_has_no_difference(tmp_path):
    for rate, kl in ((1e-5, 1.0), (1e-3, math.nan)):
        make_run(tmp_path / f"p{rate}", 0, ppo__learning_rate=rate, kl=kl)
        make_run(tmp_path / f"c{rate}", 0, agents=2, ppo__learning_rate=rate)
    comparison = compared(tmp_path, over="ppo.learning_rate")
    rows = {row["name"]: row for row in comparison.group_rows()}
    assert rows["CORY, learning_rate 1e-05"]["optimality_change"][0] > 0
    assert "optimality_change" not in rows["CORY, learning_rate 0.001"]
    said = "CORY, learning_rate 0.001: no run of the baseline PPO ended at this value, so no difference"
    assert said in comparison.problems()
    write(comparison, tmp_path / "out")
    one = compared(tmp_path, over="ppo.learning_rate", baseline="PPO, learning_rate 1e-05")  # for all values
    assert all(row["name"].startswith("PPO") or row["optimality_change"][0] > 0 for row in one.group_rows())


def test_a_difference_of_variances_has_an_interval_from_three_seeds_on(tmp_path):
    """Resamples of one run again and again, whose variance is 0, are left out of both groups."""
    for seed in range(3):
        make_run(tmp_path / f"p{seed}", seed, reward=2.0 * seed)
        make_run(tmp_path / f"c{seed}", seed, agents=2, reward=1.0 * seed)
        if seed == 1:
            (row,) = (row for row in compared(tmp_path).group_rows() if row["name"] == "CORY")
            value, low, high = row["variance_change"]
            assert value == pytest.approx(-0.75) and math.isnan(low) and math.isnan(high)
    (row,) = (row for row in compared(tmp_path).group_rows() if row["name"] == "CORY")
    # differences of two runs are 1 or 2 (CORY) and 2 or 4: of a resample with one drawn twice, 1/3 of their squares
    assert row["variance_change"] == pytest.approx((-0.75, (1 / 3) / (16 / 3) - 1, 0.0))


def test_a_difference_to_a_baseline_near_zero_is_absolute(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"p{seed}", seed, reward=seed - 1.0)
        make_run(tmp_path / f"c{seed}", seed, agents=2, reward=seed + 0.0)
    (row,) = (row for row in group_table(compared(tmp_path)) if row["group"] == "CORY")
    value, low, high = re.fullmatch(r"(\S+) \((\S+) to (\S+)\), absolute", row["difference to baseline"]).groups()
    assert float(value) == 1.5 and -0.1 < float(low) < 1.5 < float(high) < 3.1


def test_one_baseline_near_zero_makes_the_whole_column_absolute(tmp_path):
    for seed in range(2):
        for reward, rate in ((2.0, 1e-4), (seed - 0.5, 1e-3)):
            make_run(tmp_path / f"p{rate}{seed}", seed, reward=reward, ppo__learning_rate=rate)
            make_run(tmp_path / f"c{rate}{seed}", seed, agents=2, reward=reward + 1.0, ppo__learning_rate=rate)
    rows = group_table(compared(tmp_path, over="ppo.learning_rate"))
    shown = {row["group"]: row["difference to baseline"] for row in rows}
    assert re.fullmatch(r"\+1\.500 \(.*, absolute", shown["CORY, learning_rate 0.0001"]), shown
    assert re.fullmatch(r"\+1\.500 \(.*, absolute", shown["CORY, learning_rate 0.001"]), shown
    assert shown["PPO, learning_rate 0.0001"] == shown["PPO, learning_rate 0.001"] == ""


def test_names_tell_groups_apart():
    def settings(agents, **keys):
        return {"cory": {"num_agents": agents, "exchange_period": keys.pop("period", 5)}, "ppo": {"lr": 1, **keys}}

    assert names([settings(1), settings(2)]) == ["PPO", "CORY"]
    assert names([settings(2), settings(2, period=0), settings(1, lr=2)]) == [
        "CORY, exchange_period 5", "CORY, exchange_period 0", "PPO",
    ]  # fmt: skip
    assert names([settings(1), settings(1, period=0), settings(3)]) == ["PPO", "PPO", "CORY, 3 agents"]


def fingerprint(seed=0, reward="a.alliteration", data=None, **changes):
    prompts = {"pioneer": "{prompt}", "observer": "{prompt}{response}"}
    made_of = {"reward": reward, "reward_sha256": reward, "prompts": prompts, "dataset_sha256": data or f"data{seed}"}
    return made_of | {"rows": 100 + seed, **changes}


def test_groups_of_other_rewards_are_said_not_to_compare(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"p{seed}", seed, fingerprint=fingerprint(seed, "b.letters"))
        make_run(tmp_path / f"c{seed}", seed, agents=2, fingerprint=fingerprint(seed))
    comparison = compared(tmp_path)
    assert [g.name for g in comparison.groups] == ["CORY", "PPO"]
    caveat = "CORY was trained on the reward a.alliteration, PPO on b.letters: their task rewards do not compare"
    assert comparison.problems() == [caveat]
    text = write(comparison, tmp_path / "out").read_text()
    assert f"**Caveats:**\n\n* {caveat}\n" in text
    assert "| fingerprint.reward | a.alliteration | b.letters |" in text
    assert "dataset" not in text and "fingerprint.rows" not in text


def test_one_reward_function_of_two_reward_models_is_said_not_to_compare(tmp_path):
    for agents, model in ((1, "some/judge"), (2, "/a/b/c/judge")):
        changes = {"task__reward_model": model, "ppo__schedule": "linear"}
        same = fingerprint(reward="imdb.PositiveLogit")
        make_run(tmp_path / str(agents), 0, agents, 11 + agents, fingerprint=same, **changes)
    comparison = compared(tmp_path)
    said = "PPO was trained on the reward imdb.PositiveLogit of some/judge, CORY on imdb.PositiveLogit of c/judge"
    assert comparison.problems()[0] == f"{said}: their task rewards do not compare"
    assert [row["setting"] for row in comparison.setting_rows()].count("iterations") == 1


def test_one_method_on_two_rewards_is_two_groups(tmp_path):
    for seed in range(2):
        for number, reward in enumerate(("a.f", "b.g", "b.g")):
            changes = {"reward_sha256": f"{number}" * 16}
            make_run(tmp_path / f"{number}{seed}", seed, agents=2, fingerprint=fingerprint(seed, reward, **changes))
        make_run(tmp_path / f"old{seed}", seed)  # of before there were fingerprints
    comparison = compared(tmp_path)
    names = ["CORY, reward a.f, reward_sha256 0000000000000000", "CORY, reward b.g, reward_sha256 1111111111111111",
             "CORY, reward b.g, reward_sha256 2222222222222222", "PPO"]  # fmt: skip
    assert [g.name for g in comparison.groups] == names
    said = comparison.problems()[0]
    assert f"{names[0]} was trained on the reward a.f; {names[1]} on b.g (source 11111111); " in said
    assert "PPO" not in said


def test_data_compare_at_the_same_seed_alone(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"p{seed}", seed, fingerprint=fingerprint(seed))
        make_run(tmp_path / f"c{seed}", seed, agents=2, fingerprint=fingerprint(seed))
    comparison = compared(tmp_path)
    assert [(g.name, len(g.runs)) for g in comparison.groups] == [("CORY", 3), ("PPO", 3)]
    assert not comparison.problems() and not any("finger" in row["setting"] for row in comparison.setting_rows())


def test_other_data_at_the_same_seed_are_listed(tmp_path):
    make_run(tmp_path / "c1", 1, agents=2, fingerprint=fingerprint(1))
    make_run(tmp_path / "c2", 2, agents=2, fingerprint=fingerprint(2))
    make_run(tmp_path / "p2", 2, fingerprint=fingerprint(2, data="other"))
    make_run(tmp_path / "p3", 3, fingerprint=fingerprint(3))
    row = {"setting": "fingerprint.dataset_sha256 (seed 2)", "CORY": "data2", "PPO": "other"}
    assert row in compared(tmp_path).setting_rows()
    make_run(tmp_path / "q2", 2, fingerprint=fingerprint(2))  # the same but for its data
    groups = [(g.name, len(g.runs)) for g in compared(tmp_path).groups]
    assert groups == [("CORY", 2), ("PPO", 2), ("PPO, other data", 1)]


def test_other_prompts_are_listed(tmp_path):
    make_run(tmp_path / "p", 0, fingerprint=fingerprint())
    prompts = {"pioneer": "{prompt}", "observer": "{response} {prompt}"}
    make_run(tmp_path / "c", 0, agents=2, fingerprint=fingerprint(prompts=prompts))
    (row,) = (row for row in compared(tmp_path).setting_rows() if row["setting"].startswith("fingerprint"))
    assert row["setting"] == "fingerprint.prompts.observer" and row["CORY"] == "{response} {prompt}"


def test_a_difference_of_single_seeds_has_no_interval(tmp_path):
    make_run(tmp_path / "p", 0, reward=1.0)
    make_run(tmp_path / "c", 0, agents=2, reward=0.25)
    text = write(compared(tmp_path), tmp_path / "out").read_text()
    # PPO ends at 1 + 0.65 - 0.3 KL, CORY's agents at 0.25 and 1.25 in place of 1
    value = f"{(0.75 + 0.65 - 0.3) / (1.0 + 0.65 - 0.3) - 1:+.0%}"
    assert f"| {value} | 0% |  |  |" in text and f"{value} (" not in text
    make_run(tmp_path / "p1", 1, reward=1.1)
    make_run(tmp_path / "c1", 1, agents=2, reward=0.25)
    assert " to -" in write(compared(tmp_path), tmp_path / "out").read_text()


def test_runs_of_a_task_of_ones_own_compare_with_others(tmp_path):
    """They have no `task` block."""
    folder = make_run(tmp_path / "own", 0, agents=2, fingerprint=fingerprint())
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    del settings["task"]
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    make_run(tmp_path / "imdb", 0, agents=2, fingerprint=fingerprint(reward="imdb.PositiveLogit"))
    comparison = compared(tmp_path)
    assert [g.name for g in comparison.groups] == ["CORY, reward imdb.PositiveLogit", "CORY, reward a.alliteration"]
    assert {row["setting"] for row in comparison.setting_rows()} == {"fingerprint.reward", "fingerprint.reward_sha256"}


def changed(folder, names=None, **method):
    """The run with other settings of its `cory` block, and with some of its agents' names changed."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["cory"] |= method
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    text = (folder / "metrics.jsonl").read_text()
    for old, new in (names or {}).items():
        text = text.replace(f'"{old}"', f'"{new}"')
    (folder / "metrics.jsonl").write_text(text)


def test_populations_are_compared_though_their_seeds_drew_others(tmp_path):
    for seed, others in ((0, {}), (1, {"agent_2": "agent_10"})):
        run = make_run(tmp_path / f"p{seed}", seed, agents=2)
        changed(run, others, num_agents=12, chain_length=2, exchange="shuffle")
    comparison = compared(tmp_path)
    drawn = {row["name"]: row["n"] for row in comparison.final_rows()}
    kind = "12 agents in 2 roles"
    assert drawn == {f"CORY agent_1, {kind}": 2, f"CORY agent_2, {kind}": 1, f"CORY agent_10, {kind}": 1}
    assert len(comparison.run_rows()) == 4
    write(comparison, tmp_path / "out")


def test_ppo_is_the_baseline_before_other_single_agents_and_one_llm_in_two_roles_is_none(tmp_path):
    changed(make_run(tmp_path / "a_shared", agents=2), {"agent_2": "agent_1"}, num_agents=1, chain_length=2)
    rloo = make_run(tmp_path / "b_rloo")
    settings = yaml.safe_load((rloo / "config.yaml").read_text()) | {"algorithm": "rloo", "group_size": 4}
    (rloo / "config.yaml").write_text(yaml.safe_dump(settings))
    assert compared(tmp_path).baseline == "RLOO"
    make_run(tmp_path / "c_ppo")
    comparison = compared(tmp_path)
    assert comparison.baseline == "PPO"
    assert [g.name for g in comparison.groups] == ["CORY, 1 agent in 2 roles", "RLOO", "PPO"]
    write(comparison, tmp_path / "out")


@pytest.mark.parametrize(("methods", "agents"), [(5, 1), (1, 2)])
def test_methods_have_the_palette_in_order_and_agents_of_a_single_one_too(tmp_path, monkeypatch, methods, agents):
    for number in range(methods):
        make_run(tmp_path / f"r{number}", 0, agents=agents, ppo__learning_rate=0.1 + number)
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.extend(figure.axes[0].lines))
    plots.plot_comparison(compared(tmp_path, over="ppo.learning_rate").curves(), tmp_path / "curves")
    assert [line.get_color() for line in drawn] == list(COLOURS[: methods * agents])


def test_many_colours_are_distinct():
    assert len({str(colour) for colour in colours(28)}) == 28 and colours(9)[:8] == list(COLOURS)


@pytest.mark.parametrize("count", [1, 2])
def test_bars_of_metrics(tmp_path, count):
    metrics = dict([("task_reward", "Task reward"), ("kl", "KL")][:count])
    rows = [{"name": name, "task_reward": 1.0, "task_reward_ci": 0.1, "kl": 2.0, "kl_ci": 0.2} for name in ("a", "b")]
    plot_bars(rows, metrics, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000
