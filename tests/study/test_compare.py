"""Data frames, tables and pages that compare runs, on hand-worked cases."""

import json

import pandas as pd
import pytest
from handmade import compared, held, make_study
from written import write_lines
from written import write_run as make_run

from cory.errors import UserError
from study.compare import command_line, verdicts
from study.comparison import ends, ends_by_agent
from study.frame import read_study, with_combined_reward, write_study
from study.held_out import Answering, against_rivals, held_out, judged_by


def test_groups_final_values_and_differences(tmp_path):
    """Rewards start at 0.1 * seed and rise by 0.1 an iteration; agent_2 earns 1 more.

    Over the last ten of 12 iterations, the mean reward is 0.65 above the start.
    """
    for seed in range(3):
        make_run(tmp_path / f"alone-seed{seed}", seed, reward=0.1 * seed, kl=1.0)
        make_run(tmp_path / f"pair-seed{seed}", seed, agents=2, reward=0.1 * seed, kl=2.0 + seed)
    study = compared(tmp_path)
    assert study.baseline == "alone" and study.eta == pytest.approx(0.3)
    alone, pair = ends(study)
    assert (alone["group"], alone["n"], alone["difference, combined reward"]) == ("alone", "3", "")
    assert alone["task reward"] == "0.75 ± 0.25"  # 0.1 * t(0.975, 2) / sqrt(3)
    assert alone["combined reward"] == "0.45 ± 0.25"
    assert pair["KL"] == "3.00 ± 2.48"
    # The pair's reward is 0.5 higher. Its KL, whose coefficient is 0.3, is 1, 2 and 3 higher in the three seeds.
    assert pair["difference, combined reward"] == "-0.10 (-0.85 to +0.65)"
    by_agent = {row["agent"]: row["task reward"] for row in ends_by_agent(study)}
    assert by_agent["alone"] == by_agent["pair agent_1"] == "0.75 ± 0.25"
    assert by_agent["pair agent_2"] == "1.75 ± 0.25"


def test_frames_are_written_and_read_again(tmp_path):
    for name in ("None", "2"):  # names that look like numbers or missing values
        make_run(tmp_path / f"{name}-seed0", agents=2)
    study = compared(tmp_path)
    write_study(study, tmp_path)
    again = read_study(tmp_path)
    assert again.groups == study.groups == ["2", "None"]
    for name in ("metrics", "final"):
        frames = [getattr(s, name)[["group", "seed", "agent", "kl"]] for s in (study, again)]
        pd.testing.assert_frame_equal(*frames, check_dtype=False)
    before = (tmp_path / "metrics.csv.gz").read_bytes()
    write_study(again, tmp_path)
    assert (tmp_path / "metrics.csv.gz").read_bytes() == before


def test_runs_of_a_group_may_differ_only_in_their_seed(tmp_path):
    make_run(tmp_path / "a-seed0")
    make_run(tmp_path / "a-seed1", 1, changes={"ppo.learning_rate": 0.5})
    with pytest.raises(UserError, match=r"ppo\.learning_rate"):
        compared(tmp_path)
    with pytest.raises(UserError, match=r"summary\.json"):
        make_run(tmp_path / "b" / "b-seed0", planned=20)
        compared(tmp_path / "b")
    with pytest.raises(UserError, match=r"config\.yaml"):
        command_line([str(tmp_path / "none"), "--out", str(tmp_path / "out")])


def test_groups_are_named_after_the_settings_in_which_they_differ(tmp_path):
    common = "-batch_size=16-mini_batch_size=16-dataset=train.parquet-seed0"
    for name, agents in (
        ("imdb_cory_tiny-credit=own", 2),
        ("imdb_cory_tiny", 2),
        ("imdb_ppo_tiny", 1),
    ):
        make_run(tmp_path / f"{name}{common}", agents=agents)
    study = compared(tmp_path)
    groups = {"imdb_cory_tiny, credit=own", "imdb_cory_tiny", "imdb_ppo_tiny"}
    assert {*study.groups} == groups and study.baseline == "imdb_ppo_tiny"


def test_a_team_reward_is_part_of_the_combined_reward(tmp_path):
    folder = make_run(tmp_path / "a-seed0", iterations=10, reward=0.0, kl=1.0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"team_reward": 2.0}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    assert compared(tmp_path).final["combined_reward"].item() == pytest.approx(0.45 + 2.0 - 0.3)


def test_a_runs_seconds_are_summed_over_all_lines_of_timings(tmp_path):
    """So a resumed run counts all of its iterations."""
    folder = make_run(tmp_path / "a-seed0", iterations=2)
    lines = [{"seconds_total": 2.0}, {"seconds_total": 2.0, "seconds_evaluate": 1.0}]
    write_lines(folder / "timings.jsonl", lines)
    assert compared(tmp_path).runs["seconds"].item() == 5.0


