"""A run of several processes, started by torchrun from test_distributed.py: `distributed_run.py SETTINGS [FAULT]`."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from accelerate import PartialState  # noqa: E402
from jsonargparse import ArgumentParser  # noqa: E402

from cory.config import Config  # noqa: E402
from cory.policies.load import choose_device  # noqa: E402
from cory.run import processes  # noqa: E402
from cory.run.settings import main  # noqa: E402


def run() -> None:
    from test_resume import count_good, make_trainer

    parser = ArgumentParser()
    parser.add_class_arguments(Config, "config")
    config = parser.instantiate(parser.parse_object({"config": json.loads(Path(sys.argv[1]).read_text())})).config
    fault = sys.argv[2] if len(sys.argv) > 2 else ""
    choose_device(config.device)
    rank = PartialState().process_index
    calls = [0]

    def reward(prompts, completions):
        calls[0] += 1
        if rank == 1 and calls[0] == 5:
            if fault == "raises":
                raise ZeroDivisionError("the reward of rank 1 fails")
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return count_good(prompts, completions)

    trainer = make_trainer(config, reward)
    queries = []
    batch = trainer.iteration

    def spy(k, history=()):
        rendered = trainer._prompts

        def prompts(agent, role, rows, responses, length):
            if role == 0:
                queries.append(rows["prompt"])
            return rendered(agent, role, rows, responses, length)

        trainer._prompts = prompts
        result = batch(k, history)
        trainer._prompts = rendered
        orders.append([agent.name for agent in map(trainer.agents.__getitem__, trainer.schedule.order(k))])
        digest = hashlib.sha256()
        for agent in trainer.agents:
            for parameter in agent.learner.model_params:
                digest.update(parameter.detach().numpy().tobytes())
        digests.append(digest.hexdigest())
        return result

    digests, orders = [], []
    trainer.iteration = spy
    trainer.train()
    seen = {"queries": queries, "digests": digests, "orders": orders, "processes": processes.world_size()}
    Path(f"{config.output}-rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(run)
