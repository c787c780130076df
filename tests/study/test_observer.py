"""What the pioneer's response is worth to an observer: by a run's rewards, and by the toy setting's texts."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import make_gpt2
from peft import PeftModel

from cory.agents import make_agents
from cory.config import CoryConfig, LoraConfig, ModelConfig, PPOConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation import responses
from cory.trainer import CoryTrainer
from gsm8k_train import observer as gsm8k_observer
from gsm8k_train.config import Gsm8kTaskConfig
from imdb_train import observer as imdb_observer
from imdb_train.config import IMDB, ImdbConfig, ImdbTaskConfig
from imdb_train.task import make_task
from study.coupling import correlations, coupling
from study.observer import dependence, slope


def test_a_correlation_through_the_response_is_within_queries():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(200, 1))  # both rewards rise and fall with the query
    pioneer, noise = query + rng.normal(size=(200, 8)), rng.normal(size=(200, 8))
    apart = correlations(pioneer, query + noise)
    assert apart["all"][1] > 0.3 and apart["response"][1] < 0 < apart["response"][2]
    reads = correlations(pioneer, query + pioneer + 0.1 * noise)
    assert reads["response"][1] > 0.98
    assert all(
        math.isnan(x) for x in correlations(np.ones((5, 2)), pioneer[:5, :2])["response"][:3]
    )


@pytest.fixture
def chat_folder(tokenizer, tmp_path) -> Path:
    """A random GPT-2 whose tokenizer has a chat template."""
    folder = tmp_path / "chat"
    make_gpt2(tokenizer, n_positions=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    )
    return folder


def trained(run, model, classifier_folder, reviews, rank=0, agents=2):
    config = ImdbConfig(
        iterations=2, output=str(run), device="cpu", model=model, lora=LoraConfig(rank=rank),
        cory=CoryConfig(num_agents=agents), ppo=PPOConfig(learning_rate=1e-3, batch_size=8, mini_batch_size=8),
        sampling=SamplingConfig(3, 6),
        task=ImdbTaskConfig(dataset=str(reviews), min_chars=0, reward_model=str(classifier_folder)),
    )  # fmt: skip
    CoryTrainer(config, make_agents(config), make_task(config)).train()


@pytest.mark.parametrize("rank", [0, 4])
def test_agents_are_loaded_as_their_run_had_them(
    rank, chat_folder, classifier_folder, reviews, tmp_path, monkeypatch, capsys
):
    run, said = tmp_path / "run", []
    trained(
        run, ModelConfig(str(chat_folder), chat_template=True), classifier_folder, reviews, rank
    )

    def respond(model, base, tokenizer, prompts, *rest, **options):
        said.append((isinstance(model, PeftModel), base is None, options["chat_template"], prompts))
        return original(model, base, tokenizer, prompts, *rest, **options)

    original = responses.respond
    monkeypatch.setattr(responses, "respond", respond)
    found = coupling(run, IMDB, 6, 4)
    assert set(found) == {"all", "response"} and all(
        -1 <= value <= 1 for value, *_ in found.values()
    )
    assert [row[:3] for row in said] == [(rank > 0, rank > 0, True)] * 2
    pioneer, observer = (row[3] for row in said)
    assert len(pioneer) == len(observer) == 24 and len(set(pioneer)) <= 6
    for query, text in zip(pioneer, observer, strict=True):
        assert text.startswith(f'I can make this sentence "{query}') and text.endswith(
            f"more positive: {query}"
        )
    capsys.readouterr()
    with pytest.raises(
        UserError,
        match=r"expected no flag other than --queries with the folder of a run, got '--querys 5'",
    ):
        imdb_observer.command_line([str(run), "--querys", "5"])
    imdb_observer.command_line([str(run), "--queries=6"])
    out = capsys.readouterr().out
    assert (
        out.startswith(f"{run}: correlation of the agents' rewards ")
        and "through the pioneer's response" in out
    )


def test_a_run_of_one_agent_has_no_correlation(policy_folder, classifier_folder, reviews, tmp_path):
    trained(tmp_path / "run", ModelConfig(str(policy_folder)), classifier_folder, reviews, agents=1)
    with pytest.raises(UserError, match="expected a run with two saved agents, got 1"):
        imdb_observer.command_line([str(tmp_path / "run")])


def readings(out: str) -> dict[str, list[str]]:
    """The rows of a probe's table by the observer's prompt, cells as text."""
    lines = [line for line in out.splitlines() if line.startswith("| ")][1:]
    return {(cells := line.strip("| ").split(" | "))[0]: cells[1:] for line in lines}


@pytest.mark.parametrize(("script", "floor"), [(imdb_observer, 0.5), (gsm8k_observer, 0.1)])
def test_an_observer_does_better_after_a_better_response(script, floor, capsys):
    """Knowledge transfer is real in the toy settings before any training."""
    script.command_line(["--queries", "100"])
    out = capsys.readouterr().out
    assert "of 100 queries, responses to " in out
    rows = readings(out)
    assert [name.split(":")[0] for name in rows] == list(script.OBSERVERS)
    chat, worst, _, best, depends, follows = rows["paper"]
    worst, best = (float(cell.split(" ± ")[0]) for cell in (worst, best))
    assert chat == "no" and best - worst > floor
    for cell in (depends, follows):
        value, low, high = map(float, re.match(r"(\S+) \((\S+) to (\S+)\)", cell).groups())
        assert 0 < low < value < high < 1


def test_a_probe_reads_with_and_without_the_chat_template_and_in_wordings_of_ones_own(
    chat_folder, classifier_folder, reviews, capsys, monkeypatch
):
    asked = []
    original = responses.respond

    def respond(*args, **options):
        asked.append((options["chat_template"], args[3][0]))
        return original(*args, **options)

    monkeypatch.setattr(responses, "respond", respond)
    data = [
        "--task.dataset",
        str(reviews),
        "--task.min_chars",
        "0",
        "--task.reward_model",
        str(classifier_folder),
    ]
    flags = ["--model.name", str(chat_folder), *data, "--queries", "6", "--samples", "3"]
    imdb_observer.command_line([*flags, "--wording", "<{prompt}{response}> {prompt}"])
    rows = capsys.readouterr().out
    # The three that the task has, and the one given.
    assert rows.count("| no |") == rows.count("| yes |") == 4
    assert [chat for chat, _ in asked] == [False] + [False, True] * 4
    assert asked[-1][1].startswith("<") and asked[-1][1].endswith(asked[0][1])

    asked.clear()
    roles = (
        "[{name: writer}, {name: critic, prompt: 'Critic: {prompt}{writer}', max_new_tokens: 3}]"
    )
    imdb_observer.command_line([*flags, "--roles", roles, "--wording", "Better: {prompt}{writer}"])
    rows = capsys.readouterr().out
    assert "| Critic: {prompt}{writer} |" in rows and "| Better: {prompt}{writer} |" in rows
    firsts = {prompt.split(":")[0] for _, prompt in asked[1:]}
    assert {"Critic", "Better"} <= firsts


def test_a_saved_agent_is_measured_in_place_of_the_toy_policy(tokenizer, tmp_path):
    folder = tmp_path / "agent"
    make_gpt2(tokenizer, n_positions=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        UserError, match=r"expected some of which 3 responses differ in their reward, got 0"
    ):
        gsm8k_observer.command_line([str(folder), "--queries", "4"])  # random weights solve nothing
    with pytest.raises(UserError, match="--samples: expected at least 3, got 2"):
        gsm8k_observer.command_line(["--samples", "2"])
    with pytest.raises(UserError, match="observer prompt: expected the placeholder"):
        gsm8k_observer.command_line(["--wording", "{prompt}"])
    with pytest.raises(
        UserError, match=r"model.name: expected a Hub id or an existing local folder"
    ):
        gsm8k_observer.command_line([str(tmp_path / "none")])


def test_the_dependence_is_the_share_of_variance_between_responses_read():
    rng = np.random.default_rng(0)
    read, query = rng.normal(size=(400, 4, 1)), 5 * rng.normal(size=(400, 1, 1))
    _, low, high, *_ = dependence(query + 0.5 * read + rng.normal(size=(400, 4, 2)))
    assert low < 0.25 / 1.25 < high and high - low < 0.2
    assert dependence(query + read + np.zeros((400, 4, 2)))[0] == pytest.approx(1)
    assert abs(dependence(query + rng.normal(size=(400, 4, 2)))[0]) < 0.07
    assert math.isnan(dependence(np.ones((5, 4, 2)))[0])


def test_the_slope_is_that_within_queries():
    rng = np.random.default_rng(0)
    pioneer = rng.normal(size=(300, 4))
    query = 5 * rng.normal(size=(300, 1))  # what both rewards have from the query does not count
    value, low, high, *_ = slope(
        pioneer + query, 0.3 * pioneer - query + 0.1 * rng.normal(size=(300, 4))
    )
    assert low < 0.3 < high and high - low < 0.05 and abs(value - 0.3) < 0.02


def test_a_wording_is_chosen_by_its_name():
    assert ImdbTaskConfig(observer_prompt="review").observer_prompt.startswith(
        "Review: {prompt}{response}"
    )
    assert ImdbTaskConfig(observer_prompt="paper") == ImdbTaskConfig()
    assert Gsm8kTaskConfig(observer_prompt="paper") == Gsm8kTaskConfig()
