"""The trainer: Algorithm 1 on two small agents."""

import itertools
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import run_iteration, sentences
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cory import Callback
from cory.agent import make_agents
from cory.config import CoryConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.models.text import plain_texts
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer

PROMPTS = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')


def count_good(prompts, completions):
    return [float(completion.count("good")) + len(completion) / 50 for completion in completions]


def make_trainer(config, reward=count_good) -> CoryTrainer:
    task = Task.from_prompts(
        [" ".join(text.split()[:4]) for text in sentences(20)], reward, PROMPTS
    )
    return CoryTrainer(config, make_agents(config), task)


def state(agent):
    return torch.cat([p.detach().flatten() for p in agent.learner.model.parameters()])


def test_each_role_reads_and_earns_what_the_paper_says(config):
    trainer = make_trainer(config)
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
    for k, (pioneer, observer) in enumerate(
        [("agent_1", "agent_2")] * 2 + [("agent_2", "agent_1")] * 2
    ):  # period 2
        records = run_iteration(trainer, k)
        assert {r["agent"]: r["role"] for r in records} == {
            pioneer: "pioneer",
            observer: "observer",
        }
        batch = trainer.task.batch(k, 8, config.seed)["prompt"]
        first, second = seen[pioneer]["rollout"], seen[observer]["rollout"]
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


def test_a_response_too_long_to_read_is_cut(config):
    """Broken bytes are three tokens each when they are read: more than the context has room for."""
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
    prompts, length = seen[0]
    lengths = [len(ids) for ids in observer.tokenizer(prompts)["input_ids"]]
    assert max(lengths) + length <= 96
    assert 0 < prompts[2].count("\ufffd") < 40


def test_without_knowledge_transfer_the_observer_reads_the_query(config):
    config.cory.knowledge_transfer = False
    trainer = make_trainer(config)
    prompts = []
    respond = trainer.agents[1].respond
    trainer.agents[1].respond = lambda *args: prompts.append(args[0]) or respond(*args)
    trainer.iteration(0)
    assert prompts == [trainer.task.batch(0, 8, config.seed)["prompt"]]


def test_role_exchange_copies_nothing_and_carries_optimizers_on(config):
    trainer = make_trainer(config)
    trainer.iteration(0)
    trainer.iteration(1)
    pointers = [
        [p.data_ptr() for p in agent.learner.model.parameters()] for agent in trainer.agents
    ]
    moments = [
        [s["exp_avg"].data_ptr() for s in agent.learner.optimizer.state.values()]
        for agent in trainer.agents
    ]
    coefs = [agent.learner.kl_controller.value for agent in trainer.agents]
    assert all(coef != config.ppo.init_kl_coef for coef in coefs)
    assert trainer.schedule.order(2) == (1, 0)
    records = run_iteration(trainer, 2)
    assert [r["kl_coef"] for r in records] == coefs
    assert pointers == [
        [p.data_ptr() for p in agent.learner.model.parameters()] for agent in trainer.agents
    ]
    assert moments == [
        [s["exp_avg"].data_ptr() for s in agent.learner.optimizer.state.values()]
        for agent in trainer.agents
    ]
    steps = [
        int(next(iter(agent.learner.optimizer.state.values()))["step"]) for agent in trainer.agents
    ]
    assert steps == [12, 12]  # 3 iterations of 4 epochs


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_learners_restart_every_so_many_iterations(config, agents):
    """Whatever the roles do: they are exchanged every 2 iterations."""
    config.ppo.reward_scaling = True
    config.cory = CoryConfig(num_agents=agents, exchange_period=2, reset_every=3)
    trainer = make_trainer(config)
    heads = []
    for k in range(8):
        records = run_iteration(trainer, k)
        since = k % 3 + 1  # iterations since the start or the last restart
        for agent, record in zip(trainer.agents, records, strict=True):
            learner = agent.learner
            steps = int(next(iter(learner.optimizer.state.values()))["step"])
            assert steps == since * config.ppo.ppo_epochs
            assert learner.reward_moments.count == pytest.approx(8 * since)
            assert (record["kl_coef"] == config.ppo.init_kl_coef) == (since == 1)
        heads.append(trainer.agents[0].learner.model.v_head.summary.weight.detach().clone())
    # The value head is part of the model, which the authors' scripts save whole: it goes on.
    moves = [(new - old).abs().max() for old, new in itertools.pairwise(heads)]
    assert max(moves) < 0.1 < heads[0].abs().max()


