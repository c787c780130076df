"""Uploads an ended run to the Hugging Face Hub. `cory/push/stage.py` says which files.

Only files that differ are uploaded, so an upload that was interrupted, or a run that was evaluated
since, is pushed again by the same command.
"""

import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi

from cory.config import Config, HubConfig
from cory.errors import UserError
from cory.push.stage import stage


def push(run: Path, config: Config, hub: HubConfig, evaluation: Path | None = None) -> str:
    """Uploads a run to `hub.push`, which is made where it is missing; returns its address.

    Args:
        run: its folder, which is only read.
        config: the run's settings.
        hub: the repository, and whether it is public.
        evaluation: folder of its evaluation; None: the newest one beside the run, if any.

    Raises a UserError: the run has not ended, there is no token, the repository is public and
    `hub.public` is off, or the Hub refuses or cannot be reached.
    """
    assert hub.push is not None
    hub.check_token()
    api = HfApi()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stage(folder, run, config, hub, evaluation, place=_link)
        try:
            _make_repository(api, hub.push, hub.public)
            api.upload_folder(
                repo_id=hub.push,
                folder_path=folder,
                commit_message=f"Upload {run.name}",
                delete_patterns="agent_*/*",  # those that are not in the folder
            )
        except UserError:
            raise
        except Exception as error:
            # The HTTP library underneath, and so its errors, differs between versions.
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split()) or type(cause).__name__
            raise UserError(
                f"hub.push: the upload to {hub.push!r} failed, and can be repeated: {reason}"
            ) from None
    return f"{api.endpoint}/{hub.push}"


def _make_repository(api: HfApi, name: str, public: bool) -> None:
    """Makes a repository that is missing; makes one public that was private, if asked for, and never the reverse."""
    api.create_repo(name, private=not public, exist_ok=True)
    is_private = api.repo_info(name).private
    if not is_private and not public:
        raise UserError(
            f"hub.push: expected a private repository, or --public, got {name!r}, which is public"
        )
    if is_private and public:
        api.update_repo_settings(name, private=False)


def _link(source: Path, target: Path) -> None:
    """Places a file without a copy of it, which could be as large as the disk."""
    try:
        target.symlink_to(source.resolve())
    except OSError:  # Windows, without the right to make links
        shutil.copy(source, target)
