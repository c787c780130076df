"""Runs whose agents are sharded or apart, started by test_parallel.py: `parallel_run.py JOBS [killed|raises]`.

JOBS is a JSON list of settings, run one after the other: a start of Python takes longer than a run. The fault is one of
the second process: it kills itself at a random moment after the first checkpoint, or its reward raises.
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
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from jsonargparse import ArgumentParser  # noqa: E402

from cory.config import Config  # noqa: E402
from cory.policies import sharding  # noqa: E402
from cory.run import processes  # noqa: E402
from cory.run.settings import main  # noqa: E402


def save_state(config, agents) -> None:
    """Writes each agent's whole trained state to OUTPUT-agent_1, ..."""
    for agent in agents:
        tensors = {name: sharding.whole(tensor) for name, tensor in agent.state()[0].items()}
        if processes.rank() == getattr(agent, "owner", 0):
            torch.save(tensors, f"{config.output}-{agent.name}")
    processes.everyone(None)


def kill_later(output: str) -> None:
    while not list(Path(output).glob("checkpoints/iter-*")):
        time.sleep(0.01)
    time.sleep(random.SystemRandom().uniform(0, 2))
    os.kill(os.getpid(), signal.SIGKILL)


def run() -> None:
    from test_resume import after, count_good, make_trainer

    def fail() -> None:
        raise ZeroDivisionError("the reward of the second process fails")

    fault = sys.argv[2] if len(sys.argv) > 2 else ""
    parser = ArgumentParser()
    parser.add_class_arguments(Config, "config")
    for settings in json.loads(Path(sys.argv[1]).read_text()):
        config = parser.instantiate(parser.parse_object({"config": settings})).config
        second = os.environ["RANK"] == "1"
        if fault == "killed" and second:
            threading.Thread(target=kill_later, args=[config.output], daemon=True).start()
        # Three calls are for samples before training, so this one is in the third iteration.
        trainer = make_trainer(config, after(count_good, 6, fail) if fault == "raises" and second else count_good)
        trainer.train()
        save_state(config, trainer.agents)


if __name__ == "__main__":
    main(run)
