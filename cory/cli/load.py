"""A configuration from a YAML file and flags. Importing this imports neither torch nor jsonargparse."""

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cory.cli import invocation
from cory.cli.help import help_text
from cory.config import Config, blocks, keys
from cory.errors import UserError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

RECORDED = ("versions", "fingerprint", "changes")  # what a run's config.yaml holds beside its settings
SINGLE_AGENT = ("--cory.num_agents=1", "--cory.chain_length=null")
C = TypeVar("C", bound=Config)


def as_config(kind: type[C], settings: Mapping[str, Any], where: Path) -> C:
    """The settings of a file, checked like a command line. Raises a UserError if they are not those of `kind`."""
    from jsonargparse import ArgumentError

    parser = _parser(kind)
    try:
        config = _instantiate(kind, parser, parser.parse_object(dict(settings)))
        config.check()
    except (ArgumentError, UserError) as error:
        raise UserError(f"{where}: {_with_nearest(str(error), kind)}") from None
    return config


def load(
    config_class: type[C],
    default: Path | None,
    argv: Sequence[str] | None = None,
    prefix: str = "",
    single_agent: bool = False,
) -> tuple[C, str]:
    """Reads the command line: `--config FILE` (or `default`, if any), then flags such as `--ppo.batch_size 64` on top.

    `--resume RUN` without `--config` takes the run's own settings in place of `default`.

    Args:
        argv: the command line; None: that of the process.
        prefix: begins the run's name, such as imdb_cory.
        single_agent: trains the first agent alone, in one role, whatever the file says.

    Returns the settings, and a name for the run: `prefix` and the configuration file's, or that of the file's run.

    Raises:
        UserError: a file is missing or not YAML, a key is unknown (the nearest is named), a value has the wrong type or
            is out of range.
    """
    if argv is None:
        invocation.from_command_line = True
        argv = sys.argv[1:]
    argv = list(argv)
    if {"-h", "--help"} & {*argv}:
        print(help_text(Path(sys.argv[0]).name, config_class(), default))
        sys.exit(0)
    chosen = _files_and_run(argv)
    if single_agent:
        _check_single_agent(chosen)

    # Without a file: that of the run to be continued, else the default.
    files = [file for file in chosen.config if file]
    resumed = _run_of(chosen.resume)
    if not files and (resumed or default):
        files = [str(resumed / "config.yaml" if resumed else default)]
        if not Path(files[0]).exists():
            raise UserError(f"config: expected --config FILE, as in a checkout's configs/, got {argv}")
        argv = ["--config", files[0], *argv]
    if single_agent:
        argv += SINGLE_AGENT

    from jsonargparse import ArgumentError  # here and below, so that `--help` need not import it

    parser = _parser(config_class)
    try:
        config = _parse(config_class, parser, argv)
        if single_agent:
            config.agents = config.agents[:1]
            config.roles = config.roles[:1]
            config.branches = 1
        config.check()
    except (ArgumentError, UserError) as error:
        file = _blamed_file(config_class, parser, files, error)
        raise UserError(file + _with_nearest(str(error), config_class)) from None

    file_name = Path(files[-1] if files else "cory.yaml")
    is_run = file_name.name == "config.yaml" and (file_name.parent / "metrics.jsonl").exists()
    if is_run:
        return config, file_name.parent.name
    return config, f"{prefix}_{file_name.stem}".lstrip("_")


def _files_and_run(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that are needed before the others are read. Raises a UserError if there is no run to resume."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", default=[])
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--cory.num_agents", dest="num_agents", nargs="?")
    parser.add_argument("--cory.chain_length", dest="chain_length", nargs="?")
    chosen, _ = parser.parse_known_args(argv)
    if chosen.resume not in (None, "", "auto") and not Path(chosen.resume).exists():
        raise UserError(f"resume: expected auto, or the folder of a run or of a checkpoint, got {chosen.resume!r}")
    return chosen


def _check_single_agent(chosen: argparse.Namespace) -> None:
    for key in ("num_agents", "chain_length"):
        value = getattr(chosen, key)
        if value not in (None, "1"):
            raise UserError(f"cory.{key}: expected 1, as this script trains a single agent, got {value}")


def _parser(kind: type[Config]) -> "ArgumentParser":
    from jsonargparse import ArgumentParser

    from cory.cli.arguments import allow_bare_flags

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind)
    allow_bare_flags(parser)
    for key in RECORDED:  # as the file of a run has them
        parser.add_argument(f"--{key}", type=Any, default=argparse.SUPPRESS)
    return parser


def _run_of(resume: str | None) -> Path | None:
    """The run folder named by `--resume`: itself, or that of a checkpoint; None: no such folder."""
    path = Path(resume or "auto")
    return next((run for run in (path, path.parent.parent) if (run / "config.yaml").is_file()), None)


def _parse(kind: type[C], parser: "ArgumentParser", argv: Sequence[str]) -> C:
    try:
        parsed = parser.parse_args(list(argv))
    except (OSError, UnicodeError, RecursionError) as error:
        raise UserError(f"expected a readable YAML file ({error})") from None
    return _instantiate(kind, parser, parsed)


def _instantiate(kind: type[C], parser: "ArgumentParser", parsed: Any) -> C:
    from jsonargparse import Namespace

    for name, value in vars(parsed).items():
        if name in blocks(kind) and not isinstance(value, Namespace):
            raise UserError(f"{name}: expected a block of settings, got {value!r}")
    values = vars(parser.instantiate(parsed))
    return kind(**{key: value for key, value in values.items() if key not in ("config", *RECORDED)})


def _blamed_file(kind: type[Config], parser: "ArgumentParser", files: Sequence[str], error: Exception) -> str:
    """The configuration file's name, for a message, if the file alone, without flags, is refused too."""
    from jsonargparse import ArgumentError

    if not files or files[-1] in str(error):
        return ""
    try:
        _parse(kind, parser, ["--config", files[-1]]).check()
    except (ArgumentError, UserError):
        return f"{files[-1]}: "
    return ""


def _with_nearest(message: str, config_class: type[Config]) -> str:
    """The parser's message; on an unknown key, with the nearest existing one."""
    message = " ".join(message.split())
    if not any(complaint in message for complaint in ("not accept", "nrecognized arguments")):
        return message
    words = [word.strip("'\",").removeprefix("--").split("=")[0] for word in message.split() if word != "arguments:"]
    dotted = list(keys(config_class))
    key_of = {key: key for key in dotted} | {key.split(".")[-1]: key for key in dotted}
    for word in reversed(words):
        near = difflib.get_close_matches(word, key_of, n=1, cutoff=0.7)
        if near and word not in key_of:
            return f"unknown key {word!r} ({message}). Did you mean {key_of[near[0]]!r}?"
    return message
