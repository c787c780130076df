"""The trainer: Algorithm 1 on two small agents, the run's folder, callbacks and texts."""

import itertools
import json
from copy import deepcopy
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from conftest import PROMPTS, count_good, make_config, make_trainer, run_iteration, sentences
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from cory import Callback
from cory.build import make_agents
from cory.config import CoryConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.models.text import plain_texts
from cory.run.folder import read_rows
from cory.task import Task
from cory.trainer import CoryTrainer


def test_each_role_reads_and_earns_what_algorithm_1_says(config):
    """After a role exchange, each agent keeps its optimizer state and KL coefficient."""
    trainer = make_trainer(config)
    reference = trainer.agents[0].learner.reference
    assert trainer.agents[1].learner.reference is reference
    frozen = torch.cat([p.flatten() for p in reference.parameters()]).clone()
    seen = {}
    for agent in trainer.agents:
        respond, learn = agent.respond, agent.learn

        def spy_respond(*args, respond=respond, name=agent.name):
            rollout = respond(*args)
            seen[name] = {"rollout": rollout}
            return rollout

        def spy_learn(rollouts, rewards, *args, learn=learn, name=agent.name):
            (learned,) = rollouts
            is_same = learned.response_ids is seen[name]["rollout"].response_ids
            seen[name] |= {"same": is_same, "rewards": rewards[0]}
            return learn(rollouts, rewards, *args)

        agent.respond, agent.learn = spy_respond, spy_learn
    exchanged = [("agent_1", "agent_2")] * 2 + [("agent_2", "agent_1")] * 2  # period 2
    longest = set()
    for k, (pioneer, observer) in enumerate(exchanged):
        coefs = {agent.name: agent.learner.kl_controller.value for agent in trainer.agents}
        records = run_iteration(trainer, k)
        roles = {record["agent"]: record["role"] for record in records}
        assert roles == {pioneer: "pioneer", observer: "observer"}
        assert {record["agent"]: record["kl_coef"] for record in records} == coefs
        batch = trainer.task.batch(k, 8, config.seed)["prompt"]
        first, second = seen[pioneer]["rollout"], seen[observer]["rollout"]
        longest |= {max(map(len, rollout.response_ids)) for rollout in (first, second)}
        assert first.prompts == batch
        assert second.prompts == [
            f'Improve "{query}{response}": {query}'
            for query, response in zip(batch, first.completions, strict=True)
        ]
        task_rewards = torch.tensor(
            [count_good(batch, rollout.completions) for rollout in (first, second)]
        )
        for role, name in enumerate((pioneer, observer)):
            assert seen[name]["same"]
            assert torch.allclose(seen[name]["rewards"], assign_credit(task_rewards)[role])
    assert len(longest) > 1 and longest <= {3, 4, 5, 6}  # the length limit is drawn from 3 to 6
    for agent in trainer.agents:
        moments = agent.learner.optimizer.state.values()
        assert {int(state["step"]) for state in moments} == {16}  # 4 iterations of 4 epochs
        assert agent.learner.kl_controller.value != config.ppo.init_kl_coef
    assert torch.equal(torch.cat([p.flatten() for p in reference.parameters()]), frozen)


def test_learners_restart_every_reset_every_iterations(config):
    """Restarts every 3 iterations do not depend on role exchanges every 2 iterations."""
    config.ppo.reward_scaling = True
    config.cory = CoryConfig(exchange_period=2, reset_every=3)
    trainer = make_trainer(config)
    heads = []
    for k in range(7):
        records = run_iteration(trainer, k)
        since = k % 3 + 1  # iterations since the start or the last restart
        for agent, record in zip(trainer.agents, records, strict=True):
            learner = agent.learner
            steps = int(next(iter(learner.optimizer.state.values()))["step"])
            assert steps == since * config.ppo.ppo_epochs
            assert learner.reward_moments.count == pytest.approx(8 * since)
            assert (record["kl_coef"] == config.ppo.init_kl_coef) == (since == 1)
        heads.append(trainer.agents[0].learner.model.v_head.summary.weight.detach().clone())
    # The value head keeps its weights, since the authors' scripts save it with the model.
    moves = [(new - old).abs().max() for old, new in itertools.pairwise(heads)]
    assert max(moves) < 0.1 < heads[0].abs().max()


