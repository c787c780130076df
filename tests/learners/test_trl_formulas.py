"""The group learners' advantages, losses and gradients are those of current TRL."""

import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_group_learners_equal_trl_1_16():
    """Against numbers that TRL's own trainers computed: benchmarks/trl_formulas.py."""
    script, numbers = (
        ROOT / "benchmarks" / "trl_formulas.py",
        Path(__file__).with_name("trl_1_16_0.safetensors"),
    )
    done = subprocess.run(
        [sys.executable, script, "--with", "cory", numbers], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
