"""Agents on separate devices share no weights and are updated in parallel threads."""

import threading
from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from conftest import make_trainer
from run_files import outcome

from cory.build import make_agents
from cory.config import CheckpointConfig, CoryConfig, LoraConfig
from cory.parallel import devices
from cory.parallel.devices import at_the_same_time, configure, is_out_of_memory

DEVICES = [{"device": "cpu"}, {"device": "cpu"}]


def test_agents_are_made_on_the_cpu_although_accelerate_chose_the_gpu(config, monkeypatch):
    """In a notebook, accelerate may have chosen the GPU in an earlier cell."""
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
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure(torch.device("cpu"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_machine_is_named_after_its_processor_or_gpu(monkeypatch):
    entries = {"model name": "AMD EPYC", "flags": "fpu avx512f avx512_bf16"}
    monkeypatch.setattr(devices, "_cpuinfo", entries.get)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert devices.machine_name(torch.device("cpu")) == "AMD EPYC, AVX512-BF16"
    entries["flags"] = "fpu avx512f"
    assert devices.machine_name(torch.device("cpu")) == "AMD EPYC, AVX512"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 {device.index}")
    assert devices.machine_name(torch.device("cuda", 1)) == "H200 1"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_cuda_libraries_errors_count_as_out_of_memory(message, expected):
    assert is_out_of_memory(RuntimeError(message)) == expected


@pytest.mark.parametrize("kind", ["ppo", "rloo"])
def test_agents_on_separate_devices_train_to_the_same_result(config, tmp_path, kind):
    """This also holds with counterfactual credit, an agent in two roles, or a resume without separate devices."""
    config = replace(config, iterations=3, checkpoint=CheckpointConfig(save_every=1))
    if kind == "ppo":
        credit = CoryConfig(exchange_period=2, credit="counterfactual")
        config = replace(config, cory=credit, ppo=replace(config.ppo, mini_batch_size=4))
    else:
        chain = CoryConfig(exchange_period=2, chain_length=3)
        lora = LoraConfig(rank=4)
        config = replace(config, cory=chain, lora=lora, algorithm="rloo", group_size=2)
    together = make_trainer(config).train().folder
    apart = replace(config, output=str(tmp_path / "apart"), agents=DEVICES)
    expected = outcome(together)
    assert outcome(make_trainer(apart).train().folder) == expected
    if kind == "ppo":
        first = replace(apart, output=str(tmp_path / "resumed"), iterations=1)
        make_trainer(first).train()
        for iterations, agents in ((2, []), (3, DEVICES)):
            resumed = replace(first, iterations=iterations, resume=first.output, agents=agents)
            make_trainer(resumed).train()
        assert outcome(tmp_path / "resumed") == expected


def test_agents_on_separate_devices_share_no_weights(config):
    def storage(model):
        return {parameter.data_ptr() for parameter in model.parameters()}

    for lora in (LoraConfig(), LoraConfig(rank=4)):
        agents = make_agents(replace(config, agents=DEVICES, lora=lora))
        learners = [agent.learner for agent in agents]
        models = [learner.model for learner in learners]
        models += [learner.reference for learner in learners if learner.reference is not None]
        sizes = [len(storage(model)) for model in models]
        assert len(set().union(*map(storage, models))) == sum(sizes)


def test_updates_run_at_the_same_time(config):
    both_updates = threading.Barrier(2, timeout=60)
    trainer = make_trainer(replace(config, agents=DEVICES))
    for agent in trainer.agents:
        update = agent.learner.update
        agent.learner.update = lambda *args, update=update: (
            both_updates.wait() is not None and update(*args)
        )
    trainer.iteration(0)


def test_threads_are_divided_between_updates_and_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert at_the_same_time([torch.get_num_threads] * 2) == [2, 2]
        assert at_the_same_time([torch.get_num_threads] * 5) == [1] * 5
        assert torch.get_num_threads() == 4
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
    assert any("second" in note for note in caught.value.__notes__)
