"""What every script does around its work: quiet libraries, a user's mistake as a sentence, how a run is continued."""

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from cory.config import Config, UserError
from cory.run import settings


def main(work: Callable[[], None]) -> None:
    """Runs a script's work. A UserError ends it with status 2 and its message, Ctrl-C with status 130."""
    for message in (".*pin_memory.*", "`(is_)?gradient_checkpointing"):  # what PEFT and torch say of their own calls
        warnings.filterwarnings("ignore", message=message)
    try:
        work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # what read the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def announce(config: Config, name: str) -> None:
    """The first line of a run, before the libraries are loaded, which takes seconds."""
    if os.environ.get("RANK", "0") == "0":
        count = config.cory.num_agents
        method = "PPO" if count == 1 else f"CORY with {count} agents"
        print(f"{name}: {method}, model {config.model.name}, {config.iterations} iterations. Loading ...", flush=True)


def resume_command(run: Path) -> str:
    """How the run of this process is continued: the command, or the setting where a script reads no command line."""
    if not settings.read_command_line:
        return f"config.resume = {str(run)!r} (as a flag: --resume {shlex.quote(str(run))})"
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    start = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    return f"{start} {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(run))}"
