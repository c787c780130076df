"""Evaluates runs on held-out prompts: reward and KL to the base model, solo and joint, with 95 % intervals.

    python -m cory.evaluation runs/my                                     # the run's dataset, split `test`
    python -m cory.evaluation runs/cory runs/ppo --split validation       # two runs and their base model
    python -m cory.evaluation runs/my --task.eval_dataset held_out.jsonl  # other prompts

Every model answers the prompt alone (solo). The agents of one run also answer one after the other, each reading the
earlier answers (joint). The agent of a single-agent run also answers twice, the second time as its own observer.
`cory/evaluation/rows.py` describes all rows of the resulting table. In Python, call `cory.evaluate` instead of
importing this module.
"""

from cory.command import main
from cory.evaluation.command import evaluate_command


def run() -> None:
    evaluate_command(None, __doc__)


if __name__ == "__main__":
    main(run)
