"""Names of runs and evaluations say what they are."""

from pathlib import Path

import pytest

from cory.command import LONGEST, evaluation_name, read_config, run_name
from imdb_train.config import ImdbConfig


def name(*flags: str, single_agent: bool = False) -> str:
    prefix = "imdb_ppo" if single_agent else "imdb_cory"
    return read_config(ImdbConfig, "configs/imdb/tiny.yaml", prefix, single_agent, flags)[1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "imdb_cory_tiny"),
        (["--cory.credit", "causal"], "imdb_cory_tiny-credit=causal"),
        (
            ["--iterations", "7", "--tracker", "tensorboard", "--checkpoint.keep=3"],
            "imdb_cory_tiny",
        ),
        (["--cory.credit", "collective"], "imdb_cory_tiny"),  # as the file has it
        (
            ["--seed", "3", "--algorithm", "grpo", "--group_size", "4"],
            "imdb_cory_tiny-algorithm=grpo-group_size=4-seed3",
        ),
        (["--model.name", "/a/b c/my model"], "imdb_cory_tiny-name=my_model"),
    ],
)
def test_a_runs_name_has_what_differs_from_its_file(flags, expected):
    assert name(*flags) == expected


def test_the_baseline_is_named_by_its_method_alone():
    assert name(single_agent=True) == "imdb_ppo_tiny"
    assert name("--ppo.lam", "0.9", single_agent=True) == "imdb_ppo_tiny-lam=0.9"


def test_a_run_of_another_runs_settings_is_named_by_it_from_wherever_it_is_made(
    tmp_path, monkeypatch
):
    run = tmp_path / "first"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 3\n")
    (run / "metrics.jsonl").write_text("")
    for folder, file in ((tmp_path, "first/config.yaml"), (run, "config.yaml")):
        monkeypatch.chdir(folder)
        assert read_config(ImdbConfig, file, "imdb_cory", argv=[])[1] == "first"


def test_names_are_those_of_folders():
    for value in ("../../etc", "a/b", "a\\b", "é" * 300, "x\n", ".", "{prompt}: {response}?"):
        made = run_name("cory", {"task.observer_prompt": value})
        assert (
            len(made) <= LONGEST
            and "/" not in made
            and "\\" not in made
            and Path(made).name == made
        )


def test_an_evaluation_is_named_by_its_runs():
    assert evaluation_name(["runs/a", "/elsewhere/b", "gpt2"]) == "evaluation-a-b-gpt2"
    assert len(evaluation_name([f"runs/{number:030d}" for number in range(9)])) <= LONGEST
