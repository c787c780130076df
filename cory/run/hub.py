"""Settings of passing a run on through the Hugging Face Hub, and the check that it can be done."""

import re
from dataclasses import dataclass

from cory.run.checks import Settings, UserError, expect


@dataclass
class HubConfig(Settings):
    """Passing the agents on through the Hugging Face Hub: docs/share.md says what is uploaded.

    Args:
        push: Repository `user/name` that the run is uploaded to at its end. null: none.
        public: Whether everybody may read the repository. Off: only you, and your organization.
        base: Hub id of the base where `model.name` is a local folder, which others could not load.
    """

    push: str | None = None
    public: bool = False
    base: str | None = None

    def __post_init__(self) -> None:
        for key in ("push", "base"):
            value = getattr(self, key)
            known = value is None or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", value)
            expect(bool(known), f"hub.{key}", "null or user/name", value)

    def check_token(self) -> None:
        """Raises a UserError if something is to be uploaded and no token of the Hub is set up. Asks no server."""
        if self.push is None:
            return
        from huggingface_hub import get_token

        if get_token() is None:
            raise UserError(f"hub.push: expected a token to upload to {self.push!r}, got none: run `hf auth login`")
