"""A run or an evaluation as one HTML file that opens from disk: docs/report.md.

Importing this imports nothing heavy. A report that cannot be written is a warning: what it shows is
saved already.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "report.html"


def write_run_report(folder: Path, method: str) -> None:
    """Writes report.html into the folder of a run; `method` is its name in the legend. Warns if that fails."""
    from cory.report.payload import of_run

    _write(folder, lambda: of_run(folder, method))


def write_evaluation_report(folder: Path) -> None:
    """Writes report.html into the folder of an evaluation. Warns if that fails."""
    from cory.report.payload import of_evaluation

    _write(folder, lambda: of_evaluation(folder))


def _write(folder: Path, payload: Callable[[], dict[str, Any]]) -> None:
    try:
        from cory.report.page import write_page

        write_page(folder / NAME, payload())
    except Exception as error:  # whatever it is, the run or evaluation has ended well
        warnings.warn(
            f"{folder / NAME} could not be written ({type(error).__name__}: {error})", stacklevel=3
        )
