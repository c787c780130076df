"""A configuration from a YAML file and flags. Importing this imports neither torch nor jsonargparse."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import yaml

from cory.cli import invocation
from cory.cli.messages import YAML, explained, similar_file
from cory.cli.yaml_file import check_data, read_yaml
from cory.config import Config, Settings, blocks, keys
from cory.errors import UserError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

# What a run's config.yaml holds beside its settings.
BESIDE_SETTINGS = ("versions", "fingerprint", "date")
# As flags, so that --print_config shows them, too.
SINGLE_AGENT = ("--cory.num_agents=1", "--cory.chain_length=null")
# Refused as flags where a single agent is trained; in a file they are for the scripts that train several.
KEYS_OF_SEVERAL = ("cory.num_agents", "cory.chain_length", "branches")
C = TypeVar("C", bound=Config)


def as_config(kind: type[C], settings: Mapping[str, Any], where: Path) -> C:
    """The settings of a file, checked like a command line. Raises a UserError if they are not those of `kind`."""
    from jsonargparse import ArgumentError

    parser = _parser(kind)  # type: ignore[arg-type]
    try:
        check_data(settings)
        config = _instantiate(kind, parser, parser.parse_object(dict(settings)))
        config.check()
    except (ArgumentError, UserError) as error:
        raise UserError(f"{where}: {_explained(error, kind)}") from None
    return config


@dataclass(frozen=True)
class CommandLine(Generic[C]):
    """What a command line says.

    Args:
        config: the settings.
        setting: a name for them: the prefix and the configuration file's name, or that of the file's run.
        changed: the keys that the flags have changed in the file, dotted, and their values.
        run: the folder of the run whose config.yaml is that file; None: it is another file.
    """

    config: C
    setting: str
    changed: dict[str, Any]
    run: Path | None


def load(
    config_class: type[C],
    default: Path | None,
    argv: Sequence[str],
    single_agent: bool = False,
) -> C:
    """The settings of a command line; see `read_command_line`."""
    return read_command_line(config_class, default, argv, single_agent=single_agent).config


def read_command_line(
    config_class: type[C],
    default: Path | None,
    argv: Sequence[str] | None = None,
    prefix: str = "",
    single_agent: bool = False,
) -> CommandLine[C]:
    """Reads the command line: `--config FILE` (or `default`, if any), then flags such as `--ppo.batch_size 64` on top.

    `--resume RUN` without `--config` takes the run's own settings in place of `default`.

    Args:
        argv: the command line; None: that of the process.
        prefix: begins the name of the settings, such as imdb_cory.
        single_agent: trains the first agent alone, in one role, whatever the file says.

    Raises:
        UserError: a file is missing or not YAML, a key is unknown (the nearest is named), a value has the wrong type or
            is out of range.
    """
    if argv is None:
        invocation.from_command_line = True
        argv = sys.argv[1:]
    argv = _with_shipped_files(argv)
    if {"-h", "--help"} & {*argv}:
        _parser(config_class).print_help()  # type: ignore[arg-type]
        sys.exit(0)
    # Read without it first, as the parser would print before it has read what follows, and without its mistakes.
    print_config = [word for word in argv if word.split("=")[0] == "--print_config"]
    argv = [word for word in argv if word not in print_config]
    chosen = _files_and_run(argv)
    if single_agent:
        _check_single_agent(chosen)
    resumed = _run_of(chosen.resume)
    files = [file for file in chosen.config if file]
    for file in files:
        _check_file(Path(file))
    if not files and (resumed or default):
        files = [str(resumed / "config.yaml" if resumed else default)]
        if not Path(files[0]).exists():
            raise UserError(
                f"config: expected --config FILE, as in a checkout's configs/, got {argv}"
            )
        argv = ["--config", files[0], *argv]
        _check_file(Path(files[0]))

    from jsonargparse import ArgumentError

    parser = _parser(config_class)  # type: ignore[arg-type]

    def parse(words: Sequence[str]) -> C:
        if not single_agent:
            return _parse(config_class, parser, words)
        config = _parse(config_class, parser, [*words, *SINGLE_AGENT])
        _keep_single_agent(config)
        return config

    try:
        before = parse([word for file in files for word in ("--config", file)])
        config = parse(argv)
        config.check()
        if print_config != ["--print_config"] * len(print_config):
            raise UserError(f"print_config: expected no value, got {print_config[0]!r}")
    except (ArgumentError, UserError) as error:
        file = _blamed_file(config_class, parser, files, error)
        raise UserError(file + _explained(error, config_class)) from None

    changed = dict(_changed_keys(before, config))
    output = config.output
    if resumed and output and Path(output).resolve() != resumed.resolve():
        raise UserError(
            f"output: expected none, as a resumed run goes on in its folder, {str(resumed)!r}, got {output!r}. Where a "
            "file says so: --output null"
        )
    if print_config:
        parse([*argv, *print_config])  # prints, and ends the program
    return CommandLine(config, _setting_name(files, prefix), changed, _read_run(files, resumed))


def _check_file(file: Path) -> None:
    """Raises a UserError if a file is missing, has a key twice, or names code."""
    if not file.is_file():
        hint = similar_file(file, YAML)
        raise UserError(f"config: expected an existing YAML file, got {str(file)!r}{hint}")
    _check_keys(file)
    with suppress(OSError, UnicodeError, yaml.YAMLError, RecursionError):  # as below
        read_yaml(file)


def _check_keys(file: Path) -> None:
    """Raises a UserError if a key stands twice in a block, of which the last would count."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError):
        return  # the message is the parser's
    waiting = [root]
    done = set()  # an alias may stand within what it names
    while waiting:
        node = waiting.pop()
        if id(node) in done:
            continue
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            _check_block(file, node)
            waiting += [value for _, value in node.value]


