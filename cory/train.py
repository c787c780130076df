"""Trains on your own prompts and rewards: docs/own_task.md.

python -m cory.train --config my.yaml                       # two agents: CORY
python -m cory.train --config my.yaml --cory.num_agents 1   # any key as a flag; one agent: PPO
python -m cory.train --resume runs/my                       # continues a run
python -m cory.train --help                                 # every key
"""

from cory.command import main, read_config
from cory.own_task import OWN, OwnConfig


def run() -> None:
    config, name = read_config(OwnConfig)

    # The prompts, rewards and templates that config.task names, and held-out prompts for `eval_every`.
    task = OWN.make_task(config)
    has_held_out = config.eval_every or config.task.eval_dataset
    held_out = OWN.held_out_rows(config) if has_held_out else None

    # Imported late: importing torch takes seconds, and errors above, such as in a reward file, should appear at once.
    from cory import CoryTrainer, make_agents

    # By default, two copies of one LLM and a frozen reference; config.agents can change this.
    agents = make_agents(config)
    CoryTrainer(config, agents, task, name, held_out).train()


if __name__ == "__main__":
    main(run)
