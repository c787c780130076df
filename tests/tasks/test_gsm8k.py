"""The GSM8K task: its reward and prompts, scripts, pass@k and evaluation."""

import itertools
import json
import random
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from conftest import ROOT, figure_of

from cory.build import make_agents
from cory.command import load
from cory.config import SamplingConfig
from cory.errors import UserError
from cory.metrics import pass_at_k
from cory.models.text import encode
from cory.roles import RolePrompts
from cory.run.folder import read_rows
from gsm8k_train import toy
from gsm8k_train.answers import correct, gold
from gsm8k_train.config import Gsm8kConfig, Gsm8kEvaluation, Gsm8kTaskConfig
from gsm8k_train.task import problems, rule_reward, unparseable


@pytest.fixture(scope="session")
def problem_folder(tmp_path_factory):
    """A folder with the splits train and test in GSM8K's format; the problems are sums."""
    folder = tmp_path_factory.mktemp("problems")
    for split, first in (("train", 1), ("test", 50)):
        rows = [
            {
                "question": f"a film has {a} good and {a + 1} bad music",
                "answer": f"{a} + {a + 1}\n#### {2 * a + 1}",
            }
            for a in range(first, first + 20)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_pass_at_k_equals_a_count_over_all_subsets():
    n = 5
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(10_000, 5_000, 5_000) == 1
    with pytest.raises(UserError, match=r"^ks: "):
        Gsm8kEvaluation(models=["x"], samples=2, ks=[1, 4]).check()


def test_rule_reward_reads_only_the_agents_own_answer():
    completions = [" 3 + 4 = 7\n#### 7\nUser: What is 2?\n#### 2", " so 8", " none", "#### 1,234"]
    answers = ["#### 7", "#### 7", "#### 7", "x\n#### 1,234"]
    assert rule_reward(["q"] * 4, completions, answers) == [1, 0, 0, 1]
    assert unparseable(completions) == [0, 0, 1, 0]


def test_a_gold_answer_without_a_number_is_refused(tmp_path):
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "no number"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="row 2"):
        problems(Gsm8kTaskConfig(dataset=str(tmp_path)), "train")


def test_prompts_of_the_papers_configuration():
    config = load(Gsm8kConfig, ROOT / "configs/gsm8k/llama2_7b_lr1e-4.yaml", [])
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    start = (
        "Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad."
    )
    first = prompts.render(0, {"prompt": "How many?"})
    assert first.startswith(start) and first.endswith("5 + 4 = 9. Question: How many? Answer:")
    second = prompts.render(1, {"prompt": "How many?"}, ["two"])
    ending = "5 + 4 = 9. Question: How many? Reference: two Answer:"
    assert second.startswith(start) and second.endswith(ending)


def test_no_trained_token_lies_after_the_first_stop(config, tokenizer, monkeypatch):
    """Tokens after a policy's first `Question:`, which starts a new question, are neither trained nor passed on."""
    sampling = SamplingConfig(20, 20, stop=["good bad", "Question:"])
    agent = make_agents(replace(config, sampling=sampling))[0]
    texts, completions = [], []
    for text in ("some good bad film good bad", "a story", " Question: was"):
        tokens = iter((tokenizer(text)["input_ids"] * 20)[:20])
        monkeypatch.setattr(
            "cory.models.sample.draw",
            lambda *args, tokens=tokens: torch.tensor([[next(tokens)]]),
        )
        rollout = agent.respond(["the film"], sampling, torch.Generator())
        texts.append(tokenizer.decode(rollout.response_ids[0]))
        completions.append(rollout.completions[0])
    whole = tokenizer.decode((tokenizer("a story")["input_ids"] * 20)[:20])
    assert texts == ["some good bad", whole, " Question:"]
    assert completions == ["some ", whole, " "]


