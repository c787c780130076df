"""Writes the keys of docs/configuration.md from the dataclasses that hold them.

    python docs/configuration.py            # rewrites the part below the marker
    python docs/configuration.py --check    # exits with 1 if the page is out of date

A test runs it with --check.
"""

import re
import sys
from dataclasses import fields, is_dataclass
from inspect import getdoc
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import yaml  # noqa: E402

from cory.config import Config  # noqa: E402
from cory.tasks.config import OwnTaskConfig  # noqa: E402
from gsm8k_train.config import Gsm8kTaskConfig  # noqa: E402
from imdb_train.config import ImdbTaskConfig  # noqa: E402

PAGE = ROOT / "docs/configuration.md"
MARKER = "<!-- Below: written by `python docs/configuration.py`. -->\n"
TASKS = {"own prompts and rewards": OwnTaskConfig, "IMDB": ImdbTaskConfig, "GSM8K": Gsm8kTaskConfig}


def documented(settings: type) -> tuple[str, dict[str, str]]:
    """A dataclass's summary and the documentation of its keys, from its docstring."""
    summary, _, args = (getdoc(settings) or "").partition("\nArgs:\n")
    keys: dict[str, str] = {}
    for line in args.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            keys[name] = match[2]
        elif line.strip():
            keys[name] += " " + line.strip()
    return linked(" ".join(summary.split())), {name: linked(text) for name, text in keys.items()}


def linked(text: str) -> str:
    """The text with the names of other pages as links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


def default(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    return "`" + text.replace("|", "\\|").replace("\n", " ") + "`"


def table(name: str, settings: object, title: str) -> str:
    """The keys of one block with their defaults, as a section."""
    summary, keys = documented(type(settings))
    rows = []
    for key, text in keys.items():
        value = getattr(settings, key)
        if not is_dataclass(value):
            rows.append(f"| `{name}{key}` | {default(value)} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join([f"## {title}", "", summary, "", "| key | default | what it is |", "|---|---|---|", *rows, ""])


def sections() -> str:
    config = Config()
    blocks = [table("", config, "Top level")]
    for field in fields(config):
        block = getattr(config, field.name)
        if is_dataclass(block) and field.name != "task":
            blocks.append(table(f"{field.name}.", block, f"`{field.name}`"))
    blocks += [table("task.", task(), f"`task`, {what}") for what, task in TASKS.items()]
    return "\n".join(blocks)


def main() -> None:
    text = PAGE.read_text()
    written = text[: text.index(MARKER) + len(MARKER)] + "\n" + sections()
    if "--check" in sys.argv:
        sys.exit(written != text)
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
