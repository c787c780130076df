"""What the pioneer's response is worth to an observer on IMDB; see `--help` and study/observer.py.

python imdb_train/observer.py                                          # the toy setting's untrained policy
python imdb_train/observer.py --config configs/imdb/smollm2_135m.yaml  # any configuration
python imdb_train/observer.py runs/imdb_cory_tiny                      # a run: how the agents' rewards correlate
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see imdb_train/cory.py

from cory.cli.load import shipped
from cory.cli.main import main
from imdb_train.config import IMDB, OBSERVERS
from study import observer


def command_line(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    default = shipped("configs/imdb/tiny.yaml")
    observer.command_line(IMDB, OBSERVERS, default, argv)


if __name__ == "__main__":
    main(command_line)
