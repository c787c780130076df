"""The frame of a command: what becomes of its errors, and how its process ends. It does not import torch."""

import os
import sys
import warnings
from collections.abc import Callable

from cory.errors import UserError, is_disk_full

# What PEFT and torch say of their own calls.
IGNORED_WARNINGS = (".*pin_memory.*", "`(is_)?gradient_checkpointing", ".*returned a view tensor")


def main(work: Callable[[], None]) -> None:
    """Runs a command's work.

    A UserError ends it with its status and a message, a full disk with status 2, Ctrl-C with status 130.
    """
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(
            stream, "reconfigure"
        ):  # a text that the terminal cannot show is no reason to end
            stream.reconfigure(errors="backslashreplace")
    try:
        work()
        _end_process_group()
    except UserError as error:
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # what read the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if not is_disk_full(error):
            raise
        print(f"error: the disk is full ({error})", file=sys.stderr)
        sys.exit(2)


def _end_process_group() -> None:
    """Ends a process that is one of several, together with the others."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    # One that leaves early takes connections with it, which aborts the others.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # All is written and closed. While Python ends, threads of libtorch that still want its lock may abort the process
    # ("terminate called without an active exception"), and torchrun then takes the run for failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
