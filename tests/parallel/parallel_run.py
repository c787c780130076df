"""Runs of two processes, sharded or not, started by torchrun.py from test_parallel.py.

JOBS is a JSON list of pairs, run one after the other, as a start of Python takes longer than a run: settings, and
`killed`, at a random moment after the first checkpoint, or "".
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE.parent / "run")]

import torch  # noqa: E402
from conftest import save_blank  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from test_resume import make_trainer  # noqa: E402

from cory.command import main  # noqa: E402
from cory.config import Config, from_data  # noqa: E402
from cory.parallel import distributed, sharding  # noqa: E402


def save_state(config, agents) -> None:
    """Writes each agent's whole trained state to OUTPUT-agent_1, ..."""
    for agent in agents:
        tensors = {name: sharding.whole(tensor) for name, tensor in agent.state()[0].items()}
        if distributed.is_main():
            torch.save(tensors, f"{config.output}-{agent.name}")
    distributed.barrier()


def kill_later(output: str) -> None:
    while not list(Path(output).glob("checkpoints/iter-*")):
        time.sleep(0.01)
    time.sleep(random.SystemRandom().uniform(0, 2))
    Path(f"{output}-killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def run(file: str) -> None:
    jobs = json.loads(Path(file).read_text())
    for settings, fault in jobs:
        config = from_data(Config, settings)
        if fault == "killed" and os.environ["RANK"] == "1":
            threading.Thread(target=kill_later, args=[config.output], daemon=True).start()
        trainer = make_trainer(config)
        trainer.train()
        save_state(config, trainer.agents)


def start(jobs: str) -> None:
    Figure.savefig = save_blank
    main(lambda: run(jobs))


if __name__ == "__main__":
    start(sys.argv[1])
