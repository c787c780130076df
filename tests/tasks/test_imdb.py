"""The IMDB task, its scripts and its evaluation."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cory.agent import make_agents
from cory.command import load, read_config
from cory.config import ModelConfig
from cory.errors import UserError
from cory.evaluation.table import TITLES
from cory.roles import fill
from cory.trainer import CoryTrainer
from imdb_train import evaluate, toy
from imdb_train.config import OBSERVER, ImdbConfig, ImdbTaskConfig
from imdb_train.task import held_out_rows, make_task, queries
from study.cells import markdown_table
from study.report import evaluation_markdown, rows_over_seeds


def test_queries_are_the_first_tokens_of_each_review(reviews, tokenizer):
    config = ImdbTaskConfig(dataset=str(reviews), min_chars=0)
    texts = [json.loads(line)["text"] for line in (reviews / "train.jsonl").open()]
    prompts = queries(config, "train", tokenizer, 0)["prompt"]
    lengths = []
    for text, prompt in zip(texts, prompts, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert text.startswith(prompt)
        lengths.append(len(tokenizer(prompt)["input_ids"]))
        assert ids[: lengths[-1]] == tokenizer(prompt)["input_ids"]
    assert set(lengths) == set(range(2, 9))
    assert (
        prompts
        == queries(config, "train", tokenizer, 0)["prompt"]
        != queries(config, "train", tokenizer, 1)["prompt"]
    )


def test_observer_prompt_is_the_papers():
    text = fill(OBSERVER, {"prompt": "The film", "response": " was dull"})
    assert text == 'I can make this sentence "The film was dull" more positive: The film'


def flags(policy_folder, classifier_folder, reviews):
    values = {
        "model.name": policy_folder, "task.reward_model": classifier_folder, "task.dataset": reviews, "iterations": 4,
        "ppo.batch_size": 8, "ppo.mini_batch_size": 8, "device": "cpu",
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


@pytest.mark.parametrize("script, agents", [("cory", 2), ("ppo", 1)])
def test_scripts_run_from_any_directory_without_an_install(
    script, agents, policy_folder, classifier_folder, reviews, tmp_path, monkeypatch, command
):
    """A checkout is enough: the package is found beside the script's folder, not the script itself."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / f"imdb_train/{script}.py"
    argv = [*flags(policy_folder, classifier_folder, reviews), "--iterations=2"]
    if script == "cory":  # as a user starts it; a start takes seconds
        done = subprocess.run([sys.executable, path, *argv], capture_output=True, text=True)
        status, out, error = done.returncode, done.stdout, done.stderr
    else:
        status, out, error = command(path, *argv)
    assert status == 0, error
    (folder,) = (tmp_path / "runs").glob(f"imdb_{script}_tiny*")
    assert [p.name for p in sorted(folder.glob("agent_*"))] == [
        f"agent_{i + 1}" for i in range(agents)
    ]
    assert "task_reward" in out and "before" in out and f"runs/{folder.name}" in out
    assert "Traceback" not in error


def test_scripts_show_mistakes_without_a_traceback(tmp_path):
    command = [sys.executable, str(ROOT / "imdb_train/ppo.py"), "--ppo.batch_sise=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and ": unknown key" in done.stderr
        and "Traceback" not in done.stderr
        and not list(tmp_path.iterdir())
    )


