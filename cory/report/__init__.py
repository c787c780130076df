"""A run or an evaluation as one HTML file that opens from disk: docs/report.md.

Importing this imports nothing heavy. A report that cannot be written is a warning: what it shows is
saved already.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "report.html"


def write_run_report(folder: Path, method: str) -> None:
    """Writes report.html into the folder of a run, made with `method`. Warns if that fails."""
    with failure_is_a_warning(folder / NAME):
        from cory.report.contents import run_page
        from cory.report.page import write_page

        write_page(folder / NAME, run_page(folder, method))


def write_evaluation_report(folder: Path) -> None:
    """Writes report.html into the folder of an evaluation. Warns if that fails."""
    with failure_is_a_warning(folder / NAME):
        from cory.report.contents import evaluation_page
        from cory.report.page import write_page

        write_page(folder / NAME, evaluation_page(folder))


@contextmanager
def failure_is_a_warning(path: Path) -> Iterator[None]:
    """Turns any error into a warning: the run, evaluation or comparison has ended well."""
    try:
        yield
    except Exception as error:
        warnings.warn(
            f"{path} could not be written ({type(error).__name__}: {error})", stacklevel=4
        )
