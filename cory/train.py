"""Trains on prompts and rewards of your own: docs/own_task.md.

python -m cory.train --config my.yaml                       # two agents: CORY
python -m cory.train --config my.yaml --cory.num_agents 1   # any key as a flag; one agent: PPO
python -m cory.train --resume runs/my                       # continues a run
python -m cory.train --help                                 # common keys; --help all: every key
"""

from cory.cli.settings import announce, load, main
from cory.tasks.config import OwnConfig
from cory.tasks.own import held_out, load_prompts, make_task


def train() -> None:
    config, name = load(OwnConfig, None)
    announce(config, name)
    task = make_task(config)  # the rewards first: a mistake in their file is reported before torch is imported
    from cory import CoryTrainer, make_agents

    held = held_out(config.task, config.task.eval_split, "--task.eval_split") if config.eval_every else None
    queries = load_prompts(held) if held else None
    CoryTrainer(config, make_agents(config), task, name, queries).train()


if __name__ == "__main__":
    main(train)
