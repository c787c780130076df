"""A headless browser for tests of pages; tests that need one skip where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium through Playwright: the system's, or the one that Playwright has installed."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install -e '.[dev]'"
    )
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()