def test_held_out_methods_are_compared_at_equal_calls():
    """Alone (one call), CORY's agents earn 1 and 3. The KL coefficient is 0.3.

    One after the other (two calls), they earn 5 or, in the other order, 7.
    """
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda *_: (1.0, 1.0, 1.0)), seeds=2)
    rows = []
    for seed in range(2):
        rows += [
            ("PPO", seed, "agent_1", 1, 1.0 + seed, 0.0, 0.0),
            ("PPO", seed, "agent_1 after itself", 2, 2.0, 1.0, 2.0),
            ("CORY", seed, "agent_1", 1, 1.0, 0.0, 0.0),
            ("CORY", seed, "agent_2", 1, 3.0, 0.0, 0.0),
            ("CORY", seed, "agent_2 after agent_1", 2, 5.0, 1.0, 4.0),
            ("CORY", seed, "agent_1 after agent_2", 2, 7.0, 1.0, 4.0),
        ]
    study = held(study, rows)
    ppo, cory = held_out(study)
    assert ppo["one call"] == "1.50 ± 6.35" and cory["one call"] == "2.00 ± 0.00"
    assert cory["difference, one call"] == "+0.50 (-5.85 to +6.85)"
    assert cory["two calls"] == "4.80 ± 0.00"  # 6 - 0.3 * 4, the mean of both orders
    assert cory["two calls, own KL"] == "5.70 ± 0.00"
    assert cory["difference, two calls"] == "+3.40 (+3.40 to +3.40)"
    study.runs["fixed_roles"] = study.runs["group"] == "CORY"
    assert held_out(study)[1]["two calls"] == "3.80 ± 0.00"


def test_a_way_of_answering_without_a_reward_has_no_verdict():
    """If a task has only a team reward, an agent that answers alone (one call) gets no reward."""
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda *_: (1.0, 1.0, 1.0)))
    rows = [
        (group, seed, answers, calls, 1.0, 0.0, 0.0)
        for group in ("PPO", "CORY")
        for seed in range(5)
        for calls, answers in ((1, "agent_1"), (2, "agent_1 after itself"))
    ]
    study = held(study, rows)
    study.held_out.loc[study.held_out["calls"] == 1, "combined_reward"] = float("nan")
    assert [line.split(": ")[0] for line in verdicts(study)] == [
        "CORY against PPO, combined reward held out, two calls"
    ]


def test_a_rivals_mean_uses_only_the_chains_seeds():
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda *_: (1.0, 1.0, 1.0)))
    rows = [("CORY", seed, "agent_1", 1, 3.0, 0.0, 0.0) for seed in range(3)]
    rows += [("PPO", seed, "agent_1", 1, 1.0 + 9 * (seed > 2), 0.0, 0.0) for seed in range(5)]
    chain, rival = against_rivals(
        held(study, rows),
        Answering("CORY", "agent_1"),
        [Answering("PPO", "agent_1")],
        "task_reward",
    )
    assert (chain["n"], rival["n"], rival["task reward"]) == ("3", "3", "1.00 ± 0.00")


def test_a_groups_mean_leaves_out_its_frozen_agents():
    """The frozen pioneer has a reward of 0 and a KL of 0, the observer a reward of 2 and a KL of 1."""
    rewards = {"pioneer": (0.0, 0.0, 1.0), "observer": (2.0, 1.0, 1.0)}
    study = make_study(
        {"PPO": lambda *_: (1.0, 1.0, 1.0), "reader": lambda seed, k, role: rewards[role]},
        roles=("pioneer", "observer"),
    )
    assert study.by_seed("task_reward")["reader"].tolist() == [2.0] * 5
    assert [row["agent"] for row in ends_by_agent(study)] == ["PPO", "reader"]
    rows = [
        ("reader", seed, agent, 1, reward, 0.0, 0.0)
        for seed in range(5)
        for agent, reward in (("agent_1", 0.0), ("agent_2", 4.0))
    ]
    study = held(study, [("PPO", seed, "agent_1", 1, 1.0, 0.0, 0.0) for seed in range(5)] + rows)
    assert held_out(study)[1]["one call"].startswith("4.00")


def test_pass_at_1_decides_only_if_all_rows_have_it():
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda *_: (1.0, 1.0, 1.0)), seeds=1)
    rows = [(group, 0, "agent_1", 1, 1.0, 0.0, 0.0) for group in ("PPO", "CORY")]
    study = held(study, rows)
    for passes, metric in (([0.5, 1.0], "pass@1"), ([0.5, None], "combined_reward")):
        study.held_out["pass@1"] = pd.Series(passes, dtype=float)
        assert judged_by(study) == metric


