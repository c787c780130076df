"""CORY on IMDB (paper, section 4, E1): pioneer and observer learn to continue film reviews positively.

    python imdb_train/cory.py                                        # the toy setting: minutes on any machine
    python imdb_train/cory.py --config configs/imdb/gpt2_large.yaml  # the paper's Table 1
    python imdb_train/cory.py --config FILE --ppo.init_kl_coef 0.1   # any key as a flag; --help all lists them

Departures from the paper: none in the method. Differences from the authors' published code: docs/paper.md.
`imdb_train/ppo.py` is the baseline, identical but for the number of agents.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(ROOT)

from cory.cli.settings import announce, load, main  # noqa: E402
from imdb_train.config import ImdbConfig  # noqa: E402


def train() -> None:
    config, name = load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", prefix="imdb_cory")
    announce(config, name)
    from cory import CoryTrainer, make_agents  # after the settings are checked: importing torch and TRL takes seconds
    from imdb_train.task import held_out, make_task

    agents = make_agents(config)
    task = make_task(config, agents[0].device)
    CoryTrainer(config, agents, task, name, held_out(config)).train()


if __name__ == "__main__":
    main(train)