def _check_block(file: Path, block: yaml.MappingNode) -> None:
    keys = set()
    for key, _ in block.value:
        name = str(key.value)
        if name in keys:
            line = key.start_mark.line + 1
            raise UserError(f"{file}: expected each key once, got {name!r} again in line {line}")
        keys.add(name)


def _keep_single_agent(config: Config) -> None:
    """Leaves the first agent, in the first role, of a chain's settings."""
    config.agents = config.agents[:1]
    config.roles = config.roles[:1]
    config.branches = 1


def shipped(name: str) -> Path:
    """A configuration that comes with cory, by its path in a checkout, such as
    configs/imdb/tiny.yaml.

    An installed package has these files in `cory/configs`. The file may not exist.
    """
    package = Path(__file__).resolve().parent.parent
    installed = package / name
    return installed if installed.is_file() else package.parent / name


def _with_shipped_files(argv: Sequence[str]) -> list[str]:
    """The command line with the full paths of shipped configurations that are not below the current
    folder."""

    def path(name: str) -> str:
        is_elsewhere = not Path(name).exists() and name.startswith("configs/")
        return str(shipped(name)) if is_elsewhere and shipped(name).is_file() else name

    words = list(argv)
    for i, word in enumerate(words):
        if i > 0 and words[i - 1] == "--config":
            words[i] = path(word)
        elif word.startswith("--config="):
            words[i] = "--config=" + path(word.removeprefix("--config="))
    return words


def _read_run(files: Sequence[str], resumed: Path | None) -> Path | None:
    """The run whose config.yaml is among the files, if any."""
    for file in map(Path, files):
        is_of_run = file.parent == resumed or (file.parent / "metrics.jsonl").exists()
        if file.name == "config.yaml" and is_of_run:
            return file.parent
    return None


def _setting_name(files: Sequence[str], prefix: str) -> str:
    file = Path(files[-1] if files else "cory.yaml")
    is_run = file.name == "config.yaml" and (file.parent / "metrics.jsonl").exists()
    if is_run:
        return file.absolute().parent.name
    return f"{prefix}_{file.stem}".lstrip("_")


