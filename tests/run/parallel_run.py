"""Runs whose agents are sharded or apart, started by test_parallel.py: `parallel_run.py JOBS [KILL_AFTER_SECONDS]`.

JOBS is a JSON list of settings, run one after the other: a start of Python takes longer than a run.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from jsonargparse import ArgumentParser  # noqa: E402

from cory.config import Config  # noqa: E402
from cory.policies import sharding  # noqa: E402
from cory.run import processes  # noqa: E402
from cory.run.settings import main  # noqa: E402


def train(settings: dict) -> None:
    """Trains, and writes each agent's whole trained state to OUTPUT-agent_1, ..."""
    from test_resume import make_trainer

    parser = ArgumentParser()
    parser.add_class_arguments(Config, "config")
    config = parser.instantiate(parser.parse_object({"config": settings})).config
    trainer = make_trainer(config)
    trainer.train()
    for agent in trainer.agents:
        tensors = {name: sharding.whole(tensor) for name, tensor in agent.state()[0].items()}
        if processes.rank() == getattr(agent, "owner", 0):
            torch.save(tensors, f"{config.output}-{agent.name}")
    processes.everyone(None)


def run() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) > 2:

        def kill() -> None:
            if processes.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(float(sys.argv[2]), kill).start()
    for settings in jobs:
        train(settings)


if __name__ == "__main__":
    main(run)
