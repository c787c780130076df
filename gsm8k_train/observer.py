"""What the pioneer's response is worth to an observer of the toy setting: its accuracy after a wrong and a right one.

python gsm8k_train/observer.py                                       # the policy before any training
python gsm8k_train/observer.py runs/gsm8k_cory_tiny/agent_1 FOLDER   # saved agents
python gsm8k_train/observer.py runs/gsm8k_cory_tiny                  # a run: how its agents' rewards correlate
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see gsm8k_train/cory.py

from cory.config import SamplingConfig
from cory.prompts import fill
from cory.run.settings import main
from gsm8k_train import toy
from gsm8k_train.config import OBSERVER, PIONEER, Gsm8kConfig
from study import observer
from study.observer import ALONE, Prompts, Reward


def made(queries: int) -> tuple[Prompts, Reward, SamplingConfig]:
    """The prompts by what precedes them, the reward of the completions, and how they are sampled."""
    from gsm8k_train.task import rule_reward

    rng = random.Random(1)
    asked = [p for p in (toy.problem(rng) for _ in range(20 * queries)) if p.held_out][:queries]
    prompts = {ALONE: [fill(PIONEER, {"prompt": p.question}) for p in asked]}
    for kind, mistakes in (("wrong", 1.0), ("right", 0.0)):
        read = [f" {toy.attempt(rng, p, mistakes)}" for p in asked]
        prompts[kind] = [
            fill(OBSERVER, {"prompt": p.question, "response": r}) for p, r in zip(asked, read, strict=True)
        ]
    questions, answers = [p.question for p in asked], [p.answer for p in asked]
    sampling = SamplingConfig(max_new_tokens=48, stop=["Question:"])
    return prompts, lambda completions: rule_reward(questions, completions, answers), sampling


def worth(model: str | None = None, queries: int = 300) -> dict[str, tuple[float, float]]:
    """`study.observer.worth` of a saved agent, or of the toy setting's untrained policy."""
    return observer.worth(model or toy.POLICY, *made(queries))


def correlation(run: Path) -> str:
    """How the rewards of a run's two agents correlate."""
    from gsm8k_train.task import make_task
    from study.coupling import coupling, text

    return text(coupling(run, Gsm8kConfig, make_task))


def command_line(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    observer.command_line(__doc__, worth, correlation, lambda mean, half: f"{mean:.0%} ± {half:.0%} right", argv)


if __name__ == "__main__":
    main(command_line)
