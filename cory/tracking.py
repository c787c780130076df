"""The run's folder, its progress bar and its trackers: everything that a run writes and prints."""

import json
import os
import platform
import resource
import secrets
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from accelerate import PartialState
from tqdm import tqdm

from cory import processes
from cory.agent import Agent
from cory.config import Config, UserError
from cory.guards import MEANING
from cory.linefile import LineFile, replace_text
from cory.plots import plot_curves

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")
CURVES = ("task_reward", "kl", "combined_reward")
FILES = ("metrics", "samples", "timings")
WINDOW = 10  # iterations averaged into "start" and "end"


def new_folder(output: str | None, name: str) -> Path:
    """A folder for results, made: `output`, else the first free one of runs/NAME, runs/NAME-2, ...

    Raises:
        UserError: `output` already holds something, or cannot be written.
    """
    try:
        return _new_folder(output, name)
    except OSError as error:
        raise UserError(f"output: expected a folder that can be written, got {output or 'runs'!r} ({error})") from None


def _new_folder(output: str | None, name: str) -> Path:
    if output is not None:
        folder = Path(output)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise UserError(
                f"output: expected a new or empty folder, got {str(folder)!r}, which already holds a run or other files"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for number in range(1, sys.maxsize):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError


class Run:
    """Records one run; a context manager that closes files and trackers however the run ends.

    Of several processes the main one writes and prints; the others only keep the history.

    Args:
        config: the run's settings.
        name: of the run.
        agents: the agents' names.
        folder: of a run to continue; null makes a new one.
        lengths: of its files at the checkpoint, in bytes, by name; they are cut back to it.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        agents: Sequence[str],
        folder: Path | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        self.config = config
        self.agents = list(agents)
        self.history: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.said: set[str] = set()
        self.writes = PartialState().is_main_process
        self.folder = folder or processes.from_main(new_folder(config.output, name) if self.writes else None)
        self.files: dict[str, LineFile] = {}
        self.tracker = None
        if self.writes:
            settings = yaml.safe_dump({**asdict(config), "versions": versions()}, sort_keys=False)
            if folder is None:  # --resume auto knows a run by it
                replace_text(self.folder / "config.yaml", settings)
            self.files = {file: LineFile(self.folder / f"{file}.jsonl", (lengths or {}).get(file, 0)) for file in FILES}
            replace_text(self.folder / "config.yaml", settings)  # a run that goes on may have more iterations
            if lengths is not None:
                self.history = self.files["metrics"].rows()
                self.seconds = [row["seconds_total"] for row in self.files["timings"].rows()]
            self.tracker = start_tracker(config, self.folder)
        self.history, self.seconds = processes.from_main((self.history, self.seconds))
        self.bar = tqdm(
            total=config.iterations,
            initial=len(self.seconds),
            unit="it",
            disable=not (self.writes and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.close()
        for file in self.files.values():
            file.close()
        if self.tracker is not None:
            self.tracker.finish()

    def say(self, text: str) -> None:
        """A line for the user, once whatever the number of processes."""
        if self.writes:
            self.bar.clear()
            print(f"\n{text}", file=sys.stderr, flush=True)

    def lengths(self) -> dict[str, int]:
        """Bytes of the run's files, all of them flushed to the disk.

        Raises:
            OSError: they are not.
        """
        return {name: file.flushed() for name, file in self.files.items()}

    def log(self, k: int, records: list[dict[str, Any]]) -> None:
        """Takes the records of iteration `k`, one per agent, to metrics.jsonl and the tracker."""
        self.history += records
        if not self.writes:
            return
        self.files["metrics"].add(records)
        for record in records:
            for flag in record["flags"]:
                if flag not in self.said:
                    self.said.add(flag)
                    text = MEANING[flag].format(**record)
                    self.say(f"Iteration {k + 1}, {record['agent']} as {record['role']}: {text}")
        if self.tracker is not None:
            values = {
                f"{r['agent']}/{key}": value for r in records for key, value in r.items() if isinstance(value, float)
            }
            values |= {f"{r['agent']}/is_{r['role']}": 1 for r in records}
            self.tracker.log(values, step=k)

    def add_samples(self, k: int, samples: list[dict[str, Any]]) -> None:
        """Takes sample texts of iteration `k` to samples.jsonl."""
        if self.writes:
            self.files["samples"].add(samples)

    def log_timings(self, k: int, records: list[dict[str, Any]], seconds: dict[str, float]) -> None:
        """Takes the seconds by phase to timings.jsonl and the tracker, and shows progress.

        Apart from metrics.jsonl, which is thus the same, bit for bit, whenever the run is repeated.
        """
        tokens = sum(record["response_tokens"] for record in records) * self.config.ppo.batch_size
        row = {
            "iteration": k,
            **{f"seconds_{phase}": round(value, 6) for phase, value in seconds.items()},
            "tokens_per_second": round(tokens / seconds["total"], 3),
            "peak_memory_mb": round(peak_memory_mb(), 1),
        }
        self.seconds.append(seconds["total"])
        if not self.writes:
            return
        self.files["timings"].add([row])
        if self.tracker is not None:
            self.tracker.log({f"time/{key}": value for key, value in row.items() if key != "iteration"}, step=k)
        text = " | ".join(f"{r['agent']} {r['role']} reward {r['task_reward']:+.2f} KL {r['kl']:.2f}" for r in records)
        self.bar.set_postfix_str(text)
        self.bar.update()
        last = k + 1 == self.config.iterations
        if self.bar.disable and (k == 0 or last or (k + 1) % max(1, self.config.iterations // 10) == 0):
            print(f"iteration {k + 1}/{self.config.iterations} | {text} | {seconds['total']:.2f} s/it", flush=True)

    def finish(
        self, before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]], agents: Sequence[Agent]
    ) -> None:
        """Saves agents, curves and summary, and prints what the run came to."""
        self.bar.close()
        for agent in agents:
            agent.save(self.folder / agent.name)
            card = model_card(agent.name, self.config, self.summary()[agent.name])
            (self.folder / agent.name / "README.md").write_text(card, encoding="utf-8")
        plot_curves(self.history, self.folder / "curves.png")
        summary = {
            "iterations": self.config.iterations,
            "seconds_per_iteration": round(statistics.median(self.seconds), 4),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "agents": self.summary(),
            "samples": {"before": before, "after": after},
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
        print(table(self.summary()))
        print(sample_table(before, after))
        print(
            f"\n{summary['seconds_per_iteration']:.2f} s per iteration. Curves, samples and agents are in {self.folder}"
        )

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """By agent and metric: the mean over the first and over the last iterations (10, or half of a short run)."""
        window = min(WINDOW, max(1, self.config.iterations // 2))
        result: dict[str, dict[str, dict[str, float]]] = {}
        for agent in self.agents:
            rows = [record for record in self.history if record["agent"] == agent]
            result[agent] = {}
            for metric in CURVES:
                start, end = (statistics.fmean(r[metric] for r in part) for part in (rows[:window], rows[-window:]))
                result[agent][metric] = {"start": start, "end": end, "change": end - start}
        return result


def start_tracker(config: Config, folder: Path) -> Any:
    """accelerate's tracker of the kind that is asked for, or None.

    Raises:
        UserError: its package is not installed.
    """
    if config.tracker == "none":
        return None
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class = LOGGER_TYPE_TO_CLASS[config.tracker]
    if config.tracker == "wandb" and not (
        os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or _wandb_login()
    ):
        os.environ["WANDB_MODE"] = "offline"
        print(f"wandb: no account is set up, so the run is kept in {folder / 'wandb'}; `wandb sync` uploads it later.")
    options: dict[str, Any] = {
        "wandb": {"dir": str(folder), "name": folder.name, **_wandb_run(config, folder)},
        "tensorboard": {"logging_dir": str(folder)},
    }
    try:
        tracker = tracker_class("cory", **options.get(config.tracker, {}))
    except ImportError as error:
        raise UserError(f"tracker: expected {config.tracker} to be installed, got: {error}") from None
    if hasattr(tracker, "start"):
        tracker.start()
    tracker.store_init_configuration(_flat(asdict(config)))
    return tracker


def _wandb_run(config: Config, folder: Path) -> dict[str, str]:
    """The run that wandb goes on with where this one is resumed: its id lies in the run's folder."""
    if config.tracker != "wandb":
        return {}
    file = folder / "wandb_id"
    known = file.exists() and file.read_text(encoding="utf-8").strip().isalnum()
    if not known:
        replace_text(file, secrets.token_hex(4))
    return {"id": file.read_text(encoding="utf-8").strip(), **({"resume": "allow"} if known else {})}


def _wandb_login() -> bool:
    """Whether an API key of wandb lies in the user's netrc file."""
    import netrc

    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return {key: value if isinstance(value, (int, float, str)) else str(value) for key, value in flat.items()}


def versions() -> dict[str, str]:
    """Python, the libraries, and this repository's commit where it is a checkout."""
    found = {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return found


def peak_memory_mb() -> float:
    """The most memory held so far, in MiB: of the GPU where one is used, else of the process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """The summary as text: a row per agent and metric."""
    lines = ["", f"{'agent':10}{'metric':18}{'start':>9}{'end':>9}{'change':>9}"]
    for agent, metrics in summary.items():
        for metric, values in metrics.items():
            numbers = "".join(f"{values[key]:9.3f}" for key in ("start", "end", "change"))
            lines.append(f"{agent:10}{metric:18}{numbers}")
    return "\n".join(lines)


def sample_table(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> str:
    """The same queries before and after training, each agent alone."""
    lines = []
    for row, sample in enumerate(next(iter(before.values()))):
        lines.append(f"\n{one_line(sample['query'])}")
        answers = [("before", sample)] + [(agent, rows[row]) for agent, rows in after.items()]
        lines += [f"  {who:10}{s['task_reward']:+7.2f}  {one_line(s['completion'])}" for who, s in answers]
    return "\n".join(lines)


def one_line(text: str) -> str:
    """A model's text for a terminal or a table: control characters, line breaks among them, shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def model_card(agent: str, config: Config, summary: dict[str, dict[str, float]]) -> str:
    """The README.md of a saved agent."""
    method = "PPO" if config.cory.num_agents == 1 else f"CORY ({config.cory.num_agents} agents)"
    rows = "\n".join(f"| {metric} | {v['start']:.3f} | {v['end']:.3f} |" for metric, v in summary.items())
    settings = yaml.safe_dump(asdict(config), sort_keys=False)
    return f"""---
library_name: transformers
tags: [cory, ppo, reinforcement-learning]
---
# {agent}

`{config.model.name}` fine-tuned with {method} for {config.iterations} iterations.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("path/to/{agent}")
tokenizer = AutoTokenizer.from_pretrained("path/to/{agent}")
```

Means over the first and the last iterations of training, over the roles it held:

| metric | start | end |
|---|---|---|
{rows}

Settings:

```yaml
{settings}```

Method: Ma et al., "Coevolving with the Other You: Fine-Tuning LLM with Sequential Cooperative Multi-Agent
Reinforcement Learning", NeurIPS 2024, arXiv 2410.06101.
"""
