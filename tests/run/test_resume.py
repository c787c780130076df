"""A run is never lost: checkpoints, resume, signals, faults. docs/reliability.md has the table of faults."""

import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_config, sentences

import cory.agent
import cory.callbacks.held_out
import cory.callbacks.metrics
from cory.agent import make_agents
from cory.callbacks import Callback
from cory.config import CheckpointConfig, CoryConfig, GuardsConfig, LoraConfig
from cory.errors import UserError
from cory.parallel import shards
from cory.prompts import RolePrompts
from cory.resume import checkpoint
from cory.run.signals import Interrupted
from cory.task import Task
from cory.trainer import CoryTrainer

ITERATIONS = 7
AGENTS = ["agent_1", "agent_2"]


def count_good(prompts, completions):
    return [float(completion.count("good")) + len(completion) / 50 for completion in completions]


def count_words(prompts, chains):
    """A team reward: the number of different words that a chain's responses have."""
    return [float(len({*" ".join(chain).split()})) for chain in chains]


def make_trainer(config, reward=count_good, callbacks=()) -> CoryTrainer:
    prompts = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')
    task = Task.from_prompts(
        [" ".join(text.split()[:4]) for text in sentences(40)], reward, prompts
    )
    if config.roles:
        task.team_reward = count_words
    held_out = task.dataset if config.eval_every else None
    return CoryTrainer(
        config, make_agents(config), task, eval_dataset=held_out, callbacks=callbacks
    )


@pytest.fixture(params=["full", "lora"])
def settings(request, config):
    """Seven iterations with everything that has a state: adaptive KL, running reward moments, exchanges."""
    return replace(
        config,
        iterations=ITERATIONS,
        cory=CoryConfig(exchange_period=2),
        lora=LoraConfig(rank=4 if request.param == "lora" else 0),
        ppo=replace(
            config.ppo,
            reward_scaling=True,
            reward_normalization=True,
            kl_horizon=100.0,
            mini_batch_size=4,
        ),
        checkpoint=CheckpointConfig(save_every=3),
    )


def make_one(config):
    return replace(config, iterations=6, checkpoint=CheckpointConfig(save_every=1, keep=3))


@pytest.fixture
def one(config):
    """A full fine-tuning run of 6 iterations with a checkpoint after each."""
    return make_one(config)


@pytest.fixture(scope="module")
def whole(policy_folder, tmp_path_factory) -> Path:
    """The folder of a run with the settings of `one`, without interruption. Tests only read it."""
    config = make_one(make_config(policy_folder, tmp_path_factory.mktemp("whole")))
    return make_trainer(config).train().folder


@pytest.fixture(scope="module")
def four(policy_folder, tmp_path_factory) -> Path:
    """The folder of a run with the settings of `one`, but of 4 iterations. Tests change copies of it."""
    config = make_one(make_config(policy_folder, tmp_path_factory.mktemp("four")))
    return make_trainer(replace(config, iterations=4)).train().folder


def outcome(folder: Path, agents=AGENTS):
    """All that must be equal to the bit: metrics, samples, final weights."""
    files = [folder / "metrics.jsonl", folder / "samples.jsonl"]
    files += [file for agent in agents for file in sorted((folder / agent).glob("*.safetensors"))]
    assert len(files) > 2
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def after(reward, calls: int, do):
    """The reward, but for its call number `calls` (from 1), which does something first."""
    count = [0]

    @functools.wraps(reward)  # the same reward, as far as a run's record tells
    def wrapped(prompts, completions):
        count[0] += 1
        if count[0] == calls:
            do()
        return reward(prompts, completions)

    return wrapped