def test_learning_moves_one_agent_and_leaves_the_others_and_the_reference(config):
    trainer = make_trainer(config)
    first, second = trainer.agents
    reference = first.learner.reference
    assert second.learner.reference is reference
    before = [
        state(first),
        state(second),
        torch.cat([p.flatten() for p in reference.parameters()]).clone(),
    ]
    rollout = first.respond(sentences(8), 4, torch.Generator())
    first.learn([rollout], [torch.randn(8)], np.random.default_rng(0))
    assert not torch.equal(state(first), before[0])
    assert torch.equal(state(second), before[1])
    assert torch.equal(torch.cat([p.flatten() for p in reference.parameters()]), before[2])


def test_same_seed_same_metrics_to_the_bit(config, tmp_path):
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trainer = make_trainer(replace(config, output=str(tmp_path / name), seed=seed))
        torch.rand(7)  # the state of the random streams before a run does not matter
        folder = trainer.train().folder
        texts.append([(folder / f"{file}.jsonl").read_bytes() for file in ("metrics", "samples")])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.usefixtures("drawn_figures")
def test_run_folder(config):
    run = make_trainer(config).train()
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert [(m["iteration"], m["agent"]) for m in metrics] == [
        (k, f"agent_{i}") for k in range(4) for i in (1, 2)
    ]
    expected = {
        "iteration", "agent", "role", "task_reward", "kl", "combined_reward", "kl_coef", "entropy", "response_tokens",
        "policy_loss", "value_loss", "explained_variance", "clip_fraction", "gradient_norm",
        "dropped_steps", "distinct_2", "flags",
    }  # fmt: skip
    assert set(metrics[0]) == expected
    documented = (Path(__file__).parent.parent / "docs/metrics.md").read_text()
    assert all(f"`{name}`" in documented for name in expected)
    timings = [json.loads(line) for line in (run.folder / "timings.jsonl").open()]
    assert len(timings) == 4
    assert {
        "seconds_generate",
        "seconds_reward",
        "seconds_learn",
        "seconds_total",
    } < set(timings[0])
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").open()]
    assert {s["iteration"] for s in samples} == {0, 2}
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert set(summary["agents"]) == {"agent_1", "agent_2"}
    assert "transformers:" in (run.folder / "config.yaml").read_text()


def test_saved_agents_open_without_trl_and_answer_alike(config):
    trainer = make_trainer(config)
    run = trainer.train()
    for agent in trainer.agents:
        folder = run.folder / agent.name
        assert "\nlibrary_name: transformers\n" in (folder / "README.md").read_text()
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )
        ids = tokenizer(sentences(1), return_tensors="pt")["input_ids"]
        greedy = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
        expected = agent.learner.policy.eval().generate(
            ids, attention_mask=torch.ones_like(ids), **greedy
        )
        assert torch.equal(
            model.generate(ids, attention_mask=torch.ones_like(ids), **greedy), expected
        )
    agents = [
        AutoModelForCausalLM.from_pretrained(run.folder / name).state_dict()
        for name in ("agent_1", "agent_2")
    ]
    assert any(not torch.equal(agents[0][name], agents[1][name]) for name in agents[0])


