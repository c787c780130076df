"""The GSM8K task, its scripts, pass@k and its evaluation."""

import itertools
import json
import random
import re
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from conftest import ROOT
from test_lora import llama_folder  # noqa: F401

from cory.agent import make_agents
from cory.command import load
from cory.config import SamplingConfig
from cory.errors import UserError
from cory.metrics import pass_at_k
from cory.models import window
from cory.models.text import encode, plain_texts
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer
from gsm8k_train import evaluate, toy
from gsm8k_train.answers import correct, gold
from gsm8k_train.config import Gsm8kConfig, Gsm8kEvaluation, Gsm8kTaskConfig
from gsm8k_train.task import make_task, problems, rule_reward, unparseable
from gsm8k_train.toy import EXAMPLE

REAL = ROOT.parent / "shared/data/gsm8k"


@pytest.fixture(scope="session")
def problem_folder(tmp_path_factory):
    """Sums as problems in GSM8K's form, train and test."""
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


@pytest.mark.parametrize("n", [1, 3, 5])
def test_pass_at_k_equals_a_count_over_all_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(n, 0, n) == 0 and pass_at_k(n, 1, n) == 1


def test_pass_at_k_of_many_samples():
    assert pass_at_k(10_000, 5_000, 5_000) == 1
    with pytest.raises(
        UserError, match=r"pass@k: expected k from 1 to the number of samples, 4, got 5"
    ):
        pass_at_k(4, 1, 5)


def test_rule_reward_reads_only_the_agents_own_answer():
    completions = [" 3 + 4 = 7. Question: What is 2? Answer: 2", " so 8", " none", "#### 1,234"]
    assert rule_reward(["q"] * 4, completions, ["#### 7", "#### 7", "#### 7", "x\n#### 1,234"]) == [
        1,
        0,
        0,
        1,
    ]
    assert unparseable(completions) == [0, 0, 1, 0]


def test_gold_answer_without_a_number(tmp_path):
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "no number"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        UserError,
        match=r"expected a gold answer with a number after ####, got 'no number' in row 2",
    ):
        problems(Gsm8kTaskConfig(dataset=str(tmp_path)), "train")


def test_papers_prompts():
    config = load(Gsm8kConfig, ROOT / "configs/gsm8k/llama2_7b_lr1e-4.yaml", [])
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    start = (
        "Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad."
    )
    first = prompts.render(0, {"prompt": "How many?"})
    assert first.startswith(start) and first.endswith("5 + 4 = 9. Question: How many? Answer:")
    second = prompts.render(1, {"prompt": "How many?"}, ["two"])
    assert second.startswith(start) and second.endswith(
        "5 + 4 = 9. Question: How many? Reference: two Answer:"
    )


def test_no_trained_token_lies_after_the_first_stop(config, tokenizer, monkeypatch):
    """A policy that rambles on into a new question: nothing after its first `Question:` is trained or handed on."""
    config = replace(config, sampling=SamplingConfig(20, 20, stop=["good bad", "Question:"]))
    trainer = CoryTrainer(
        config, make_agents(config), Task.from_prompts(["the film"] * 8, _zero, RolePrompts())
    )
    agent = trainer.agents[0]
    ramble = [
        tokenizer(text)["input_ids"]
        for text in ("some good bad film good bad", "a story", " Question: was")
    ]
    forced = [(ids * 20)[:20] for ids in ramble]
    rollouts = []
    for row in forced:
        tokens = iter(row)
        monkeypatch.setattr(
            "cory.models.sample.draw",
            lambda *args, tokens=tokens: torch.tensor([[next(tokens)]]),
        )
        rollouts.append(agent.respond(["the film"], 20, torch.Generator()))
    texts = [tokenizer.decode(rollout.response_ids[0]) for rollout in rollouts]
    assert texts == ["some good bad", tokenizer.decode(forced[1]), " Question:"]
    assert [rollout.completions[0] for rollout in rollouts] == ["some ", texts[1], " "]
    packed = window.pack(
        [r.prompt_ids[0] for r in rollouts], [r.response_ids[0] for r in rollouts], 0
    )
    assert packed.response_mask.sum(1).tolist() == [len(r.response_ids[0]) for r in rollouts]


def _zero(prompts, completions):
    return [0.0] * len(prompts)


