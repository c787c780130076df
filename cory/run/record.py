"""What a run's folder records: its settings, and how far it is. Importing this does not import torch."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from cory.cli.yaml_file import read_yaml
from cory.config import HELD_OUT_REWARDS
from cory.errors import UserError


def read_settings(run: Path) -> dict[str, Any]:
    """A run's config.yaml: settings, fingerprint, versions, changes. Nothing in it is executed.

    Raises a UserError if there is none, or if it names code.
    """
    try:
        settings = read_yaml(run / "config.yaml")
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"expected the folder of a run, with a config.yaml, got {str(run)!r} ({reason})"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"{run / 'config.yaml'}: expected settings, got {settings!r}")
    return settings


CALLBACK = "a callback"  # that has ended a run early, in the place of a guard's name
BEST = "best_agents"  # in the summary.json of a run's best agents, the name of their folder
LINE_BREAKS = "\x85\u2028\u2029"  # which YAML reads as spaces or other line breaks


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as prompts, as blocks, and quotes what the configuration's
    loader would read as something else.
    """


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if _is_number(text) or not text.strip("\n") or any(each in text for each in LINE_BREAKS):
        style = '"'
    elif "\n" in text.strip("\n"):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    """Such as 1e3, which is text in YAML and a number to its loader here."""
    try:
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _text)


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Settings as YAML for people to read, in their order."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def named(folder: Path) -> Path:
    """The folder by a path that ends with its name: not `.` or `..`."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def recorded_iterations(run: Path) -> int:
    """The number of iterations in metrics.jsonl, without a line that was cut short by a kill."""
    last = -1
    with suppress(OSError):
        for line in (
            (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            with suppress(ValueError, LookupError, TypeError):
                last = max(last, json.loads(line)["iteration"])
    return last + 1


def finished_iterations(run: Path) -> int | None:
    """The number of iterations after which the run was finished and its agents saved; None: it was never finished.

    A finished run that is being extended has more in metrics.jsonl, and its agents are still those of its end.
    """
    iterations = _summary(run).get("iterations")
    return iterations if isinstance(iterations, int) else None


def stopped_by(run: Path) -> str | None:
    """What ended a run before its last iteration: a guard, such as `guards.patience`, or CALLBACK; None: nothing."""
    return _summary(run).get("stopped_by")


def best_folder(run: Path) -> Path:
    """Where the best agents of a run are (`guards.patience`). It is named by the run, as rows of an evaluation are.

    In a run's folder that was renamed or copied it has the former name. A folder that somebody has renamed to keep it
    is none, nor is another run in this run's folder.
    """
    folder = run / f"{run.resolve().name}-best"  # by whatever path it was reached
    saved = [path for path in run.glob("[!.]*-best") if best_of(path) == path.name]
    return saved[0] if len(saved) == 1 else folder


def best_of(folder: Path) -> str | None:
    """The name under which a run has saved its best agents in a folder; None: it has not."""
    return _summary(folder).get(BEST)


def rewards_of_best(folder: Path) -> dict[str, float]:
    """The held-out rewards, by name, for which the agents in a folder were saved as a run's best; empty: none were."""
    return {name: value for name, value in _summary(folder).items() if name in HELD_OUT_REWARDS}


def _summary(folder: Path) -> dict[str, Any]:
    """The summary.json of a run; empty if it has none that can be read."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def run_of_best(folder: Path) -> Path | None:
    """The run whose best agents are in a folder; None if it is no such folder."""
    run = folder.parent
    is_best = best_of(folder) is not None and (folder / "config.yaml").is_file()
    return run if is_best and (run / "config.yaml").is_file() else None