def test_several_passes_over_the_data(config):
    task = make_trainer(config).task  # 20 rows, 8 a batch: 2 batches a pass
    passes = [[task.batch(k, 8, 0)["prompt"] for k in (2 * p, 2 * p + 1)] for p in range(3)]
    rows = task.dataset["prompt"]
    for one in passes:
        drawn = one[0] + one[1]
        assert len(drawn) == 16 and all(
            drawn.count(text) <= list(rows).count(text) for text in drawn
        )
    assert passes[0] != passes[1] != passes[2]


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
    # As in the tokenizers of chat models, of which no setting names it.
    unnamed = deepcopy(tokenizer)
    unnamed.add_tokens(AddedToken("<|turn|>", special=True))
    spelled = tokenizer("<|turn|>")["input_ids"]
    assert plain_texts(tokenizer, [torch.tensor(ids + spelled)]) == ["good film<|turn|>"]
    assert plain_texts(unnamed, [torch.tensor(ids + spelled)]) == ["good film"]


def test_a_response_keeps_the_space_before_its_first_word(tokenizer):
    """As Llama 2's tokenizer writes and reads texts: it drops a space at their start."""
    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    words.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    words.decoder = decoders.Sequence(steps)
    words.train_from_iterator(
        sentences(50), trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "</s>"])
    )
    llama = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    for kind in (llama, tokenizer):
        prompt, whole = (
            kind(text)["input_ids"] for text in ("the film was", "the film was good and bad")
        )
        assert whole[: len(prompt)] == prompt
        response = torch.tensor([*whole[len(prompt) :], kind.eos_token_id])
        assert plain_texts(kind, [response]) == [" good and bad"]
        assert plain_texts(kind, [response], [" and"]) == [" good"]
        assert plain_texts(kind, [response], turn=True)[0].strip() == "good and bad"
    assert plain_texts(llama, [response[:0]]) == [""]


@pytest.mark.parametrize("agents", [1, 3])
def test_chains_of_other_lengths(config, agents):
    config.cory.num_agents = agents
    config.cory.exchange_period = 1
    trainer = make_trainer(config)
    roles = [{r["agent"]: r["role"] for r in run_iteration(trainer, k)} for k in range(agents)]
    names = ["pioneer", "observer", "observer_2"][:agents]
    for agent in trainer.agents:
        assert sorted(role[agent.name] for role in roles) == sorted(names)


def test_reward_gets_the_columns_it_names(config):
    import datasets

    got = {}

    def reward(prompts, completions, label):
        got["label"] = label
        return [0.5] * len(prompts)

    rows = {"prompt": sentences(8), "label": list(range(8)), "other": [None] * 8}
    trainer = CoryTrainer(
        config, make_agents(config), Task(datasets.Dataset.from_dict(rows), reward, PROMPTS)
    )
    trainer.iteration(0)
    assert sorted(got["label"]) == sorted([*range(8), *range(8)])


def held_out(trainer):
    return datasets.Dataset.from_dict(
        {"prompt": [" ".join(text.split()[:3]) for text in sentences(30)[20:]]}
    )


def test_held_out_queries_are_answered_without_touching_training(config, tmp_path):
    plain = make_trainer(config).train()
    task = make_trainer(config).task
    config = replace(config, eval_every=2, eval_queries=6, output=str(tmp_path / "evaluated"))
    seen = []

    def reward(prompts, completions, role):
        if len(prompts) == 2 * 6:
            seen.append((prompts, role))
        return count_good(prompts, completions)

    reward.__name__ = "count_good"
    trainer = CoryTrainer(
        config, make_agents(config), replace(task, reward=reward), eval_dataset=held_out(task)
    )
    run = trainer.train()
    assert [row["iteration"] for row in run.history if "eval_task_reward" in row] == [1, 1, 3, 3]
    assert (
        seen[0][0] == held_out(task)["prompt"][:6] * 2
        and seen[0][1] == ["pioneer"] * 6 + ["observer"] * 6
    )
    rest = [
        {key: value for key, value in row.items() if not key.startswith("eval_task_reward")}
        for row in run.history
    ]
    assert rest == plain.history


def test_held_out_queries_that_are_also_in_training_are_said(config, capsys):
    task = make_trainer(config).task
    asked = [task.dataset["prompt"][0], "a new one", "a new one", "another"]
    config = replace(config, eval_every=2, eval_queries=4, iterations=2)
    rows = datasets.Dataset.from_dict({"prompt": asked})
    folder = CoryTrainer(config, make_agents(config), task, eval_dataset=rows).train().folder
    said = "eval_every: 4 held-out queries (3 distinct), 25 % of them also in training"
    assert capsys.readouterr().err.count(said) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out"] == {"queries": 4, "distinct": 3, "in_training": 0.25}


