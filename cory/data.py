"""Reads datasets from files, folders and the Hub.

The library `datasets` reads Parquet files, folders of `save_to_disk`, and datasets on the Hub. This module itself reads
JSON and CSV, since `datasets` would turn a text such as 2026-01-31 in JSON into a date, and 007 in CSV into a number.
"""

import csv
import gzip
import json
import re
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import datasets

from cory.checks import check_templates
from cory.config import Config
from cory.errors import UserError
from cory.identity import is_local
from cory.models.load import tokenizer_of
from cory.models.text import encode
from cory.process import is_first
from cory.roles import RolePrompts
from cory.run.folder import json_object, parse_rows

FORMATS = (".parquet", ".jsonl", ".json", ".csv")


def load_dataset(
    name: str,
    split: str,
    columns: Sequence[str] = (),
    subset: str | None = None,
    key: str = "task.dataset",
) -> datasets.Dataset:
    """Loads one split of a dataset.

    Args:
        name: Hub id, local file, folder with files named after their split, or folder of `save_to_disk`. Files are
            Parquet, JSON lines, JSON or CSV; all except Parquet may be gzipped (.gz). CSV cells are texts.
        split: name of the split. A single file has no splits and is read whole.
        columns: required columns.
        subset: configuration of a Hub dataset.
        key: the settings' key, for messages.

    Raises a UserError if the dataset is missing, empty or unreadable, or lacks a column.
    """
    path = Path(name)
    if not path.exists() and (is_local(name) or _ending(path) in FORMATS):
        raise UserError(f"{key}: expected an existing file or folder, or a Hub id, got {name!r}")
    try:
        rows = _read(name, split, subset)
    except Exception as error:  # readers raise different exceptions
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason}"
        where = "" if path.exists() else f"; {str(Path.cwd())!r} has no such file or folder"
        raise UserError(f"{key}: cannot read {name!r}, split {split!r} ({reason}{where})") from None
    if len(rows) == 0:
        raise UserError(f"{key}: expected rows, got none in {name!r}, split {split!r}")
    for column in columns:
        if column not in rows.column_names:
            raise UserError(
                f"{key}: expected a column {column!r} in {name!r}, got {rows.column_names}"
            )
    return rows


def has_splits(name: str) -> bool:
    """Whether a dataset can have several splits, unlike a single file or a single dataset of `save_to_disk`."""
    return not (Path(name).is_file() or (Path(name) / "state.json").is_file())


def check_held_out(dataset: str, trained: str) -> None:
    """Raises a UserError if a dataset has no held-out rows: it has no splits, or its split `test` was used in training.

    Args:
        trained: the split used in training.
    """
    if not has_splits(dataset) or trained == "test":
        raise UserError(
            "task.dataset: expected a dataset whose split 'test' is not used in training (on the Hub, or a folder "
            f"with files named after their splits), got {dataset!r}, split {trained!r}"
        )


def without_long_prompts(
    rows: datasets.Dataset, config: Config, pioneer_prompt: str
) -> datasets.Dataset:
    """Returns the rows for which the first role's prompt has at most `task.max_prompt_tokens` tokens.

    Prints how many rows are left out. Raises a UserError if no row remains.

    Args:
        config: the run's settings; its `task` block has the key `max_prompt_tokens`.
        pioneer_prompt: the template of the first role (the pioneer), used unless `config.roles` has another.
    """
    limit = config.task.max_prompt_tokens  # type: ignore[attr-defined]
    if limit is None:
        return rows
    prompts = RolePrompts(pioneer_prompt, roles=tuple(config.roles)).loaded()
    check_templates(prompts, rows.column_names)
    queries = prompts.render_rows(0, rows[:])
    chat_template = config.of_agent(0).model.chat_template
    # Chat templates may print the date. A fixed one keeps the selection the same on every day.
    lengths = list(map(len, encode(tokenizer_of(config), queries, chat_template, "2000-01-01")))
    short = [row for row, length in enumerate(lengths) if length <= limit]
    if not short:
        raise UserError(
            f"task.max_prompt_tokens: expected at least {min(lengths)}, the length of the shortest prompt, got {limit}"
        )
    if len(short) < len(rows) and is_first():
        print(
            f"task.max_prompt_tokens: {len(rows) - len(short)} of {len(rows)} prompts are longer than {limit} tokens "
            f"(the longest {max(lengths)}) and are left out",
            file=sys.stderr,
        )
    return rows.select(short)


