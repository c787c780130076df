"""The group learners have the same advantages, losses and gradients as TRL 1.16."""

from pathlib import Path

from conftest import ROOT


def test_group_learners_equal_trl_1_16(command):
    """benchmarks/trl_formulas.py compares the learners' numbers with those that TRL's trainers computed."""
    script = ROOT / "benchmarks" / "trl_formulas.py"
    numbers = Path(__file__).with_name("trl_1_16_0.safetensors")
    ended = command(script, "--with", "cory", numbers)
    assert ended.status == 0, ended
