"""CORY on IMDB (paper, section 4, E1): pioneer and observer learn to continue film reviews positively.

    python imdb_train/cory.py                                        # the toy setting: minutes on any machine
    python imdb_train/cory.py --config configs/imdb/gpt2_large.yaml  # the paper's Table 1
    python imdb_train/cory.py --config FILE --ppo.init_kl_coef 0.1   # any key as a flag; --help lists them

Departures from the paper: none in the method. Differences from the authors' published code: docs/paper.md.
`imdb_train/ppo.py` is the baseline, identical but for the number of agents.
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
    train(IMDB, default=shipped("configs/imdb/tiny.yaml"), prefix="imdb_cory")


if __name__ == "__main__":
    main(run)
