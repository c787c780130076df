"""Without TRL or with a newer TRL, group learners (GRPO, for example) train and PPO is refused."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
# Applies a length reward from TRL, as docs/learners.md does. The responses have four and eight tokens; the limit is 8.
OVERLONG = """
from trl.rewards import get_soft_overlong_punishment
from cory.rewards import score_by_function
reward = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)
columns = {"completion_ids": [[1] * 4, [1] * 8]}
print((score_by_function([reward], ["a"] * 2, ["b"] * 2, columns).total + 0.0).tolist())
"""
SIZES = ["--iterations=2", "--ppo.batch_size=8", "--ppo.mini_batch_size=8"]


def train(packages: list[Path], output: Path, algorithm: str) -> subprocess.CompletedProcess[str]:
    """Trains a pair on the IMDB toy in an interpreter that sees only the packages of these folders."""
    script = [ROOT / "imdb_train/cory.py", "--algorithm", algorithm, "--output", output, *SIZES]
    path = os.pathsep.join(map(str, packages))
    return subprocess.run(
        [sys.executable, "-S", *map(str, script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def check(packages: list[Path], folder: Path, installed: str) -> None:
    done = train(packages, folder / "grpo", "grpo")
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"agent_1", "agent_2"} <= {path.name for path in (folder / "grpo").iterdir()}
    done = train(packages, folder / "ppo", "ppo")
    assert done.returncode and not (folder / "ppo").exists()
    (line,) = [line for line in done.stderr.splitlines() if "algorithm: " in line]
    assert "expected trl==0.11.4 for ppo" in line and "'.[ppo]'" in line
    assert line.endswith(f"got {installed}")


def test_a_pair_trains_without_trl_and_ppo_is_refused(tmp_path):
    packages = tmp_path / "site-packages"  # dill recognises installed modules by this name
    packages.mkdir()
    for entry in SITE_PACKAGES.iterdir():
        if entry.name != "trl" and not entry.name.startswith("trl-"):
            (packages / entry.name).symlink_to(entry)
    check([packages], tmp_path, "none")


@pytest.mark.slow
def test_a_pair_trains_beside_the_newest_trl(tmp_path):
    packages = tmp_path / "site-packages"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", packages, "trl"]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip has no trl: {installed.stderr.strip().splitlines()[-1]}")
    (metadata,) = packages.glob("trl-*.dist-info")
    version = metadata.name.removeprefix("trl-").removesuffix(".dist-info")
    assert int(version.split(".")[0]) >= 1
    check([packages, SITE_PACKAGES], tmp_path, version)
    path = os.pathsep.join(map(str, [ROOT, packages, SITE_PACKAGES]))
    done = subprocess.run(
        [sys.executable, "-S", "-c", OVERLONG],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["[0.0,", "-1.0]"], done.stderr[-2000:]
