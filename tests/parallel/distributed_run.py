"""Jobs for two processes, which test_distributed.py starts by torchrun.py.

JOBS is a JSON list. One launch does all jobs in order, since starting Python takes longer than most of them:

* a run: `{"run": SETTINGS, "fault": FAULT}`, where the fault hits only one process
* a single update: `{"update": KL_PENALTY, "tokenizer": FILE, "output": FILE}`
"""

import hashlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE.parent / "learners")]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from conftest import count_good, hurry, make_trainer  # noqa: E402
from ppo_learner import make_learner  # noqa: E402
from questions import make_questions  # noqa: E402
from ragged import ragged, rollout_of, weights  # noqa: E402

from cory import Callback  # noqa: E402
from cory.command import main  # noqa: E402
from cory.config import Config  # noqa: E402
from cory.parallel import distributed, sharding  # noqa: E402
from cory.settings import as_config  # noqa: E402


class Watch(Callback):
    """Records each iteration's queries, order of agents and, without sharding, a digest of the weights."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops
        self.seen = {
            "queries": [],
            "orders": [],
            "digests": [],
            "processes": distributed.world_size(),
        }

    def on_iteration_end(self, trainer, iteration):
        order = trainer.schedule.order(iteration.index)
        self.seen["orders"].append([trainer.agents[index].name for index in order])
        self.seen["queries"].append(iteration.batch.columns["prompt"])
        if trainer.config.parallel.shard == "none":
            digest = hashlib.sha256()
            for agent in filter(is_trained, trainer.agents):
                for parameter in agent.learner.model_params:
                    digest.update(parameter.detach().numpy().tobytes())
            self.seen["digests"].append(digest.hexdigest())
        if self.stops:  # only the second process asks for the stop
            trainer.should_stop = iteration.index == 1 and distributed.rank() == 1


def is_trained(agent) -> bool:
    return agent.is_trained


def save_state(config: Config, agents) -> None:
    """Writes each agent's unsharded state to OUTPUT-agent_1 and so on."""
    for agent in agents:
        tensors = {name: sharding.whole(tensor) for name, tensor in agent.state()[0].items()}
        if distributed.is_main():
            torch.save(tensors, f"{config.output}-{agent.name}")
    distributed.barrier()


def train(config: Config, fault: str) -> None:
    """Trains, and writes each process's records to OUTPUT-rankRANK.json."""
    rank, calls = distributed.rank(), [0]

    def reward(prompts, completions):
        calls[0] += 1
        if fault == "killed" and rank == 1 and calls[0] == 5:
            Path(f"{config.output}-killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return count_good(prompts, completions)

    watch = Watch(stops=fault == "callback stops")
    make = make_questions if config.cory.credit == "information" else make_trainer
    trainer = make(config, reward, [watch])
    trainer.train()
    save_state(config, filter(is_trained, trainer.agents))
    Path(f"{config.output}-rank{rank}.json").write_text(json.dumps(watch.seen))


def update(kl: str, tokenizer: str, output: str) -> None:
    """Makes one update on this rank's rows and writes statistics and weights to the file OUTPUT + rank."""
    loaded = torch.load(tokenizer, weights_only=False)
    learner, _ = make_learner(loaded, kl_penalty=kl)
    queries, responses, scores = ragged()
    part = distributed.share_of_rows(8)
    rollout = rollout_of(queries[part], responses[part])
    (stats,) = learner.update([rollout], [scores[part]], np.random.default_rng(0))
    torch.save((stats.metrics(), weights(learner)), f"{output}{distributed.rank()}")


def run_job(config: Config, fault: str = "") -> dict:
    """Returns the job for a run."""
    return {"run": asdict(config), "fault": fault}


def work(jobs: str) -> None:
    distributed.start(torch.device("cpu"))
    for job in json.loads(Path(jobs).read_text()):
        if "update" in job:
            update(job["update"], job["tokenizer"], job["output"])
        else:
            train(as_config(Config, job["run"], Path(jobs)), job["fault"])


def start(jobs: str) -> None:
    hurry(pytest.MonkeyPatch())
    main(lambda: work(jobs))
