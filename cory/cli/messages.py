"""Messages about wrong command lines and files: the parser's, in the words of all others, with the nearest key."""

import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from cory.config import nearest

YAML = (".yaml", ".yml")  # endings of configuration files
TYPES = {
    "<class 'int'>": "an integer",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'list'>": "a list",
    "<class 'dict'>": "a mapping",
    "<class 'NoneType'>": "null",
}


def similar_file(path: Path, endings: Collection[str]) -> str:
    """For a message about a file that there is not: the one beside it of the most similar name, if there is one.

    Args:
        endings: of the files that come into question, such as .yaml.
    """
    names = [file.name for file in path.parent.glob("*") if file.suffix in endings]
    similar = difflib.get_close_matches(path.name, names, n=1)
    return f". Did you mean {str(path.with_name(similar[0]))!r}?" if similar else ""


def explained(message: str, keys: Sequence[str]) -> str:
    """A message of the parser as `KEY: expected ..., got ...`; one that needs no change is returned as it is.

    Args:
        keys: all keys of the command line, dotted.
    """
    message = " ".join(message.split())
    if match := re.match(r"unrecognized arguments: (.*)", message):
        words = match[1].split(" ")
        flag = next((word for word in words if word.startswith("--") and word != "--"), None)
        return (
            _unknown_key(flag.lstrip("-").partition("=")[0], keys)
            if flag
            else _unexpected(words[0], keys)
        )
    if match := re.search(r"Group '(.*)' does not accept option '(.*)'", message):
        return _unknown_key(f"{match[1]}.{match[2]}", keys)
    if match := re.search(r"Option '(.*)' is not accepted", message):
        return _unknown_key(match[1], keys)
    if match := re.match(r"argument --([\w.]+).*: expected one argument", message):
        return f"{match[1]}: expected a value, got none"
    if match := re.match(r'Parser key "config": Path .*: (.*)', message):
        return f"config: expected an existing YAML file, got {match[1]}"
    if match := re.match("Unexpected config: ?(.*)", message):
        return f"config: expected a YAML file of settings, got {match[1]!r}"
    if match := re.match(r"Importing '(.*?)' is not allowed", message):
        return f"class_path: expected none, as a configuration names no code, got {match[1]!r}"
    # A text in the place of a block is a file, or else the name of a class, which is not imported.
    block = r"(?:Unable to load config .|Importing ')([^\"']*)"
    if match := re.match(rf'Parser key "([\w.]+)": {block}', message):
        example = next((key for key in keys if key.startswith(f"{match[1]}.")), match[1])
        return f"{match[1]}: expected a block of settings, such as --{example}, got {match[2]!r}"
    if match := re.match(r'Parser key "([\w.]+)": .*NestedArg\(key=\'([\w.]+)\'', message):
        return _unknown_key(f"{match[1]}.{match[2]}", keys)  # such as --seed.x
    if match := re.match(r'Parser key "([\w.]+)": (Does not validate.*|Expected a .*)', message):
        return _wrong_type(match[1], match[2])
    return message


def _unknown_key(word: str, keys: Sequence[str]) -> str:
    near = nearest(word, keys)
    return f"unknown key {word!r}. " + (
        f"Did you mean {near!r}?" if near else "--help lists the keys"
    )


def _unexpected(word: str, keys: Sequence[str]) -> str:
    """Of a word that is no flag, such as `lr=3`."""
    name, equals, value = word.lstrip("-").partition("=")
    near = nearest(name, keys) if equals else None
    if near:
        return f"unexpected argument {word!r}. Did you mean '--{near} {value}'?"
    return f"unexpected argument {word!r}: expected flags such as --seed 1"


def _wrong_type(key: str, complaint: str) -> str:
    """Of a value that is of none of the types of its key."""
    expected, *value = re.split(r" Given value: |\. Got value: ", complaint, maxsplit=1)
    types = re.findall(r"Expected a (typing\.Literal\[.*?\]|<class '\w+'>)", expected)
    texts = [TYPES.get(name) or _choices(name) for name in dict.fromkeys(types)]
    return f"{key}: expected {' or '.join(texts)}, got {''.join(value)!r}"


def _choices(literal: str) -> str:
    """`typing.Literal['a', 'b']` in words."""
    words = re.findall(r"'(.*?)'", literal)
    return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