def test_without_knowledge_transfer_the_observer_reads_the_query(config):
    config.cory.knowledge_transfer = False
    trainer = make_trainer(config)
    rollouts = trainer.iteration(0).rollouts
    assert rollouts[1].prompts == trainer.task.batch(0, 8, config.seed)["prompt"]
    # Both agents start as the same model, but each role samples with its own random numbers.
    assert rollouts[0].prompts == rollouts[1].prompts
    assert rollouts[0].completions != rollouts[1].completions


# A run


class Watch(Callback):
    """Records the calls of its methods, and ends a run after the third iteration."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, trainer, run):
        self.seen.append(("begin", run.folder.name))

    def on_iteration_begin(self, trainer, k):
        self.seen.append((k, trainer.schedule.order(k)))

    def on_iteration_end(self, trainer, iteration):
        roles = [record["role"] for record in iteration.records]
        self.seen.append((iteration.index, roles))
        trainer.should_stop = iteration.index == 2

    def on_train_end(self, trainer, run):
        saved = ("agent_1", "agent_2", "curves.png", "report.html", "summary.json")
        self.seen.append(("end", [name for name in saved if (run.folder / name).exists()]))


@pytest.fixture(scope="module")
def trained(policy_folder, tmp_path_factory) -> tuple[CoryTrainer, Watch]:
    """A trainer after a run that the callback Watch has ended, and the callback."""
    watch = Watch()
    config = make_config(policy_folder, tmp_path_factory.mktemp("trained"))
    trainer = make_trainer(config, callbacks=[Callback(), watch])
    trainer.train()
    return trainer, watch


def test_files_and_keys_in_the_runs_folder(trained):
    folder = trained[0].run.folder
    metrics = read_rows(folder / "metrics.jsonl")
    assert [(m["iteration"], m["agent"]) for m in metrics] == [
        (k, f"agent_{i}") for k in range(3) for i in (1, 2)
    ]
    expected = {
        "iteration", "agent", "role", "task_reward", "kl", "combined_reward", "kl_coef", "entropy", "response_tokens",
        "policy_loss", "value_loss", "explained_variance", "clip_fraction", "gradient_norm",
        "dropped_steps", "distinct_2", "flags",
    }  # fmt: skip
    assert set(metrics[0]) == expected
    timings = read_rows(folder / "timings.jsonl")
    seconds = {"seconds_generate", "seconds_reward", "seconds_learn", "seconds_total"}
    assert len(timings) == 3 and seconds < set(timings[0])
    assert {s["iteration"] for s in read_rows(folder / "samples.jsonl")} == {0, 2}
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["agents"]) == {"agent_1", "agent_2"}
    assert (summary["iterations"], summary["stopped_by"]) == (3, "a callback")


def test_callbacks_see_every_step_and_can_end_a_run(trained):
    roles = ["pioneer", "observer"]
    assert trained[1].seen == [
        ("begin", "run"), (0, (0, 1)), (0, roles), (1, (0, 1)), (1, roles), (2, (1, 0)), (2, roles[::-1]),
        ("end", ["agent_1", "agent_2", "curves.png", "report.html", "summary.json"]),
    ]  # fmt: skip


def test_saved_agents_load_without_trl_and_give_the_same_logits(trained):
    trainer, _ = trained
    ids = torch.arange(3, 12)[None]
    logits = []
    for agent in trainer.agents:
        folder = trainer.run.folder / agent.name
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits.append(model(ids).logits)
            expected = agent.learner.policy.eval()(ids).logits
        assert torch.allclose(logits[-1], expected, atol=1e-5)
        saved = AutoTokenizer.from_pretrained(folder)
        assert saved(sentences(9))["input_ids"] == agent.tokenizer(sentences(9))["input_ids"]
    assert not torch.allclose(*logits)


def test_a_runs_numbers_depend_only_on_its_seed(trained, config, tmp_path):
    """Global generators and held-out evaluations change nothing. Held-out rows may lack columns that nothing reads."""
    calls = []
    plain, _ = trained

    def reward(prompts, completions, role):
        torch.rand(3)
        np.random.rand()
        calls.append((prompts, role))
        return count_good(prompts, completions)

    rows = list(plain.task.dataset["prompt"])
    asked = [rows[0], "a new one", "a new one", "another"]
    data = datasets.Dataset.from_dict({"prompt": rows, "source": ["here"] * 20})
    config = replace(config, eval_every=2, eval_queries=4, output=str(tmp_path / "evaluated"))
    held_out = datasets.Dataset.from_dict({"prompt": asked})
    task = Task(data, reward, PROMPTS)
    torch.manual_seed(7)
    trainer = CoryTrainer(
        config, make_agents(config), task, eval_dataset=held_out, callbacks=[Watch()]
    )
    run = trainer.train()
    assert [row["iteration"] for row in run.history if "eval_task_reward" in row] == [1, 1]
    history = [
        {key: value for key, value in row.items() if not key.startswith("eval_task_reward")}
        for row in run.history
    ]
    assert history == plain.run.history
    samples, expected = (read_rows(r.folder / "samples.jsonl") for r in (run, plain.run))
    assert samples == expected
    assert (asked * 2, ["pioneer"] * 4 + ["observer"] * 4) in calls

    other = run_iteration(make_trainer(replace(config, seed=1, eval_every=0)), 0)
    assert other[0]["kl_coef"] == history[0]["kl_coef"]
    assert other[0]["task_reward"] != history[0]["task_reward"]


@pytest.mark.parametrize(
    ("key", "rows"), [("eval_every", None), ("eval_every", []), ("dataset", ["good " * 200])]
)
def test_held_out_queries_are_checked_before_training(config, key, rows):
    config = replace(config, eval_every=2)
    task = make_trainer(config).task
    dataset = None
    if rows is not None:
        dataset = datasets.Dataset.from_dict({"prompt": rows}) if rows else task.dataset.select([])
    with pytest.raises(UserError, match=f"^{key}: "):
        CoryTrainer(config, make_agents(config), task, eval_dataset=dataset)


# Texts


def test_a_response_too_long_to_read_is_cut(config):
    """Each U+FFFD takes three tokens when it is encoded again, so the prompt would exceed the context."""
    trainer = make_trainer(config)
    pioneer, observer = trainer.agents
    respond, seen = pioneer.respond, []

    def garbage(*args):
        rollout = respond(*args)
        rollout.completions[2] = "\ufffd" * 40
        return rollout

    pioneer.respond = garbage
    answer = observer.respond
    observer.respond = lambda *args: seen.append(args[:2]) or answer(*args)
    trainer.iteration(0)
    prompts, sampling = seen[0]
    lengths = [len(ids) for ids in observer.tokenizer(prompts)["input_ids"]]
    assert max(lengths) + sampling.max_new_tokens <= 96
    assert 0 < prompts[2].count("\ufffd") < 40


def test_special_tokens_never_reach_text(tokenizer):
    ids = tokenizer("good film")["input_ids"]
    assert plain_texts(tokenizer, [torch.tensor([*ids, 0, 1])]) == ["good film"]
    spelled = [i for piece in ("<|end", "of", "text|>") for i in tokenizer(piece)["input_ids"]]
    nested = [
        i for piece in ("<|endof<|end", "oftext|>", "text|>") for i in tokenizer(piece)["input_ids"]
    ]
    assert tokenizer.decode(spelled) == "<|endoftext|>"
    assert plain_texts(tokenizer, [torch.tensor(ids + spelled)]) == ["good film"]
    assert plain_texts(tokenizer, [torch.tensor(ids + nested)]) == ["good film"]
    # Chat models' tokenizers have special tokens that no named setting, such as `eos_token`, lists.
    unnamed = deepcopy(tokenizer)
    unnamed.add_tokens(AddedToken("<|turn|>", special=True))
    spelled = tokenizer("<|turn|>")["input_ids"]
    assert plain_texts(tokenizer, [torch.tensor(ids + spelled)]) == ["good film<|turn|>"]
    assert plain_texts(unnamed, [torch.tensor(ids + spelled)]) == ["good film"]


def test_summary_and_report_show_warnings(config):
    def sometimes(prompts, completions):
        return [None, *[1.0] * (len(completions) - 1)]

    config = replace(config, iterations=1)
    with pytest.warns(UserWarning):
        sampling = replace(config.sampling, top_k=5)
        folder = make_trainer(replace(config, sampling=sampling), sometimes).train().folder
    notes = json.loads((folder / "summary.json").read_text())["notes"]
    page = (folder / "report.html").read_text()
    for words in ("samples are off-policy", "returned None for a row"):
        assert any(words in note for note in notes) and words in page
    again = make_trainer(replace(config, output=f"{config.output}-again")).train().folder
    assert "notes" not in json.loads((again / "summary.json").read_text())
