"""The evaluator: solo, joint and compute-matched rows, with the settings of each model's run."""

import json
import math
import re
import shutil
import warnings
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from conftest import (
    PROMPTS,
    answering,
    count_good,
    figure_of,
    make_gpt2,
    make_trainer,
    read_responses,
    sentences,
)
from evaluation_settings import settings
from safetensors.torch import load_file, save_file

from cory import evaluate
from cory.agent import Agent
from cory.config import EvaluationConfig, LoraConfig, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.answer import load_agent, respond
from cory.evaluation.rows import ModelSource, agent_sources, line_up
from cory.evaluation.table import table_rows
from cory.models import load
from cory.task import Task
from toys.small_models import train_tokenizer


def make_run(config, agents=2, **changes):
    config = replace(config, cory=replace(config.cory, num_agents=agents), **changes)
    return make_trainer(config).train().folder


def by_length(prompts, completions):
    return [len(completion) / 50 for completion in completions]


@pytest.fixture
def held_out():
    return Task.from_prompts(
        [" ".join(text.split()[:4]) for text in sentences(30)[20:]], count_good, PROMPTS
    )


@pytest.mark.usefixtures("drawn_figures")
def test_a_run_of_two_agents_is_compared_with_a_single_agent(
    finished, config, held_out, tmp_path, monkeypatch
):
    """In a joint row, an agent reads the other agent's response; in a compute-matched row, its own first answer."""
    ppo = make_run(config, 1, iterations=1, output=str(tmp_path / "ppo"))
    chosen = settings(tmp_path, samples=2, ks=[1, 2], greedy=True)
    read_greedily = []
    answer = Agent.respond

    def recorded(agent, prompts, sampling, *others, **options):
        if sampling.top_k == 1:
            read_greedily.extend(prompts)
        return answer(agent, prompts, sampling, *others, **options)

    monkeypatch.setattr(Agent, "respond", recorded)
    done = evaluate([finished.folder, ppo], replace(held_out, reward=by_length), chosen)
    names = ["base", "run/agent_1", "run/agent_2", "ppo/agent_1", "base after itself", "run/agent_2 after agent_1",
             "run/agent_1 after agent_2", "ppo/agent_1 after itself"]  # fmt: skip
    assert [row["name"] for row in done.rows] == names
    records = read_responses(done.folder)
    assert len(records) == len(names) * 10
    assert {len(record["completions"]) for record in records.values()} == {2}
    best = [max(records["ppo/agent_1", number]["rewards"]) for number in range(10)]
    assert done.rows[3]["best_of_2"] == pytest.approx(sum(best) / 10)
    first_of = {
        "run/agent_2 after agent_1": "run/agent_1",
        "ppo/agent_1 after itself": "ppo/agent_1",
    }
    for name, first in first_of.items():
        for number, query in enumerate(held_out.dataset["prompt"]):
            alone, chain = records[first, number], records[name, number]
            assert alone["prompt"] == query and chain["read"] == first
            assert chain["prompt"] == f'Improve "{query}{alone["completions"][0]}": {query}'
            assert f'Improve "{query}{alone["greedy"]}": {query}' in read_greedily
    figure = figure_of((done.folder / "report.html").read_text())
    assert "ppo/agent_1 after itself" in figure and "95 % intervals over queries" in figure
    # pass@k needs rewards of 0 and 1.
    assert "pass@k" not in figure


def test_each_agents_kl_is_to_its_own_base(config, held_out, tmp_path, tokenizer):
    """Each untrained agent has a KL of 0 to the model that its run started from, whichever run is named first."""
    other = tmp_path / "other"
    make_gpt2(tokenizer, seed=1).save_pretrained(other)
    tokenizer.save_pretrained(other)
    untrained = replace(config, iterations=1, ppo=replace(config.ppo, learning_rate=1e-12))
    ppo = make_run(untrained, 1, output=str(tmp_path / "ppo"))
    other_run = make_run(untrained, 1, model=ModelConfig(str(other)))
    done = evaluate([ppo, other_run], held_out, settings(tmp_path))
    rows = {row["name"]: row for row in done.rows}
    (note,) = json.loads((done.folder / "evaluation.json").read_text())["notes"]
    assert re.search(
        r": base \(\w+/gpt2\) for ppo/agent_1; base of run/agent_1 \(\w+/other\) for run/agent_1$",
        note,
    )
    assert "base of run/agent_1" in rows
    assert rows["ppo/agent_1"]["kl"] < 1e-4 and rows["run/agent_1"]["kl"] < 1e-4
    assert rows["base of run/agent_1"]["kl"] == 0


