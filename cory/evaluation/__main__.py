"""Evaluates runs on held-out prompts: reward, KL to the base, solo and joint, with 95 % intervals.

    python -m cory.evaluation runs/my                                     # split test of the run's dataset
    python -m cory.evaluation runs/cory runs/ppo --split validation       # two runs and their base
    python -m cory.evaluation runs/my --task.eval_dataset held_out.jsonl  # other prompts

Every model answers the prompt alone (solo). The agents of one run also answer in a chain (joint). The agent of a
single-agent run also answers twice, the second time as its own observer. See `cory/evaluation/`. Run this module
instead of importing it: `cory.evaluate` is the function.
"""

from cory.command import main
from cory.evaluation.command import evaluate_command


def run() -> None:
    evaluate_command(None, __doc__)


if __name__ == "__main__":
    main(run)
