"""Reads settings from flags and YAML files, and runs a command's main function.

argparse reads flags, PyYAML's safe loader reads files, and pydantic validates the values (`cory/settings.py`). Reading
a configuration runs no code. Rewards, metrics, prompts and callbacks that it names as FILE.py:NAME are run only later.

Importing this module does not import torch.
"""

import argparse
import inspect
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import cory.process as process
from cory.code_files import announce_files, announce_prompts
from cory.config import Config
from cory.errors import UserError, counted
from cory.run.folder import run_label, short_labels
from cory.run.settings import FREE
from cory.settings import (
    UNREADABLE,
    Settings,
    blocks,
    dotted,
    from_dotted,
    keys,
    parse_yaml,
    read_yaml,
    unknown_key,
    yaml_text,
)

C = TypeVar("C", bound=Config)
# Scripts that train a single agent refuse these as flags, but allow them in files, which other scripts may share.
MULTI_AGENT_KEYS = ("cory.num_agents", "cory.chain_length", "branches")
LONGEST = 200  # letters in a folder's name; file systems take 255 bytes
# Warnings that PEFT's and torch's own code causes.
IGNORED_WARNINGS = (".*pin_memory.*", "`(is_)?gradient_checkpointing", ".*returned a view tensor")


def main(work: Callable[[], None]) -> None:
    """Runs a command. Exits with status 2 and a message after a UserError or on a full disk, with 130 after Ctrl-C."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal cannot show; printing them would raise an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        work()
        _end_process_group()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # a program that reads the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        # Libraries raise different exceptions when the disk is full, so check the message.
        if not isinstance(error, UserError) and "No space left on device" not in str(error):
            raise
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit(2)


def _end_process_group() -> None:
    """In a run with several processes, waits for the others, and then ends this one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    # Wait first: a process that ends early closes its connections, which makes the others fail.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Skip Python's shutdown, during which libtorch's threads may abort the process ("terminate called without an active
    # exception"). torchrun would report this as a failure. All files are already written and closed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Arguments(argparse.ArgumentParser):
    """An argparse parser that raises a UserError on mistakes, and shows `description` (a docstring) verbatim."""

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(
            prog=process.invocation(),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument --"))

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        words = sys.argv[1:] if argv is None else argv
        flags = [word.partition("=")[0] for word in words]
        for action in self._actions:
            is_repeated = sum(flags.count(option) for option in action.option_strings) > 1
            if is_repeated and not isinstance(action, argparse._AppendAction):
                print(
                    f"--{action.dest} is given several times; the last one counts", file=sys.stderr
                )
        parsed, rest = self.parse_known_args(words)
        for word in rest:
            if word.startswith("--"):
                names = [action.dest for action in self._actions]
                raise UserError(unknown_key(word[2:].partition("=")[0], names))
        if rest:
            raise UserError(f"{rest[0]}: expected a flag, such as --seed 1")
        return parsed


# Flags


def add_flags(
    parser: argparse.ArgumentParser, kind: type[Settings], without: Sequence[str] = ()
) -> None:
    """Adds a flag for each key of the settings, such as `--ppo.batch_size VALUE`, except those in `without`."""
    texts = documented(kind)
    for key, hint in keys(kind).items():
        if key in without:
            continue
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        parser.add_argument(
            f"--{key}",
            default=argparse.SUPPRESS,
            nargs="?" if hint is bool else None,
            const="true" if hint is bool else None,  # value of a flag that is given without a value
            metavar=f"{{{','.join(choices)}}}" if choices else "VALUE",
            help=texts[key].replace("%", "%%"),
        )


def show_values(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    """Appends each key's value to the help of its flag."""
    for action in parser._actions:
        if action.dest in values:
            value = json.dumps(values[action.dest], ensure_ascii=False, default=str)
            action.help = f"{action.help} [{value.replace('%', '%%')}]"


def documented(kind: type[Settings], prefix: str = "") -> dict[str, str]:
    """Returns the documentation of each dotted key, from the `Args` sections of the classes."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, args = (inspect.getdoc(base) or "").partition("\nArgs:\n")
        for key, text in re.findall(r"^ {4}(\w+): (.+?)(?=^ {4}\w|\Z)", args, re.M | re.S):
            texts[prefix + key] = " ".join(text.split())
    for name, block in blocks(kind).items():
        texts |= documented(block, f"{prefix}{name}.")
    return texts


def flag_values(kind: type[Settings], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags' values by key. Values of unknown keys stay as they are; later code refuses these keys."""
    hints = keys(kind)
    return {
        key: _value(text, hints[key]) if key in hints and isinstance(text, str) else text
        for key, text in texts.items()
    }


def _value(text: str, hint: Any) -> Any:
    """Returns a flag's value. The text is parsed as YAML, unless the key takes only text."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    others = [get_origin(member) or member for member in members if member is not str]
    if Literal in others:
        others.remove(Literal)
    if not others:
        return text
    try:
        value = parse_yaml(text)
    except UNREADABLE:
        return text
    if value is None and text != "null":  # YAML reads an empty text, or a comment, as null
        return text
    takes_texts = len(others) < len(members)
    return text if takes_texts and type(value) not in others else value


# Settings


def read_config(
    kind: type[C],
    default: str | Path | None = None,
    prefix: str = "",
    single_agent: bool = False,
    argv: Sequence[str] | None = None,
) -> tuple[C, str]:
    """Reads settings from the command line, prints a line that announces the run, and returns settings and run name.

    The values come from `--config FILE`, from the run in `--resume RUN`, or else from `default`; flags such as
    `--ppo.batch_size 64` change them. `--help`, `--version` and `--print_config` print and end the program.

    Args:
        kind: class of the settings.
        default: a configuration shipped with cory, such as configs/imdb/tiny.yaml. None: the class's defaults.
        prefix: first part of the run's name, such as imdb_cory.
        single_agent: whether to keep only the first agent, in one role, even if the file has more.
        argv: arguments. None: this process's command line.

    Raises a UserError that names the key. Causes are a missing or unreadable file, an unknown key, a value with a wrong
    type or out of range, values that contradict each other, and a tracker that is not installed.
    """
    if argv is None:
        process.from_command_line = True
        argv = sys.argv[1:]
    config, file, changed = _read_line(kind, default, argv, single_agent)
    name = run_name(_setting_name(file, prefix), changed)
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise UserError(
            f"tracker: expected the package {config.tracker} to be installed, got none. "
            f"Install it (pip install {config.tracker}), or train without: --tracker none"
        )
    if process.is_first():
        _announce(config, name)
        if file is not None and _is_of_run(file):
            announce_files(file.parent, config, changed, callbacks=True)
            if "roles" not in changed:
                announce_prompts(file.parent, config)
    return config, name


def load(
    kind: type[C], default: str | Path | None, argv: Sequence[str], single_agent: bool = False
) -> C:
    """Reads settings from a command line, like `read_config`, but neither names nor announces the run."""
    return _read_line(kind, default, argv, single_agent)[0]


def _read_line(
    kind: type[C], default: str | Path | None, argv: Sequence[str], single_agent: bool
) -> tuple[C, Path | None, dict[str, Any]]:
    """Returns the settings, the file they were read from, and the flags that change a value."""
    if "--version" in argv:
        print(version("cory"))
        sys.exit(0)
    parser = _parser(kind)
    parsed = parser.parse_args(argv)
    flags = flag_values(kind, vars(parsed))
    for name in ("help", "version", "print_config", "config"):
        del flags[name]

    run = _resumed_run(flags.get("resume"))
    file = _file(parsed.config, run, default)
    file_values = {} if file is None else _values_of(file, kind)
    values = dotted(kind, asdict(kind())) | file_values
    if parsed.help:
        show_values(parser, values)
        parser.print_help()
        sys.exit(0)

    if single_agent:
        _refuse_more_agents(flags if run is None else values | flags)
    if run is not None and parsed.config:
        raise UserError(
            f"config: expected none with --resume, got {parsed.config!r}. A resumed run keeps its settings"
        )
    if run is not None and Path(flags.get("output") or run).resolve() != run.resolve():
        raise UserError(
            f"output: expected none with --resume, got {flags['output']!r}. A resumed run keeps its folder, {run}"
        )
    try:
        config = from_dotted(kind, values | flags)
        if single_agent:
            config.keep_first_agent()
        config.check()
    except UserError as error:
        key = str(error).partition(":")[0]
        # A key such as agents.1.device is part of the file's key `agents`.
        in_file = [name for name in file_values if f"{key}.".startswith(f"{name}.")]
        where = f"{file}: " if in_file and in_file[0] not in flags else ""
        advice = " (continue a run with the script that made it)" if where and run else ""
        raise UserError(f"{where}{error}{advice}") from None
    if parsed.print_config:
        print(yaml_text(asdict(config)), end="")
        sys.exit(0)
    changed = {key: value for key, value in flags.items() if value != values[key]}
    return config, file, changed


def _parser(kind: type[Settings]) -> Arguments:
    """Makes the parser of a script's command line: general flags, and one flag per key of the settings."""
    parser = Arguments(
        sys.modules["__main__"].__doc__,
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        add_help=False,  # our --help shows the file's values, so the file must be read first
    )
    parser.add_argument("--help", "-h", action="store_true", help="print this, and end")
    parser.add_argument("--version", action="store_true", help="print the version, and end")
    parser.add_argument("--print_config", action="store_true", help="print all settings, and end")
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    add_flags(parser, kind)
    return parser


def _refuse_more_agents(given: Mapping[str, Any]) -> None:
    """Raises a UserError if a script that trains a single agent was given more agents or roles."""
    for key in MULTI_AGENT_KEYS:
        if given.get(key) not in (None, 1):
            raise UserError(
                f"{key}: expected 1 in a script that trains a single agent, got {given[key]}"
            )


def _values_of(file: Path, kind: type[Settings]) -> dict[str, Any]:
    """Returns a file's values by dotted key."""
    content = read_yaml(file)
    try:
        return dotted(kind, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _file(name: str | None, run: Path | None, default: str | Path | None) -> Path | None:
    """Returns the file to read settings from; None for the defaults. Raises a UserError if it does not exist."""
    if name is not None:
        file = Path(name)
        if not file.exists() and file.parts[:1] == ("configs",):
            file = shipped(name)
    elif run is not None:
        file = run / "config.yaml"
    elif default is not None:
        file = shipped(str(default))
    else:
        return None
    if not file.is_file():
        raise UserError(f"config: expected an existing YAML file, got {str(file)!r}")
    return file


def _resumed_run(resume: str | None) -> Path | None:
    """Returns the folder that `--resume` names. Raises a UserError if it is not the folder of a run."""
    if resume in (None, "auto"):
        return None
    run = Path(resume)
    if not (run / "config.yaml").is_file():
        raise UserError(f"resume: expected auto, or the folder of a run, got {resume!r}")
    return run


def shipped(name: str) -> Path:
    """Finds a configuration shipped with cory, such as configs/imdb/tiny.yaml, in a checkout or an installed package.

    Other paths are returned unchanged.
    """
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):
        if (folder / name).is_file():
            return folder / name
    return Path(name)


# The announcement and the name of a run


def _announce(config: Config, name: str) -> None:
    """Prints a run's name, method and model before libraries are imported, which takes seconds."""
    names = dict.fromkeys(
        config.of_agent(index).model.name for index in range(config.cory.num_agents)
    )
    models = " and ".join(names)
    iterations = counted(config.iterations, "iteration")
    print(f"{name}: {config.method()}, model {models}, {iterations}. Loading ...", flush=True)


def _is_of_run(file: Path) -> bool:
    return file.name == "config.yaml" and (file.parent / "metrics.jsonl").exists()


def _setting_name(file: Path | None, prefix: str) -> str:
    """Returns the prefix with the file's name, or a run's name if the file is the run's config.yaml."""
    if file is None:
        return prefix or "cory"
    if _is_of_run(file):
        return file.absolute().parent.name
    return f"{prefix}_{file.stem}".lstrip("_")


def run_name(setting: str, changed: Mapping[str, Any]) -> str:
    """Returns a run's name: `setting` followed by the changed values, except those that may change on resume.

    Args:
        setting: name of the method and the configuration file, such as imdb_cory_tiny.
        changed: changed values by dotted key.

    >>> run_name("imdb_cory_tiny", {"cory.credit": "causal", "iterations": 20, "seed": 3})
    'imdb_cory_tiny-credit=causal-seed3'
    """
    parts = [setting]
    for key in sorted(changed, key=lambda key: (key == "seed", key)):
        block, _, name = key.rpartition(".")
        if key in FREE or block in FREE:
            continue
        value = changed[key]
        if isinstance(value, list | dict):  # too long for a name
            parts.append(name)
            continue
        text = Path(value).name if isinstance(value, str) else json.dumps(value)
        # Reports group an experiment's runs by the suffix -seedN.
        parts.append(f"seed{text}" if key == "seed" else f"{name}={text}")
    return _folder_name(parts)


def evaluation_name(models: Sequence[str]) -> str:
    """Returns an evaluation's name, made from its run's label, or from short labels if there are several runs.

    >>> evaluation_name(["runs/imdb_cory_tiny-seed3", "runs/imdb_ppo_tiny-seed3"])
    'evaluation-imdb_cory_tiny-imdb_ppo_tiny'
    """
    names = [run_label(Path(model)) for model in models]
    labels = names if len(names) == 1 else short_labels(names).values()
    return _folder_name(["evaluation", *(label.replace(", ", "-") for label in labels)])


def _folder_name(parts: list[str]) -> str:
    """Joins parts to a portable folder name. The longest parts are dropped until it has at most LONGEST letters."""
    while len("-".join(parts)) > LONGEST and len(parts) > 1:
        parts.remove(max(parts[1:], key=len))
    return re.sub(r"[^\w.=+-]", "_", "-".join(parts))[:LONGEST]
