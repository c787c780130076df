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
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.cli.load import load
from cory.cli.main import main
from cory.config import Config
from cory.errors import UserError
from cory.evaluation.agents import run_agents
from cory.run.output import check_result_file, replace_text
from cory.tasks.kind import TaskKind
from study.intervals import Interval, over_queries

if TYPE_CHECKING:
    import numpy as np

    from cory.prompts import RolePrompts
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
        return _ratio(read, read + rest)

    return over_queries(share, len(observer), RESAMPLES)


def slope(pioneer: "np.ndarray", observer: "np.ndarray") -> Interval:
    """Slope of the observer's reward on the pioneer's, within queries; NaN where the pioneer's never varies.

    Args:
        pioneer: (queries, responses) rewards. observer: mean reward of the answers to each response, likewise.
    """
    read = pioneer - pioneer.mean(1, keepdims=True)
    answered = observer - observer.mean(1, keepdims=True)
    covariance = (read * answered).sum(1)
    variance = (read * read).sum(1)

    def slope_of(queries: Sequence[int]) -> float:
        return _ratio(float(covariance[list(queries)].sum()), float(variance[list(queries)].sum()))

    return over_queries(slope_of, len(read), RESAMPLES)


def _ratio(a: float, b: float) -> float:
    """A ratio; undefined where the denominator is not above 0."""
    return a / b if b > 0 else math.nan


