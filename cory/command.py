"""Flags and YAML files to settings, and how a command ends. Importing this does not import torch.

argparse reads flags, PyYAML's safe loader reads files, pydantic judges the values (`cory/settings.py`). A configuration
is data: nothing that it names is imported or run, but the FILE.py:NAME of rewards, metrics, prompts and callbacks,
later.
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
# Refused as flags where a single agent is trained; in a file they are for the scripts that train several.
KEYS_OF_SEVERAL = ("cory.num_agents", "cory.chain_length", "branches")
LONGEST = 200  # letters of a name, of 255 bytes that file systems take
# What PEFT and torch say of their own calls.
IGNORED_WARNINGS = (".*pin_memory.*", "`(is_)?gradient_checkpointing", ".*returned a view tensor")


def main(work: Callable[[], None]) -> None:
    """Runs a command's work. A UserError or a full disk ends it with a message and status 2, Ctrl-C with status 130."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for stream in (sys.stdout, sys.stderr):
        # A text that the terminal cannot show is no reason to end.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        work()
        _end_process_group()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # what read the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        # What a full disk raises depends on the library that writes.
        if not isinstance(error, UserError) and "No space left on device" not in str(error):
            raise
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit(2)


def _end_process_group() -> None:
    """Ends a process that is one of several, together with the others."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    # One that leaves early takes connections with it, which aborts the others.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # All is written and closed. While Python ends, threads of libtorch that still want its lock may abort the process
    # ("terminate called without an active exception"), and torchrun then takes the run for failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Arguments(argparse.ArgumentParser):
    """argparse's parser: `--help` shows `description`, a module's docstring, verbatim; mistakes raise a UserError."""

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
            twice = sum(flags.count(option) for option in action.option_strings) > 1
            if twice and not isinstance(action, argparse._AppendAction):
                print(
                    f"--{action.dest} is given several times; the last one counts", file=sys.stderr
                )
        parsed, rest = self.parse_known_args(words)
        for word in rest:
            if word.startswith("--"):
                known = [action.dest for action in self._actions]
                raise UserError(unknown_key(word[2:].partition("=")[0], known))
        if rest:
            raise UserError(f"{rest[0]}: unexpected argument; flags are such as --seed 1")
        return parsed


# Flags


def add_flags(
    parser: argparse.ArgumentParser, kind: type[Settings], without: Sequence[str] = ()
) -> None:
    """A flag for each key of settings but those of `without`, such as `--ppo.batch_size VALUE`."""
    texts = documented(kind)
    for key, hint in keys(kind).items():
        if key in without:
            continue
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        parser.add_argument(
            f"--{key}",
            default=argparse.SUPPRESS,
            nargs="?" if hint is bool else None,
            const="true" if hint is bool else None,  # of a flag alone
            metavar=f"{{{','.join(choices)}}}" if choices else "VALUE",
            help=texts[key].replace("%", "%%"),
        )


def show_values(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    """Ends the help of each flag with the value of its key."""
    for action in parser._actions:
        if action.dest in values:
            value = json.dumps(values[action.dest], ensure_ascii=False, default=str)
            action.help = f"{action.help} [{value.replace('%', '%%')}]"


def documented(kind: type[Settings], prefix: str = "") -> dict[str, str]:
    """What each key of settings is, dotted, from the `Args` of the classes."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, args = (inspect.getdoc(base) or "").partition("\nArgs:\n")
        for key, text in re.findall(r"^ {4}(\w+): (.+?)(?=^ {4}\w|\Z)", args, re.M | re.S):
            texts[prefix + key] = " ".join(text.split())
    for name, block in blocks(kind).items():
        texts |= documented(block, f"{prefix}{name}.")
    return texts


