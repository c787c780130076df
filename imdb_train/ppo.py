"""PPO on IMDB (paper, section 4, E1), the baseline: one agent learns to continue film reviews positively.

    python imdb_train/ppo.py                                        # the toy setting: minutes on any machine
    python imdb_train/ppo.py --config configs/imdb/gpt2_large.yaml  # the paper's Table 1
    python imdb_train/ppo.py --config FILE --ppo.init_kl_coef 0.1   # any key as a flag; --help lists them

Trainer, data, reward and settings are the same as in `imdb_train/cory.py`, which makes two agents instead of one.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cory.command import main, read_config
from imdb_train.config import IMDB, ImdbConfig


def run() -> None:
    config, name = read_config(
        ImdbConfig, default="configs/imdb/tiny.yaml", prefix="imdb_ppo", single_agent=True
    )

    # Film reviews, the classifier's reward and both prompts; held-out queries for `eval_every`.
    task = IMDB.make_task(config)
    held_out = IMDB.held_out_rows(config) if config.eval_every else None

    # Imported late: torch takes seconds, and errors above should appear at once.
    from cory import CoryTrainer, make_agents

    agents = make_agents(config)  # one LLM and its frozen reference
    CoryTrainer(config, agents, task, name, held_out).train()


if __name__ == "__main__":
    main(run)
