"""The IMDB task, its scripts, and the embedded default."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cory.config import ModelConfig, SamplingConfig, UserError
from cory.evaluation import respond
from cory.metrics import mean_interval
from cory.policies.load import load_policy
from cory.prompts import fill
from cory.run.settings import load
from cory.run.tables import markdown_table, over_seeds
from imdb_train import evaluate, toy
from imdb_train.config import OBSERVER, ImdbConfig, ImdbTaskConfig
from imdb_train.task import PositiveLogit, queries
from study.coupling import coupling


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
        prompts == queries(config, "train", tokenizer, 0)["prompt"] != queries(config, "train", tokenizer, 1)["prompt"]
    )


def test_reward_is_the_positive_logit_of_query_plus_response(classifier_folder):
    reward = PositiveLogit(str(classifier_folder), batch_size=3, device=torch.device("cpu"))
    prompts = ["the film", "a", "some very fine acting and music", "the story", "good", "bad", "in"]
    completions = [" was good", " bad film", "", " was awful" * 4, " scene", "", " every single scene"]
    model = AutoModelForSequenceClassification.from_pretrained(classifier_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier_folder)
    expected = [
        model(**{k: v for k, v in tokenizer(p + c, return_tensors="pt").items() if k != "token_type_ids"}).logits[0, 1]
        for p, c in zip(prompts, completions, strict=True)
    ]
    assert reward(prompts=prompts, completions=completions) == pytest.approx([x.item() for x in expected], rel=1e-4)
    assert len(reward(prompts=["good " * 500], completions=[" film"])) == 1  # longer than its context: cut


def test_observer_prompt_is_the_papers():
    text = fill(OBSERVER, {"prompt": "The film", "response": " was dull"})
    assert text == 'I can make this sentence "The film was dull" more positive: The film'


def flags(policy_folder, classifier_folder, reviews):
    values = {
        "model.name": policy_folder, "task.reward_model": classifier_folder, "task.dataset": reviews, "iterations": 4,
        "ppo.batch_size": 8, "ppo.mini_batch_size": 8, "device": "cpu",
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


def test_scripts_run_from_any_directory_without_an_install(policy_folder, classifier_folder, reviews, tmp_path):
    """A checkout is enough: the package is found beside the script's folder, not the script itself."""
    for script, agents in (("cory", 2), ("ppo", 1)):
        command = [
            sys.executable,
            str(ROOT / f"imdb_train/{script}.py"),
            *flags(policy_folder, classifier_folder, reviews),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / f"runs/imdb_{script}_tiny"
        assert [p.name for p in sorted(folder.glob("agent_*"))] == [f"agent_{i + 1}" for i in range(agents)]
        assert "task_reward" in done.stdout and "before" in done.stdout and f"runs/imdb_{script}_tiny" in done.stdout
        assert "Traceback" not in done.stderr


def test_scripts_show_mistakes_without_a_traceback(tmp_path):
    command = [sys.executable, str(ROOT / "imdb_train/ppo.py"), "--ppo.batch_sise=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "error: unknown key" in done.stderr
        and "Traceback" not in done.stderr
        and not list(tmp_path.iterdir())
    )


def test_scripts_are_short_and_differ_only_in_their_agents():
    cory, ppo = ((ROOT / f"imdb_train/{name}.py").read_text().splitlines() for name in ("cory", "ppo"))
    assert max(len(cory), len(ppo)) < 80
    code = [[line for line in lines[lines.index("import sys") :] if "tiny.yaml" not in line] for lines in (cory, ppo)]
    different = [(a, b) for a, b in zip(*code, strict=True) if a != b]
    assert len(different) == 1 and all("make_agents" in line for line in different[0])


def test_evaluation_of_two_runs(policy_folder, classifier_folder, reviews, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    from imdb_train.cory import CoryTrainer, make_agents, make_task

    for name, agents in (("cory_tiny", 2), ("ppo_tiny", 1)):
        argv = [f"--output=runs/imdb_{name}", *flags(policy_folder, classifier_folder, reviews)]
        config, _ = load(ImdbConfig, ROOT / f"configs/imdb/{name}.yaml", argv)
        CoryTrainer(config, make_agents(config, agents), make_task(config, torch.device("cpu"))).train()
    monkeypatch.setattr(
        sys, "argv", ["evaluate.py", "runs/imdb_cory_tiny", "runs/imdb_ppo_tiny", "--prompts=20", "--device=cpu"]
    )
    evaluate.run()
    result = json.loads((tmp_path / "runs/evaluation/evaluation.json").read_text())
    names = ["base", "imdb_cory_tiny/agent_1", "imdb_cory_tiny/agent_2", "imdb_ppo_tiny/agent_1"]
    names += ["imdb_cory_tiny/agent_2 after agent_1", "imdb_cory_tiny/agent_1 after agent_2"]
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert row["combined_reward"] == pytest.approx(row["task_reward"] - 0.3 * row["kl"], abs=1e-5)
        assert all(row[f"{metric}_ci"] >= 0 for metric in evaluate.METRICS)
    assert result["rows"][0]["kl"] == pytest.approx(0, abs=1e-5) and result["rows"][1]["kl"] > 0
    table = (tmp_path / "runs/evaluation/evaluation.md").read_text()
    assert all(name in table for name in names)
    assert (tmp_path / "runs/evaluation/evaluation.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["reference.py", "runs/imdb_cory_tiny"])
    reference.report()
    assert "through the reference" in capsys.readouterr().out
    with pytest.raises(UserError, match="expected a run with two saved agents, got 1"):
        coupling(Path("runs/imdb_ppo_tiny"), ImdbConfig, make_task)


def test_models_that_differ_in_their_seed_are_one_row():
    rows = [{"name": "base", "kl": 0.0, "kl_ci": 0.1}]
    for seed, kl in enumerate((1.0, 2.0, 6.0)):
        rows.append({"name": f"a-seed{seed}/agent_1", "kl": kl, "kl_ci": 9.0})
        rows.append({"name": f"a-seed{seed}/agent_2 after agent_1", "kl": 2 * kl, "kl_ci": 9.0})
    one = over_seeds(rows)
    names = ["base", "a/agent_1, 3 seeds", "a/agent_2 after agent_1, 3 seeds"]
    assert [row["name"] for row in one] == names
    assert [row["kl"] for row in one] == [0, 3, 6] and one[0]["kl_ci"] == 0.1
    assert one[1]["kl_ci"] == pytest.approx(7**0.5) and over_seeds(rows[:3]) == []
    metrics = {f"{metric}{end}": 1.0 for metric in evaluate.METRICS for end in ("", "_ci")}
    text = evaluate.markdown([{"name": f"a-seed{seed}", **metrics} for seed in range(2)], [{"query": "q"}])
    assert (
        text.index("over seeds") < text.index("| a, 2 seeds |") < text.index("over queries") < text.index("| a-seed1")
    )


def test_sample_texts_cannot_act_as_markdown():
    table = markdown_table([{"query": "a|b", "base": "<img src=x>\n# [x](y) `z`\x1b[31m"}])
    assert markdown_table([{"_a_ agent_1 __": "_b"}]).splitlines() == [
        "| &#95;a&#95; agent_1 &#95;&#95; |",
        "|---|",
        "| &#95;b |",
    ]
    assert table.count("\n") == 3 and "<img" not in table and "](" not in table and "\x1b" not in table


def test_knowledge_transfer_is_real_in_the_embedded_model():
    """The untrained observer does better after a good reference than after a bad one."""
    rewards = reference.worth()
    assert rewards["positive"][0] - rewards["negative"][0] > 1.0
    assert rewards["positive"][0] - rewards["positive"][1] > rewards["negative"][0] + rewards["negative"][1]


def test_embedded_models_are_small_and_good():
    folder = toy.paths()
    policy, tokenizer = load_policy(ModelConfig(name=str(folder / "policy")))
    assert 0.4e6 < policy.num_parameters() < 1.1e6
    reward = PositiveLogit(str(folder / "reward_model"), 64, torch.device("cpu"))
    texts = [
        "the acting was truly wonderful and I loved every minute.",
        "the acting was truly awful and I hated every minute.",
    ]
    good, bad = reward(prompts=texts, completions=["", ""])
    assert good > 1.5 and bad < -1.5
    answers = respond(policy, policy, tokenizer, ["the plot was"] * 50, SamplingConfig())
    mean, _ = mean_interval(reward(prompts=["the plot was"] * 50, completions=answers.completions))
    assert abs(mean) < 1.0  # no mood is preferred before training


def test_tiny_names_are_resolved_and_announced(capsys):
    config, _ = load(ImdbConfig, ROOT / "configs/imdb/cory_tiny.yaml", [])
    resolve_tiny(config)
    folder = str(toy.paths())
    assert config.model.name.startswith(folder) and config.task.dataset == folder
    first = capsys.readouterr().out.splitlines()
    assert "Embedded default" in first[0] and "configs/imdb/cory_gpt2_large.yaml" in first[1]


def test_cache_is_atomic_and_keyed_by_the_recipe(tmp_path, monkeypatch):
    from study.small_models import cached

    monkeypatch.setenv("CORY_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "recipe.py"
    recipe.write_text("1")
    built = []

    def build(folder):
        built.append(folder)
        (folder / "model").write_text("x")

    def fail(folder):
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("it", [recipe], fail)
    assert list((tmp_path / "cache").iterdir()) == []
    first = cached("it", [recipe], build)
    assert (first / "model").exists() and cached("it", [recipe], fail) == first
    recipe.write_text("2")
    assert cached("it", [recipe], build) != first
    assert len(built) == 3