def test_held_out_queries_are_needed_where_they_are_asked_for(config):
    with pytest.raises(UserError, match=r"^eval_every: "):
        make_trainer(replace(config, eval_every=2))


def test_held_out_queries_may_lack_columns_that_nobody_reads(config):
    rows = [" ".join(text.split()[:4]) for text in sentences(16)]
    data = datasets.Dataset.from_dict({"prompt": rows, "source": ["here"] * 16})
    task = Task(data, lambda prompts, completions: [0.0] * len(prompts), RolePrompts())
    asked = replace(config, iterations=1, eval_every=1, eval_queries=4)
    held_out = data.remove_columns("source")
    run = CoryTrainer(asked, make_agents(asked), task, eval_dataset=held_out).train()
    assert "eval_task_reward" in run.history[-1]


def test_callbacks_see_every_step_and_can_end_a_run(config):
    said = []

    class Watch(Callback):
        def on_train_begin(self, trainer, run):
            said.append(("begin", run.folder.name))

        def on_iteration_begin(self, trainer, k):
            said.append((k, trainer.schedule.order(k)))

        def on_iteration_end(self, trainer, iteration):
            said.append((iteration.index, [record["role"] for record in iteration.records]))
            trainer.should_stop = iteration.index == 2

        def on_train_end(self, trainer, run):
            said.append(("end", sorted(path.name for path in run.folder.glob("agent_*"))))

    task = make_trainer(config).task
    CoryTrainer(config, make_agents(config), task, callbacks=[Callback(), Watch()]).train()
    roles = ["pioneer", "observer"]
    assert said == [("begin", "run"), (0, (0, 1)), (0, roles), (1, (0, 1)), (1, roles), (2, (1, 0)), (2, roles[::-1]),
                    ("end", ["agent_1", "agent_2"])]  # fmt: skip


def test_learning_rate_follows_its_schedule(config):
    config.ppo = replace(config.ppo, schedule="linear", warmup=2)
    trainer = make_trainer(config)
    rates = []
    for k in range(4):
        trainer.iteration(k)
        rates.append({agent.learner.optimizer.param_groups[0]["lr"] for agent in trainer.agents})
    assert [rate.pop() for rate in rates] == pytest.approx([5e-4, 1e-3, 2 / 3 * 1e-3, 1 / 3 * 1e-3])


def test_optimizer_of_another_name_is_used_and_an_unknown_one_refused(config):
    config.ppo = replace(config.ppo, optimizer="AdamW", optimizer_options={"weight_decay": 0.5})
    (optimizer, _) = (agent.learner.optimizer.optimizer for agent in make_trainer(config).agents)
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["weight_decay"] == 0.5
    config.ppo.optimizer = "Adamm"
    with pytest.raises(
        UserError, match=r"ppo.optimizer: expected one of torch.optim's .*AdamW.*, got 'Adamm'"
    ):
        make_agents(config)


def test_held_out_queries_are_checked_before_training(config):
    task = make_trainer(config).task
    config = replace(config, eval_every=2)
    for rows, message in (
        ([], "^eval_every: "),
        (["good " * 200], r"^dataset: .*1 of 1 held-out rows"),
    ):
        dataset = datasets.Dataset.from_dict({"prompt": rows}) if rows else task.dataset.select([])
        with pytest.raises(UserError, match=message):
            CoryTrainer(config, make_agents(config), task, eval_dataset=dataset)


def test_a_run_that_a_callback_has_ended_says_so(config):
    class Stop(Callback):
        def on_iteration_end(self, trainer, iteration):
            trainer.should_stop = iteration.index == 1

    folder = (
        CoryTrainer(config, make_agents(config), make_trainer(config).task, callbacks=[Stop()])
        .train()
        .folder
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["iterations"], summary["stopped"]) == (2, True)
