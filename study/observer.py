"""Does an observer read? Its reward after a bad, a middling and a good response of the pioneer.

    python imdb_train/observer.py                                          # the toy setting's untrained policy
    python imdb_train/observer.py --config configs/imdb/smollm2_135m.yaml  # any configuration, any of its keys
    python imdb_train/observer.py runs/imdb_cory_tiny/agent_1 FOLDER       # saved full models, in the toy setting
    python imdb_train/observer.py runs/imdb_cory_tiny                      # a run: how the rewards correlate

Folders come first, then flags. The model answers each of `--queries` held-out queries `--samples` times as pioneer, and
each of these responses `--answers` times as observer: in the configuration's own observer's prompt, in the others that
the task has by name, and in every `--wording`, a name or a template; where the tokenizer has a chat template, with and
without it. `--split` names the held-out queries, `--out FILE.json` keeps the numbers. `gsm8k_train/observer.py` does
the same for GSM8K, `python -m study.observer --config my.yaml` for a task of your own.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.cli.settings import load, main
from cory.config import Config
from cory.errors import UserError, expect
from cory.evaluation.settings import run_agents
from cory.run.output import check_result_file, replace_text
from study.statistics import Interval, bootstrap, over, with_interval

if TYPE_CHECKING:
    import numpy as np

    from cory.task import Task

KINDS = ("worst", "middle", "best")  # the pioneer's responses to a query, by their reward
RESAMPLES = 1000  # of the queries


MARK = '"readings": ['  # in every file that --out writes


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
        differ: number of queries whose responses differ in reward, those in `Reading.after`. of: number of all queries.
        readings: the first is of the configuration's own prompt and template.
    """

    alone: tuple[float, float]
    spread: float
    differ: int
    of: int
    readings: list[Reading]


def dependence(observer: "np.ndarray") -> Interval:
    """How much the observer's reward depends on which of the pioneer's responses to a query it has read.

    The intraclass correlation of a one-way analysis of variance within queries: the share of the variance that lies
    between responses read. 0: what was read does not matter; 1: nothing else does; NaN where the reward never varies.

    Args:
        observer: (queries, pioneer's responses, answers to each) rewards.
    """
    answers = observer.shape[2]
    between = answers * observer.mean(2).var(1, ddof=1)
    within = observer.var(2, ddof=1).mean(1)

    def share(queries: Sequence[int]) -> float:
        rest = float(within[list(queries)].sum())
        read = (float(between[list(queries)].sum()) - rest) / answers
        return over(read, read + rest)

    return bootstrap(share, range(len(observer)), resamples=RESAMPLES)


def slope(pioneer: "np.ndarray", observer: "np.ndarray") -> Interval:
    """Slope of the observer's reward on the pioneer's, within queries; NaN where the pioneer's never varies.

    Args:
        pioneer: (queries, responses) rewards. observer: mean reward of the answers to each response, likewise.
    """
    x, y = (rewards - rewards.mean(1, keepdims=True) for rewards in (pioneer, observer))
    xy, xx = (x * y).sum(1), (x * x).sum(1)

    def ratio(queries: Sequence[int]) -> float:
        return over(float(xy[list(queries)].sum()), float(xx[list(queries)].sum()))

    return bootstrap(ratio, range(len(x)), resamples=RESAMPLES)


def probe(
    config: Config, task: "Task", wordings: Mapping[str, str], queries: int = 200, samples: int = 3, answers: int = 2
) -> Probe:
    """What a configuration's policy as observer makes of its own responses as pioneer.

    Args:
        task: on held-out queries, of which the first `queries` are taken.
        wordings: observer's prompts, by name, besides the task's own.
        samples: of the pioneer for a query. answers: of the observer to each of them.

    Raises a UserError: no two responses to a query differ in their reward.
    """
    import numpy as np  # here, as importing them and torch takes seconds

    from cory.evaluation.responses import answer
    from cory.metrics import mean_interval
    from cory.models.families import check_model
    from cory.models.load import choose_device, load_policy
    from cory.prompts import RolePrompts
    from study.coupling import repeated

    own = task.prompts.observer
    names = {template: name for name, template in wordings.items()}
    tasks = {
        names.get(template, template): replace(task, prompts=RolePrompts(task.prompts.pioneer, template))
        for template in dict.fromkeys([own, *wordings.values()])
    }
    model, sampling = replace(config.model, name=config.resolve(config.model.name)), config.sampling
    policy, tokenizer = load_policy(model)
    templates: list[Any] = [model.chat_template]
    if tokenizer.chat_template and isinstance(task.dataset["prompt"][0], str):  # messages always are turns
        templates.append(not model.chat_template)
    loaded = policy.to(choose_device(config.device)), None, tokenizer
    check_model(policy, tokenizer)
    columns = repeated(task.dataset[:queries], samples)
    said, rewards = answer(loaded, task, columns, sampling, chat_template=model.chat_template, kl=False)
    pioneer = np.reshape(rewards, (-1, samples))
    differ = np.flatnonzero(pioneer.max(1) > pioneer.min(1))
    expect(len(differ) > 1, "queries", f"some of which {samples} responses differ in their reward", len(differ))
    columns, read = repeated(columns, answers), [text for text in said.completions for _ in range(answers)]
    order, places = pioneer[differ].argsort(1, kind="stable"), (0, samples // 2, -1)
    readings = []
    for name, worded in tasks.items():
        for chat in templates:
            _, rewards = answer(loaded, worded, columns, sampling, read, 1, seed=1, chat_template=chat, kl=False)
            observer = np.reshape(rewards, (-1, samples, answers))
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
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for name, usual in (("--queries", 200), ("--samples", 3), ("--answers", 2)):
        parser.add_argument(name, type=int, default=usual)
    parser.add_argument("--wording", action="append", default=[])
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path)
    if {"-h", "--help"} & {*argv}:
        print(f"{__doc__}\nThe keys of a configuration:\n")
        load(kind, default, ["--help", "all"])
    models = argv[: next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))]
    try:
        own, flags = parser.parse_known_args(argv[len(models) :])
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    for name, least in (("queries", 2), ("samples", 3), ("answers", 2)):
        expect(getattr(own, name) >= least, f"--{name}", f"at least {least}", getattr(own, name))
    expect(own.out is None or len(models) < 2, "--out", "one model", models)
    more = [wordings.get(each, each) for each in own.wording]
    for name in models or [""]:
        if name and run_agents(Path(name)):
            from study.coupling import coupling, text

            only = "no flag other than --queries with the folder of a run"
            named = {word.split("=")[0] for word in argv[len(models) :] if word.startswith("--")}
            expect(named <= {"--queries"}, "flags", only, " ".join(argv[len(models) :]))
            make_task = importlib.import_module(task_module).make_task
            print(f"{name}: {text(coupling(Path(name), kind, make_task, own.queries))}")
            continue
        config, _ = load(kind, default, [*flags, *([f"--model.name={name}"] if name else [])])
        from cory.models.load import choose_device  # after the settings are checked: importing torch takes seconds

        task = importlib.import_module(task_module).make_task(config, choose_device(config.device), own.split)
        chosen = {**wordings, **{template: template for template in more if template not in wordings.values()}}
        if own.out:
            check_result_file(own.out, MARK)
        found = probe(config, task, chosen, own.queries, own.samples, own.answers)
        print(table(config.model.name, found))
        if own.out:
            numbers = json.dumps(asdict(found), indent=2).replace("NaN", "null")
            replace_text(own.out, numbers)


if __name__ == "__main__":
    from cory.tasks.config import OwnConfig

    main(lambda: command_line(OwnConfig, "cory.tasks.own", {}))
