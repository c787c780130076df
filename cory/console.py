"""What every script does around its work: quiet libraries, and a user's mistake shown as a sentence."""

import sys
import warnings
from collections.abc import Callable

from cory.config import UserError


def main(run: Callable[[], None]) -> None:
    """Runs a script's work. A UserError ends it with status 2 and its message, Ctrl-C with status 130."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