def interrupt(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def same(a, b):
    a, b = outcome(a), outcome(b)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def test_interrupted_after_every_iteration_it_ends_the_same(settings, tmp_path):
    whole = make_trainer(settings).train().folder
    broken = replace(settings, output=str(tmp_path / "broken"))
    for k in range(ITERATIONS):
        number = (signal.SIGTERM, signal.SIGINT)[k % 2]
        # A fresh run first scores the samples before training in three calls: each agent alone, and the chain.
        reward = after(count_good, 4 if k == 0 else 1, lambda number=number: interrupt(number))
        with pytest.raises(Interrupted) as error:
            make_trainer(replace(broken, resume=None if k == 0 else "auto"), reward).train()
        assert error.value.code == 128 + number
        lines = (tmp_path / "broken/metrics.jsonl").read_text().splitlines()
        assert len(lines) == 2 * (k + 1)
    make_trainer(replace(broken, resume="auto")).train()
    same(whole, tmp_path / "broken")
    summaries = [
        json.loads((folder / "summary.json").read_text()) for folder in (whole, tmp_path / "broken")
    ]
    assert (
        summaries[0]["samples"] == summaries[1]["samples"]
        and summaries[0]["agents"] == summaries[1]["agents"]
    )


def test_longer_run_continues_a_finished_one(one, whole, four, tmp_path):
    folder = shutil.copytree(four, tmp_path / "short")
    make_trainer(replace(one, output=str(folder), resume="auto")).train()
    same(whole, folder)


def test_auto_without_any_run_starts_one(one, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = make_trainer(replace(one, output=None, resume="auto", iterations=2)).train()
    assert "no earlier run" in capsys.readouterr().out
    other = make_trainer(replace(one, output=None, resume="auto", iterations=2, seed=1)).train()
    assert other.folder != run.folder  # other settings that matter: another run
    again = make_trainer(replace(one, output=None, resume="auto", iterations=3)).train()
    assert again.folder == run.folder
    assert len({record["iteration"] for record in again.history}) == 3

    for iterations in (2, 3):  # a name from Python, which is no pattern
        named = make_trainer(replace(one, output=None, resume="auto", iterations=iterations))
        named.name = "sweep[lr]"
        assert named.train().folder == Path("runs/sweep[lr]")


def test_settings_that_matter_must_be_the_same(one):
    make_trainer(replace(one, iterations=1)).train()
    for changes in ({"resume": "auto"}, {"resume": one.output}):
        changed = replace(one, ppo=replace(one.ppo, learning_rate=5e-4), seed=3, **changes)
        with pytest.raises(UserError, match=r"seed: 0 -> 3; ppo.learning_rate: 0.001 -> 0.0005"):
            make_trainer(changed).train()
    make_trainer(replace(one, tracker="none", sample_every=0, resume="auto", iterations=2)).train()


def test_a_run_of_other_agents_is_not_called_damaged(one, capsys):
    folder = make_trainer(replace(one, iterations=1)).train().folder
    capsys.readouterr()
    single = replace(one.cory, num_agents=1)
    with pytest.raises(UserError, match=r"got others: cory\.num_agents: 2 -> 1"):
        make_trainer(replace(one, cory=single, resume=str(folder))).train()
    assert "Skipping" not in capsys.readouterr().out


def test_resume_of_what_is_no_run(one, tmp_path):
    checkpoints = make_trainer(replace(one, iterations=1)).train().folder / "checkpoints"
    for place in (tmp_path / "nothing", tmp_path, checkpoints / "iter-000001"):
        with pytest.raises(UserError, match="resume: expected auto, or the folder of a run"):
            make_trainer(replace(one, resume=str(place))).train()


DAMAGE = {
    "truncated": (lambda path: os.truncate(path / "agent_2.safetensors", 100), "100 bytes"),
    "bit flipped": (lambda path: flip(path / "agent_1.safetensors"), "SHA-256"),
    "missing": (
        lambda path: (path / "agent_1.safetensors").unlink(),
        "agent_1.safetensors is missing",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest no json": (
        lambda path: (path / "manifest.json").write_text("{"),
        "manifest.json is not JSON",
    ),
    "foreign manifest": (
        lambda path: (path / "manifest.json").write_text('{"files": {"../x": {}}}'),
        r"\.\./x",
    ),
    "link": (lambda path: link(path / "agent_1.safetensors"), "agent_1.safetensors is missing"),
}


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link(file: Path):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_skipped_with_the_reason(
    one, whole, four, tmp_path, capsys, damage
):
    folder = shutil.copytree(four, tmp_path / "short")
    harm, reason = DAMAGE[damage]
    harm(folder / "checkpoints/iter-000004")
    (folder / "summary.json").unlink()  # as if it had been killed before it ended
    capsys.readouterr()
    resumed = replace(one, output=str(folder), resume="auto")
    make_trainer(resumed).train()
    said = capsys.readouterr().out
    assert "Skipping the checkpoint" in said and "iter-000004" in said
    assert re.search(reason, said)
    assert "iter-000003: next is iteration 4" in said
    same(whole, folder)


def test_a_damaged_checkpoint_is_not_called_the_last_good_state(one, four, tmp_path):
    folder = shutil.copytree(four, tmp_path / "short")
    flip(folder / "checkpoints/iter-000004/agent_1.safetensors")
    (folder / "summary.json").unlink()
    trainer = make_trainer(replace(one, output=str(folder), resume="auto"))
    spoil(trainer.agents[1], 1)  # in iteration 4, when agent_1 has learnt already
    with pytest.raises(UserError, match=r"The last good state is .*iter-000003"):
        trainer.train()
    assert not (
        folder / "checkpoints/iter-000004"
    ).exists()  # nor does it count among those that are kept


@pytest.mark.parametrize(
    "change", ["short metrics", "no lengths", "no agents", "lengths elsewhere", "no size"]
)
def test_a_checkpoint_whose_files_do_not_fit_is_not_taken(one, change):
    """Checksums can be right and the content wrong: nothing is cut, lengthened or raised raw."""
    once = replace(one, iterations=2, checkpoint=CheckpointConfig(save_every=2))
    folder = make_trainer(once).train().folder
    path = folder / "checkpoints/iter-000002"
    state = json.loads((path / "state.json").read_text())
    manifest = json.loads((path / "manifest.json").read_text())
    if change == "short metrics":
        os.truncate(folder / "metrics.jsonl", 10)
    elif change == "no size":
        manifest["files"]["state.json"] = 7
    else:
        state.pop("agents" if change == "no agents" else "lengths")
        if change == "lengths elsewhere":
            state["lengths"] = {"../../x": 0}
        (path / "state.json").write_text(json.dumps(state))
        content = (path / "state.json").read_bytes()
        manifest["files"]["state.json"] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    (path / "manifest.json").write_text(json.dumps(manifest))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(checkpoint.Damaged):
        checkpoint.read(path, AGENTS)
    with pytest.raises(UserError, match="resume: expected a checkpoint of the end"):
        make_trainer(replace(one, iterations=3, resume=str(folder))).train()
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_checkpoint_of_another_model_is_an_error(one):
    folder = make_trainer(replace(one, iterations=1)).train().folder
    agents = make_agents(replace(one, lora=LoraConfig(rank=2)))
    path, state = checkpoint.newest(folder, AGENTS)
    with pytest.raises(UserError, match="resume: expected a checkpoint of these agents"):
        checkpoint.load(path, state, agents)


def test_no_pickle_is_written(one):
    folder = make_trainer(replace(one, iterations=2)).train().folder
    kinds = {file.suffix for file in (folder / "checkpoints").rglob("*") if file.is_file()}
    assert kinds == {".json", ".safetensors"}


def test_memory_that_runs_out_while_responses_are_sampled_leaves_the_state(one, monkeypatch):
    sample, calls = cory.agent.sample, []

    def limited(*args):
        calls.append(args)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return sample(*args)

    monkeypatch.setattr(cory.agent, "sample", limited)
    trainer = make_trainer(one)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    done = trainer.run.iterations_done
    assert done > 0
    assert (trainer.run.folder / f"checkpoints/iter-{done:06d}").exists()


def rewrite(path: Path, change) -> None:
    """Changes the state of a checkpoint, and its checksum."""
    state, manifest = (
        json.loads((path / name).read_text()) for name in ("state.json", "manifest.json")
    )
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    data = (path / "state.json").read_bytes()
    manifest["files"]["state.json"] = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_state_that_is_saved_already_is_not_written_again(one, whole, damaged):
    """Else a process that is killed between two renames would leave none."""
    saved = Path(one.output, "checkpoints/iter-000002")
    before = []

    def fail():
        if damaged:
            flip(saved / "agent_1.safetensors")
        before[:] = [file.stat().st_ino for file in sorted(saved.iterdir())]
        raise UserError("the reward's own fault")

    def written_again():
        return before != [file.stat().st_ino for file in sorted(saved.iterdir())]

    # In iteration 3, which is the first one after the resume.
    for resume, calls in ((None, 6), ("auto", 1)):
        with pytest.raises(UserError, match=f"The last good state is {saved}"):
            make_trainer(replace(one, resume=resume), after(count_good, calls, fail)).train()
        assert written_again() == damaged
        assert checkpoint.read(saved, AGENTS).iteration == 2
    make_trainer(replace(one, resume="auto")).train()
    same(whole, Path(one.output))


@pytest.mark.parametrize("where", ["checkpoint", "metrics"])
def test_full_disk_leaves_the_run_alive(one, whole, tmp_path, monkeypatch, where):
    other = replace(one, output=str(tmp_path / "full"))
    trainer = make_trainer(other)
    full = [False]

    def toggle(on):
        full[0] = on

    trainer.task.reward = after(
        after(count_good, 5, lambda: toggle(True)), 7, lambda: toggle(False)
    )
    if where == "checkpoint":
        save_file = shards.save_file

        def failing(tensors, path):
            if full[0]:
                Path(path).write_bytes(b"part of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            save_file(tensors, path)

        monkeypatch.setattr(shards, "save_file", failing)
    else:
        from cory.run import jsonl

        class Disk:
            def __init__(self, file):
                self.file = file

            def write(self, data):
                if full[0]:
                    self.file.write(data[:5])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return self.file.write(data)

            def __getattr__(self, name):
                return getattr(self.file, name)

        opened = jsonl.JsonlWriter.__init__

        def init(self, *args, **kwargs):
            opened(self, *args, **kwargs)
            self.file = Disk(self.file)

        monkeypatch.setattr(jsonl.JsonlWriter, "__init__", init)
    with pytest.warns(UserWarning, match="No space left on device"):
        run = trainer.train()
    same(whole, run.folder)
    assert not list((run.folder / "checkpoints").glob(".partial*"))


def test_folder_that_cannot_be_written_is_refused_before_training(one, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="output: expected a folder that can be written"):
        make_trainer(replace(one, output=str(tmp_path / "file/run"))).train()

    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    for output in (str(tmp_path / "closed/run"), None):
        with pytest.raises(
            UserError, match=r"output: expected a folder that can be written.*Permission denied"
        ):
            make_trainer(replace(one, output=output)).train()


def test_a_run_that_cannot_be_written_is_not_resumed(one, four, tmp_path, monkeypatch):
    run = shutil.copytree(four, tmp_path / "copy")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("cory.run.folder.JsonlWriter", refuse)
    with pytest.raises(UserError, match=r"output: expected a folder that can be written, .*copy"):
        make_trainer(replace(one, resume=str(run))).train()


@pytest.mark.parametrize(
    "output, message",
    [
        ("-x", "expected a path that does not begin with a dash, got '-x'"),
        ("runs/" + "ä" * 120, "expected a folder's name of at most 200 bytes, got 240"),
    ],
)
def test_names_that_commands_and_file_systems_do_not_take_are_refused(
    one, tmp_path, monkeypatch, output, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"output: {message}"):
        make_trainer(replace(one, output=output)).train()
    assert not list(tmp_path.iterdir())


def test_run_that_another_process_writes_is_left_alone(one, tmp_path):
    make_trainer(one).train()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code = "import sys; from pathlib import Path; from cory.run.output import locked\n"
    code += "with locked(Path(sys.argv[1])): print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, one.output]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"1\n"
        again = replace(one, resume="auto", iterations=one.iterations + 1)
        with pytest.raises(
            UserError, match=r"expected a folder that no other process is writing, got '.*run'"
        ):
            make_trainer(again).train()
        assert files == {path: path.read_bytes() for path in files}
        other.kill()
    make_trainer(again).train()
    assert outcome(Path(one.output))


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_reward_that_fails_loses_nothing(one, whole, tmp_path, kind):
    count = [0]

    @functools.wraps(count_good)
    def failing(prompts, completions):
        count[0] += 1
        if count[0] == 3 + 4:  # three for the samples before training: the fourth iteration
            if kind == "raises":
                raise ZeroDivisionError("the reward's own fault")
            return [float("nan")] * len(prompts)
        return count_good(prompts, completions)

    other = replace(one, output=str(tmp_path / "failed"), checkpoint=CheckpointConfig(save_every=0))
    kind_of_error = ZeroDivisionError if kind == "raises" else UserError
    with pytest.raises(kind_of_error, match=r"own fault|iteration 4.*finite"):
        make_trainer(other, failing).train()
    assert (tmp_path / "failed/checkpoints/iter-000003/manifest.json").exists()
    make_trainer(replace(other, resume="auto")).train()
    same(whole, tmp_path / "failed")


@pytest.mark.parametrize(
    "where, saved",
    [
        (cory.callbacks.held_out, 4),  # after the update, so the iteration is done
        (cory.callbacks.metrics, 3),
    ],
)
def test_what_fails_beside_the_rewards_loses_nothing(one, whole, monkeypatch, where, saved):
    name = {cory.callbacks.held_out: "evaluate", cory.callbacks.metrics: "of_task"}[where]
    function, failures = getattr(where, name), []

    def failing(trainer, iteration, *args):
        if iteration.index == 3 and not failures:
            failures.append(iteration)
            raise ZeroDivisionError("a function's own fault")
        return function(trainer, iteration, *args)

    monkeypatch.setattr(where, name, failing)
    one = replace(one, eval_every=2, checkpoint=CheckpointConfig(save_every=0))
    with pytest.raises(ZeroDivisionError):
        make_trainer(one).train()
    saves = list((Path(one.output) / "checkpoints").iterdir())
    assert [path.name for path in saves] == [f"iter-{saved:06d}"]
    folder = make_trainer(replace(one, resume="auto")).train().folder
    for file in sorted(whole.glob("agent_*/*.safetensors")):
        assert file.read_bytes() == (folder / file.relative_to(whole)).read_bytes()


def test_checkpoints_may_be_on_another_disk(one, four, tmp_path):
    run = shutil.copytree(four, tmp_path / "copy")
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    again = make_trainer(replace(one, iterations=5, resume=str(run))).train()
    assert again.iterations_done == 5


class Reads(Callback):
    """Takes it for granted that there is a held-out reward."""

    def on_iteration_end(self, trainer, iteration):
        if trainer.config.eval_every and (iteration.index + 1) % trainer.config.eval_every == 0:
            iteration.eval_task_rewards[0] += 0


def test_a_callback_that_misses_what_has_failed_does_not_hide_it(one, monkeypatch):
    def failing(*args):
        raise ZeroDivisionError("a function's own fault")

    monkeypatch.setattr(cory.callbacks.held_out, "evaluate", failing)
    with pytest.raises(ZeroDivisionError):
        make_trainer(replace(one, eval_every=2), callbacks=[Reads()]).train()


def test_that_checkpoints_are_missing_is_judged_by_the_runs_own_settings(one, four, tmp_path):
    run = shutil.copytree(four, tmp_path / "copy")
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    settings = replace(one, resume=str(run), checkpoint=CheckpointConfig(save_every=10))
    with pytest.raises(UserError, match=r"expected a valid checkpoint in .* got none. Nothing was"):
        make_trainer(settings).train()
    assert (run / "metrics.jsonl").read_bytes() == before


def spoil(agent, iteration: int, what: str = "loss"):
    """In this iteration, the agent's update has a logit, or a gradient, that is not a number in row 3."""
    learner = agent.learner
    forward, update, seen, bad = learner.forward, learner.update, [0], []

    def counted(rollouts, *args):
        seen[0] += 1
        bad[:] = rollouts[0].prompt_ids[3].tolist(), rollouts[0].response_ids[3].tolist()
        return update(rollouts, *args)

    def is_bad(rows, i):
        width = rows.prompt_lengths[i]
        start = rows.input_ids.shape[1] + 1 - rows.response_ids.shape[1] - width
        query = rows.input_ids[i, start : start + width].tolist()
        return [query, rows.response_ids[i, : rows.response_lengths[i]].tolist()] == bad

    def spoiled(rows):
        result = forward(rows)
        if seen[0] != iteration:
            return result
        if what != "gradient":
            result.logprobs.data[[is_bad(rows, i) for i in range(len(rows.input_ids))]] = math.nan
        if what == "gradient" and result.logprobs.requires_grad:
            factors = [math.nan if is_bad(rows, i) else 1.0 for i in range(len(rows.input_ids))]
            result.logprobs.register_hook(
                lambda gradient: gradient * gradient.new_tensor(factors)[:, None]
            )
        return result

    learner.update, learner.forward = counted, spoiled


@pytest.mark.parametrize("agent", AGENTS)
def test_update_that_is_not_finite_ends_the_run(one, whole, tmp_path, agent):
    other = replace(one, output=str(tmp_path / "nan"))
    trainer = make_trainer(other)
    spoiled = trainer.agents[AGENTS.index(agent)]
    # agent_1 learns first, so that agent_2's fault comes in the middle of iteration 2.
    spoil(spoiled, 2)
    before = [p.detach().clone() for p in spoiled.learner.model_params]
    with pytest.raises(
        UserError, match=rf"iteration 2: {agent} as \w+: the loss is not finite"
    ) as error:
        trainer.train()
    assert "iter-000001" in str(error.value) and "A new run" in str(error.value)
    weights = spoiled.learner.model_params
    assert all(p.isfinite().all() for p in weights)
    # The first iteration's stay.
    assert not all(torch.equal(p, q) for p, q in zip(weights, before, strict=True))
    make_trainer(replace(other, resume="auto")).train()
    same(whole, tmp_path / "nan")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_gradient_that_is_not_finite_ends_the_run(one, rank, algorithm):
    ppo = replace(one.ppo, micro_batch=3)
    trainer = make_trainer(
        replace(one, lora=LoraConfig(rank=rank), ppo=ppo, algorithm=algorithm, group_size=2)
    )
    spoil(trainer.agents[1], 2, "gradient")
    with pytest.raises(
        UserError, match=r"iteration 2: agent_2 as observer: the gradient is not finite\n"
    ):
        trainer.train()


def test_a_run_may_go_on_with_other_sizes_of_passes(one, whole):
    """As after memory ran out. They change rounding alone."""
    folder = make_trainer(replace(one, iterations=2)).train().folder
    smaller = replace(one, resume=str(folder), ppo=replace(one.ppo, micro_batch=3))
    smaller.model = replace(one.model, gradient_checkpointing=True)
    trainer = make_trainer(smaller)
    run = trainer.train()
    assert {agent.learner.pass_size.micro_batch for agent in trainer.agents} == {3}
    expected = [json.loads(line) for line in (whole / "metrics.jsonl").open()]
    assert len(run.history) == len(expected)
    for record, other in zip(run.history, expected, strict=True):
        assert record["task_reward"] == pytest.approx(other["task_reward"], abs=1e-4)
        assert record["kl"] == pytest.approx(other["kl"], abs=1e-3)


def test_flags_are_raised_and_said_once(one, capsys):
    config = replace(one, guards=GuardsConfig(kl_bound=1e-6), iterations=3)
    run = make_trainer(config, lambda prompts, completions: [1.0] * len(prompts)).train()
    assert all("equal_rewards" in record["flags"] for record in run.history)
    assert any("kl" in record["flags"] for record in run.history[2:])
    said = capsys.readouterr().err
    assert said.count("nothing to learn") == 1


def test_early_stop_on_kl(one):
    run = make_trainer(replace(one, guards=GuardsConfig(stop_at_kl=1e-9))).train()
    done = len({record["iteration"] for record in run.history})
    assert 1 < done < 6
    assert (run.folder / "agent_2/model.safetensors").exists()
    assert (run.folder / f"checkpoints/iter-{done:06d}").exists()


def test_a_schedule_holds_the_number_of_iterations(one):
    config = replace(
        one, ppo=replace(one.ppo, schedule="linear"), checkpoint=CheckpointConfig(save_every=2)
    )
    folder = make_trainer(config).train().folder
    with pytest.raises(UserError, match=r"iterations: 6 -> 8"):
        make_trainer(replace(config, iterations=8, resume=str(folder))).train()
