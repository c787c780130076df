"""Files of prompts. Importing this does not import torch."""

from pathlib import Path

from cory.errors import UserError

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


def check_file(key: str, name: str) -> None:
    """Raises a UserError if a dataset's name is that of a file, and there is none; it names a similar one beside it.

    Args:
        key: of the settings, for the message.
        name: of the dataset: a file, a folder or a Hub id.
    """
    path = Path(name)
    if path.suffix not in FORMATS or path.exists():
        return
    raise UserError(f"{key}: expected an existing file, got {name!r}")
