"""Writes the keys of docs/configuration.md from the dataclasses that hold them.

    python docs/configuration.py            # rewrites the part below the marker
    python docs/configuration.py --check    # exits with 1 if the page is out of date

A test runs it with --check.
"""

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from cory.config import AgentConfig, Config, EvaluationConfig, RoleConfig  # noqa: E402
from cory.own_task import OwnTaskConfig  # noqa: E402
from cory.settings import Settings  # noqa: E402
from gsm8k_train.config import Gsm8kConfig, Gsm8kEvaluation, Gsm8kTaskConfig  # noqa: E402
from imdb_train.config import ImdbTaskConfig  # noqa: E402

PAGE = ROOT / "docs/configuration.md"
MARKER = "<!-- Below: written by `python docs/configuration.py`. -->\n"
TASKS = {"own prompts and rewards": OwnTaskConfig, "IMDB": ImdbTaskConfig, "GSM8K": Gsm8kTaskConfig}


def documented(settings: type[Settings]) -> tuple[str, dict[str, str]]:
    """A class's summary and the documentation of its own keys, from its docstring."""
    summary, _, args = (inspect.getdoc(settings) or "").partition("\nArgs:\n")
    keys: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            keys[name] = match[2]
        elif line.strip():
            keys[name] += " " + line.strip()
    return " ".join(summary.split()), keys


def default_text(value: object) -> str:
    """A default as YAML, on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


def linked(text: str) -> str:
    """The text with the names of other pages as links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


def default(value: object) -> str:
    return "`" + default_text(value).replace("|", "\\|").replace("\n", " ") + "`"


def table(name: str, settings: Settings, title: str) -> str:
    """The keys of one block with their defaults, as a section."""
    summary, keys = documented(type(settings))
    rows = []
    for key, text in keys.items():
        value = getattr(settings, key)
        if not isinstance(value, Settings):
            text = linked(text)
            rows.append(
                f"| `{name}{key}` | {default(value)} | {text.replace('|', chr(92) + '|')} |"
            )
    return "\n".join(
        [
            f"## {title}",
            "",
            linked(summary),
            "",
            "| key | default | what it is |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def sections() -> str:
    config = Config()
    blocks = [
        table("", config, "Top level"),
        table("agents[i].", AgentConfig(), "`agents`, each entry"),
        table("roles[i].", RoleConfig(), "`roles`, each entry"),
    ]
    for field in fields(config):
        block = getattr(config, field.name)
        if isinstance(block, Settings) and field.name != "task":
            blocks.append(table(f"{field.name}.", block, f"`{field.name}`"))
    blocks += [table("task.", task(), f"`task`, {what}") for what, task in TASKS.items()]
    blocks += [
        own_defaults(Gsm8kConfig(), config),
        table("", EvaluationConfig(), "An evaluation"),
        table("", Gsm8kEvaluation(), "An evaluation of GSM8K"),
    ]
    return "\n".join(blocks)


def own_defaults(config: Config, common: Config) -> str:
    """The keys whose defaults are others for a task, as a section."""
    rows = []
    for field in fields(common):
        own, other = getattr(config, field.name), getattr(common, field.name)
        if field.name == "task" or own == other:
            continue
        if not isinstance(own, Settings):
            rows.append(f"| `{field.name}` | {default(own)} |")
            continue
        for key in fields(own):
            value = getattr(own, key.name)
            if value != getattr(other, key.name):
                rows.append(f"| `{field.name}.{key.name}` | {default(value)} |")
    return "\n".join(
        [
            "## GSM8K's own defaults",
            "",
            "Those of `gsm8k_train` where they are not the defaults above (Table 2 of the paper).",
            "",
            "| key | default |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    text = PAGE.read_text()
    written = text[: text.index(MARKER) + len(MARKER)] + "\n" + sections()
    if "--check" in sys.argv:
        sys.exit(written != text)
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
