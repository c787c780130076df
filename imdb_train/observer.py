"""What the pioneer's response is worth to an observer of the toy setting: after a bad, a neutral and a good one.

python imdb_train/observer.py                                      # the policy before any training
python imdb_train/observer.py runs/imdb_cory_tiny/agent_1 FOLDER   # saved agents
python imdb_train/observer.py runs/imdb_cory_tiny                  # a run: how the rewards of its agents correlate
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see imdb_train/cory.py

from cory.config import SamplingConfig
from cory.run.settings import main
from imdb_train import toy
from imdb_train.config import ImdbConfig
from study import observer
from study.observer import ALONE, Prompts, Reward


def made(queries: int) -> tuple[Prompts, Reward, SamplingConfig]:
    """The prompts by what precedes them, the reward of the completions, and how they are sampled."""
    import torch

    from imdb_train.task import PositiveLogit

    rng = random.Random(1)
    starts = [toy.fill(rng, "{part} was", 0) for _ in range(queries)]
    prompts = {ALONE: starts}
    for kind, mood in (("negative", -2), ("neutral", 0), ("positive", 2)):
        read = [toy.fill(rng, " {very} {adjective} and {verdict}", mood) for _ in starts]
        prompts[kind] = [toy.OBSERVER.format(sentence=s + r, rewrite=s) for s, r in zip(starts, read, strict=True)]
    classifier = PositiveLogit(str(toy.REWARD_MODEL), 100, torch.device("cpu"))
    return prompts, lambda completions: classifier(starts, completions), SamplingConfig()


def worth(model: str | None = None, queries: int = 300) -> dict[str, tuple[float, float]]:
    """`study.observer.worth` of a saved agent, or of the toy setting's untrained policy."""
    return observer.worth(model or toy.POLICY, *made(queries))


def correlation(run: Path) -> str:
    """How the rewards of a run's two agents correlate."""
    from imdb_train.task import make_task
    from study.coupling import coupling, text

    return text(coupling(run, ImdbConfig, make_task))


def command_line(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    observer.command_line(__doc__, worth, correlation, lambda mean, half: f"task reward {mean:+.2f} ± {half:.2f}", argv)


if __name__ == "__main__":
    main(command_line)
