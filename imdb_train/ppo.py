"""PPO on IMDB (paper, section 4, E1), the baseline: one agent learns to continue film reviews positively.

    python imdb_train/ppo.py                                        # the toy setting: minutes on any machine
    python imdb_train/ppo.py --config configs/imdb/gpt2_large.yaml  # the paper's Table 1
    python imdb_train/ppo.py --config FILE --ppo.init_kl_coef 0.1   # any key as a flag; --help lists them

The same trainer, data, reward and settings as `imdb_train/cory.py`, which makes two agents instead of one.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cory.cli.load import shipped
from cory.cli.main import main
from cory.train import train
from imdb_train.config import IMDB


def run() -> None:
    train(IMDB, default=shipped("configs/imdb/tiny.yaml"), prefix="imdb_ppo", single_agent=True)


if __name__ == "__main__":
    main(run)
