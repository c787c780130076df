"""What a run's folder records: its settings, and how far it is. Importing this does not import torch."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from cory.cli.yaml_file import read_yaml
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
BEST = "best"  # in a run's folder, that of its best agents (`guards.patience`)
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


def _summary(folder: Path) -> dict[str, Any]:
    """The summary.json of a run; empty if it has none that can be read."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