def _read(name: str, split: str, subset: str | None) -> datasets.Dataset:
    path = Path(name)
    if not path.exists():
        return datasets.load_dataset(name, subset, split=split)
    if (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(path)[split]
    if path.is_dir() and not has_splits(name):
        return datasets.load_from_disk(path)
    files = [path] if path.is_file() else _files_of_split(path, split)
    endings = {_ending(file) for file in files}
    if len(endings) != 1 or not endings <= {*FORMATS}:
        raise UserError(
            f"expected files of one kind among {FORMATS}, got {[file.name for file in files]}"
        )
    if endings == {".parquet"}:
        return datasets.Dataset.from_parquet([str(file) for file in files])
    read = _csv_rows if endings == {".csv"} else _json_rows
    rows = [row for file in files for row in read(file)]
    for number, row in enumerate(rows, 1):
        if row.keys() != rows[0].keys():
            raise UserError(
                f"row {number}: expected the columns of row 1, {[*rows[0]]}, got {[*row]}. A missing value can be null"
            )
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    for name, values in columns.items():
        if not _fit_together(values):
            # Find the first row that does not fit those before it, by bisection.
            index = bisect(
                range(1, len(values)), 0, key=lambda end: not _fit_together(values[:end])
            )
            raise UserError(
                f"row {index + 1}, column {name!r}: expected a value of the type of earlier rows, got {values[index]!r}"
            )
    return datasets.Dataset.from_dict(columns)


def _fit_together(values: Sequence[Any]) -> bool:
    """Whether values can form one column."""
    try:
        datasets.Dataset.from_dict({"column": values})
    except (TypeError, ValueError, OverflowError):  # Arrow's errors derive from the first two
        return False
    return True


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Returns a split's files in a folder or its subfolder `data`.

    The split 'train', for example, is one file such as train.jsonl, or parts such as train-00000-of-00002.parquet.
    """
    files = [
        f for f in sorted([*folder.glob("*"), *folder.glob("data/*")]) if _ending(f) in FORMATS
    ]
    names = {file: Path(file.name.removesuffix(".gz")).stem for file in files}
    whole = [file for file in files if names[file] == split]
    part = re.compile(rf"{re.escape(split)}-\d+(?:-of-(\d+))?")
    counts = {file: match[1] for file in files if (match := part.fullmatch(names[file]))}
    parts = [*counts]
    if len(whole) != 1 and (whole or not parts):
        raise UserError(
            f"expected a file {split}.parquet, {split}.jsonl or {split}.csv, or its parts {split}-00000, ..., "
            f"got {[file.name for file in whole or files]}"
        )
    if whole:
        return whole
    for count in set(counts.values()) - {None}:
        if len(parts) != int(count):
            raise UserError(
                f"expected {int(count)} parts of {split}, got {[file.name for file in parts]}"
            )
    return parts


def _ending(file: Path) -> str:
    """Returns a file's ending without .gz: .jsonl for rows.jsonl and rows.jsonl.gz."""
    return Path(file.name.removesuffix(".gz")).suffix


def _open(file: Path) -> TextIO:
    opener: Any = gzip.open if file.suffix == ".gz" else open
    text: TextIO = opener(file, "rt", encoding="utf-8-sig", newline="")
    return text


def _json_rows(file: Path) -> list[dict[str, Any]]:
    """Reads the objects in a file of JSON lines, or in a JSON list."""
    with _open(file) as stream:
        text = stream.read()
    if not text.lstrip().startswith("["):
        return parse_rows(text, file.name)
    try:
        rows: list[dict[str, Any]] = json.loads(text, object_pairs_hook=json_object)
    except ValueError as error:
        raise UserError(
            f"{file.name}: expected an object per line, or one list of objects ({error})"
        ) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{file.name}, row {number}: expected an object, got {row!r}")
    return rows


def _csv_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Reads the rows of a CSV file. Cells are texts: 007 is not a number, and null is not None."""
    with _open(file) as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            names = reader.fieldnames or []
            if len({*names}) < len(names):
                raise UserError(f"{file.name}: expected columns of different names, got {names}")
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(
                        f"{file.name}, line {reader.line_num}: expected as many cells as columns, got more or fewer"
                    )
                yield row
        except csv.Error as error:
            raise UserError(f"{file.name}, line {reader.reader.line_num}: {error}") from None
