"""YAML files are data: nothing that one names is imported or run. Importing this does not import torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cory.errors import UserError

UNREADABLE = (yaml.YAMLError, TypeError, ValueError, RecursionError)
LINE_BREAKS = "\x85\u2028\u2029"  # which YAML reads as spaces or other line breaks
INT = re.compile(r"[-+]?\d+(_\d+)*$")
FLOAT = re.compile(
    r"[-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """Reads decimal numbers alone: 010 is 10, 1e-4 a number; 0x1F, 1:30 and dates are texts. Refuses a key that
    stands twice in a block.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [rule for rule in rules if not rule[0].endswith((":int", ":float", ":timestamp"))]
        for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.composer.ComposerError(
                    None, None, f"{key.value}: stands twice", key.start_mark
                )
            names.add(str(key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as prompts, as blocks, and quotes what would not be read as text."""


_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:int", INT, [*"-+0123456789"])
    _each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, [*"-+.0123456789"])


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.strip("\n") or any(each in text for each in LINE_BREAKS):
        style = '"'
    elif "\n" in text.strip("\n"):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Settings as YAML for people to read, in their order."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str) -> Any:
    """What a YAML text says, of what JSON has, too. Raises one of UNREADABLE."""
    content = yaml.load(text, _Loader)
    json.dumps(content)
    return content


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises a UserError: it cannot be read, or a key stands twice in a block."""
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}: {error.problem}") from None
    except (OSError, *UNREADABLE) as error:
        raise UserError(f"{file}: expected a readable YAML file, got {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a mapping of keys to values, got {content!r}")
    return content