def test_a_chat_template_gets_the_prompt_as_one_turn_and_its_options(tokenizer, monkeypatch):
    with pytest.raises(UserError, match=r"^model\.chat_template: "):
        encode(tokenizer, ["a"], chat_template=True)
    turn = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    thinking = "{% if enable_thinking is defined and not enable_thinking %} bad{% endif %}"
    answer = "{% if add_generation_prompt %}<bot>{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", turn + thinking + answer)
    for options, text in (
        (True, "<user>good film<bot>"),
        ({"enable_thinking": True}, "<user>good film<bot>"),
        ({"enable_thinking": False}, "<user>good film bad<bot>"),
    ):
        assert tokenizer.decode(encode(tokenizer, ["good film"], options)[0]) == text
    # The template reads neither option, although it contains the name `enable_thinking`.
    for option in ("thinking", "tokenize"):
        with pytest.raises(UserError, match=r"^model\.chat_template: "):
            encode(tokenizer, ["good"], {option: False})


@pytest.mark.usefixtures("drawn_figures")
def test_both_scripts_train_and_their_runs_are_evaluated(
    policy_folder, problem_folder, tmp_path, monkeypatch, command
):
    flags = [
        f"--model.name={policy_folder}", f"--task.dataset={problem_folder}", "--iterations=1", "--device=cpu",
        "--ppo.batch_size=8", "--ppo.mini_batch_size=8", "--sampling.min_new_tokens=4", "--sampling.max_new_tokens=4",
        "--task.pioneer_prompt={prompt} answer:", "--task.observer_prompt={prompt} reference {response} answer:",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for script, agents in (("cory", 2), ("ppo", 1)):
        output = f"runs/gsm8k_{script}_tiny"
        ended = command(ROOT / f"gsm8k_train/{script}.py", *flags, f"--output={output}")
        assert ended.status == 0, ended.error
        assert len(list((tmp_path / output).glob("agent_*/model.safetensors"))) == agents
        records = read_rows(tmp_path / output / "metrics.jsonl")
        assert all("unparseable" in record for record in records)
    runs = ["runs/gsm8k_cory_tiny", "runs/gsm8k_ppo_tiny"]
    argv = ["--samples=4", "--ks=[1,2,4]", "--queries=6", "--device=cpu", "--output=out"]
    ended = command(ROOT / "gsm8k_train/evaluate.py", *runs, *argv)
    assert ended.status == 0, ended.error
    saved = json.loads((tmp_path / "out/evaluation.json").read_text())
    metrics = {"pass@1", "pass@2", "pass@4", "greedy", "unparseable", "tokens", "kl"}
    assert len(saved["rows"]) == 8 and all(metrics < set(row) for row in saved["rows"])
    figure = figure_of((tmp_path / "out/report.html").read_text())
    assert "pass@k" in figure and "gsm8k_ppo_tiny/agent_1 after itself" in figure
    assert saved["in_training"] == {"gsm8k_cory_tiny": 0.0, "gsm8k_ppo_tiny": 0.0}


def test_generated_problems_are_in_gsm8ks_format_and_correct():
    rng = random.Random(3)
    problems_made = [toy.problem(rng) for _ in range(400)]
    assert len(toy.TEMPLATES) >= 36 and {len(p.steps) for p in problems_made} == {1, 2, 3}
    for p in problems_made:
        *steps, last = p.answer.split("\n")
        assert re.fullmatch(r"#### \d+", last) and len(steps) == len(p.steps)
        for step in steps:  # check the arithmetic of each step
            expression, result = re.search(r"(\d+(?: [-+*/] \d+)+) = (\d+)", step).groups()
            first, *rest = expression.split()
            total = Fraction(int(first))
            for operator, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
                other = {"+": number, "-": -number}
                total = total * number if operator == "*" else total
                total = total / number if operator == "/" else total + other.get(operator, 0)
            assert total == int(result), step
        assert steps[-1].split(" = ")[1].startswith(last.removeprefix("#### "))
        assert correct(p.answer, gold(p.answer))


def test_generated_splits_share_no_combination_of_template_and_numbers():
    names = "|".join([*toy.GIRLS, *toy.BOYS, *toy.ITEMS, "she", "he", "She", "He", "her", "him"])
    train, test = (
        {re.sub(rf"\b({names})\b", "_", row["question"]) for row in toy.problems(split)}
        for split in ("train", "test")
    )
    assert train and test and not train & test
