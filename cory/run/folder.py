"""The run's folder and its progress: everything that a run writes and prints while it trains."""

import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import yaml
from tqdm import tqdm

from cory.config import Config
from cory.errors import UserError
from cory.run import processes
from cory.run.card import agent_card
from cory.run.guards import MEANING
from cory.run.jsonl import JsonlWriter, read_rows
from cory.run.output import is_not_written, new_folder, remove, remove_partial, replace_text, staged
from cory.run.provenance import versions
from cory.run.report import sample_table, summarise, table
from cory.run.settings import resume_command
from cory.run.tracker import check_tracker, log_samples, start_tracker

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FILES = ("metrics", "samples", "timings")
Samples = dict[str, list[dict[str, Any]]]  # by agent


class NotSaved(UserError):
    """The end of a run could not be written."""


class SavedAgent(Protocol):
    """What a run's folder and its checkpoints need of an agent; see `cory.agent.Agent`."""

    name: str

    def save(self, folder: Path) -> None: ...
    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...
    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None: ...


def run_record(config: Config, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.yaml, also kept in checkpoints: a run's settings, its task's fingerprint, versions.

    What concerns one start alone, such as `output` and `resume`, has its default, so that the file can configure a new
    run. `changes` lists what was accepted with `accept_changes`.
    """
    of_this_start = {"output": None, "resume": None, "overwrite": False, "accept_changes": "none"}
    record = {**asdict(config), **of_this_start}
    return {**record, "fingerprint": dict(fingerprint), "versions": versions(), "changes": []}


class Run:
    """Records one run; a context manager that closes files and trackers however the run ends.

    Of several processes the main one writes and prints; the others only keep the history.

    Args:
        config: the run's settings. name: of the run. agents: their names.
        record: the contents of config.yaml: see `run_record`.
        folder: of a run to continue; None makes a new one.
        lengths: of its files at the checkpoint, in bytes, by name; files are truncated to them.
        outdated: newer files and folders of the run to continue, which are removed.
        finished: whether nothing is left to do, so that the folder is only read.
        locks: what locks the folder; `folder` is locked already. None: it is locked here.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        agents: Sequence[str],
        record: Mapping[str, Any],
        folder: Path | None = None,
        lengths: Mapping[str, int] | None = None,
        outdated: Sequence[Path] = (),
        finished: bool = False,
        locks: ExitStack | None = None,
    ) -> None:
        config.hub.check_token()
        if not finished:
            check_tracker(config.tracker)
        self.locks = locks or ExitStack()
        self.config, self.agents, self.finished = config, list(agents), False
        self.fingerprint = record.get("fingerprint") or {}
        self.history: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.said: set[str] = set()
        self.writes = processes.is_main() and not finished
        if folder is None:
            made = new_folder(config.output, name, self.locks) if self.writes else None
            self.folder = processes.broadcast(made)
        else:
            self.folder = folder
        self.files: dict[str, JsonlWriter] = {}
        self.tracker = None
        if finished and processes.is_main():
            self._read_history()
        if self.writes:
            settings = yaml.safe_dump(dict(record), sort_keys=False)
            if folder is None:  # --resume auto knows a run by it
                try:
                    replace_text(self.folder / "config.yaml", settings)
                except OSError as error:
                    folder_that_came = f"{str(self.folder)!r} ({error})"
                    raise UserError(f"output: expected a folder that can be written, got {folder_that_came}") from None
            for file in FILES:
                self.files[file] = JsonlWriter(self.folder / f"{file}.jsonl")
            if folder is not None:
                remove_partial(self.folder)
                remove_partial(self.folder / "checkpoints")
                kept = {file: (lengths or {}).get(file, 0) for file in FILES}
                self._read_history(kept)  # a damaged file is refused before anything is changed
                for path in outdated:  # before the files are cut, as it would be taken for newer than they are
                    remove(path)
                for file, length in kept.items():
                    self.files[file].cut(length)
                replace_text(self.folder / "config.yaml", settings)  # with what this start has changed
            self.tracker = start_tracker(config, self.folder, None if folder is None else len(self.seconds))
        self.history, self.seconds = processes.broadcast((self.history, self.seconds))
        layout = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"  # leaves a line of 80 for two agents
        hidden, done = not (self.writes and sys.stderr.isatty()), len(self.seconds)
        self.bar = tqdm(total=config.iterations, initial=done, bar_format=layout, disable=hidden, dynamic_ncols=True)

    def _read_history(self, lengths: Mapping[str, int] | None = None) -> None:
        """Reads the run's files, or the first bytes of them."""
        lengths = lengths or {}
        self.history = read_rows(self.folder / "metrics.jsonl", lengths.get("metrics"))
        timings = read_rows(self.folder / "timings.jsonl", lengths.get("timings"))
        self.seconds = [row["seconds_total"] for row in timings]

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        for file in self.files.values():
            file.close()
        if self.tracker is not None:
            self.tracker.finish()
        if self.finished and self.config.hub.push:
            self._push()  # here, as other processes do not wait for it
        self.locks.close()

    def _push(self) -> None:
        """Uploads the run. A failure is told, with the command that repeats it, and does not fail the run."""
        from cory.run.upload import push

        try:
            print(f"Uploaded to {push(self.folder, self.config, self.config.hub)}")
        except UserError as error:
            hub = self.config.hub
            more = " --public" * hub.public + (f" --base {hub.base}" if hub.base else "")
            again = f"python -m cory.push {shlex.quote(str(self.folder))} {hub.push}{more}"
            print(f"{error}\nThe run is complete. Upload it with: {again}", file=sys.stderr)

    def say(self, text: str) -> None:
        """Prints a line for the user, in the main process only."""
        if self.writes:
            self.bar.clear()
            print(f"\n{text}", file=sys.stderr, flush=True)

    def lengths(self) -> dict[str, int]:
        """Flushes the run's files to the disk and returns their bytes. Raises an OSError if that fails."""
        return {name: file.flushed() for name, file in self.files.items()}

    def log(self, k: int, records: list[dict[str, Any]]) -> None:
        """Writes the records of iteration `k`, one per role, to metrics.jsonl and the tracker."""
        self.history += records
        if not self.writes:
            return
        self.files["metrics"].add(records)
        values: dict[str, float] = {}
        for record in records:
            agent, role = record["agent"], record["role"]
            for flag in [flag for flag in record["flags"] if flag not in self.said]:
                self.said.add(flag)
                self.say(f"Iteration {k + 1}, {agent} as {role}: {MEANING[flag].format(**record)}")
            several = self.config.cory.roles > self.config.cory.num_agents
            who = f"{agent}/{role}" if several else agent  # of an agent in several roles each by itself
            values |= {f"{who}/{key}": value for key, value in record.items() if isinstance(value, float)}
            values[f"{agent}/is_{role}"] = 1
        if self.tracker is not None:
            self.tracker.log(values, step=k)

    def add_samples(self, k: int, samples: list[dict[str, Any]]) -> None:
        """Writes samples of iteration `k` to samples.jsonl and the tracker, if there are any."""
        rows = [{"iteration": k, **sample} for sample in samples]
        if rows and self.writes:
            self.files["samples"].add(rows)
            if self.tracker is not None:
                log_samples(self.tracker, k, rows)

    def log_timings(self, k: int, records: list[dict[str, Any]], seconds: dict[str, float]) -> None:
        """Writes the seconds by phase to timings.jsonl and the tracker, and shows progress.

        They are kept out of metrics.jsonl, so that repeating a run reproduces that file bit for bit.
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
        text, iterations = progress(records), self.config.iterations
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        if self.bar.disable and (k + 1 in (1, iterations) or (k + 1) % max(1, iterations // 10) == 0):
            print(f"iteration {k + 1}/{iterations} | {text} | {seconds['total']:.2f} s/it", flush=True)

    def interrupted(self) -> None:
        """Prints how to continue the run."""
        self.say(f"Continue with: {resume_command(self.folder)}")

    def finish(
        self,
        before: Samples,
        after: Samples,
        agents: Sequence[SavedAgent],
        held_out: Mapping[str, float] | None = None,
    ) -> None:
        """Saves agents, curves and summary, and prints the results; in the main process but for parts of agents.

        Args:
            held_out: about the held-out queries of `eval_every`, for the summary.

        Raises NotSaved, in all processes, if something cannot be written, such as on a full disk. What was saved before
        stays as it was then: the new files appear when all of them are written.
        """
        self.bar.close()
        means = summarise(self.history, self.agents)
        summary = {
            "iterations": len(self.seconds),
            "stopped": len(self.seconds) < self.config.iterations,  # by guards.stop_at_kl or a callback
            "seconds_per_iteration": round(statistics.median(self.seconds), 4),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "agents": means,
            **({"held_out": dict(held_out)} if held_out else {}),
            "samples": {"before": before, "after": after},
        }
        # Each step is taken by all processes, so that none waits for one that could not write.
        try:
            with ExitStack() as stage:
                folder = processes.broadcast(processes.agreed(partial(self._begin_to_finish, stage)))
                for agent in agents:
                    processes.agreed(partial(self._save_agent, agent, folder))
                processes.agreed(partial(self._write_results, summary, folder))
                processes.agreed(partial(self._complete, stage))
        except Exception as error:
            if not (is_not_written(error) or isinstance(error, processes.FailedElsewhere)):
                raise
            raise NotSaved(
                f"expected to save agents and results in {str(self.folder)!r}, which could not be written ({error})"
            ) from None
        if not self.writes:
            return
        print(table(means))
        print(sample_table(before, after))
        speed = f"{summary['seconds_per_iteration']:.2f} s per iteration"
        print(f"\n{speed}. Curves, samples and agents are in {self.folder}; report.html shows them")
        self.finished = True

    def _begin_to_finish(self, stage: ExitStack) -> Path | None:
        """In the main process: writes what waits, and makes the folder in which everything is written first."""
        if not self.writes:
            return None
        self.lengths()
        return stage.enter_context(staged(self.folder))

    def _save_agent(self, agent: SavedAgent, folder: Path) -> None:
        if self.writes or processes.parallel.split:
            agent.save(folder / agent.name)

    def _write_results(self, summary: Mapping[str, Any], folder: Path) -> None:
        if not self.writes:
            return
        from cory.run.plots import plot_curves  # here, as importing matplotlib takes a while

        for name, means in summary["agents"].items():
            samples = summary["samples"]["before"].get(name, [])
            card = agent_card(name, self.config, means, self.fingerprint, samples)
            (folder / name / "README.md").write_text(card, encoding="utf-8")
        plot_curves(self.history, folder / "curves.png")
        (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")

    def _complete(self, stage: ExitStack) -> None:
        """Moves what is written to its place, the summary last."""
        if self.writes:
            # Of an extended run: without a summary, it is not taken for finished while only some agents are new.
            (self.folder / "summary.json").unlink(missing_ok=True)
            stage.close()


def peak_memory_mb() -> float:
    """Peak memory so far, in MiB: of the GPU if CUDA is used, else of the process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    if resource is None:
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss) / 2**20  # bytes; only Windows has the peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def progress(records: Sequence[Mapping[str, Any]]) -> str:
    """One line on an iteration: each agent's name, role, task reward and KL; for more than two roles, their means."""
    if len(records) > 2:
        reward, kl = (statistics.fmean(r[key] for r in records) for key in ("task_reward", "kl"))
        return f"{len(records)} roles: reward {reward:+.2f} KL {kl:.2f}"
    parts = (f"{r['agent']} {r['role'][:3]} {r['task_reward']:+.2f} KL {r['kl']:.2f}" for r in records)
    return " | ".join(parts)
