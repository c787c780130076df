"""What a reference is worth to an observer of the embedded default: its accuracy with none, a wrong and a right one.

python gsm8k_train/reference.py                                      # before any training
python gsm8k_train/reference.py runs/gsm8k_cory_tiny/agent_1 FOLDER   # saved agents
python gsm8k_train/reference.py runs/gsm8k_cory_tiny                  # a run: how its agents' rewards go together
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
from cory.prompts import fill
from cory.run.command_line import main
from gsm8k_train.config import Gsm8kConfig
from gsm8k_train.task import PIONEER, make_task, rule_reward
from imdb_train.config import OBSERVER
from study.coupling import coupling, text


def worth(model: str | None = None, problems: int = 300) -> dict[str, tuple[float, float]]:
    """The share of right answers of a model as observer, by what it reads.

    Args:
        model: folder of a saved agent. None: the embedded default's policy, untrained.

    Returns:
        without a reference, after a wrong and after a right one: the share for held-out problems and the half-width of
        its 95 % interval.
    """
    policy, tokenizer = load_policy(ModelConfig(name=model or str(tiny.paths() / "policy")))
    rng = random.Random(1)
    asked = [p for p in (tiny.problem(rng) for _ in range(20 * problems)) if p.held_out][:problems]
    prompts = {"no": [fill(PIONEER, {"prompt": p.question}) for p in asked]}
    for name, mistakes in (("wrong", 1.0), ("right", 0.0)):
        read = [f" {tiny.attempt(rng, p, mistakes)}" for p in asked]
        prompts[name] = [
            fill(OBSERVER, {"prompt": p.question, "response": text}) for p, text in zip(asked, read, strict=True)
        ]
    result = {}
    for name, texts in prompts.items():
        answers = respond(policy, policy, tokenizer, texts, SamplingConfig(max_new_tokens=48, stop=["Question:"]))
        result[name] = mean_interval(rule_reward(texts, answers.completions, [p.answer for p in asked]))
    return result


def report() -> None:
    """Prints it for the folders on the command line, or for the untrained policy; of a run, `study.coupling`."""
    for model in sys.argv[1:] or [None]:
        if model and run_agents(Path(model)):
            print(f"{model}: {text(coupling(Path(model), Gsm8kConfig, lambda config, _: make_task(config)))}")
            continue
        for name, (mean, half) in worth(model).items():
            print(f"{model or 'Untrained'}, {name} reference: {100 * mean:.0f} +- {100 * half:.0f} % right")


if __name__ == "__main__":
    main(report)