def _changed_keys(before: Settings, after: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of `after` whose values are not those of `before`, dotted, and their values."""
    for field in fields(after):
        old = getattr(before, field.name)
        new = getattr(after, field.name)
        if isinstance(new, Settings):
            yield from _changed_keys(old, new, f"{prefix}{field.name}.")
        elif new != old:
            yield f"{prefix}{field.name}", new


def _files_and_run(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that are needed before the others are read. Raises a UserError if there is no run to resume."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", default=[])
    parser.add_argument("--resume", nargs="?")
    for key in KEYS_OF_SEVERAL:
        parser.add_argument(f"--{key}", nargs="?")
    chosen, _ = parser.parse_known_args(argv)
    if chosen.resume not in (None, "", "auto") and _run_of(chosen.resume) is None:
        raise UserError(f"resume: expected auto, or the folder of a run, got {chosen.resume!r}")
    return chosen


def _check_single_agent(chosen: argparse.Namespace) -> None:
    for key in KEYS_OF_SEVERAL:
        value = getattr(chosen, key)
        if value not in (None, "null", "1"):
            raise UserError(f"{key}: expected 1, as this script trains a single agent, got {value}")


@cache
def _parser(kind: type[Config]) -> "ArgumentParser":
    from jsonargparse import ArgumentParser

    from cory.cli.arguments import Help, Verbatim, allow_bare_flags

    parser = ArgumentParser(
        prog=invocation.command(),
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        description=sys.modules["__main__"].__doc__,
        formatter_class=Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind, skip={"agents", "roles"})
    for key in ("agents", "roles"):  # the class checks the entries, and names them by their index
        parser.add_argument(f"--{key}", type=list[dict[str, Verbatim]], default=[])
    allow_bare_flags(parser)
    for key in BESIDE_SETTINGS:  # as the file of a run has them
        parser.add_argument(f"--{key}", type=Any, default=argparse.SUPPRESS)
    return parser


def resumed_run(argv: Sequence[str]) -> Path | None:
    """The folder of the run that a command line continues; None: none, or `--resume auto`."""
    return _run_of(_files_and_run(argv).resume)


def _run_of(resume: str | None) -> Path | None:
    """The run folder named by `--resume`; None: no such folder."""
    if resume in (None, "", "auto"):
        return None
    run = Path(resume)
    return run if (run / "config.yaml").is_file() else None


def run_of_checkpoint(path: Path) -> Path:
    """RUN, of RUN/checkpoints/iter-000002, also where the path is relative to the middle one."""
    return path.parent.parent if path.parent != Path() else path.resolve().parent.parent


def _parse(kind: type[C], parser: "ArgumentParser", argv: Sequence[str]) -> C:
    try:
        parsed = parser.parse_args(list(argv))
    except (OSError, UnicodeError, RecursionError) as error:
        raise UserError(f"expected a readable YAML file ({error})") from None
    except ImportError as error:  # of a `class_path` in a file that the file names
        raise UserError(str(error)) from None
    return _instantiate(kind, parser, parsed)


def _instantiate(kind: type[C], parser: "ArgumentParser", parsed: Any) -> C:
    from jsonargparse import Namespace

    check_data(parsed.as_dict())  # also what the parser has read from texts, and from further files
    for name, value in vars(parsed).items():
        if name in blocks(kind) and not isinstance(value, Namespace):
            raise UserError(f"{name}: expected a block of settings, got {value!r}")
    values = vars(parser.instantiate(parsed))
    return kind(
        **{key: value for key, value in values.items() if key not in ("config", *BESIDE_SETTINGS)}
    )


def _blamed_file(
    kind: type[Config], parser: "ArgumentParser", files: Sequence[str], error: Exception
) -> str:
    """The configuration file's name, for a message, if the file alone, without flags, is refused too."""
    from jsonargparse import ArgumentError

    if any(file in str(error) for file in files):
        return ""
    for file in files:
        try:
            _parse(kind, parser, ["--config", file]).check()
        except (ArgumentError, UserError):
            return f"{file}: "
    return ""


def _explained(error: Exception, config_class: type[Config]) -> str:
    return explained(str(error), [*keys(config_class), "config", "print_config"])
