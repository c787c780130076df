"""Settings from command lines, YAML files and a run's record, and the frame of a script.

Nothing here imports torch, so `--help` and mistakes are answered at once.
"""

import argparse
import difflib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from cory.config import Config, UserError, expect, keys
from cory.run.output import is_disk_full
from cory.run.tracker import check_tracker

RECORDED = ("versions", "fingerprint", "changes")  # what config.yaml holds beside the settings
# What may differ on resume; `iterations` only where the learning rate does not depend on it.
FREE = {"iterations", "output", "tracker", "resume", "checkpoint", "sample_every", "eval_every", "eval_queries"}
FREE |= {"overwrite", "accept_changes", "changes", "fingerprint.models"}  # cory/run/resume.py checks models
FREE |= {"versions", "hub", "parallel", "sampling.engine", "sampling.engine_url", "sampling.engine_folder"}
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
    return completed(settings)


def completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Adds keys introduced after the run was made, at their defaults, which is how it was made."""
    if isinstance(method := settings.get("cory"), dict) and method.get("other_coef") is not None:
        method["weight"], method["other_coef"] = method["other_coef"], None  # as CoryConfig does
    for key, value in asdict(Config()).items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            settings[key] = value | settings[key]
        else:
            settings.setdefault(key, value)
    return settings


def as_config(kind: type[C], settings: Mapping[str, Any], where: Path) -> C:
    """The settings of a file, checked like a command line. Raises a UserError if they are not those of `kind`."""
    parser = _parser(kind)
    try:
        return kind(**_values(parser, parser.parse_object(dict(settings))))
    except ArgumentError as error:
        raise UserError(f"{where}: {_with_nearest(str(error), kind)}") from None


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
    config_class: type[C], default: Path | None, argv: Sequence[str] | None = None, task: str = ""
) -> tuple[C, str]:
    """Reads the command line: `--config FILE` (or `default`, if any), then flags such as `--ppo.batch_size 64` on top.

    `--resume RUN` without `--config` takes the run's own settings in place of `default`.
    Returns the settings, and a name for the run: `task` and the configuration file's, or that of the file's run.

    Raises:
        UserError: a file is missing or not YAML, a key is unknown (the nearest is named), a value has the wrong type or
            is out of range.
    """
    global read_command_line
    read_command_line = read_command_line or argv is None
    parser = _parser(config_class)
    usual = f" (default: {default.name})" if default else ""
    parser.add_argument("--config", action="config", help=f"YAML file of the run{usual}")
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", action="append", nargs="?", default=[])
    first.add_argument("--resume", nargs="?")
    named, _ = first.parse_known_args(argv)
    files, resumed = [file for file in named.config if file], _run_of(named.resume)
    there = named.resume in (None, "", "auto") or Path(named.resume).exists()
    expect(there, "resume", "auto, or the folder of a run or of a checkpoint", named.resume)
    if not files and (resumed or default):
        files = [str(resumed / "config.yaml" if resumed else default)]
        helped = {"-h", "--help"} & {*argv}
        expect(Path(files[0]).exists() or bool(helped), "config", "--config FILE, as in a checkout's configs/", argv)
        argv = argv if helped else ["--config", files[0], *argv]
    try:
        values = _parse(parser, _renamed(argv))
    except ArgumentError as error:
        blamed = _blame(parser, files[-1], error) if files else ""
        raise UserError(blamed + _with_nearest(str(error), config_class)) from None
    del values["config"]
    file = Path(files[-1] if files else "cory.yaml")
    of_run = file.name == "config.yaml" and (file.parent / "metrics.jsonl").exists()
    return config_class(**values), (file.parent.name if of_run else f"{task}_{file.stem}".lstrip("_"))


def _renamed(argv: Sequence[str]) -> list[str]:
    """The command line, with a key that a file sets by its old name moved to the new one; flags of either win."""
    result: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        result.append(word)
        file = word if before == "--config" else word.removeprefix("--config=") if "=" in word else ""
        with suppress(OSError, UnicodeError, yaml.YAMLError, AttributeError, LookupError, TypeError, RecursionError):
            old = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["cory"].get("other_coef")
            result += [] if old is None else [f"--cory.weight={old}", "--cory.other_coef=null"]
    return result


def _parser(kind: type[Config]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(kind)
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:  # `--overwrite` alone means `--overwrite true`
            action.nargs = "?"
            action.const = True
    for key in RECORDED:  # as the file of a run has them
        parser.add_argument(f"--{key}", type=Any, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _run_of(resume: str | None) -> Path | None:
    """The run folder named by `--resume`: itself, or that of a checkpoint; None: no such folder."""
    path = Path(resume or "auto")
    return next((run for run in (path, path.parent.parent) if (run / "config.yaml").is_file()), None)


def _parse(parser: ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    try:
        parsed = parser.parse_args(list(argv))
    except (OSError, UnicodeError, RecursionError) as error:
        raise UserError(f"expected a readable YAML file ({error})") from None
    return _values(parser, parsed)


def _values(parser: ArgumentParser, parsed: Any) -> dict[str, Any]:
    for key in keys_that_take_no_null(parser, parsed):
        raise UserError(f"{key}: expected a value, got null")
    return {key: value for key, value in vars(parser.instantiate(parsed)).items() if key not in RECORDED}


def keys_that_take_no_null(parser: ArgumentParser, parsed: Any) -> Iterator[str]:
    """The keys set to null although their type does not allow it; the parser lets those pass."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is not None and type(None) not in get_args(hint) and parsed.get(action.dest, 0) is None:
            yield action.dest


def _blame(parser: ArgumentParser, file: str, error: ArgumentError) -> str:
    """The file's name, if the file alone, without flags, is refused too."""
    try:
        _parse(parser, ["--config", file])
    except ArgumentError:
        return "" if file in str(error) else f"{file}: "
    except UserError:
        pass
    return ""


def _with_nearest(message: str, config_class: type) -> str:
    """The parser's message; on an unknown key, with the nearest existing one."""
    message = " ".join(message.split())
    if not any(complaint in message for complaint in ("not accept", "nrecognized arguments")):
        return message
    words = [word.strip("'\",").removeprefix("--").split("=")[0] for word in message.split() if word != "arguments:"]
    known = {key: key for key in keys(config_class)} | {key.split(".")[-1]: key for key in keys(config_class)}
    for word in reversed(words):
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
        if near and word not in known:
            return f"unknown key {word!r} ({message}). Did you mean {known[near[0]]!r}?"
    return message


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
    check_tracker(config.tracker)
    if os.environ.get("RANK", "0") == "0":
        models = " and ".join(dict.fromkeys(config.of_agent(i).model.name for i in range(config.cory.num_agents)))
        print(f"{name}: {config.method()}, model {models}, {config.iterations} iterations. Loading ...", flush=True)


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
