"""Writes docs/api.md from the signatures and docstrings of cory's public names.

python docs/api.py            # rewrites the page
python docs/api.py --check    # exits with status 1 if the page is out of date; a test runs this
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import cory  # noqa: E402
from cory.learners.records import UpdateStats  # noqa: E402

PAGE = ROOT / "docs/api.md"
INTRODUCTION = """# API

This page lists the public names of `import cory`. [Your own task](own_task.md) shows them in use,
[configuration](configuration.md) lists every key, and `cory/learners/losses.py` has the losses.

<!-- Written by `python docs/api.py`. -->
"""


SECTIONS: dict[str, list[Any]] = {
    "Training": [
        cory.CoryTrainer,
        cory.CoryTrainer.train,
        cory.CoryTrainer.iteration,
        cory.make_agents,
        cory.Task,
        cory.Task.from_prompts,
        cory.RolePrompts,
    ],
    "Evaluation": [cory.evaluate],
    "Callbacks": [
        cory.Callback,
        cory.Callback.on_train_begin,
        cory.Callback.on_iteration_begin,
        cory.Callback.on_iteration_end,
        cory.Callback.on_train_end,
        cory.Callback.state_dict,
        cory.Callback.load_state_dict,
        cory.Iteration,
        cory.Rollout,
        UpdateStats,
    ],
    "Credit and role exchange": [
        cory.assign_credit,
        cory.RoleSchedule,
        cory.RoleSchedule.order,
    ],
}


def signature(item: Any) -> str:
    """Formats a call with its parameters and their types; a long call has a line per parameter."""
    call = inspect.signature(item)
    parameters = [without_modules(str(p)) for p in call.parameters.values() if p.name != "self"]
    returned = call.return_annotation
    if inspect.isclass(item) or returned in (None, inspect.Signature.empty):
        end = ")"
    else:
        end = ") -> " + without_modules(inspect.formatannotation(returned)).strip("'")
    line = f"{item.__qualname__}({', '.join(parameters)}{end}"
    if len(line) <= 100:
        return line
    rows = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{item.__qualname__}(\n{rows}{end}"


def without_modules(annotation: str) -> str:
    """Removes module names: `datasets.arrow_dataset.Dataset | None` becomes `Dataset | None`."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", annotation)


def described(item: Any) -> str:
    """Converts a docstring to Markdown: arguments, results and errors become lists, examples become code."""
    lines = []
    for line in (inspect.getdoc(item) or "").splitlines():
        if match := re.match(r"(Args|Returns|Raises|Attributes):$", line):
            lines += [f"*{match[1]}*", ""]
        elif match := re.match(r" {4}(\w+(?:, \w+)*): (.*)", line):
            lines.append(f"* `{match[1]}`: {match[2]}")
        elif re.match(r" {4}\S", line) and lines and lines[-1] == "":
            lines.append(line.strip())
        elif line.strip() and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    text = "\n".join(lines)
    return re.sub(r"(?m)(^>>> .*\n(?:.+(?:\n|$))*)", r"```pycon\n\1\n```\n", text).rstrip()


def main() -> None:
    parts = [INTRODUCTION]
    for title, items in SECTIONS.items():
        parts.append(f"## {title}\n")
        for item in items:
            parts.append(f"### `{item.__qualname__}`\n")
            parts.append(f"```text\n{signature(item)}\n```\n")
            parts.append(described(item) + "\n")
    text = "\n".join(parts)
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
