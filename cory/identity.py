"""Identifies models, reward functions, data and versions for a run's config.yaml, and compares rows across datasets.

A model on the Hub is identified by its commit. A local model is identified by a SHA-256 over its weight files: their
names, sizes and headers, and 64 KiB of each tensor. This takes under a second even for seven billion parameters.
Modification times do not count, so a copy is the same model.

Importing this module does not import torch.
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
# Maps the setting that names a model to the model's `name` and `identity`.
Models = dict[str, dict[str, Any]]
ROWS_AT_ONCE = 10_000  # rows of a dataset in memory at a time
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")


def is_local(name: str) -> bool:
    """Whether a model's name can only be a path, since no Hub id has this form."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (folder / "adapter_config.json").exists()


def model_identity(name: str, revision: str | None = None) -> str | None:
    """Identifies a model as `commit:...` or `sha256:...`.

    Args:
        name: Hub id or local folder.
        revision: revision of a model on the Hub.

    Returns None if the model is neither a local folder nor in the Hub's local cache.
    """
    if Path(name).is_dir():
        return f"sha256:{_folder_hash(Path(name))}"
    if is_local(name):
        return None
    from huggingface_hub import try_to_load_from_cache  # slow to import

    for file in ("config.json", "adapter_config.json"):
        cached = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str):
            return f"commit:{Path(cached).parent.name}"  # .../snapshots/COMMIT/config.json
    return None


def row_keys(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Returns one key per row. Rows with equal values have equal keys; 1 and 1.0 count as equal.

    >>> row_keys({"prompt": ["Which?", "Which?"], "letter": ["a", "b"]})
    ['["a", "Which?"]', '["b", "Which?"]']
    """
    rows = zip(*(columns[name] for name in sorted(columns)), strict=True)
    return [json.dumps(_comparable(row), sort_keys=True, default=repr) for row in rows]


def _comparable(value: Any) -> Any:
    """Normalizes a value, so that rows from different files can be compared."""
    if hasattr(value, "tolist"):  # written as text, a long array is abbreviated
        value = value.tolist()
    if isinstance(value, Mapping):  # Arrow fills missing keys with None
        return {key: _comparable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return int(value) if value == int(value) else float(value)
    return value


def share_in_training(
    held_out: Mapping[str, Sequence[Any]], trained: Mapping[str, Sequence[Any]]
) -> float:
    """Returns the share of held-out rows that also occur in the training rows. Only common columns are compared."""
    common = held_out.keys() & trained.keys()
    queries, trained_queries = (
        row_keys({name: columns[name] for name in common}) for columns in (held_out, trained)
    )
    seen = set(trained_queries)
    return sum(query in seen for query in queries) / len(queries)


def policy_models(config: Config) -> Models:
    """Returns the identities of a run's models; for a model that is an adapter, also its base model's identity."""
    models: Models = {}
    for index in range(config.cory.num_agents):
        model = config.of_agent(index).model
        is_runs_model = (model.name, model.revision) == (config.model.name, config.model.revision)
        key = "model.name" if is_runs_model else f"agents[{index}].model.name"
        folder = config.resolve(model.name)
        models[key] = {"name": model.name, "identity": model_identity(folder, model.revision)}
        base, revision = _base_of_adapter(Path(folder))
        if base is not None:
            models[f"{key} (base)"] = {"name": base, "identity": model_identity(base, revision)}
    return models


def check_models(
    recorded: Mapping[str, Any], current: Models, run: str, chosen: bool = False
) -> None:
    """Raises a UserError if a model has changed although its name is the same as in a run's record.

    A model is skipped if it could not be identified, then or now.

    Args:
        recorded: the run's record of its models.
        current: the models that these names stand for now.
        run: the run's name, for the message.
        chosen: whether the user may have chosen other models. If true, a model with another name is skipped, too.
    """
    for key, model in current.items():
        recorded_model = recorded.get(key) or {}
        if chosen and model["name"] != recorded_model.get("name"):
            continue
        both_identified = recorded_model.get("identity") and model["identity"]
        if both_identified and model["identity"] != recorded_model["identity"]:
            raise UserError(
                f"{key}: expected the model recorded in {run}/config.yaml, got another model with the same name, "
                f"{model['name']!r}"
            )


def _base_of_adapter(folder: Path) -> tuple[str | None, str | None]:
    """Returns the base model that an adapter's folder names, and its revision. Each is None if missing."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return settings["base_model_name_or_path"] or None, settings.get("revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # Not a readable adapter; loading it reports the error.
        return None, None


def _folder_hash(folder: Path) -> str:
    """Returns the start of a SHA-256 that identifies the weights in a folder."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for part in _parts_of_weights(file):
            digest.update(part)
    return digest.hexdigest()[:16]


def _parts_of_weights(file: Path) -> Iterator[bytes]:
    """Yields the parts of a file to hash: its two ends or, for safetensors, the header and both ends of each tensor."""
    with open(file, "rb") as stream:
        size = file.stat().st_size
        spans = [(0, size)]
        if file.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, size))
            yield header
            # A file with a damaged header is hashed like other files; loading the model reports the error.
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
    """Returns a reward function's name: `module.function`, or the class of a callable object."""
    named = _definition(function)
    return f"{named.__module__}.{named.__qualname__}"


def source_hash(function: Callable[..., Any]) -> str:
    """Returns the start of the SHA-256 of the file that defines a function, or a callable object's class.

    The hash does not cover the file's imports. It is empty for a function without a file, such as one typed in an
    interpreter or a notebook.
    """
    try:
        source = Path(inspect.getfile(_definition(function))).read_bytes()
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source).hexdigest()[:16]


def _definition(function: Callable[..., Any]) -> Any:
    """Returns what defines a callable: the function inside any wrappers, or an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if hasattr(function, "__qualname__") else type(function)


def data_hash(rows: "Dataset") -> str:
    """Returns the start of the SHA-256 of a dataset's rows, in order."""
    digest = hashlib.sha256()
    # Hash rows as Arrow stores them: a decoded image or a long array, written as text, does not show its full value.
    stored = rows.with_format("arrow")
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = stored[start : start + ROWS_AT_ONCE].to_pydict()
        digest.update(json.dumps(chunk, default=repr).encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Returns the versions of Python and the libraries, and cory's commit if it runs from a checkout."""
    result = {"python": platform.python_version()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):  # trl is optional
            result[library] = version(library)
    with suppress(OSError, subprocess.SubprocessError):  # git is missing, or this is not a checkout
        result["commit"] = commit(Path(__file__).parent)
    return result


def commit(folder: Path) -> str:
    """Returns the commit of a folder's repository, with `-dirty` appended if tracked files have changed.

    Changes in `results` do not count, since experiments write rows there that do not affect their next runs.

    Raises an OSError or a subprocess.SubprocessError if git is missing or no repository tracks the folder.
    """
    # Fails, as it should, if cory is installed in a .venv inside another project's repository.
    _git(folder, "ls-files", "--error-unmatch", ".")
    changes = _git(
        folder, "status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)results"
    )
    return _git(folder, "rev-parse", "HEAD") + ("-dirty" if changes else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=5
    ).stdout.strip()