def test_a_fully_trained_agent_is_quantized_like_its_base(config):
    folder = make_run(replace(config, iterations=1))
    for changes in ({}, {"quantization": "4bit"}):
        for source in agent_sources(folder, config, changes).values():
            assert source.model.quantization == source.base.quantization


def test_a_base_with_other_tokens_is_refused(config, held_out, policy_folder, tmp_path, tokenizer):
    """An equally large vocabulary is refused, too, since the KL would compare unrelated tokens."""
    other = tmp_path / "other"
    make_gpt2(tokenizer).save_pretrained(other)
    train_tokenizer(sentences(200)[::-1][:150], vocab_size=len(tokenizer)).save_pretrained(other)
    run = make_run(config, 1, iterations=1)
    with pytest.raises(UserError, match=r"^models: .* its base '.*other'"):
        evaluate([run], held_out, settings(tmp_path, base=str(other)))
    with pytest.raises(UserError, match=r"^models: .*got '.*other'"):
        evaluate([policy_folder, other], held_out, settings(tmp_path))
    assert not list((tmp_path / "evaluation").glob("*.json*"))


def test_a_kl_that_is_not_finite_is_an_error(policy_folder):
    model, tokenizer = load.load_policy(ModelConfig(str(policy_folder)))
    base, _ = load.load_policy(ModelConfig(str(policy_folder)))
    base.lm_head.register_forward_hook(lambda module, args, output: output * math.nan)
    with pytest.raises(UserError, match=r"nan .*'the film'"):
        respond(answering(model, tokenizer), base, ["the film"], SamplingConfig(5, 5))


def test_evaluated_chains_are_those_of_training(config, held_out, tmp_path):
    """Two agents that share three roles, and agents that do not read each other's responses."""
    long = replace(config, iterations=1, cory=replace(config.cory, chain_length=3))
    run = make_run(long)
    lineup = line_up(held_out, settings(tmp_path, models=[str(run)], kl_coef=0.0))
    assert "run/agent_1 after agent_2 after agent_1" in {row.name for row in lineup.rows}
    assert lineup.kl_coef == 0.0 != config.ppo.init_kl_coef
    alone = replace(config, iterations=1, cory=replace(config.cory, knowledge_transfer=False))
    run = make_run(replace(alone, output=str(tmp_path / "alone")))
    lineup = line_up(held_out, settings(tmp_path, models=[str(run)]))
    assert [row.name for row in lineup.rows if row.reads] == ["base after itself"]


def test_a_query_that_is_too_long_is_refused_before_any_is_answered(
    held_out, policy_folder, tmp_path
):
    rows = [*held_out.dataset["prompt"][:3], "word " * 200]
    task = Task.from_prompts(rows, count_good, PROMPTS)
    with pytest.raises(UserError, match="row 4"):
        evaluate([policy_folder], task, settings(tmp_path, batch_size=2))
    assert not list((tmp_path / "evaluation").glob("*.json*"))


def test_the_sampled_kl_is_reported_if_a_run_penalizes_it(config, held_out, tmp_path):
    full = make_run(config, 1, iterations=1, output=str(tmp_path / "full"))
    sampled = replace(config, ppo=replace(config.ppo, kl_penalty="kl"))
    run = make_run(sampled, 2, iterations=1, output=str(tmp_path / "sampled"))
    rows = evaluate([full], held_out, settings(tmp_path / "one")).rows
    assert not any("chain_sampled_kl" in row for row in rows)
    done = evaluate([run], held_out, settings(tmp_path / "other", samples=8))
    records = read_responses(done.folder)
    chain = ("sampled/agent_2 after agent_1", "sampled/agent_1")
    means = [
        sum(fmean(records[name, number]["sampled_kl"]) for name in chain) for number in range(10)
    ]
    row = next(row for row in done.rows if row["name"] == chain[0])
    assert row["chain_sampled_kl"] == pytest.approx(fmean(means))
    assert row["chain_sampled_kl"] == pytest.approx(row["chain_kl"], rel=0.5)


