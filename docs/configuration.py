"""Writes the tables of keys in docs/configuration.md from the configuration's dataclasses.

python docs/configuration.py            # rewrites the part below the marker
python docs/configuration.py --check    # exits with status 1 if the page is out of date; a test runs this
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
    """Returns the summary in a class's docstring, and the text for each of its keys."""
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
    """Formats a default as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


def linked(text: str) -> str:
    """Turns the names of other pages in a text into links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


def default(value: object) -> str:
    return "`" + default_text(value).replace("|", "\\|").replace("\n", " ") + "`"


def table(name: str, settings: Settings, title: str) -> str:
    """Returns a section with the keys and defaults of one block."""
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
    """Returns a section with the keys whose defaults differ for GSM8K."""
    rows = []
    for field in fields(common):
        task_block, common_block = getattr(config, field.name), getattr(common, field.name)
        if field.name == "task" or task_block == common_block:
            continue
        if not isinstance(task_block, Settings):
            rows.append(f"| `{field.name}` | {default(task_block)} |")
            continue
        for key in fields(task_block):
            value = getattr(task_block, key.name)
            if value != getattr(common_block, key.name):
                rows.append(f"| `{field.name}.{key.name}` | {default(value)} |")
    return "\n".join(
        [
            "## GSM8K's own defaults",
            "",
            "Defaults of `gsm8k_train` that differ from the defaults above (Table 2 of the paper).",
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
