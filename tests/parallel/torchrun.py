"""Scripts in two processes on the CPU (gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(script: str, jobs: list[Any], folder: Path) -> subprocess.CompletedProcess:
    """Runs a script of this folder, which reads `jobs` from a JSON file, by torchrun."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
    ]
    command += [str(Path(__file__).with_name(script)), str(file)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, env=env)
