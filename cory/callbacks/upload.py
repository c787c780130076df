"""The upload of a finished run to the Hugging Face Hub: `hub.push`."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cory.callbacks.callback import Callback
from cory.config import Config, HubConfig
from cory.errors import UserError
from cory.parallel import distributed
from cory.push.upload import push

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Upload(Callback):
    """Uploads the run. A failure is told, with the command that repeats it, and does not fail the run."""

    collective = True  # the other processes wait for the main one

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        if trainer.config.hub.push is not None:
            distributed.in_main(partial(_upload, run, trainer.config))


def _upload(run: Run, config: Config) -> None:
    try:
        print(f"Uploaded to {push(run.folder, config, config.hub)}")
    except Exception as error:  # the run has ended well, whatever this is
        reason = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        command = push_command(run.folder, config.hub)
        print(f"{reason}\nThe run is complete. Upload it with: {command}", file=sys.stderr)


def push_command(run: Path, hub: HubConfig) -> str:
    """The command that uploads a finished run as these settings say."""
    assert hub.push is not None
    command = ["python", "-m", "cory.push", str(run), hub.push]
    if hub.public:
        command.append("--public")
    if hub.base:
        command += ["--base", hub.base]
    return shlex.join(command)
