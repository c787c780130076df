"""The program on a simulated accelerator: no device mistakes, the CPU's numbers, few waits."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cory.agent import Agent
from cory.learners.learner import Learner
from cory.learners.passes import Passes
from cory.learners.update import Update
from cory.models.sampling import sample
from cory.models.window import Window, pack

RUN = Path(__file__).parent / "simulated_run.py"
EQUAL = (
    "ppo",
    "full KL, micro-batches, reward scaling",
    "reinforce, counterfactual credit",
    "rloo, lora",
    "grpo, lora",
    "held out",
    "resumed",
    "two devices",
    "reward model",
    "evaluation",
    "benchmark",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Of each scenario, its result and counts by device, from one process."""
    folder = tmp_path_factory.mktemp("simulated")
    done = subprocess.run(
        [sys.executable, RUN, folder],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "results.json").read_text())


def waits(counts: dict[str, int], *functions: Callable) -> int:
    """How often the program waits for the device in functions of the project."""
    names = {function.__name__ for function in functions}
    return sum(
        n for line, n in counts.items() if line.startswith("wait") and line.split()[-1] in names
    )


@pytest.mark.parametrize("name", EQUAL)
def test_numbers_are_those_of_the_cpu(results, name):
    for device, outcome in results[name].items():
        assert "error" not in outcome, f"{device}: {outcome.get('error')}"
    on_cpu, on_sim = (results[name][device]["result"] for device in ("cpu", "sim:0"))
    assert on_cpu
    for record, expected in zip(on_sim, on_cpu, strict=True):
        assert record == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_bfloat16_trains(results):
    """Autocast's list of operations is the CPU's in the main, so numbers are near and not equal."""
    on_cpu, on_sim = (results["bf16"][device]["result"] for device in ("cpu", "sim:0"))
    assert on_sim[0]["entropy"] == pytest.approx(on_cpu[0]["entropy"], rel=0.02)
    assert all(math.isfinite(value) for record in on_sim for value in record.values())


@pytest.mark.parametrize(
    "name, place, operation",
    [
        ("advantages on the CPU", "losses.py ppo_losses", "aten.mul.Tensor got ['cpu', 'sim:0']"),
        (
            "advantages on the other device",
            "update.py select",
            "aten.index.Tensor got ['sim:0', 'sim:1']",
        ),
    ],
)
def test_a_planted_mistake_is_found(results, name, place, operation):
    message = results[name]["sim:0"]["result"]
    assert message.startswith(f"{place}: Expected all tensors to be on the same device")
    assert operation in message


def test_without_the_mistake_nothing_is_raised(results):
    assert results["advantages on the CPU"]["cpu"]["result"] == ""


def test_the_program_waits_once_per_token_and_once_per_step(results):
    """Two iterations of two agents, 8 responses of at most 6 tokens, four epochs of one step."""
    counts = results["ppo"]["sim:0"]["counts"]
    updates = 2 * 2
    batches_of_samples = 2 + 3  # before training, and with the solo answers after it
    assert updates < waits(counts, sample) <= 6 * (updates + 2 * batches_of_samples)
    assert waits(counts, Learner._gradients) == 4 * updates
    statistics = (Update.rollout_means, Update.term_means, Update.explained_variance)
    assert waits(counts, *statistics, Learner._statistics) == 3 * updates
    for function in (
        Passes.forward,
        Passes._fill,
        Learner._backward,
        Learner.terms_of_rows,
        Window.select,
        pack,
        Agent.respond,
    ):
        assert waits(counts, function) == 0, function
