"""Pages of results that stay as they are, as the code has no longer what they measure.

A line such as `<!-- frozen: c0f7e9e -->` names the commit that made them. No command rewrites such a page or folder.
"""

import re
from pathlib import Path

FROZEN = re.compile(r"^<!-- frozen: (\w+) -->$", re.MULTILINE)


def frozen_at(page: Path) -> str | None:
    """The commit that a page is frozen at; None: it is not, or there is no page."""
    if not page.is_file():
        return None
    found = FROZEN.search(page.read_text(encoding="utf-8"))
    return found[1] if found else None
