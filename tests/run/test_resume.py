"""A resumed run equals an unbroken one; runs that cannot be resumed are refused (docs/reliability.md)."""

import json
import math
import os
import re
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import count_good, make_config, make_one, make_trainer
from interruptions import after, interrupt
from run_files import AGENTS, content, same, summary_of

from cory import Callback
from cory.config import AgentConfig, CheckpointConfig, CoryConfig, GuardsConfig, LoraConfig
from cory.errors import NotFinite, UserError
from cory.run.checkpoint import save
from cory.run.folder import read_rows
from cory.run.signals import Interrupted
from cory.settings import parse_yaml
from study.frame import of_run

ITERATIONS = 5


@pytest.fixture(scope="module")
def whole(policy_folder, tmp_path_factory) -> Path:
    """The folder of an unbroken run with the settings of the fixture `one`. Tests only read it."""
    config = make_one(make_config(policy_folder, tmp_path_factory.mktemp("whole")))
    return make_trainer(config).train().folder


@pytest.fixture(scope="module")
def ended(policy_folder, tmp_path_factory) -> Path:
    """The folder of a completed run of 4 iterations, otherwise with the settings of `one`."""
    config = make_one(make_config(policy_folder, tmp_path_factory.mktemp("four")))
    return make_trainer(replace(config, iterations=4)).train().folder


@pytest.fixture
def four(ended, tmp_path) -> Path:
    """A copy of the run in `ended`, which a test may change."""
    return shutil.copytree(ended, tmp_path / "four")


def spoil(agent, number: int, what: str = "loss"):
    """Makes a log-probability NaN in update `number`. If `what` is "gradient", the gradient becomes NaN instead."""
    learner = agent.learner
    forward, update, seen = learner.forward, learner.update, [0]

    def counted(rollouts, *args):
        seen[0] += 1
        return update(rollouts, *args)

    def spoiled(rows):
        result = forward(rows)
        if seen[0] == number and what == "loss":
            result.logprobs.data[0] = math.nan
        elif seen[0] == number and result.logprobs.requires_grad:
            result.logprobs.register_hook(lambda gradient: gradient * math.nan)
        return result

    learner.update, learner.forward = counted, spoiled


def interrupted(config, iterations: int, number=signal.SIGTERM) -> Path:
    """Starts a run, interrupts it by a signal after some iterations, and returns its folder."""
    # The samples before training take three calls of the reward.
    reward = after(count_good, 3 + iterations, lambda: interrupt(number))
    with pytest.raises(Interrupted) as ended:
        make_trainer(config, reward).train()
    assert ended.value.code == 128 + number
    return Path(config.output)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_interrupted_after_every_iteration_ends_the_same(config, tmp_path, rank):
    """The run has all kinds of state: adaptive KL, running reward moments, role exchanges."""
    ppo = replace(config.ppo, reward_scaling=True, reward_normalization=True)
    ppo = replace(ppo, kl_horizon=100.0, mini_batch_size=4)
    settings = replace(config, iterations=ITERATIONS, ppo=ppo, lora=LoraConfig(rank=rank))
    settings.checkpoint = CheckpointConfig(save_every=3)
    whole = make_trainer(settings).train().folder
    broken = replace(settings, output=str(tmp_path / "broken"), resume="auto")
    interrupted(broken, 1)
    for k in range(1, ITERATIONS):
        with pytest.raises(Interrupted) as error:
            reward = after(count_good, 1, lambda: interrupt(signal.SIGINT))
            make_trainer(broken, reward).train()
        assert error.value.code == 128 + signal.SIGINT
        lines = (tmp_path / "broken/metrics.jsonl").read_text().splitlines()
        assert len(lines) == 2 * (k + 1)
    make_trainer(broken).train()
    same(whole, tmp_path / "broken")
    expected, summary = summary_of(whole), summary_of(tmp_path / "broken")
    assert summary["samples"] == expected["samples"] and summary["agents"] == expected["agents"]


def test_a_resumed_run_with_restarted_learners_ends_the_same(one, tmp_path):
    config = replace(one, cory=CoryConfig(exchange_period=2, reset_every=4))
    whole = make_trainer(config).train().folder
    broken = interrupted(replace(config, output=str(tmp_path / "broken")), 3)
    make_trainer(replace(config, resume=str(broken))).train()
    same(whole, broken)


