"""Runs a script in two processes on the CPU (gloo) by torchrun's launcher: `torchrun.py SCRIPT JOBS`.

Starting Python takes longer than most jobs, so the script is imported once and both processes are forked afterwards.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(script: str, jobs: list[Any], folder: Path) -> subprocess.CompletedProcess:
    """Runs a script's function `start` with a JSON file of `jobs` in two processes. The script is in this folder."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, script, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, env=env)


def main(script: str, jobs: str) -> None:
    module = importlib.import_module(Path(script).stem)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="tests",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, process)(module.start, jobs)


def process(start: Callable[[str], None], jobs: str) -> None:
    # A command ends its process by `os._exit`, but this one has to return to the launcher.
    with patch.object(os, "_exit", sys.exit):
        start(jobs)


if __name__ == "__main__":
    main(*sys.argv[1:])
