"""What a run is made of, as its config.yaml records it: models, the reward's source, data, versions; and when two rows
are the same query. Importing this does not import torch.

A model of the Hub is identified by its commit, a local folder by the SHA-256 of its weights: the names of their files,
the headers, and 64 KiB of each tensor. Modification times do not count, so a copy is the same model. Reading so little
takes under a second, also for seven billion parameters.
"""

import functools
import hashlib
import inspect
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.config import Config
from cory.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

CHUNK = 32 * 1024  # bytes read at the beginning and at the end of each tensor
WEIGHTS = ("*.safetensors", "*.bin")
# By the setting that names the model: its `name`, and its `identity`.
Models = dict[str, dict[str, Any]]
ROWS_AT_ONCE = 10_000  # rows of a data set that are in memory at a time
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")


def is_local(name: str) -> bool:
    """Whether a model's name can only be that of a file or folder, as no id on the Hub looks like it."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def model_identity(name: str, revision: str | None = None) -> str | None:
    """Identifies a model as `commit:...` or `sha256:...`.

    Args:
        name: Hub id or local folder. revision: of a model on the Hub.

    Returns None if the model is neither a local folder nor in the local cache of the Hub.
    """
    if Path(name).is_dir():
        return f"sha256:{_folder_hash(Path(name))}"
    if is_local(name):
        return None
    from huggingface_hub import try_to_load_from_cache  # here, as importing it takes a while

    for file in ("config.json", "adapter_config.json"):
        cached = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str):
            return f"commit:{Path(cached).parent.name}"  # .../snapshots/COMMIT/config.json
    return None


def row_keys(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """A key for each row: two rows are the same query if all their columns are. 1 and 1.0 are alike.

    >>> row_keys({"prompt": ["Which?", "Which?"], "letter": ["a", "b"]})
    ['["a", "Which?"]', '["b", "Which?"]']
    """
    rows = zip(*(columns[name] for name in sorted(columns)), strict=True)
    return [json.dumps(_comparable(row), sort_keys=True, default=repr) for row in rows]


def _comparable(value: Any) -> Any:
    """A value by which rows of different files are compared."""
    if hasattr(value, "tolist"):  # of numpy or torch, whose texts are abbreviated
        value = value.tolist()
    if isinstance(value, Mapping):  # Arrow gives all rows the keys of any, with None
        return {key: _comparable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return int(value) if value == int(value) else float(value)
    return value


def share_in_training(
    held_out: Mapping[str, Sequence[Any]], trained: Mapping[str, Sequence[Any]]
) -> float:
    """The share of held-out rows that also stand among those of training, by the columns that both have."""
    common = held_out.keys() & trained.keys()
    queries, trained_queries = (
        row_keys({name: columns[name] for name in common}) for columns in (held_out, trained)
    )
    seen = set(trained_queries)
    return sum(query in seen for query in queries) / len(queries)


def policy_models(config: Config) -> Models:
    """The models from which a run's agents are made, and the bases of those that are adapters."""
    models: Models = {}
    for index in range(config.cory.num_agents):
        model = config.of_agent(index).model
        key = f"agents[{index}].model.name" if config.agents else "model.name"
        folder = config.resolve(model.name)
        models[key] = {"name": model.name, "identity": model_identity(folder, model.revision)}
        base, revision = _base_of_adapter(Path(folder))
        if base is not None:
            models[f"{key} (base)"] = {"name": base, "identity": model_identity(base, revision)}
    return models


def check_models(
    recorded: Mapping[str, Any], current: Models, run: str, chosen: bool = False
) -> None:
    """Raises a UserError if a name stands for another model than when `run` recorded it.

    A model that was not identified then, or cannot be now, is passed over. `chosen`: so is one of
    another name, as the user has chosen another model.
    """
    for key, model in current.items():
        before = recorded.get(key) or {}
        if chosen and model["name"] != before.get("name"):
            continue
        both_identified = before.get("identity") and model["identity"]
        if both_identified and model["identity"] != before["identity"]:
            raise UserError(
                f"{key}: expected {model['name']!r} to be the model that {run}/config.yaml records, got another one "
                "behind this name"
            )


def _base_of_adapter(folder: Path) -> tuple[str | None, str | None]:
    """The base that an adapter's folder names, and its revision; None for what it does not name."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return settings["base_model_name_or_path"] or None, settings.get("revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # No adapter; loading it reports what is wrong.
        return None, None


def _folder_hash(folder: Path) -> str:
    """The start of the SHA-256 of what identifies the weights in a folder."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for part in _parts_of_weights(file):
            digest.update(part)
    return digest.hexdigest()[:16]


def _parts_of_weights(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and the beginning and the end of each tensor; those of another file."""
    with open(file, "rb") as stream:
        size = file.stat().st_size
        spans = [(0, size)]
        if file.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, size))
            yield header
            # A damaged header is one span; loading the model reports it.
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                tensors = json.loads(header)
                tensors.pop("__metadata__", None)
                offsets = [tensor["data_offsets"] for tensor in tensors.values()]
                spans = [(8 + length + start, 8 + length + end) for start, end in offsets]
        for start, end in sorted(spans):
            stream.seek(start)
            yield stream.read(min(CHUNK, end - start))
            stream.seek(max(start, end - CHUNK))
            yield stream.read(min(CHUNK, end - start))


def function_name(function: Callable[..., Any]) -> str:
    """A reward function's name: `module.function`, or the class of a callable object."""
    named = _definition(function)
    return f"{named.__module__}.{named.__qualname__}"


def source_hash(function: Callable[..., Any]) -> str:
    """The start of the SHA-256 of the file that defines a function, or the class of a callable object.

    What the file imports is not covered. Empty for a function without a file, as one that is typed at a prompt or in a
    notebook.
    """
    try:
        source = Path(inspect.getfile(_definition(function))).read_bytes()
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source).hexdigest()[:16]


def _definition(function: Callable[..., Any]) -> Any:
    """What a callable is defined by: a function without its wrappers, or the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if hasattr(function, "__qualname__") else type(function)


def data_hash(rows: "Dataset") -> str:
    """The start of the SHA-256 of a dataset's rows, in their order."""
    digest = hashlib.sha256()
    # As Arrow stores them: the text of a decoded image or a long array does not tell its value.
    stored = rows.with_format("arrow")
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = stored[start : start + ROWS_AT_ONCE].to_pydict()
        digest.update(json.dumps(chunk, default=repr).encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Python, the installed libraries, and this repository's commit where it is a checkout."""
    result = {"python": platform.python_version()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):  # trl
            result[library] = version(library)
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no checkout
        result["commit"] = commit(Path(__file__).parent)
    return result


def commit(folder: Path) -> str:
    """The commit of a folder's repository, with `-dirty` after it where tracked files differ from it.

    But for those under `results`: an experiment that writes its rows there changes nothing that its next run computes.

    Raises an OSError or a subprocess.SubprocessError: no git, or no repository that holds the folder.
    """
    _git(folder, "ls-files", "--error-unmatch", ".")  # not that of a project with cory in its .venv
    changes = _git(
        folder, "status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)results"
    )
    return _git(folder, "rev-parse", "HEAD") + ("-dirty" if changes else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=5
    ).stdout.strip()