def probe(
    config: Config,
    task: "Task",
    wordings: Mapping[str, str],
    queries: int = 200,
    samples: int = 3,
    answers: int = 2,
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
    from cory.models.load import load_policy
    from cory.parallel.devices import choose_device
    from study.coupling import repeated

    model = replace(config.model, name=config.resolve(config.model.name))
    device = choose_device(config.device)
    policy, tokenizer = load_policy(model, device)
    loaded = policy.to(device), None, tokenizer
    check_model(policy, tokenizer)

    # The pioneer answers each query `samples` times; only queries with rewards that differ tell better from worse.
    sampling = config.sampling
    columns = repeated(task.dataset[:queries], samples)
    responses, scores = answer(
        loaded, task, columns, sampling, chat_template=model.chat_template, kl=False
    )
    rewards = scores.total.tolist()
    pioneer = np.reshape(rewards, (-1, samples))
    differ = np.flatnonzero(pioneer.max(1) > pioneer.min(1))
    if len(differ) < 2:
        raise UserError(
            f"queries: expected some of which {samples} responses differ in their reward, got {len(differ)}. "
            "A first role that earns nothing by itself cannot be probed"
        )

    # The observer answers each of these responses `answers` times.
    columns = repeated(columns, answers)
    read = [text for text in responses.completions for _ in range(answers)]
    readings = []
    for name, worded in _tasks(task, wordings).items():
        for chat in _templates(model.chat_template, tokenizer, task):
            _, scores = answer(
                loaded, worded, columns, sampling, [read], 1, seed=1, chat_template=chat, kl=False
            )
            observer = np.reshape(scores.total.tolist(), (-1, samples, answers))
            readings.append(_reading(name, bool(chat), pioneer, observer))
    alone = mean_interval(pioneer.mean(1).tolist())
    return Probe(alone, float(pioneer.std()), len(differ), len(pioneer), readings)


def _tasks(task: "Task", wordings: Mapping[str, str]) -> dict[str, "Task"]:
    """The task with each wording of its second role's prompt, by name; the first is the task as it is."""
    own = task.prompts.template(1)
    tasks = {next((name for name, wording in wordings.items() if wording == own), own): task}
    for name, wording in wordings.items():
        if wording != own:
            tasks[name] = replace(task, prompts=_worded(task.prompts, wording))
    return tasks


def _templates(own: Any, tokenizer: Any, task: "Task") -> list[Any]:
    """The settings of the chat template to try: the configuration's own, and its opposite if prompts may be either."""
    has_template = tokenizer.chat_template and isinstance(task.dataset["prompt"][0], str)
    return [own, not own] if has_template else [own]  # messages always are turns


def _reading(name: str, chat: bool, pioneer: "np.ndarray", observer: "np.ndarray") -> Reading:
    """A reading from the rewards of the responses read, (queries, samples), and of the answers to each, (queries,
    samples, answers).
    """
    import numpy as np

    from cory.metrics import mean_interval

    means = observer.mean(2)
    differ = pioneer.max(1) > pioneer.min(1)
    order = pioneer[differ].argsort(1, kind="stable")
    ranked = np.take_along_axis(means[differ], order, 1)
    ranks = dict(zip(KINDS, (0, pioneer.shape[1] // 2, -1), strict=True))
    after = {kind: mean_interval(ranked[:, rank].tolist()) for kind, rank in ranks.items()}
    return Reading(name, chat, after, dependence(observer), slope(pioneer, means))


def _worded(prompts: "RolePrompts", wording: str) -> "RolePrompts":
    """The prompts with another one for the second role."""
    if len(prompts.roles) < 2:
        return replace(prompts, observer=wording)
    first, second, *others = prompts.roles
    return replace(prompts, roles=(first, replace(second, prompt=wording), *others))


def table(name: str, probe: Probe) -> str:
    """A probe as a Markdown table."""
    from study.markdown import markdown_table

    def shown(value: tuple[float, float]) -> str:
        return f"{value[0]:.2f} ± {value[1]:.2f}"

    rows = [
        {"observer's prompt": r.wording, "chat template": "yes" if r.chat else "no"}
        | {f"after the {kind}": shown(value) for kind, value in r.after.items()}
        | {"dependence": r.dependence.text(".2f"), "slope": r.slope.text(".2f")}
        for r in probe.readings
    ]
    return (
        f"{name}: task reward as pioneer {shown(probe.alone)}. As observer (of {probe.of} queries, responses to "
        f"{probe.differ} differ in their reward):\n\n{markdown_table(rows)}"
    )


def command_line(
    kind: TaskKind[Any],
    wordings: Mapping[str, str],
    default: Path | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """A task's command; see the module.

    Args:
        kind: of the task. default: its usual configuration.
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
        load(kind.config, default, ["--help", "all"])
    models = argv[: next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))]
    try:
        args, flags = parser.parse_known_args(argv[len(models) :])
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    for name, least in (("queries", 2), ("samples", 3), ("answers", 2)):
        if getattr(args, name) < least:
            raise UserError(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    if args.out is not None and len(models) > 1:
        raise UserError(f"--out: expected one model, got {models}")
    for name in models or [""]:
        if name and run_agents(Path(name)):
            _print_coupling(name, kind, args.queries, argv[len(models) :])
        else:
            model = [f"--model.name={name}"] if name else []
            config = load(kind.config, default, [*flags, *model])
            _print_probe(config, kind, _with_further(wordings, args.wording), args)


def _with_further(wordings: Mapping[str, str], further: Sequence[str]) -> dict[str, str]:
    """The wordings by name, and further templates, which are their own names, or the names of known ones."""
    chosen = dict(wordings)
    for wording in further:
        template = wordings.get(wording, wording)
        if template not in wordings.values():
            chosen[template] = template
    return chosen


def _print_coupling(run: str, kind: TaskKind[Any], queries: int, flags: Sequence[str]) -> None:
    """Of a trained pair, how the observer's reward follows the pioneer's (`study/coupling.py`)."""
    from study.coupling import coupling, text

    named = {word.split("=")[0] for word in flags if word.startswith("--")}
    if not named <= {"--queries"}:
        raise UserError(
            f"flags: expected no flag other than --queries with the folder of a run, got {' '.join(flags)!r}"
        )
    print(f"{run}: {text(coupling(Path(run), kind, queries))}")


def _print_probe(
    config: Config, kind: TaskKind[Any], wordings: Mapping[str, str], args: argparse.Namespace
) -> None:
    """Of a model, what it makes of a first response by each wording; into `args.out` as JSON, too."""
    task = kind.make_task(config, kind.held_out_rows(config, args.split))
    if args.out:
        check_result_file(args.out, MARK)
    measured = probe(config, task, wordings, args.queries, args.samples, args.answers)
    print(table(config.model.name, measured))
    if args.out:
        # JSON has no NaN.
        numbers = json.loads(json.dumps(asdict(measured)), parse_constant=lambda _: None)
        replace_text(args.out, json.dumps(numbers, indent=2))


if __name__ == "__main__":
    from cory.tasks.config import OWN

    main(lambda: command_line(OWN, {}))
