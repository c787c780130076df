"""Runs a module as if the modules that only Unix has could not be imported: `windows.py MODULE ARGUMENTS`.

They are missing for the project alone. Libraries and Python itself ask `sys.platform` before they
import them, and here it says what it is.
"""

import builtins
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from typing import Any

UNIX = set("curses fcntl grp posix pty pwd readline resource syslog termios tty".split())
PROJECT = {"__main__", "cory", "gsm8k_train", "imdb_train", "study"}
import_of_python = builtins.__import__


def import_as_on_windows(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    importer = (globals or {}).get("__name__", "").split(".")[0]
    if importer in PROJECT and level == 0 and name.split(".")[0] in UNIX:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return import_of_python(name, globals, locals, fromlist, level)


if __name__ == "__main__":
    builtins.__import__ = import_as_on_windows
    del signal.SIGHUP
    sys.argv = sys.argv[1:]
    sys.path[0] = os.getcwd()  # as of `python -m`
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
