"""Does an observer read? Its reward after a bad, a middling and a good response of the pioneer.

    python imdb_train/observer.py                                               # the toy setting's untrained policy
    python imdb_train/observer.py --config configs/imdb/cory_smollm2_135m.yaml  # any configuration, any of its keys
    python imdb_train/observer.py runs/imdb_cory_tiny/agent_1 FOLDER            # saved full models, in the toy setting
    python imdb_train/observer.py runs/imdb_cory_tiny                           # a run: how the rewards correlate

As pioneer the model answers each of `--queries` held-out queries `--draws` times. As observer it answers `--reads`
times after each of these responses, in every wording of the observer's prompt that the task knows and every `--wording
TEMPLATE` given, without and, where the tokenizer has one, with a chat template. `gsm8k_train/observer.py` does the same
for GSM8K, `python -m study.observer --config my.yaml` for a task of your own. `--out FILE.json` keeps the numbers.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cory.config import Config, expect
from cory.run.evaluation_settings import run_agents
from cory.run.jsonl import replace_text
from cory.run.settings import load, main
from study.statistics import Interval, bootstrap, with_interval

if TYPE_CHECKING:
    import numpy as np

    from cory.task import Task

KINDS = ("worst", "middle", "best")  # the pioneer's responses to a query, by their reward
RESAMPLES = 1000  # of the queries


@dataclass(frozen=True)
class Reading:
    """What an observer makes of the pioneer's responses; intervals are over queries.

    Args:
        wording: of its prompt, by name. chat: whether that is a turn of the chat template.
        after: mean task reward and half-width of its interval, by the KIND of response that was read.
        dependence, slope: see these functions.
    """

    wording: str
    chat: bool
    after: dict[str, tuple[float, float]]
    dependence: Interval
    slope: Interval


@dataclass(frozen=True)
class Probe:
    """The readings of a model.

    Args:
        alone: task reward of the pioneer's responses, and the half-width of its interval. spread: their standard
            deviation.
        differ: queries whose responses differ in their reward, which `Reading.after` is over. of: all queries.
    """

    alone: tuple[float, float]
    spread: float
    differ: int
    of: int
    readings: list[Reading]


def dependence(observer: "np.ndarray") -> Interval:
    """How much the observer's reward depends on which of the pioneer's responses to a query it has read.

    The share of its variance within a query that lies between responses read: the intraclass correlation of a one-way
    analysis of variance. 0: what was read does not matter; 1: nothing else does.

    Args:
        observer: (queries, responses read, answers to each) rewards.
    """
    answers = observer.shape[2]
    between = answers * observer.mean(2).var(1, ddof=1)
    within = observer.var(2, ddof=1).mean(1)

    def over(queries: Sequence[int]) -> float:
        rest = within[list(queries)].sum()
        read = (between[list(queries)].sum() - rest) / answers
        return float(read / (read + rest))

    return bootstrap(over, range(len(observer)), resamples=RESAMPLES)


def slope(pioneer: "np.ndarray", observer: "np.ndarray") -> Interval:
    """What is left, on average, of a difference in reward between two responses to a query between their readers'.

    The slope of the observer's reward on the pioneer's within queries: 0 where better responses make no better readers.

    Args:
        pioneer: (queries, responses) rewards. observer: the mean reward of those who read them, in the same places.
    """
    x, y = (rewards - rewards.mean(1, keepdims=True) for rewards in (pioneer, observer))
    xy, xx = (x * y).sum(1), (x * x).sum(1)

    def over(queries: Sequence[int]) -> float:
        return float(xy[list(queries)].sum() / xx[list(queries)].sum())

    return bootstrap(over, range(len(x)), resamples=RESAMPLES)


def probe(
    config: Config, task: "Task", wordings: Mapping[str, str], queries: int = 200, draws: int = 3, reads: int = 2
) -> Probe:
    """What a configuration's policy as observer makes of its own responses as pioneer.

    Args:
        task: on held-out queries, of which the first `queries` are taken. wordings: observer's prompts, by name.
        draws: the pioneer's responses to a query. reads: the observer's answers to each of them.

    Raises a UserError: no two responses to a query differ in their reward.
    """
    import numpy as np  # here, as importing them and torch takes seconds

    from cory.evaluation import answer
    from cory.metrics import mean_interval
    from cory.policies.load import choose_device, load_policy
    from cory.prompts import RolePrompts
    from study.coupling import repeated

    model, sampling = replace(config.model, name=config.resolve(config.model.name)), config.sampling
    policy, tokenizer = load_policy(model)
    loaded = policy.to(choose_device(config.device)), None, tokenizer
    columns = repeated(task.dataset[:queries], draws)
    said, rewards = answer(loaded, task, columns, sampling, chat_template=model.chat_template, kl=False)
    pioneer = np.reshape(rewards, (-1, draws))
    differ = np.flatnonzero(pioneer.max(1) > pioneer.min(1))
    expect(len(differ) > 1, "queries", f"some of which {draws} responses differ in their reward", len(differ))
    columns, read = repeated(columns, reads), [text for text in said.completions for _ in range(reads)]
    order, places = pioneer[differ].argsort(1, kind="stable"), (0, draws // 2, -1)
    readings = []
    for name, template in wordings.items():
        worded = replace(task, prompts=RolePrompts(task.prompts.pioneer, template))
        for chat in (False, model.chat_template or True) if tokenizer.chat_template else (False,):
            _, rewards = answer(loaded, worded, columns, sampling, read, 1, seed=1, chat_template=chat, kl=False)
            observer = np.reshape(rewards, (-1, draws, reads))
            means = observer.mean(2)
            ranked = np.take_along_axis(means[differ], order, 1)
            after = {kind: mean_interval(ranked[:, at].tolist()) for kind, at in zip(KINDS, places, strict=True)}
            readings.append(Reading(name, bool(chat), after, dependence(observer), slope(pioneer, means)))
    alone = mean_interval(pioneer.mean(1).tolist())
    return Probe(alone, float(pioneer.std()), len(differ), len(pioneer), readings)


def table(name: str, probe: Probe) -> str:
    """A probe as a Markdown table."""
    from study.tables import markdown_table

    def shown(value: tuple[float, float]) -> str:
        return f"{value[0]:.2f} ± {value[1]:.2f}"

    rows = [
        {"observer's prompt": r.wording, "chat template": "yes" if r.chat else "no"}
        | {f"after the {kind}": shown(value) for kind, value in r.after.items()}
        | {"dependence": with_interval(r.dependence, ".2f"), "slope": with_interval(r.slope, ".2f")}
        for r in probe.readings
    ]
    return (
        f"{name}: task reward as pioneer {shown(probe.alone)}. As observer (of {probe.of} queries, responses to "
        f"{probe.differ} differ in their reward):\n\n{markdown_table(rows)}"
    )


def command_line(
    kind: type[Config],
    task_module: str,
    wordings: Mapping[str, str],
    default: Path | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """A task's command; see the module.

    Args:
        kind: its configuration class. default: its usual configuration.
        task_module: whose `make_task` makes it; it is imported late, as it imports torch.
        wordings: templates of the observer's prompt, by name.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--reads", type=int, default=2)
    parser.add_argument("--wording", action="append", default=[])
    parser.add_argument("--out", type=Path)
    if {"-h", "--help"} & {*argv}:
        print(f"{__doc__}\nThe keys of a configuration:\n")
    models = argv[: next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))]
    own, flags = parser.parse_known_args(argv[len(models) :])
    expect(own.out is None or len(models) < 2, "--out", "one model", models)
    expect(own.queries >= 2, "--queries", "at least 2", own.queries)
    expect(own.draws >= 2, "--draws", "at least 2", own.draws)
    expect(own.reads >= 2, "--reads", "at least 2", own.reads)
    for name in models or [""]:
        if name and run_agents(Path(name)):
            from study.coupling import coupling, text

            make_task = importlib.import_module(task_module).make_task
            print(f"{name}: {text(coupling(Path(name), kind, make_task, own.queries))}")
            continue
        config, _ = load(kind, default, [*flags, *([f"--model.name={name}"] if name else [])])
        from cory.policies.load import choose_device  # after the settings are checked: importing torch takes seconds

        task = importlib.import_module(task_module).make_task(config, choose_device(config.device), "test")
        more = [task.prompts.observer, *own.wording]
        chosen = dict(wordings) | {text: text for text in more if text not in wordings.values()}
        found = probe(config, task, chosen, own.queries, own.draws, own.reads)
        print(table(config.model.name, found))
        if own.out:
            replace_text(own.out, json.dumps(asdict(found), indent=2))


if __name__ == "__main__":
    from cory.tasks.config import OwnConfig

    main(lambda: command_line(OwnConfig, "cory.tasks.own", {}))
