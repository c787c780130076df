"""How this process was started, and the warnings that it has given. Importing this module does not import torch."""

import os
import shlex
import sys
import warnings

from_command_line = False  # whether the settings came from the command line


# Warnings about a run's numbers, each once. The run's report repeats them.
caveats: dict[str, None] = {}


def warn(caveat: str) -> None:
    """Warns of something that affects a run's numbers; the run's report repeats the warning."""
    caveats[caveat] = None
    warnings.warn(caveat, stacklevel=3)


def is_first() -> bool:
    """Whether this process is the run's first or only one. The other processes do not print."""
    return os.environ.get("RANK", "0") == "0"


def invocation() -> str:
    """Returns this process's command without arguments, as typed: `python imdb_train/cory.py`, ..."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    start = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # set by `python -m MODULE`
    if spec and spec.origin == sys.argv[0]:
        return f"{start} -m {spec.name.removesuffix('.__main__')}"
    return f"{start} {shlex.quote(sys.argv[0])}"
