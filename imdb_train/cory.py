"""CORY on IMDB (paper, section 4, E1): pioneer and observer learn to continue film reviews positively.

    python imdb_train/cory.py                                        # the toy setting: minutes on any machine
    python imdb_train/cory.py --config configs/imdb/gpt2_large.yaml  # the paper's Table 1
    python imdb_train/cory.py --config FILE --ppo.init_kl_coef 0.1   # any key as a flag; --help lists them

The defaults are the paper's. The toy setting, tiny.yaml, has other sizes and the sampled KL penalty. docs/paper.md
lists differences from the authors' published code.
`imdb_train/ppo.py` is the baseline; only the number of agents differs.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cory.command import main, read_config
from imdb_train.config import IMDB, ImdbConfig


def run() -> None:
    config, name = read_config(ImdbConfig, default="configs/imdb/tiny.yaml", prefix="imdb_cory")

    # Film reviews, the classifier's reward and both prompts; held-out queries for `eval_every`.
    task = IMDB.make_task(config)
    held_out = IMDB.held_out_rows(config) if config.eval_every else None

    # Imported late: torch takes seconds, and errors above should appear at once.
    from cory import CoryTrainer, make_agents

    # Two copies of one LLM, unless config.agents says otherwise, and a frozen reference.
    agents = make_agents(config)
    CoryTrainer(config, agents, task, name, held_out).train()


if __name__ == "__main__":
    main(run)