def test_a_run_resumed_during_warm_up_ends_the_same(one, tmp_path):
    config = replace(one, ppo=replace(one.ppo, warmup_iterations=4))
    trainer = make_trainer(config)
    (rates,) = trainer.agents[0].learner.optimizer.param_groups
    factors = []
    for k in range(5):
        trainer.iteration(k)
        factors.append(rates["lr"] / config.ppo.learning_rate)
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]
    whole = make_trainer(config).train().folder
    broken = interrupted(replace(config, output=str(tmp_path / "broken")), 2)
    make_trainer(replace(config, resume=str(broken))).train()
    same(whole, broken)


def test_records_after_the_last_checkpoint_are_computed_again(one, whole, tmp_path):
    config = replace(one, output=str(tmp_path / "run"), checkpoint=CheckpointConfig(save_every=3))
    failing = after(count_good, 3 + 6, lambda: 1 / 0)

    class Lines(Callback):
        def on_train_begin(self, trainer, run):
            self.file = run.folder / "mine.jsonl"

        def on_iteration_end(self, trainer, iteration):
            with self.file.open("a") as file:
                file.write(f"{iteration.index}\n")

    def trainer(*arguments):
        made = make_trainer(*arguments)
        made.callbacks.append(Lines())
        return made

    with pytest.raises(ZeroDivisionError) as error:
        trainer(config, failing).train()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2 * 5
    assert "iter-000003" in "\n".join(error.value.__notes__)
    assert (tmp_path / "run/mine.jsonl").read_text().split() == list("01234")
    trainer(replace(config, resume="auto")).train()
    same(whole, tmp_path / "run")
    assert (tmp_path / "run/mine.jsonl").read_text().split() == list("012345")


def test_an_error_after_the_last_iteration_does_not_suggest_to_resume(one):
    class Fails(Callback):
        def on_train_end(self, trainer, run):
            raise ZeroDivisionError

    trainer = make_trainer(replace(one, iterations=1))
    trainer.callbacks.append(Fails())
    with pytest.raises(ZeroDivisionError) as error:
        trainer.train()
    (note,) = error.value.__notes__
    assert "is finished" in note and "Continue" not in note
    # An error while the run is extended does suggest it.
    run = trainer.run.folder
    with pytest.raises(ZeroDivisionError) as error:
        failing = after(count_good, 1, lambda: 1 / 0)
        extended = make_trainer(replace(one, iterations=2, resume=str(run)), failing)
        extended.callbacks.append(Callback())
        extended.train()
    assert "Continue" in error.value.__notes__[0]


def test_a_run_without_a_checkpoint_starts_again(one, whole, tmp_path):
    config = replace(one, output=str(tmp_path / "run"), resume="auto")
    with pytest.raises(ZeroDivisionError) as error:
        make_trainer(config, after(count_good, 3 + 1, lambda: 1 / 0)).train()
    assert "No checkpoint" in "\n".join(error.value.__notes__)
    for changes, key in [({"resume": config.output}, "resume"), ({"resume": None}, "output")]:
        with pytest.raises(UserError, match=rf"^{key}: "):
            make_trainer(replace(config, **changes)).train()
    make_trainer(config).train()
    same(whole, tmp_path / "run")


def test_resuming_a_finished_run_changes_nothing(one, four):
    before = content(four)
    for changes in ({"resume": str(four)}, {"resume": "auto", "output": str(four)}):
        run = make_trainer(replace(one, iterations=4, **changes)).train()
        assert run.folder == four and len(run.history) == 2 * 4
    assert content(four) == before


def test_a_resumed_run_can_end_earlier_than_planned(one, tmp_path):
    broken = interrupted(replace(one, output=str(tmp_path / "broken")), 3)
    assert not (broken / "agent_1").exists()
    make_trainer(replace(one, iterations=3, resume=str(broken))).train()
    whole = make_trainer(replace(one, iterations=3, output=str(tmp_path / "whole"))).train().folder
    same(whole, broken)
    assert summary_of(broken)["iterations"] == 3


def test_a_finished_run_can_be_extended(one, whole, four):
    ended = content(four)
    longer = replace(one, resume="auto", output=str(four))
    with pytest.raises(Interrupted):
        make_trainer(longer, after(count_good, 1, interrupt)).train()
    now = content(four)
    # Agents and summary of the finished run stay until the extension ends.
    kept = [name for name in ended if name.startswith("agent_") or name == "summary.json"]
    assert kept and all(now[name] == ended[name] for name in kept)
    make_trainer(longer).train()
    same(whole, four)
    assert summary_of(four)["iterations"] == 6


