"""The folder of an evaluation: a new one, or one that was begun and goes on. Importing this does not import torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cory.errors import NotContinued, UserError
from cory.evaluation.agents import run_agents
from cory.evaluation.settings import EvaluationConfig
from cory.provenance.models import Models, check_models, model_identity
from cory.run.output import lock, new_folder, remove_partial, replace_text

# May differ when an evaluation is continued.
FREE = ("device", "output", "ks", "shown", "identities")
RESPONSES = "responses.jsonl"  # a line for each model and query
# What each line has; those of some settings and tasks have more.
COLUMNS = ("model", "query", "role", "rewards", "rewards_by_function", "kl", "base_nll", "tokens", "prompt_tokens",
           "completions", "read", "prompt")  # fmt: skip


def read_responses(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The records of responses.jsonl, by model and query, without a line that was cut short by a kill."""
    records = {}
    for line in (folder / RESPONSES).read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            records[record["model"], record["query"]] = record
    return records


def begun_responses(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """As `read_responses`, for an evaluation to go on. Raises a NotContinued if an older version of cory began it."""
    records = read_responses(folder)
    for record in records.values():
        missing = [column for column in COLUMNS if column not in record]
        if missing:
            raise NotContinued(
                f"output: expected an evaluation that this version of cory can continue, got {str(folder)!r}, whose "
                f"{RESPONSES} has no {', '.join(missing)}. Delete that folder, or choose another --output"
            )
    return records


def trained(models: Sequence[str]) -> dict[str, str]:
    """For each run among the models, a hash of its results and its agents, which differs if it was trained again."""
    hashes = {}
    for name in models:
        with suppress(OSError, ValueError):
            summary = json.loads((Path(name) / "summary.json").read_text(encoding="utf-8"))
            results: list[Any] = [summary.get(key) for key in ("iterations", "agents", "samples")]
            results += [model_identity(str(agent)) for agent in run_agents(Path(name)).values()]
            hashes[name] = _hash(results)
    return hashes


def extends(models: Sequence[str], before: Mapping[str, Any]) -> bool:
    """Whether an evaluation with the settings `before` can go on with these models, more or fewer.

    The first model and the first run must be the same, as they decide on base, prompts and sampling; runs must be
    unchanged.
    """
    earlier_models = before.get("models") or []
    if _first_model_and_run(models) != _first_model_and_run(earlier_models):
        return False
    now = trained(models)
    then = before.get("trained", now)
    # A folder's name is that of its rows.
    by_folder = {Path(name).name: name for name in earlier_models}
    for name in models:
        earlier = by_folder.get(Path(name).name)
        if earlier is not None and (earlier != name or then.get(name) != now.get(name)):
            return False
    return True


def _first_model_and_run(models: Sequence[str]) -> list[str]:
    runs = [name for name in models if (Path(name) / "config.yaml").exists()]
    return [*models[:1], *runs[:1]]


def output_folder(
    settings: EvaluationConfig,
    name: str,
    task: Mapping[str, Any],
    identities: Models,
    locks: ExitStack,
) -> Path:
    """The folder of the results, which is locked until `locks` is closed.

    Args:
        settings: whose `output` it is; null: a new one.
        name: of a new one.
        task: `reward`, `prompts` and `data_sha256`, the hash of the held-out rows, as responses are stored by the
            number of their row.
        identities: of base, reward model and models that are no runs.

    Raises a NotContinued if the folder was begun with other settings or models, or a run was trained on since.
    """
    content = {**asdict(settings), **task}
    content["trained"] = trained(settings.models)
    content["identities"] = identities
    if settings.output and (Path(settings.output) / "settings.json").exists():
        folder = Path(settings.output)
        content = _continued(folder, content, locks)
    else:
        folder = new_folder(settings.output, name, locks)
    replace_text(folder / "settings.json", json.dumps(content, indent=2))
    return folder


def check_untouched(before: Mapping[str, Any], after: Mapping[str, Any], folder: Path) -> None:
    """Raises a UserError if runs were trained on while they were evaluated: what `trained` said before and after."""
    again = [run for run in before if before[run] != after.get(run)]
    if again:
        raise UserError(
            f"expected runs that stay as they are while they are evaluated, got {', '.join(again)} trained again. The "
            f"responses in {str(folder)!r} may be of either; evaluate them anew, into another folder"
        )


def _continued(folder: Path, content: Mapping[str, Any], locks: ExitStack) -> dict[str, Any]:
    """The settings of an evaluation that goes on. Raises a NotContinued if it was begun with others."""
    _begun_settings(folder)  # refuses another folder before anything is written
    lock(folder, locks)
    before = _begun_settings(folder)  # as a process that had the lock until now has left them
    if (folder / RESPONSES).exists():
        begun_responses(folder)  # refuses those of an older version, too
    remove_partial(folder)
    begun_with = before.get("identities", {})
    try:
        check_models(begun_with, content["identities"], f"the evaluation in {folder}")
    except UserError as error:
        raise NotContinued(str(error)) from None

    extended = extends(content["models"], before)
    free = (*FREE, "models", "trained") if extended else FREE
    different = [key for key in content if content[key] != before.get(key) and key not in free]
    if different:
        texts = [_difference(key, before.get(key), content[key]) for key in different]
        raise NotContinued(
            f"output: expected the settings with which {str(folder)!r} was begun, got {'; '.join(texts)}"
        )
    if not extended:
        return dict(content)
    return {
        **content,
        "models": list(dict.fromkeys([*before["models"], *content["models"]])),
        "trained": before.get("trained", {}) | content["trained"],
        "identities": begun_with | content["identities"],
    }


def _difference(key: str, before: Any, now: Any) -> str:
    """What differs from the settings with which an evaluation was begun, in words."""
    if key == "trained":
        again = [run for run, end in now.items() if (before or {}).get(run, end) != end]
        return f"{', '.join(again)} trained again since" if again else "other runs"
    if key in ("reward", "prompts"):
        return f"another {key.removesuffix('s')}"
    if key == "data_sha256":
        return "other queries, or other columns beside them"
    return f"{key} {before!r} -> {now!r}"


def _begun_settings(folder: Path) -> dict[str, Any]:
    """The settings with which an evaluation was begun. Raises a NotContinued if the folder is none of an evaluation."""
    content: Any = None
    with suppress(OSError, ValueError):
        content = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    if (
        not isinstance(content, dict)
        or not {"models", "split", "queries", "samples"} <= content.keys()
    ):
        raise NotContinued(
            f"output: expected a new folder or one of an evaluation, got {str(folder)!r}, whose settings.json is not "
            "that of an evaluation"
        )
    return content


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