def flag_values(kind: type[Settings], texts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags, by their keys. An unknown key stays as it is; whoever uses it refuses it."""
    hints = keys(kind)
    return {
        key: _value(text, hints[key]) if key in hints and isinstance(text, str) else text
        for key, text in texts.items()
    }


def _value(text: str, hint: Any) -> Any:
    """The value of a flag: its text, read as YAML where its key takes something else than texts."""
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
    if value is None and text != "null":  # an empty text, or a comment
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
    """The settings of this process's command line, and the run's name, which is announced.

    `--config FILE`, else `default`, is read, then flags such as `--ppo.batch_size 64` change it. `--resume RUN` takes
    the run's own settings in place of `default`. `--help`, `--version` and `--print_config` print, and end the program.

    Args:
        default: a configuration that comes with cory, such as configs/imdb/tiny.yaml; None: --config is needed.
        prefix: begins the run's name, such as imdb_cory.
        single_agent: trains the first agent alone, in one role, whatever the file says.
        argv: None: the command line of the process.

    Raises a UserError, by the key: a file is missing or not YAML, a key is unknown, a value is of another type or out
    of range, values contradict each other, the tracker is not installed.
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
    """The settings of a command line: see `read_config`, which also names the run."""
    return _read_line(kind, default, argv, single_agent)[0]


def _read_line(
    kind: type[C], default: str | Path | None, argv: Sequence[str], single_agent: bool
) -> tuple[C, Path | None, dict[str, Any]]:
    """The settings, the file that they are read from, and the values of the flags that differ from it."""
    if "--version" in argv:
        print(version("cory"))
        sys.exit(0)
    parser = Arguments(
        sys.modules["__main__"].__doc__,
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        add_help=False,  # it shows the values of the file, which is read first
    )
    parser.add_argument("--help", "-h", action="store_true", help="print this, and end")
    parser.add_argument("--version", action="store_true", help="print the version, and end")
    parser.add_argument("--print_config", action="store_true", help="print all settings, and end")
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    add_flags(parser, kind)
    parsed = parser.parse_args(argv)
    flags = flag_values(kind, vars(parsed))
    for name in ("help", "version", "print_config", "config"):
        del flags[name]

    run = _resumed_run(flags.get("resume"))
    file = _file(parsed.config, run, default)
    of_file = {} if file is None else _values_of(file, kind)
    values = dotted(kind, asdict(kind())) | of_file
    if parsed.help:
        show_values(parser, values)
        parser.print_help()
        sys.exit(0)

    if single_agent:
        given = flags if run is None else values | flags
        for key in KEYS_OF_SEVERAL:
            if given.get(key) not in (None, 1):
                raise UserError(
                    f"{key}: expected 1, as this script trains a single agent, got {given[key]}"
                )
    if run is not None and parsed.config:
        raise UserError(
            f"config: expected none, as {run} is continued with its own settings, got {parsed.config!r}"
        )
    if run is not None and Path(flags.get("output") or run).resolve() != run.resolve():
        raise UserError(
            f"output: expected none, as {run} is continued in its folder, got {flags['output']!r}"
        )
    try:
        config = from_dotted(kind, values | flags)
        if single_agent:
            config.keep_first_agent()
        config.check()
    except UserError as error:
        key = str(error).partition(":")[0]
        # An entry of a list, such as agents.1.device, came with the list.
        in_file = [name for name in of_file if f"{key}.".startswith(f"{name}.")]
        where = f"{file}: " if in_file and in_file[0] not in flags else ""
        advice = " (a run is continued by the script that made it)" if where and run else ""
        raise UserError(f"{where}{error}{advice}") from None
    if parsed.print_config:
        print(yaml_text(asdict(config)), end="")
        sys.exit(0)
    changed = {key: value for key, value in flags.items() if value != values[key]}
    return config, file, changed


def _values_of(file: Path, kind: type[Settings]) -> dict[str, Any]:
    """What a file says, by dotted keys."""
    content = read_yaml(file)
    try:
        return dotted(kind, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _file(name: str | None, run: Path | None, default: str | Path | None) -> Path | None:
    """The file of settings that is read; None: the defaults are. Raises a UserError if it does not exist."""
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
    """The folder of the run that `--resume` names. Raises a UserError if it is none."""
    if resume in (None, "auto"):
        return None
    run = Path(resume)
    if not (run / "config.yaml").is_file():
        raise UserError(f"resume: expected auto, or the folder of a run, got {resume!r}")
    return run


def shipped(name: str) -> Path:
    """A configuration that comes with cory, by its path in a checkout, such as configs/imdb/tiny.yaml.

    An installed package has these files in `cory/configs`. Other files keep their names.
    """
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):
        if (folder / name).is_file():
            return folder / name
    return Path(name)


# What is said of a run before the libraries are loaded, which takes seconds


def _announce(config: Config, name: str) -> None:
    names = dict.fromkeys(
        config.of_agent(index).model.name for index in range(config.cory.num_agents)
    )
    models = " and ".join(names)
    iterations = counted(config.iterations, "iteration")
    print(f"{name}: {config.method()}, model {models}, {iterations}. Loading ...", flush=True)


def _is_of_run(file: Path) -> bool:
    return file.name == "config.yaml" and (file.parent / "metrics.jsonl").exists()


def _setting_name(file: Path | None, prefix: str) -> str:
    """The prefix and the file's name, or that of the run whose settings it has."""
    if file is None:
        return prefix or "cory"
    if _is_of_run(file):
        return file.absolute().parent.name
    return f"{prefix}_{file.stem}".lstrip("_")


def run_name(setting: str, changed: Mapping[str, Any]) -> str:
    """The name of a run: its setting, and what its flags have changed there, unless that may differ on resume.

    Args:
        setting: of the method and the configuration file, such as imdb_cory_tiny.
        changed: keys, dotted, and their values.

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
        # Seeds as in the runs of an experiment, which reports put together.
        parts.append(f"seed{text}" if key == "seed" else f"{name}={text}")
    return _folder_name(parts)


def evaluation_name(models: Sequence[str]) -> str:
    """The name of an evaluation: that of its run, or the short labels of several.

    >>> evaluation_name(["runs/imdb_cory_tiny-seed3", "runs/imdb_ppo_tiny-seed3"])
    'evaluation-imdb_cory_tiny-imdb_ppo_tiny'
    """
    names = [run_label(Path(model)) for model in models]
    labels = names if len(names) == 1 else short_labels(names).values()
    return _folder_name(["evaluation", *(label.replace(", ", "-") for label in labels)])


def _folder_name(parts: list[str]) -> str:
    """The parts as the name of a folder on any system, without the longest where it had more than LONGEST letters."""
    while len("-".join(parts)) > LONGEST and len(parts) > 1:
        parts.remove(max(parts[1:], key=len))
    return re.sub(r"[^\w.=+-]", "_", "-".join(parts))[:LONGEST]
