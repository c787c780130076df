"""Runs of two processes, sharded or not, started by torchrun.py from test_parallel.py.

JOBS is a JSON list of pairs, run one after the other, as a start of Python takes longer than a run: settings, and a
fault, PROCESSES:KIND:ITERATION, or "". The kinds: `killed`, at a random moment after the first checkpoint; of the
reward, `raises` and `nan`; what is not finite in the update of a process's first agent, `loss` and `gradient`, or of
its second one, `loss_2`. Errors are written to OUTPUT-error-RANK, but the last run's ends the processes.
"""

import functools
import json
import math
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
from test_resume import count_good, make_trainer, spoil  # noqa: E402

from cory.command import main  # noqa: E402
from cory.config import Config, from_data  # noqa: E402
from cory.errors import UserError  # noqa: E402
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


def faulty_reward(reward, kind: str, iteration: int):
    """The reward, which fails in that iteration, from 1."""
    calls = [0]

    @functools.wraps(reward)
    def wrapped(prompts, completions):
        calls[0] += 1
        failing = calls[0] == 3 + iteration  # three calls are for the samples before training
        if failing and kind == "raises":
            raise UserError("the reward of this process fails")
        return (
            [math.nan] * len(prompts) if failing and kind == "nan" else reward(prompts, completions)
        )

    return wrapped


def run(file: str) -> None:
    jobs = json.loads(Path(file).read_text())
    for number, (settings, fault) in enumerate(jobs):
        config = from_data(Config, settings)
        where, kind, iteration = (fault or "::0").split(":")
        kind = kind if os.environ["RANK"] in where else ""
        if kind == "killed":
            threading.Thread(target=kill_later, args=[config.output], daemon=True).start()
        trainer = make_trainer(config, faulty_reward(count_good, kind, int(iteration)))
        if kind in ("loss", "gradient", "loss_2"):
            spoil(trainer.agents[kind == "loss_2"], int(iteration), kind)
        try:
            trainer.train()
            save_state(config, trainer.agents)
        except UserError as error:
            if number + 1 == len(jobs):
                raise
            Path(f"{config.output}-error-{distributed.rank()}").write_text(str(error))


def start(jobs: str) -> None:
    Figure.savefig = save_blank
    main(lambda: run(jobs))


if __name__ == "__main__":
    start(sys.argv[1])
