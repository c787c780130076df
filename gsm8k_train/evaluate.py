"""Evaluates models on held-out word problems: pass@k, greedy accuracy, unparseable answers, length, KL.

    python gsm8k_train/evaluate.py runs/gsm8k_cory_tiny runs/gsm8k_ppo_tiny    # all agents of two runs, and their base
    python gsm8k_train/evaluate.py Qwen/Qwen2.5-0.5B-Instruct --samples 16 --ks "[1, 4, 16]"   # any model

Every model answers the question alone (solo). A CORY run's agents also answer as a chain, the second reading the
first's answer (joint). A PPO run's agent also answers twice, the second time as its own observer (compute-matched).
The base is the model before training; KL is measured to it. Base and data default to the first run's. pass@k is the
unbiased estimate from n samples per problem (Chen et al., 2021). `cory/evaluation/rows.py` describes all rows.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see gsm8k_train/cory.py

from cory.command import main
from cory.evaluation.command import evaluate_command
from gsm8k_train.config import GSM8K


def run() -> None:
    evaluate_command(GSM8K, __doc__)


if __name__ == "__main__":
    main(run)
