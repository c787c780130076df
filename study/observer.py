"""What the pioneer's response is worth to an observer: its reward after a bad response, after a good one, and alone.

    python -m study.observer imdb                                      # the toy setting's policy, before any training
    python -m study.observer gsm8k runs/gsm8k_cory_tiny/agent_1 ...    # saved agents
    python -m study.observer imdb runs/imdb_cory_tiny                  # a run: how the rewards of its agents correlate

The responses are generated as the toy setting's texts are: in a negative, a neutral and a positive mood, or wrong and
right. An observer has something to learn from its pioneer where it does better after a better response.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from cory.config import ModelConfig, SamplingConfig
from cory.prompts import fill
from cory.run.command_line import main
from cory.run.evaluation_settings import run_agents
from gsm8k_train import toy as gsm8k
from gsm8k_train.config import OBSERVER, PIONEER, Gsm8kConfig
from imdb_train import toy as imdb
from imdb_train.config import ImdbConfig
from study.arguments import Arguments

ALONE = "query alone"
Prompts = dict[str, list[str]]  # by what precedes them
Reward = Callable[[list[str]], list[float]]  # of completions, one for each query


def worth(task: str, model: str | None = None, queries: int = 300) -> dict[str, tuple[float, float]]:
    """The task reward of a model as observer, by what it reads; of GSM8K, the share of right answers.

    Args:
        task: imdb or gsm8k.
        model: folder of a saved agent. None: the policy of the toy setting, untrained.

    Returns:
        for the query alone, then by kind of response (negative, neutral, positive; wrong, right): the mean over queries
        and the half-width of its 95 % interval.
    """
    from cory.evaluation import respond  # here, as importing torch takes seconds
    from cory.metrics import mean_interval
    from cory.policies.load import load_policy

    policy_folder, made = (imdb.POLICY, _imdb) if task == "imdb" else (gsm8k.POLICY, _gsm8k)
    prompts, reward, sampling = made(queries)
    policy, tokenizer = load_policy(ModelConfig(name=model or str(policy_folder)))
    return {
        kind: mean_interval(reward(respond(policy, policy, tokenizer, texts, sampling).completions))
        for kind, texts in prompts.items()
    }


def _imdb(queries: int) -> tuple[Prompts, Reward, SamplingConfig]:
    import torch

    from imdb_train.task import PositiveLogit

    rng = random.Random(1)
    starts = [imdb.fill(rng, "{part} was", 0) for _ in range(queries)]
    prompts = {ALONE: starts}
    for kind, mood in (("negative", -2), ("neutral", 0), ("positive", 2)):
        read = [imdb.fill(rng, " {very} {adjective} and {verdict}", mood) for _ in starts]
        prompts[kind] = [imdb.OBSERVER.format(sentence=s + r, rewrite=s) for s, r in zip(starts, read, strict=True)]
    classifier = PositiveLogit(str(imdb.REWARD_MODEL), 100, torch.device("cpu"))
    return prompts, lambda completions: classifier(starts, completions), SamplingConfig()


def _gsm8k(queries: int) -> tuple[Prompts, Reward, SamplingConfig]:
    from gsm8k_train.task import rule_reward

    rng = random.Random(1)
    asked = [p for p in (gsm8k.problem(rng) for _ in range(20 * queries)) if p.held_out][:queries]
    prompts = {ALONE: [fill(PIONEER, {"prompt": p.question}) for p in asked]}
    for kind, mistakes in (("wrong", 1.0), ("right", 0.0)):
        read = [f" {gsm8k.attempt(rng, p, mistakes)}" for p in asked]
        prompts[kind] = [
            fill(OBSERVER, {"prompt": p.question, "response": r}) for p, r in zip(asked, read, strict=True)
        ]
    questions, answers = [p.question for p in asked], [p.answer for p in asked]
    sampling = SamplingConfig(max_new_tokens=48, stop=["Question:"])
    return prompts, lambda completions: rule_reward(questions, completions, answers), sampling


def _correlation(task: str, run: Path) -> str:
    from study.coupling import coupling, text

    if task == "imdb":
        from imdb_train.task import make_task as make_imdb

        return text(coupling(run, ImdbConfig, make_imdb))
    from gsm8k_train.task import make_task as make_gsm8k

    return text(coupling(run, Gsm8kConfig, make_gsm8k))


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.observer`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("task", choices=["imdb", "gsm8k"], help="imdb or gsm8k")
    parser.add_argument("models", nargs="*", default=[], help="Folders of runs or of saved agents; none: untrained")
    args = parser.of(argv)
    for model in args.models or [None]:
        if model and run_agents(Path(model)):
            print(f"{model}: {_correlation(args.task, Path(model))}")
            continue
        for kind, (mean, half) in worth(args.task, model).items():
            read = f"from the {kind}" if kind == ALONE else f"after a {kind} response"
            value = f"task reward {mean:+.2f} ± {half:.2f}" if args.task == "imdb" else f"{mean:.0%} ± {half:.0%} right"
            print(f"{model or 'Untrained'}, {read}: {value}")


if __name__ == "__main__":
    main(command_line)