def test_the_kl_of_an_adapter_is_to_the_model_without_it(config, held_out, tmp_path):
    folder = make_run(replace(config, lora=LoraConfig(rank=4)))
    rows = evaluate([folder], held_out, settings(tmp_path)).rows
    one, two = (row["kl"] for row in rows[1:3])
    assert one > 0 and two > 0 and one != two and rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    # A base that is loaded separately gives the same numbers.
    policy, tokenizer = load.load_policy(ModelConfig(str(folder / "agent_2")), merge=False)
    base, _ = load.load_policy(config.model)
    sampling = replace(config.sampling, min_new_tokens=1)
    prompts = list(held_out.dataset["prompt"])
    agent = answering(policy, tokenizer, adapter="default")
    _, divergences = respond(agent, base, prompts, sampling, batch_size=100)
    assert fmean(divergence.kl for divergence in divergences) == pytest.approx(two, rel=1e-5)


def test_a_model_in_an_adapter_folder_answers_with_its_adapter(config, held_out):
    folder = make_run(replace(config, iterations=1, lora=LoraConfig(rank=4)), 1) / "agent_1"
    file = folder / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(file).items()
    }
    save_file(weights, file)
    adapter = replace(config.model, name=str(folder))
    prompts = list(held_out.dataset["prompt"])
    loaded, base = load_agent(ModelSource(adapter, None, config.model), torch.device("cpu"), config)
    rollout, divergences = respond(loaded, base, prompts, config.sampling)

    merged, tokenizer = load.load_policy(adapter)
    expected, expected_divergences = respond(
        answering(merged, tokenizer), base, prompts, config.sampling
    )
    assert rollout.completions == expected.completions
    kls = [divergence.kl for divergence in divergences]
    assert min(kls) > 0.1
    assert kls == pytest.approx([divergence.kl for divergence in expected_divergences], rel=1e-3)


@pytest.mark.parametrize("other_base", [False, True])
def test_a_run_that_started_from_an_adapter(config, held_out, tmp_path, other_base):
    """The run merged the first adapter into its base and trained a second adapter on the result."""
    config = replace(config, iterations=2, lora=LoraConfig(rank=4))
    first = make_run(config, 1)
    start = replace(config.model, name=str(first / "agent_1"))
    second = make_run(replace(config, model=start, output=str(tmp_path / "second")), 1)
    kl_base = config.model if other_base else start
    changes = {"base": config.model.name} if other_base else {}
    rows = evaluate([second], held_out, settings(tmp_path, **changes)).rows
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)

    merged, tokenizer = load.load_policy(start)
    policy = load.attach(merged, second / "agent_1").eval()
    sampling = replace(config.sampling, min_new_tokens=1)
    prompts = list(held_out.dataset["prompt"])
    base, _ = load.load_policy(kl_base)
    agent = answering(policy, tokenizer, adapter="default")
    _, divergences = respond(agent, base, prompts, sampling, batch_size=100)
    kl = fmean(divergence.kl for divergence in divergences)
    assert kl > 0 and rows[1]["kl"] == pytest.approx(kl, rel=1e-4)


def test_evaluating_one_of_several_runs_gives_the_same_rows(config, held_out, tmp_path):
    """With `only`, the first run still sets the base, the prompts and the length of chains."""
    long = replace(config, iterations=1, cory=replace(config.cory, chain_length=3))
    first, second = make_run(long), make_run(long, 1, output=str(tmp_path / "second"), seed=1)
    both = evaluate([first, second], held_out, settings(tmp_path / "both")).rows
    only = settings(tmp_path, only=str(second))
    rows = evaluate([first, second], held_out, only).rows
    assert rows == [row for row in both if row["name"].startswith("second/")] and len(rows) == 3
    with pytest.raises(UserError, match=r"^only: "):
        line_up(held_out, settings(tmp_path, models=[str(first)], only=str(second)))