@pytest.fixture(scope="module")
def runs(policy_folder, classifier_folder, reviews, tmp_path_factory):
    """A folder with a CORY run and a PPO run of four iterations."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("cory", "ppo"):
        argv = [
            f"--output={folder}/imdb_{method}_tiny",
            *flags(policy_folder, classifier_folder, reviews),
        ]
        config = load(
            ImdbConfig, ROOT / "configs/imdb/tiny.yaml", argv, single_agent=method == "ppo"
        )
        CoryTrainer(config, make_agents(config), make_task(config)).train()
    return folder


@pytest.mark.usefixtures("drawn_figures")
def test_evaluation_of_two_runs(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [
        "evaluate.py",
        f"{runs}/imdb_cory_tiny",
        f"{runs}/imdb_ppo_tiny",
        "--queries=20",
        "--device=cpu",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    evaluate.run()
    folder = tmp_path / "runs/evaluation-imdb_cory_tiny-imdb_ppo_tiny"
    result = json.loads((folder / "evaluation.json").read_text())
    names = ["base", "imdb_cory_tiny/agent_1", "imdb_cory_tiny/agent_2", "imdb_ppo_tiny/agent_1"]
    names += [
        "base after itself",
        "imdb_cory_tiny/agent_2 after agent_1",
        "imdb_cory_tiny/agent_1 after agent_2",
    ]
    names += ["imdb_ppo_tiny/agent_1 after itself"]
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert row["combined_reward"] == pytest.approx(
            row["task_reward"] - 0.3 * row["chain_kl"], abs=1e-5
        )
        shown = result["titles"]
        assert all(row[f"{metric}_ci"] >= 0 for metric in shown)
    assert result["rows"][0]["kl"] == pytest.approx(0, abs=1e-5) and result["rows"][1]["kl"] > 0
    table = (folder / "evaluation.md").read_text()
    assert all(name in table for name in names)
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(name in out for name in names)


def test_evaluation_reports_queries_that_were_trained_on(
    runs, reviews, tokenizer, tmp_path, monkeypatch, capsys
):
    """All, if it is of the training queries; of the split `test` those that reviews of both splits begin with."""
    settings = ImdbTaskConfig(dataset=str(reviews), min_chars=0)
    train, test = (queries(settings, split, tokenizer, 0)["prompt"] for split in ("train", "test"))
    shared = sum(query in train for query in test)
    assert 0 < shared < len(test)
    monkeypatch.chdir(tmp_path)
    for split, share in (("test", shared / len(test)), ("train", 1.0)):
        argv = [
            f"{runs}/imdb_ppo_tiny",
            f"--split={split}",
            "--queries=0",
            "--device=cpu",
            f"--output={split}",
        ]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *argv])
        evaluate.run()
        saved = json.loads((tmp_path / split / "evaluation.json").read_text())
        assert saved["in_training"] == {"imdb_ppo_tiny": share}
        said = f"{100 * share:.3g} % of them also in training"
        assert (
            said in capsys.readouterr().out
            and said in (tmp_path / split / "evaluation.md").read_text()
        )


def test_models_that_differ_in_their_seed_are_one_row():
    rows = [{"name": "base", "kl": 0.0, "kl_ci": 0.1}]
    for seed, kl in enumerate((1.0, 2.0, 6.0)):
        rows.append({"name": f"a-seed{seed}/agent_1", "kl": kl, "kl_ci": 9.0})
        rows.append({"name": f"a-seed{seed}/agent_2 after agent_1", "kl": 2 * kl, "kl_ci": 9.0})
    one = rows_over_seeds(rows)
    names = ["base", "a/agent_1, 3 seeds", "a/agent_2 after agent_1, 3 seeds"]
    assert [row["name"] for row in one] == names
    assert [row["kl"] for row in one] == [0, 3, 6] and one[0]["kl_ci"] == 0.1
    assert (
        one[1]["kl_ci"] == pytest.approx(4.30265 * (7 / 3) ** 0.5)
        and rows_over_seeds(rows[:3]) == []
    )
    metrics = {f"{metric}{end}": 1.0 for metric in TITLES for end in ("", "_ci")}
    records = {"a-seed0": [{"completions": ["x"]}]}
    two = [{"name": f"a-seed{seed}", **metrics} for seed in range(2)]
    text = evaluation_markdown(two, TITLES, {}, ["q"], records, shown=1)
    assert (
        text.index("over seeds")
        < text.index("| a, 2 seeds |")
        < text.index("over queries")
        < text.index("| a-seed1")
    )


def test_sample_texts_cannot_act_as_markdown():
    table = markdown_table([{"query": "a|b", "base": "<img src=x>\n# [x](y) `z`\x1b[31m"}])
    assert markdown_table([{"_a_ agent_1 __": "_b"}]).splitlines() == [
        "| &#95;a&#95; agent_1 &#95;&#95; |",
        "|---|",
        "| &#95;b |",
    ]
    assert (
        table.count("\n") == 3 and "<img" not in table and "](" not in table and "\x1b" not in table
    )


def test_tiny_names_are_resolved_and_stay_symbolic(tmp_path):
    """What a run records is `tiny`, not a folder of this machine."""
    config, name = read_config(ImdbConfig, "configs/imdb/tiny.yaml", "imdb_cory", argv=[])
    assert (
        name == "imdb_cory_tiny"
        and config.model.name == config.task.dataset == config.task.reward_model == "tiny"
    )
    assert (
        Path(config.resolve("tiny")) == toy.POLICY and config.resolve("some/model") == "some/model"
    )
    config.iterations, config.output, config.ppo.batch_size, config.ppo.mini_batch_size = (
        1,
        str(tmp_path / "run"),
        4,
        4,
    )
    CoryTrainer(config, make_agents(config), make_task(config)).train()
    text = (tmp_path / "run/config.yaml").read_text()
    recorded = yaml.safe_load(text)
    assert (
        recorded["model"]["name"]
        == recorded["task"]["dataset"]
        == recorded["task"]["reward_model"]
        == "tiny"
    )
    assert str(ROOT) not in text


def test_the_first_line_comes_before_torch(tmp_path):
    code = "import sys; from imdb_train.config import ImdbConfig; import imdb_train.cory, cory.evaluation.command; "
    code += "print(sorted({'torch', 'transformers', 'trl', 'datasets', 'peft', 'accelerate'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_held_out_queries_are_not_those_of_training(reviews, policy_folder):
    config = ImdbConfig(eval_every=2, model=ModelConfig(str(policy_folder)))
    config.task = replace(config.task, dataset=str(reviews / "train.jsonl"), min_chars=0)
    with pytest.raises(UserError, match=r"task.dataset: expected a folder with files named"):
        held_out_rows(config)
    config.task = replace(config.task, dataset=str(reviews))
    assert len(held_out_rows(config)) > 0