@pytest.mark.parametrize(
    ("seeds", "word"), [(4, "no verdict from fewer than 5 seeds"), (5, "higher")]
)
def test_the_page_states_verdicts_in_words(seeds, word):
    """Verdicts compare held-out rewards with two calls and with one.

    Without an evaluation, they compare rewards at the end of training.
    """
    study = make_study(
        dict.fromkeys(["PPO", "CORY", "alone"], lambda *_: (1.0, 1.0, 1.0)), seeds=seeds
    )
    training = verdicts(study)[0]
    assert training.startswith("CORY against PPO, combined reward at the end of training: +0.00")
    rows = []
    for seed in range(seeds):
        rows += [
            ("PPO", seed, "agent_1", 1, 1.0, 0.0, 0.0),
            ("PPO", seed, "agent_1 after itself", 2, 2.0, 0.0, 0.0),
            ("CORY", seed, "agent_1", 1, 0.0, 0.0, 0.0),
            ("CORY", seed, "agent_2 after agent_1", 2, 3.0 + seed, 0.0, 0.0),
            ("alone", seed, "agent_1", 1, 2.0, 0.0, 0.0),
        ]
    two, one, alone = verdicts(held(study, rows))
    assert "held out, two calls: +" in two and two.endswith(f"{seeds} seeds: {word}.")
    assert "held out, one call: -1.00" in one
    assert "held out, one call: +1.00" in alone and alone.endswith(f"{word}.")


def test_each_value_of_a_key_has_its_own_baseline():
    names = ["PPO, eta 1", "PPO, eta 2", "CORY, eta 1", "CORY, eta 2"]
    study = make_study({name: lambda *_: (1.0, 1.0, 1.0) for name in names}, seeds=2)
    study.runs["family"] = study.runs["group"].str[:-7]
    study.runs["value"] = study.runs["group"].str[-1]
    study.runs["over"] = "cory.weight"
    study.runs["baseline"] = study.runs["family"] == "PPO"
    study = with_combined_reward(study)
    assert study.base_of("CORY, eta 2") == "PPO, eta 2" and study.baseline == "PPO"


def test_a_page_is_made_from_stored_rows_alone(tmp_path, capsys):
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda s, k, r: (-k / 20, 1.0, 1.0)), seeds=3)
    study.runs.loc[0, ["stopped_by", "iterations"]] = ["guards.stop_at_kl", 38]
    (tmp_path / "rows").mkdir()
    write_study(study, tmp_path / "rows")
    out = tmp_path / "out"
    out.mkdir()
    (out / "frontier.png").touch()  # left from an earlier page
    command_line([str(tmp_path / "rows"), "--out", str(out), "--baseline", "CORY"])
    text = (out / "comparison.md").read_text()
    assert "Differences are to CORY" in text and "guards.stop_at_kl" in text
    paper = out / "for_paper"
    assert {path.name for path in out.glob("*.*")} == {"comparison.md", "curves.png", "paths.png"}
    assert {path.name for path in paper.glob("*.pdf")} == {"curves.pdf", "paths.pdf"}
    latex = (paper / "end_of_training.tex").read_text()
    assert "\\begin{tabular}" in latex and "& $-$" in latex and "& -" not in latex
    assert list(pd.read_csv(paper / "end_of_training.csv")["group"]) == ["PPO", "CORY"]
    with pytest.raises(UserError, match="one folder of results"):
        command_line([str(tmp_path / "rows"), str(tmp_path), "--out", str(out)])
    with pytest.raises(UserError, match="--baseline"):
        command_line([str(tmp_path / "rows"), "--out", str(out), "--baseline", "GRPO"])


def test_a_pattern_that_matches_only_logs_is_refused(tmp_path):
    (tmp_path / "a-seed0.log").touch()
    with pytest.raises(UserError, match="expected folders of runs"):
        command_line([str(tmp_path / "a-seed0.log"), "--out", str(tmp_path / "out")])


def test_a_file_as_output_folder_and_a_run_without_metrics_are_refused(tmp_path):
    run = make_run(tmp_path / "a-seed0")
    (tmp_path / "file").touch()
    for out in ("file", "file/inside"):
        with pytest.raises(UserError, match="--out: expected a folder"):
            command_line([str(run), "--out", str(tmp_path / out)])
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"a-seed0: .*metrics\.jsonl"):
        command_line([str(run), "--out", str(tmp_path / "out")])


def test_runs_are_not_written_over_the_rows_of_an_experiment(tmp_path, capsys):
    runs = [make_run(tmp_path / f"a-seed{seed}", seed) for seed in range(2)]
    out = tmp_path / "out"
    command_line([*map(str, runs), "--out", str(out)])
    study = read_study(out)
    assert study.names == [("a", 0), ("a", 1)]
    study.runs["experiment"] = "e"
    write_study(study, out)
    with pytest.raises(UserError, match="--out"):
        command_line([*map(str, runs), "--out", str(out)])