def test_a_run_that_a_guard_has_ended_stays_ended(one, tmp_path):
    """It is not extended, and a signal in its last iteration changes nothing."""
    config = replace(one, guards=GuardsConfig(stop_at_kl=1e-9, kl_bound=1e-9))
    folder = make_trainer(config).train().folder
    assert "kl" in read_rows(folder / "metrics.jsonl")[-1]["flags"]
    summary = summary_of(folder)
    done = summary["iterations"]
    assert summary["stopped_by"] == "guards.stop_at_kl" and 1 < done < 6
    before = content(folder)
    make_trainer(replace(config, resume=str(folder), iterations=12)).train()
    assert content(folder) == before

    broken = interrupted(replace(config, output=str(tmp_path / "broken")), done)
    assert not (broken / "summary.json").exists()
    make_trainer(replace(config, resume=str(broken))).train()
    same(folder, broken)
    assert summary_of(broken)["stopped_by"] == "guards.stop_at_kl"

    planned = replace(config, iterations=done, output=str(tmp_path / "planned"))
    # In the last planned iteration, the guard has nothing to end.
    summary = summary_of(make_trainer(planned).train().folder)
    assert not summary["stopped"] and "stopped_by" not in summary


def test_settings_that_do_not_affect_results_may_change(one, whole, four):
    other = replace(one, resume=str(four), ppo=replace(one.ppo, micro_batch=3), sample_every=0)
    other.checkpoint = CheckpointConfig(save_every=0)
    trainer = make_trainer(other)
    history = trainer.train().history
    assert {agent.learner.pass_size.micro_batch for agent in trainer.agents} == {3}
    expected = read_rows(whole / "metrics.jsonl")
    for record, unbroken in zip(history, expected, strict=True):  # equal up to rounding
        assert record["task_reward"] == pytest.approx(unbroken["task_reward"], abs=1e-4)


STATE = "state.json"
WEIGHTS = "agent_2.safetensors"


def change_state(**changes):
    def change(checkpoint: Path) -> None:
        state = json.loads((checkpoint / STATE).read_text())
        (checkpoint / STATE).write_text(json.dumps(state | changes))

    return change


def other_reward(prompts, completions):
    return count_good(prompts, completions)


def other_file(checkpoint: Path) -> None:
    """Changes the recorded hash of the reward's file."""
    settings = json.loads((checkpoint / STATE).read_text())["settings"]
    settings["fingerprint"]["reward_sha256"] = "0"
    change_state(settings=settings)(checkpoint)


def remove_all(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint.parent)


