"""Agents with devices of their own: they share nothing, and are updated at the same time, in threads."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from test_resume import count_good, make_trainer, outcome, same, spoil

from cory.agent import make_agents
from cory.config import CheckpointConfig, CoryConfig, LoraConfig, ParallelConfig
from cory.errors import UserError
from cory.parallel.devices import at_the_same_time, configure, is_out_of_memory
from cory.run import measure

DEVICES = [{"device": "cpu"}, {"device": "cpu"}]


def test_a_process_that_began_on_a_gpu_goes_on_on_the_cpu(config, monkeypatch):
    """As in a notebook. What accelerate chooses by itself is the GPU, where there is one."""
    before = dict(PartialState._shared_state)
    try:
        PartialState._reset_state()
        monkeypatch.setattr(PartialState, "default_device", torch.device("cuda"))
        assert PartialState().device.type == "cuda"
        (agent, _) = make_agents(config)
        assert agent.learner.accelerator.device.type == "cpu"
    finally:
        PartialState._reset_state()
        PartialState._shared_state.update(before)


def test_attention_on_a_gpu_is_not_cudnns():
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure(torch.device("cpu"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_library_without_memory_is_out_of_memory(message):
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def test_only_gpus_in_use_are_asked(monkeypatch):
    waited_for = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited_for.append)
    seconds = {}
    with measure.timed(seconds, "generate"):
        pass
    assert waited_for == []  # on a machine with GPUs, too, none of which is used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", [2**20, 0, 3 * 2**20].__getitem__)
    with measure.timed(seconds, "generate"):
        pass
    assert waited_for == [0, 2] and measure.peak_memory_mb() == 3


def with_devices(config, folder: Path):
    return replace(config, output=str(folder), agents=DEVICES)


@pytest.mark.parametrize("kind", ["ppo", "rloo"])
def test_agents_with_devices_train_as_others(config, tmp_path, kind):
    """Also with held roles, and responses for counterfactual credit."""
    if kind == "ppo":
        credit = CoryConfig(exchange_period=2, credit="counterfactual")
        config = replace(config, cory=credit, ppo=replace(config.ppo, mini_batch_size=4))
    else:
        chain = CoryConfig(exchange_period=2, chain_length=3)
        lora = LoraConfig(rank=4)
        config = replace(config, cory=chain, lora=lora, algorithm="rloo", group_size=2)
    together = make_trainer(config).train().folder
    apart = make_trainer(with_devices(config, tmp_path / "apart")).train().folder
    assert outcome(apart) == outcome(together)


def test_agents_with_devices_share_no_weights(config):
    def storage(model):
        return {parameter.data_ptr() for parameter in model.parameters()}

    for lora in (LoraConfig(), LoraConfig(rank=4)):
        agents = make_agents(replace(config, agents=DEVICES, lora=lora))
        models = [agent.learner.model for agent in agents]
        models += [
            agent.learner.reference for agent in agents if agent.learner.reference is not None
        ]
        assert len(set().union(*map(storage, models))) == sum(
            len(storage(model)) for model in models
        )


def test_updates_are_made_at_the_same_time(config):
    both_are_here = threading.Barrier(2, timeout=60)
    trainer = make_trainer(replace(config, agents=DEVICES))
    for agent in trainer.agents:
        update = agent.learner.update
        agent.learner.update = lambda *args, update=update: (
            both_are_here.wait() is not None and update(*args)
        )
    trainer.iteration(0)
    alone = make_trainer(config)
    for agent in alone.agents:
        agent.learner.update = lambda *args: pytest.fail(threading.current_thread().name)
    with pytest.raises(pytest.fail.Exception, match="MainThread"):
        alone.iteration(0)


def test_cores_are_shared_out_and_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert at_the_same_time([torch.get_num_threads] * 2) == [2, 2]
        assert at_the_same_time([torch.get_num_threads] * 5) == [1] * 5
        assert torch.get_num_threads() == 4
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [4]
    finally:
        torch.set_num_threads(before)


def test_all_calls_end_before_the_first_error_is_raised():
    done = []

    def fails():
        raise KeyError("first")

    def fails_later():
        done.append("second")
        raise ValueError("second")

    with pytest.raises(KeyError, match="first") as caught:
        at_the_same_time([lambda: done.append("zeroth"), fails, fails_later])
    assert sorted(done) == ["second", "zeroth"]
    assert caught.value.__notes__ == ["At the same time: ValueError: second"]


@pytest.mark.parametrize("faulty", [[0], [1], [0, 1]])
def test_an_update_that_fails_ends_the_run_and_it_continues(config, tmp_path, faulty):
    config = replace(config, checkpoint=CheckpointConfig(save_every=1))
    whole = make_trainer(with_devices(config, tmp_path / "whole")).train().folder
    failing = with_devices(config, tmp_path / "failing")
    trainer = make_trainer(failing)
    for index in faulty:
        spoil(trainer.agents[index], 2)
    names = [f"agent_{index + 1} as {('pioneer', 'observer')[index]}" for index in faulty]
    with pytest.raises(
        UserError, match=rf"^iteration 2: {names[0]}: the loss is not finite"
    ) as caught:
        trainer.train()
    notes = "\n".join(caught.value.__notes__)
    assert f"{tmp_path}/failing/checkpoints/iter-000001" in notes
    if len(faulty) == 2:
        assert f"At the same time: NotFinite: {names[1]}: the loss is not finite" in notes
    steps = [agent.optimizer_steps for agent in trainer.agents]
    assert steps == [4 if index in faulty else 8 for index in range(2)]
    make_trainer(replace(failing, resume="auto")).train()
    same(whole, tmp_path / "failing")


def test_a_run_continues_with_and_without_devices(config, tmp_path):
    whole = make_trainer(config).train().folder
    first = replace(config, output=str(tmp_path / "resumed"), iterations=2)
    make_trainer(replace(first, agents=DEVICES)).train()
    make_trainer(replace(first, iterations=3, resume=first.output)).train()
    make_trainer(
        replace(first, iterations=4, resume=first.output, agents=DEVICES), count_good
    ).train()
    same(whole, tmp_path / "resumed")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"agents": [{"device": "cpu"}, {}]},
            r"agents\.1\.device: ",
        ),
        (
            {"agents": [{"device": "gpu"}] * 2},
            "device: expected auto, cpu, cuda or cuda:N, got 'gpu'",
        ),
        ({"agents": [{"device": 3}] * 2}, r"agents\.0\.device: "),
        (
            {"agents": DEVICES, "parallel": ParallelConfig(shard="full")},
            "parallel.shard: expected none in a single process",
        ),
    ],
)
def test_what_does_not_go_with_devices_is_refused(config, monkeypatch, changes, message):
    monkeypatch.setattr("cory.agent.load_policy", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match=message):
        make_agents(replace(config, **changes))
