"""Settings from command lines, YAML files and a run's record, and the frame of a script.

Nothing here imports torch, so `--help` and mistakes are answered at once.
"""

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from cory.cli.help import help_text
from cory.cli.messages import explained
from cory.config import Config, blocks, keys
from cory.errors import UserError, is_disk_full

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

RECORDED = ("versions", "fingerprint", "changes")  # what config.yaml holds beside the settings
# What may differ on resume; `iterations` only where the learning rate does not depend on it.
FREE = {"iterations", "output", "tracker", "resume", "checkpoint", "sample_every", "eval_every", "eval_queries"}
FREE |= {"overwrite", "accept_changes", "changes", "fingerprint.models"}  # cory/run/resume.py checks models
FREE |= {"versions", "hub", "parallel", "sampling.engine", "sampling.engine_url", "sampling.engine_folder"}
SINGLE_AGENT = ("--cory.num_agents=1", "--cory.chain_length=null")
C = TypeVar("C", bound=Config)
read_command_line = False  # whether this process got its settings from its command line


def read_settings(run: Path) -> dict[str, Any]:
    """A run's config.yaml: settings and RECORDED. Nothing in it is executed. Raises a UserError if there is none."""
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"expected the folder of a run, with a config.yaml, got {str(run)!r} ({reason})") from None
    if not isinstance(settings, dict):
        raise UserError(f"{run / 'config.yaml'}: expected settings, got {settings!r}")
    return settings


def as_config(kind: type[C], settings: Mapping[str, Any], where: Path) -> C:
    """The settings of a file, checked like a command line. Raises a UserError if they are not those of `kind`."""
    from jsonargparse import ArgumentError

    parser = _parser(kind)
    try:
        config = _instantiate(kind, parser, parser.parse_object(dict(settings)))
        config.check()
    except (ArgumentError, UserError) as error:
        raise UserError(f"{where}: {_explained(error, kind)}") from None
    return config


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Differences of two runs, in what matters: "key: saved -> wanted". A fingerprint counts if both have one."""
    free = FREE if saved.get("ppo", {}).get("schedule", "constant") == "constant" else FREE - {"iterations"}
    for key in [*saved, *(key for key in wanted if key not in saved)]:
        one_has_none = prefix + key == "fingerprint" and not (saved.get(key) and wanted.get(key))
        if prefix + key in free or one_has_none:
            continue
        old, new = saved.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {old!r} -> {new!r}"


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
    global read_command_line
    read_command_line = read_command_line or argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & {*argv}:
        after = argv[argv.index("--help" if "--help" in argv else "-h") + 1 :]
        topic = after[0] if after and not after[0].startswith("-") else ""
        about = sys.modules["__main__"].__doc__ or ""
        print(help_text(Path(sys.argv[0]).name, config_class(), default, topic, about))
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
        config.check()
    except (ArgumentError, UserError) as error:
        file = _blamed_file(config_class, parser, files, error)
        raise UserError(file + _explained(error, config_class)) from None

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


def _explained(error: Exception, config_class: type[Config]) -> str:
    return explained(str(error), [*keys(config_class), "config", "print_config"])


def main(work: Callable[[], None]) -> None:
    """Runs a script's work. A UserError or a full disk ends it with status 2 and a message, Ctrl-C with status 130."""
    # What PEFT and torch say of their own calls.
    for message in (".*pin_memory.*", "`(is_)?gradient_checkpointing", ".*returned a view tensor"):
        warnings.filterwarnings("ignore", message=message)
    try:
        work()
        if (torch := sys.modules.get("torch")) and torch.distributed.is_initialized():
            torch.distributed.barrier()  # one that leaves early takes connections with it, which aborts the others
            torch.distributed.destroy_process_group()
            # All is written and closed. While Python ends, threads of libtorch that still want its lock may abort the
            # process ("terminate called without an active exception"), and torchrun then takes the run for failed.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # what read the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if not is_disk_full(error):
            raise
        print(f"error: the disk is full ({error})", file=sys.stderr)
        sys.exit(2)


def announce(config: Config, name: str) -> None:
    """The first line of a run, before the libraries are loaded, which takes seconds.

    Raises a UserError if the run is to be uploaded at its end and there is no token, or if its tracker is missing.
    """
    config.hub.check_token()
    config.check_tracker()
    if os.environ.get("RANK", "0") == "0":
        models = " and ".join(dict.fromkeys(config.of_agent(i).model.name for i in range(config.cory.num_agents)))
        iterations = "1 iteration" if config.iterations == 1 else f"{config.iterations} iterations"
        print(f"{name}: {config.method()}, model {models}, {iterations}. Loading ...", flush=True)


def resume_command(run: Path, mended_reward: bool = False) -> str:
    """How to continue the run of this process: the command, or the settings if the script reads no command line.

    `mended_reward`: whether its reward function may differ from that of the run.
    """
    flags = f"--resume {shlex.quote(str(run))}" + " --accept_changes reward" * mended_reward
    if not read_command_line:
        settings = f"config.resume = {str(run)!r}"
        if mended_reward:
            settings += "; config.accept_changes = 'reward'"
        return f"{settings} (as flags: {flags})"
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    start = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m MODULE`
    script = f"-m {spec.name}" if spec and spec.origin == sys.argv[0] else shlex.quote(sys.argv[0])
    return f"{start} {script} {flags}"
