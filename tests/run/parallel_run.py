"""A run whose agents are sharded or apart, started by test_parallel.py: `parallel_run.py SETTINGS OUT [KILL_SECONDS]`."""

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


def run() -> None:
    """Trains, and writes each agent's whole trained state to OUT-agent_1, ..."""
    from test_resume import make_trainer

    parser = ArgumentParser()
    parser.add_class_arguments(Config, "config")
    config = parser.instantiate(parser.parse_object({"config": json.loads(Path(sys.argv[1]).read_text())})).config
    trainer = make_trainer(config)
    if len(sys.argv) > 3 and processes.rank() == 1:
        threading.Timer(float(sys.argv[3]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    trainer.train()
    for agent in trainer.agents:
        tensors = {name: sharding.whole(tensor) for name, tensor in agent.state()[0].items()}
        owner = getattr(agent, "owner", 0)
        if processes.rank() == owner:
            torch.save(tensors, f"{sys.argv[2]}-{agent.name}")
    processes.everyone(None)


if __name__ == "__main__":
    main(run)
