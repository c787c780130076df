"""On a simulated accelerator, no learner makes a device mistake, and each gives the same metrics as on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "simulated_run.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("simulated")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, RUN, folder], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    "algorithm", ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce"]
)
def test_metrics_equal_those_on_the_cpu(results, algorithm):
    on_cpu, on_sim = results[algorithm]["cpu"], results[algorithm]["sim:0"]
    assert len(on_cpu) == 4
    for record, expected in zip(on_sim, on_cpu, strict=True):
        assert record == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_planted_mistake_is_found(results):
    assert results["mistake"].startswith("Expected all tensors to be on the same device")
    assert "got some on cpu and some on sim" in results["mistake"]
