"""What the pioneer's response is worth to an observer on GSM8K; see `--help` and study/observer.py.

python gsm8k_train/observer.py                                           # the toy setting's untrained policy
python gsm8k_train/observer.py --config configs/gsm8k/qwen2_5_0_5b.yaml  # any configuration
python gsm8k_train/observer.py runs/gsm8k_cory_tiny                      # a run: how the agents' rewards correlate
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see gsm8k_train/cory.py

from cory.cli.load import shipped
from cory.cli.main import main
from gsm8k_train.config import GSM8K, OBSERVERS
from study import observer


def command_line(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    default = shipped("configs/gsm8k/tiny.yaml")
    observer.command_line(GSM8K, OBSERVERS, default, argv)


if __name__ == "__main__":
    main(command_line)
