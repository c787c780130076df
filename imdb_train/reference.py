"""What a reference is worth to an observer of the embedded default: its reward after a bad, a neutral and a good one.

python imdb_train/reference.py                                      # before any training
python imdb_train/reference.py runs/imdb_cory_tiny/agent_1 FOLDER   # saved agents
python imdb_train/reference.py runs/imdb_cory_tiny                  # a run: how its agents' rewards go together
"""

import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see imdb_train/cory.py

from cory.config import ModelConfig, SamplingConfig
from cory.evaluation import respond, run_agents
from cory.metrics import mean_interval
from cory.policies.load import load_policy
from cory.run.command_line import main
from imdb_train.config import ImdbConfig
from imdb_train.task import PositiveLogit, make_task
from study.coupling import coupling, text

REFERENCES = {"negative": -2, "neutral": 0, "positive": 2}


def worth(model: str | None = None, queries: int = 300) -> dict[str, tuple[float, float]]:
    """The task reward of a model as observer, by what it reads.

    Args:
        model: folder of a saved agent. None: the embedded default's policy, untrained.

    Returns:
        for a negative, a neutral and a positive reference, and for none (the query alone): the mean over queries and
        the half-width of its 95 % interval.
    """
    policy, tokenizer = load_policy(ModelConfig(name=model or str(tiny.paths() / "policy")))
    reward = PositiveLogit(str(tiny.paths() / "reward_model"), 100, policy.device)
    rng = random.Random(1)
    starts = [tiny.fill(rng, "{part} was", 0) for _ in range(queries)]
    prompts = {"no": starts}
    for name, mood in REFERENCES.items():
        read = [tiny.fill(rng, " {very} {adjective} and {verdict}", mood) for _ in starts]
        prompts[name] = [tiny.OBSERVER.format(sentence=s + r, rewrite=s) for s, r in zip(starts, read, strict=True)]
    result = {}
    for name, texts in prompts.items():
        answers = respond(policy, policy, tokenizer, texts, SamplingConfig())
        result[name] = mean_interval(reward(prompts=starts, completions=answers.completions))
    return result


def report() -> None:
    """Prints it for the folders on the command line, or for the untrained policy; of a run, `study.coupling`."""
    for model in sys.argv[1:] or [None]:
        if model and run_agents(Path(model)):
            print(f"{model}: {text(coupling(Path(model), ImdbConfig, make_task))}")
            continue
        for name, (mean, half) in worth(model).items():
            print(f"{model or 'Untrained'}, {name} reference: task reward {mean:+.2f} +- {half:.2f}")


if __name__ == "__main__":
    main(report)
