"""What the pioneer's response is worth to an observer: its reward after a bad response, after a good one, and alone.

An observer has something to learn from its pioneer where it does better after a better response. Each task has a
script, such as `imdb_train/observer.py`, that brings the prompts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from cory.config import ModelConfig, SamplingConfig
from cory.run.arguments import Arguments
from cory.run.evaluation_settings import run_agents

ALONE = "query alone"
Prompts = dict[str, list[str]]  # by what precedes them
Reward = Callable[[list[str]], list[float]]  # of completions, one for each query


def worth(
    model: Path | str, prompts: Prompts, reward: Reward, sampling: SamplingConfig
) -> dict[str, tuple[float, float]]:
    """The task reward of a model as observer, by what it reads.

    Args:
        model: folder or Hub id.
        prompts: for the query alone (ALONE), and by kind of response that the observer's prompt holds.

    Returns:
        for each kind, the mean over queries and the half-width of its 95 % interval.
    """
    from cory.evaluation import respond  # here, as importing torch takes seconds
    from cory.metrics import mean_interval
    from cory.policies.load import load_policy

    policy, tokenizer = load_policy(ModelConfig(name=str(model)))
    return {
        kind: mean_interval(reward(respond(policy, policy, tokenizer, texts, sampling).completions))
        for kind, texts in prompts.items()
    }


def command_line(
    doc: str | None,
    measure: Callable[[str | None], dict[str, tuple[float, float]]],
    correlate: Callable[[Path], str],
    show: Callable[[float, float], str],
    argv: Sequence[str] | None = None,
) -> None:
    """A task's command: prints what a response is worth to a model, or how the rewards of a run's agents correlate.

    Args:
        doc: the script's. measure: `worth` of a model's folder, or of the untrained policy. show: a mean, as text.
    """
    parser = Arguments(doc)
    parser.add_argument("models", nargs="*", default=[], help="Folders of runs or of saved agents; none: untrained")
    for model in parser.of(argv).models or [None]:
        if model and run_agents(Path(model)):
            print(f"{model}: {correlate(Path(model))}")
            continue
        for kind, measured in measure(model).items():
            read = f"from the {kind}" if kind == ALONE else f"after a {kind} response"
            print(f"{model or 'Untrained'}, {read}: {show(*measured)}")