def test_generation_stops_early_at_a_stop_text(config, tokenizer):
    agent = make_agents(replace(config, sampling=SamplingConfig(20, 20, stop=["ggg"])))[0]
    letter = tokenizer("g")["input_ids"][0]
    bias = torch.zeros(len(tokenizer))
    bias[letter] = 100.0
    calls = []
    agent.policy.lm_head.register_forward_hook(
        lambda module, args, output: calls.append(1) or output + bias
    )
    rollout = agent.respond(["the film", "a"], 20, torch.Generator())
    assert [len(row) for row in rollout.response_ids] == [3, 3] and len(calls) == 3
    assert rollout.completions == ["", ""]


def test_a_chat_template_is_given_its_options(tokenizer, monkeypatch):
    thinking = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %} bad{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", thinking)
    for options, text in (
        (True, "good"),
        ({"enable_thinking": True}, "good"),
        ({"enable_thinking": False}, "good bad"),
    ):
        assert (
            encode(tokenizer, ["good"], options)
            == tokenizer([text], add_special_tokens=False)["input_ids"]
        )
    with pytest.raises(  # as a template's words go, not their parts
        UserError,
        match=r"model.chat_template: expected options that .* template reads, got 'thinking'",
    ):
        encode(tokenizer, ["good"], {"thinking": False})
    with pytest.raises(
        UserError,
        match=r"model.chat_template: expected options that .* template reads, got 'tokenize'",
    ):
        encode(tokenizer, ["good"], {"tokenize": False})


def test_chat_template_puts_everything_into_one_turn(tokenizer):
    with pytest.raises(
        UserError, match=r"model.chat_template: expected a tokenizer with a chat template"
    ):
        encode(tokenizer, ["a"], chat_template=True)
    chat = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    tokenizer.chat_template = chat
    try:
        (ids,) = encode(tokenizer, ["good film"], chat_template=True)
        assert tokenizer.decode(ids) == "<user>good film<bot>"
    finally:
        tokenizer.chat_template = None


def test_greedy_is_the_likeliest_token(config, tokenizer):
    agent = make_agents(replace(config, sampling=SamplingConfig(8, 8, top_k=1)))[0]
    query = torch.tensor(tokenizer("the film")["input_ids"])
    drawn = [agent.respond(["the film"], 8, torch.Generator()).completions[0] for _ in range(3)]
    expected = agent.policy.generate(
        query[None], do_sample=False, max_new_tokens=8, pad_token_id=1
    )[0, len(query) :]
    assert drawn == plain_texts(tokenizer, [expected]) * 3


@pytest.mark.skipif(not REAL.exists(), reason="the real GSM8K is not beside this checkout")
def test_llama_configuration_in_4_bit_on_real_problems(llama_folder, tmp_path, monkeypatch):  # noqa: F811
    pytest.importorskip("bitsandbytes")
    for split in ("train", "test"):  # all rows would be encoded before the run
        rows = (REAL / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{split}.jsonl").write_text("".join(rows[:64]))
    argv = [
        f"--model.name={llama_folder}", f"--task.dataset={tmp_path}", "--task.subset=null", "--iterations=1",
        "--device=cpu",
        "--sampling.min_new_tokens=8", "--sampling.max_new_tokens=8", "--tracker=none", f"--output={tmp_path / 'run'}",
        "--ppo.batch_size=8", "--ppo.gradient_accumulation_steps=4", "--model.dtype=float32",
    ]  # fmt: skip
    config = load(Gsm8kConfig, ROOT / "configs/gsm8k/llama2_7b_lr1e-4.yaml", argv)
    assert (config.model.quantization, config.ppo.mini_batch_size, config.lora.rank) == (
        "4bit",
        2,
        16,
    )
    run = CoryTrainer(config, make_agents(config), make_task(config)).train()
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert len(records) == 2 and all("unparseable" in record for record in records)
    assert (run.folder / "agent_2/adapter_model.safetensors").exists()


@pytest.mark.usefixtures("drawn_figures")
def test_scripts_and_evaluation(
    policy_folder, problem_folder, tmp_path, monkeypatch, capsys, command
):
    flags = [
        f"--model.name={policy_folder}", f"--task.dataset={problem_folder}", "--iterations=2", "--device=cpu",
        "--ppo.batch_size=8", "--ppo.mini_batch_size=8", "--sampling.min_new_tokens=4", "--sampling.max_new_tokens=4",
        "--task.pioneer_prompt={prompt} answer:", "--task.observer_prompt={prompt} reference {response} answer:",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for script, agents in (("cory", 2), ("ppo", 1)):
        output = f"runs/gsm8k_{script}_tiny"
        ended = command(ROOT / f"gsm8k_train/{script}.py", *flags, f"--output={output}")
        assert ended.status == 0, ended.error
        assert len(list((tmp_path / output).glob("agent_*/model.safetensors"))) == agents
    argv = [
        "evaluate.py",
        "runs/gsm8k_cory_tiny",
        "runs/gsm8k_ppo_tiny",
        "--samples=4",
        "--ks=[1,2,4]",
    ]
    argv += ["--queries=6", "--device=cpu", "--output=out", "--batch_size=8"]
    monkeypatch.setattr(sys, "argv", argv)
    evaluate.run()
    rows = json.loads((tmp_path / "out/evaluation.json").read_text())["rows"]
    names = ["base", "gsm8k_cory_tiny/agent_1", "gsm8k_cory_tiny/agent_2", "gsm8k_ppo_tiny/agent_1"]
    names += [
        "base after itself",
        "gsm8k_cory_tiny/agent_2 after agent_1",
        "gsm8k_cory_tiny/agent_1 after agent_2",
    ]
    names += ["gsm8k_ppo_tiny/agent_1 after itself"]
    assert [row["name"] for row in rows] == names
    assert {"pass@1", "pass@2", "pass@4", "greedy", "unparseable", "tokens", "kl"} < set(rows[0])
    assert (tmp_path / "out/pass_at_k.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert saved["in_training"] == {"gsm8k_cory_tiny": 0.0, "gsm8k_ppo_tiny": 0.0}
    assert "Where models differ from the base" in (tmp_path / "out/evaluation.md").read_text()


def test_k_larger_than_n(monkeypatch):
    with pytest.raises(
        UserError, match=r"pass@k: expected k from 1 to the number of samples, 2, got 4"
    ):
        Gsm8kEvaluation(models=["x"], samples=2, ks=[1, 4]).check()
    for wrong in ({"batch_size": 0}, {"queries": -5}, {"samples": 0}):
        with pytest.raises(UserError, match="Input should be"):
            Gsm8kEvaluation(models=["x"], **wrong)


def test_generated_problems_are_in_gsm8ks_form():
    rng = random.Random(3)
    made = [toy.problem(rng) for _ in range(400)]
    assert len(toy.TEMPLATES) >= 36 and {len(p.steps) for p in made} == {1, 2, 3}
    for p in made:
        *steps, last = p.answer.split("\n")
        assert re.fullmatch(r"#### \d+", last) and len(steps) == len(p.steps)
        for step in steps:  # every worked step is right
            expression, result = re.search(r"(\d+(?: [-+*/] \d+)+) = (\d+)", step).groups()
            first, *rest = expression.split()
            total = Fraction(int(first))
            for operator, number in zip(rest[::2], rest[1::2], strict=True):
                number = int(number)
                total = {
                    "+": total + number,
                    "-": total - number,
                    "*": total * number,
                    "/": total / number,
                }[operator]
            assert total == int(result), step
        assert steps[-1].split(" = ")[1].startswith(last.removeprefix("#### "))
        assert correct(p.answer, gold(p.answer))


def test_generated_mistakes_are_mistakes_and_references_come_right_and_wrong():
    rng = random.Random(4)
    made = [toy.problem(rng) for _ in range(300)]
    wrong = [(p, toy.solve(rng, p, mistake=True)) for p in made]
    assert sum(text is not None and not correct(text, gold(p.answer)) for p, text in wrong) > 200
    lessons = [toy.lesson(rng, p) for p in made]
    observers = [(p, text.split(" Reference: ")[1].split(" Answer:")[0]) for p, text in zip(made, lessons, strict=True)
                 if " Reference: " in text]  # fmt: skip
    right = [correct(reference, gold(p.answer)) for p, reference in observers]
    assert (
        0.25 * len(made) < len(observers) < 0.75 * len(made)
        and 0.25 < sum(right) / len(right) < 0.75
    )
    assert any(text.startswith(EXAMPLE + "Question: ") for text in lessons)


def test_generated_splits_share_no_combination_of_template_and_numbers():
    rows = {split: [row["question"] for row in toy.problems(split)] for split in ("train", "test")}
    assert len(rows["train"]) == toy.TRAIN_PROBLEMS and len(rows["test"]) == toy.TEST_PROBLEMS
    names = "|".join([*toy.GIRLS, *toy.BOYS, *toy.ITEMS, "she", "he", "She", "He", "her", "him"])
    bare = {
        split: {re.sub(rf"\b({names})\b", "_", question) for question in rows[split]}
        for split in rows
    }
    assert bare["train"] and bare["test"] and not bare["train"] & bare["test"]
