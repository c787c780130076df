"""The group learners' advantages, losses and gradients are those of current TRL."""

from pathlib import Path

from conftest import ROOT


def test_group_learners_equal_trl_1_16(command):
    """Against numbers that TRL's own trainers computed: benchmarks/trl_formulas.py."""
    script = ROOT / "benchmarks" / "trl_formulas.py"
    numbers = Path(__file__).with_name("trl_1_16_0.safetensors")
    ended = command(script, "--with", "cory", numbers)
    assert ended.status == 0, ended
