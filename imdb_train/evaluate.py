"""Evaluates models on held-out reviews: task reward, KL, combined reward, diversity, length, sample texts.

    python imdb_train/evaluate.py runs/imdb_cory_tiny runs/imdb_ppo_tiny      # all agents of two runs, and their base
    python imdb_train/evaluate.py gpt2 my/folder --base gpt2                  # any models, on stanfordnlp/imdb

Every model answers the query alone (solo). A CORY run's agents also answer as a chain, the second reading the first's
answer (joint). A PPO run's agent also answers twice, the second time as its own observer (compute-matched). The base is
the model before training; KL is measured to it under the same prompt. Base, data and reward default to the first run's.
`cory/evaluation/rows.py` describes all rows.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see imdb_train/cory.py

from cory.command import main
from cory.evaluation.command import evaluate_command
from imdb_train.config import IMDB


def run() -> None:
    evaluate_command(IMDB, __doc__)


if __name__ == "__main__":
    main(run)