def test_rows_of_the_same_name_are_refused(
    finished, held_out, policy_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = finished.folder
    other = shutil.copytree(run, tmp_path / "b/run")
    with pytest.raises(UserError, match=r"^models: .*'run/agent_1'"):
        evaluate([run, other], held_out, settings(tmp_path))
    shutil.copytree(policy_folder, "base")
    with pytest.raises(UserError, match=r"^models: .*'base'"):
        evaluate([run, "base"], held_out, settings(tmp_path))
    rows = evaluate([run, "./base"], held_out, settings(tmp_path, queries=2)).rows
    assert {"base", "./base"} <= {row["name"] for row in rows}


def test_a_reward_that_was_changed_since_training_is_named(finished, held_out, tmp_path, capsys):
    run = shutil.copytree(finished.folder, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    text = re.sub(r"reward_sha256: \w+", "reward_sha256: 0123456789abcdef", text)
    (run / "config.yaml").write_text(text)
    folder = evaluate([run], held_out, settings(tmp_path, queries=2)).folder
    change = "reward_sha256 0123456789abcdef"
    assert change in capsys.readouterr().err
    (note,) = json.loads((folder / "evaluation.json").read_text())["notes"]
    assert change in note and change in (folder / "report.html").read_text()


@pytest.mark.filterwarnings("default")
def test_the_report_shows_warnings(held_out, policy_folder, tmp_path):
    def sometimes(prompts, completions):
        warnings.warn("as a library does", stacklevel=1)
        return [None, *([1.0] * (len(completions) - 1))]

    task = Task(held_out.dataset, sometimes, PROMPTS)
    folder = evaluate([policy_folder], task, settings(tmp_path, queries=2)).folder
    (note,) = json.loads((folder / "evaluation.json").read_text())["notes"]
    assert "sometimes returned None" in note
    assert note in (folder / "report.html").read_text()


def test_an_observer_draws_other_random_numbers_than_the_pioneer(
    config, held_out, policy_folder, tmp_path
):
    """The model finds all tokens equally likely, so responses differ only if the random numbers do."""
    model, tokenizer = load.load_policy(ModelConfig(str(policy_folder)))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path / "even")
    tokenizer.save_pretrained(tmp_path / "even")
    run = make_run(config, 1, iterations=1, model=ModelConfig(str(tmp_path / "even")))
    records = read_responses(evaluate([run], held_out, settings(tmp_path, queries=1)).folder)
    pioneer = records["base", 0]
    observer = records["base after itself", 0]
    assert pioneer["completions"] != observer["completions"]


def test_rewards_are_computed_as_in_training_whatever_the_precision(
    held_out, policy_folder, tmp_path
):
    kinds = []

    def by_a_model(prompts, completions):
        values = torch.nn.Linear(4, 1)(torch.ones(len(prompts), 4))
        kinds.append(values.dtype)
        return values[:, 0].tolist()

    task = Task(held_out.dataset, by_a_model, PROMPTS)
    evaluate([policy_folder], task, settings(tmp_path, precision="bf16"))
    assert set(kinds) == {torch.float32}


def test_the_share_of_responses_that_copy_their_input_is_reported(held_out):
    common = {"rewards": [0.0, 0.0], "kl": [0.0, 0.0], "base_nll": [1.0, 1.0]}
    common |= {"tokens": [1, 1], "prompt_tokens": [1, 1]}
    solo = [{**common, "completions": texts, "read": None} for texts in ([" a b", "c"], ["d", "e"])]
    chain = [
        {**common, "completions": texts, "read": "one"} for texts in (["a b", "d"], ["e", "e"])
    ]
    records = {"one": solo, "two": chain}
    one, two = table_rows(
        records, {"prompt": ["first", "second"]}, held_out, EvaluationConfig(samples=2), 0.1
    )
    assert "copied" not in one and two["copied"] == 0.5


def test_an_answer_that_cannot_be_counted_ends_an_evaluation_at_its_first_responses(
    policy_folder, held_out, tmp_path
):
    task = replace(held_out, extract=lambda text: [text])
    with pytest.raises(UserError, match=r"^task\.extract: "):
        evaluate([policy_folder], task, settings(tmp_path, samples=2, ks=[2]))


def test_queries_that_were_trained_on_are_reported(finished, tmp_path):
    """Two of four held-out queries were trained on.

    If `trained_on` is not the dataset on which the run was trained, the share is unknown.
    """
    query = finished.task.dataset["prompt"][0]
    asked = [query, query, "my own", "the new film"]
    held_out = Task.from_prompts(asked, count_good, PROMPTS)
    for number, (rows, share) in enumerate(
        [(finished.task.dataset, 0.5), (held_out.dataset, None)]
    ):
        chosen = settings(tmp_path / str(number))
        done = evaluate([finished.folder], held_out, chosen, trained_on=rows)
        saved = json.loads((done.folder / "evaluation.json").read_text())
        assert saved["in_training"] == {"run": share}


def test_an_evaluation_may_ask_for_shorter_responses_than_training():
    sampling = SamplingConfig(min_new_tokens=16, max_new_tokens=16)
    assert sampling.after_training({"max_new_tokens": 8}) == SamplingConfig(
        min_new_tokens=1, max_new_tokens=8
    )
    with pytest.raises(UserError, match=r"sampling\.min_new_tokens: "):
        sampling.after_training({"min_new_tokens": 4, "max_new_tokens": 8})