# By case: a change to a run's newest checkpoint, settings changed for the resume, a pattern for the error.
FOLDERS = {
    "truncated weights": (lambda path: os.truncate(path / WEIGHTS, 100), {}, "iter-000004"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), {}, "iter-000004"),
    "no json": (lambda path: (path / STATE).write_text("{"), {}, "iter-000004"),
    "no state": (lambda path: (path / STATE).write_text("{}"), {}, "iter-000004"),
    "no numbers": (change_state(agents={}), {}, "iter-000004"),
    "lost metrics": (
        lambda path: os.truncate(path.parents[1] / "metrics.jsonl", 10),
        {},
        r"metrics\.jsonl",
    ),
    "no checkpoint": (remove_all, {}, "^resume: "),
    "two processes": (change_state(processes=2), {}, "processes"),
    "fewer iterations": (None, {"iterations": 2}, "^iterations: "),
    "seed": (None, {"seed": 3}, "seed"),
    "LoRA": (None, {"lora": LoraConfig(rank=2)}, r"lora\.rank"),
    "reward": (None, {"reward": other_reward}, r"fingerprint\.reward"),
    "reward's file": (other_file, {}, r"reward .*count_good has changed"),
    "rows": (None, {"rows": 10}, "dataset has changed"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_runs_that_cannot_be_resumed_are_refused(one, four, name):
    change, settings, match = FOLDERS[name]
    if change:
        change(four / "checkpoints/iter-000004")
    before = content(four)
    settings = dict(settings)
    rows, reward = settings.pop("rows", None), settings.pop("reward", count_good)
    trainer = make_trainer(replace(one, resume=str(four), **settings), reward)
    if rows:
        rows = trainer.task.dataset.select(range(rows))
        trainer.task = replace(trainer.task, dataset=rows)
    with pytest.raises(UserError, match=match) as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert content(four) == before


def refused_resume(config, run: Path) -> str:
    with pytest.raises(UserError, match=r"^resume: ") as error:
        make_trainer(replace(config, resume=str(run))).train()
    return str(error.value)


def agents_named(message: str) -> list[str]:
    """Returns the models of the new run that an error message proposes."""
    flags = shlex.split(message.partition("A new run")[2])
    assert "--output" in flags
    return [entry["model"]["name"] for entry in parse_yaml(flags[flags.index("--agents") + 1])]


def test_the_error_for_a_changed_reward_proposes_a_new_run_from_all_agents(one, four):
    agents = [f"{four}/{name}" for name in AGENTS]
    other_file(four / "checkpoints/iter-000004")
    message = refused_resume(one, four)
    assert agents_named(message) == agents
    assert not re.search("[0-9a-f]{16}", message.replace(str(four), ""))  # no hash

    (four / "summary.json").unlink()  # an unfinished run has no saved agents
    message = refused_resume(one, four)
    assert "--iterations 4" in message and "--agents" not in message


def test_a_proposed_new_run_keeps_each_agents_own_settings(one, four):
    agents = [AgentConfig(learning_rate=2e-4), AgentConfig(trained=False)]
    message = refused_resume(replace(one, agents=agents), four)
    flags = shlex.split(message.partition("A new run")[2])
    proposed = parse_yaml(flags[flags.index("--agents") + 1])
    assert proposed == [
        {"model": {"name": f"{four}/agent_1"}, "learning_rate": 2e-4},
        {"model": {"name": f"{four}/agent_2"}, "trained": False},
    ]


def test_metrics_of_a_failed_extension_are_cut_off_when_the_finished_run_is_resumed(one, four):
    metrics = four / "metrics.jsonl"
    before = metrics.read_bytes()
    last = read_rows(metrics)[-1] | {"iteration": 4}
    metrics.write_bytes(before + json.dumps(last).encode() + b"\n")
    with pytest.raises(UserError, match="being extended"):
        of_run(four, {"group": "a", "seed": 0})
    make_trainer(replace(one, iterations=4, resume=str(four))).train()
    assert metrics.read_bytes() == before


def test_the_error_for_a_damaged_only_checkpoint_proposes_a_new_run(one, four):
    for number in (2, 3):
        shutil.rmtree(four / f"checkpoints/iter-{number:06d}")
    os.truncate(four / "checkpoints/iter-000004" / WEIGHTS, 100)
    message = refused_resume(one, four)
    assert agents_named(message) == [f"{four}/{name}" for name in AGENTS]
    assert "Delete" not in message
    (four / "summary.json").unlink()
    message = refused_resume(one, four)
    assert f"--config {four}/config.yaml" in message and "--agents" not in message


def test_a_run_continues_from_the_previous_checkpoint_if_the_last_is_deleted(one, whole, four):
    shutil.rmtree(four / "checkpoints/iter-000004")
    make_trainer(replace(one, resume=str(four))).train()
    same(whole, four)


def test_resuming_a_folder_without_a_run_is_refused(one, tmp_path):
    for changes in ({"resume": str(tmp_path / "nothing")}, {"resume": str(tmp_path)}):
        with pytest.raises(UserError, match=r"^resume: "):
            make_trainer(replace(one, **changes)).train()
    with pytest.raises(UserError, match=r"^resume: "):
        make_trainer(replace(one, resume="auto", output=None)).train()


def test_resume_auto_starts_no_run_among_other_files(one, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a"}\n')
    (tmp_path / "config.yaml").write_text("iterations: 1\n")  # a user's file, not a run's
    with pytest.raises(UserError, match=r"^output: "):
        make_trainer(replace(one, resume="auto", output=str(tmp_path))).train()
    assert data.read_text() == '{"prompt": "a"}\n'


def test_only_the_newest_checkpoints_stay_and_nothing_is_pickled(whole):
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["iter-000004", "iter-000005", "iter-000006"]
    kinds = {file.suffix for file in (whole / "checkpoints").rglob("*") if file.is_file()}
    assert kinds == {".json", ".safetensors"}


def test_a_trainer_can_train_only_once(one):
    trainer = make_trainer(replace(one, iterations=1))
    trainer.train()
    with pytest.raises(UserError, match=r"^train: "):
        trainer.train()


def test_a_checkpoint_is_on_disk_before_it_is_renamed(one, monkeypatch):
    """`fsync` is called for all files, then for their folder. A file keeps its inode when it is renamed."""
    trainer = make_trainer(replace(one, iterations=1))
    folder = trainer.train().folder
    events = []
    rename = os.replace

    def renamed(*paths):
        events.append("renamed")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "replace", renamed)
    trainer.state.iteration = 2
    save(trainer.run, trainer.state, trainer.agents, trainer.callbacks, keep=3)
    checkpoint = folder / "checkpoints/iter-000002"
    *files, listed, event, named = events
    contents = [*folder.glob("*.jsonl"), *checkpoint.iterdir()]
    assert set(files) == {file.stat().st_ino for file in contents}
    assert (listed, event) == (checkpoint.stat().st_ino, "renamed")
    assert named == checkpoint.parent.stat().st_ino


class Counts(Callback):
    """Counts iterations and saves the count in checkpoints."""

    def __init__(self):
        self.counted = 0

    def on_iteration_end(self, trainer, iteration):
        self.counted += 1

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state):
        self.counted = state["counted"]


def test_callbacks_are_resumed_with_their_state(one, tmp_path):
    config = replace(one, output=str(tmp_path / "run"))
    reward = after(count_good, 3 + 2, interrupt)
    with pytest.raises(Interrupted):
        make_trainer(config, reward, [Callback(), Counts()]).train()
    counts = Counts()
    make_trainer(replace(config, resume="auto"), callbacks=[Callback(), counts]).train()
    assert counts.counted == 6
    longer = replace(config, resume="auto", iterations=7)
    with pytest.raises(UserError, match="callbacks"):
        make_trainer(longer, callbacks=[Counts()]).train()


def test_an_update_that_is_not_finite_ends_the_run(one, whole, tmp_path):
    """The run can be resumed, although agent_1 has already been updated in that iteration."""
    other = replace(one, output=str(tmp_path / "nan"))
    trainer = make_trainer(other)
    spoil(trainer.agents[1], 2)
    with pytest.raises(NotFinite, match=r"iteration 2: agent_2 as \w+: the loss"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.agents[1].learner.model_params)
    make_trainer(replace(other, resume="auto")).train()
    same(whole, tmp_path / "nan")


@pytest.mark.parametrize(("algorithm", "rank"), [("ppo", 4), ("grpo", 0)])
def test_a_gradient_that_is_not_finite_ends_the_run(one, rank, algorithm):
    config = replace(one, ppo=replace(one.ppo, micro_batch=3), lora=LoraConfig(rank=rank))
    trainer = make_trainer(replace(config, algorithm=algorithm, group_size=2))
    spoil(trainer.agents[1], 2, "gradient")
    with pytest.raises(NotFinite, match="iteration 2: agent_2 as observer: the gradient"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.agents[1].learner.model_params)


@pytest.mark.parametrize("step", ["rename", "removal of an old one"])
def test_a_run_killed_while_it_writes_a_checkpoint_ends_the_same(
    one, whole, tmp_path, monkeypatch, step
):
    """An exception that no handler catches stands in for SIGKILL."""
    config = replace(one, output=str(tmp_path / "killed"), resume="auto")

    class Killed(BaseException):
        pass

    # The kill comes while the fifth checkpoint is renamed, or when the first is removed after the fourth.
    module, name, call = (os, "replace", 5) if step == "rename" else (shutil, "rmtree", 1)
    original = getattr(module, name)
    calls = [0]

    def dies(path, *args, **kwargs):
        if Path(path) == tmp_path / "killed/checkpoints/.unfinished" and Path(path).exists():
            calls[0] += 1
            if calls[0] == call:
                raise Killed
        return original(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, dies)
        with pytest.raises(Killed):
            make_trainer(config).train()
    newest = sorted(path.name for path in (tmp_path / "killed/checkpoints").glob("iter-*"))[-1]
    assert newest == "iter-000004" and (tmp_path / "killed/checkpoints/.unfinished").exists()
    make_trainer(config).train()
    same(whole, tmp_path / "killed")
    assert not list((tmp_path / "killed").rglob(".unfinished*"))
