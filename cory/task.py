"""Loads datasets from the Hub or from local files, and holds what a run trains on."""

import csv
import inspect
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import datasets

from cory.config import RoleConfig
from cory.data_files import FORMATS, check_file
from cory.errors import UserError
from cory.identity import Models, data_hash, function_name, model_identity, source_hash
from cory.learners.records import UpdateStats
from cory.models.load import find, quiet
from cory.prompts import Prompt, RolePrompts, check_prompt
from cory.rewards import Reward, RewardFunction, TeamReward
from cory.rewards import names as reward_names
from cory.row_functions import Function, RowFunction
from cory.streams import Purpose, Stream
from cory.task_metrics import Metric, MetricFunction

# Names in metrics.jsonl that a task's metrics cannot have.
RECORDED = {
    "iteration",
    "agent",
    "role",
    "flags",
    "task_reward",
    "combined_reward",
    "distinct_2",
    "eval_task_reward",
}
RECORDED |= {"team_reward", "eval_team_reward"}
# Columns of an evaluation.
RECORDED |= {"name", "calls", "chain_kl", "tokens", "tokens_read", "tokens_written", "perplexity"}
RECORDED |= {"distinct_1", "best_of_2", "greedy", "copied"}
RECORDED |= {field.name for field in fields(UpdateStats)}


def load_dataset(
    name: str, split: str, columns: Sequence[str], subset: str | None = None
) -> datasets.Dataset:
    """One split of a dataset.

    Args:
        name: Hub id, local file (parquet, json lines, csv, whose cells are texts), or local folder
            with files named after their split.
        columns: the required ones. subset: configuration of a Hub dataset.

    Raises a UserError: it is missing, empty, cannot be read, or lacks a column.
    """
    check_file("dataset", name)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    where = find(name, "dataset", kind="dataset", cached=cache.is_dir())
    path = Path(name)
    if path.exists():
        files = [path] if path.is_file() else _files_of_split(path, split)
        formats = {FORMATS.get(file.suffix) for file in files}
        if len(formats) != 1 or None in formats:
            raise UserError(
                f"dataset: expected files of one kind among {sorted(FORMATS)}, got {[file.name for file in files]}"
            )
        arguments = {
            "path": formats.pop(),
            "data_files": [str(file) for file in files],
            "split": "train",
        }
    else:
        arguments = {
            "path": name,
            "name": subset,
            "split": split,
            "revision": where.get("revision"),
        }
    try:
        with quiet(datasets.utils.logging):
            if path.exists() and arguments["path"] in TEXT_READERS:
                loaded = TEXT_READERS[arguments["path"]](files)
            else:
                loaded = datasets.load_dataset(**arguments)
    except Exception as error:  # every reader raises its own kind
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise UserError(
            f"dataset: expected {name!r} to be readable, got {type(error).__name__}: {reason}"
        ) from None
    if len(loaded) == 0:
        raise UserError(f"dataset: expected rows, got none in {name!r}, split {split!r}")
    for column in columns:
        if column not in loaded.column_names:
            raise UserError(
                f"dataset: expected a column {column!r} in {name!r}, got {loaded.column_names}"
            )
    return loaded


def _read_csv(files: Sequence[Path]) -> datasets.Dataset:
    """The rows of CSV files. A cell is its text: 007 is no number, and NA not nothing."""
    rows = []
    for file in files:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"{file.name}, line {reader.line_num}: not as many cells as columns"
                    )
                rows.append(row)
    return datasets.Dataset.from_list(rows)


def _read_json(files: Sequence[Path]) -> datasets.Dataset:
    """The rows of JSON lines, or of lists of objects. A text is a text, also where it looks like a date."""
    rows = [row for file in files for row in _json_rows(file)]
    columns = dict.fromkeys(name for row in rows for name in row)
    for name in columns:
        _check_kinds(name, [row.get(name) for row in rows])
    return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


def _check_kinds(column: str, values: Sequence[Any]) -> None:
    """Raises a ValueError if a column has values of different kinds, which a dataset cannot hold."""
    kinds: dict[type, int] = {}
    for row, value in enumerate(values, 1):
        if value is not None:
            kinds.setdefault(float if type(value) is int else type(value), row)
    if len(kinds) > 1:
        (_, first), (_, other), *_ = kinds.items()
        raise ValueError(
            f"column {column!r}: {values[first - 1]!r} in row {first} and {values[other - 1]!r} in row {other} are of "
            "different kinds"
        )


def _json_rows(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        numbered = list(enumerate(json.loads(text), 1))
        unit = "row"
    else:
        lines = enumerate(text.split("\n"), 1)
        numbered = [(number, _json(file, number, line)) for number, line in lines if line.strip()]
        unit = "line"
    for number, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{file.name}, {unit} {number}: expected an object, got {row!r}")
    return [row for _, row in numbered]


def _json(file: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{file.name}, line {number}: {error}") from None


# The library would make numbers of texts such as 007, and dates of texts such as 2026-01-31.
TEXT_READERS = {"csv": _read_csv, "json": _read_json}


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = [f for f in sorted([*folder.glob("*"), *folder.glob("data/*")]) if f.suffix in FORMATS]
    whole = [file for file in files if file.stem == split]
    parts = [
        file for file in files if re.fullmatch(rf"{re.escape(split)}-\d+(-of-\d+)?", file.stem)
    ]
    if len(whole) != 1 and (whole or not parts):
        raise UserError(
            f"dataset: expected a file {split}.parquet, {split}.jsonl or {split}.csv in {str(folder)!r}, or its "
            f"parts {split}-00000, ..., got {[file.name for file in whole or files]}"
        )
    return whole or parts


def check_held_out(dataset: str, trained: str) -> None:
    """Raises a UserError if a dataset's split `test` was trained on: it is a single file, or `trained` is `test`."""
    if Path(dataset).is_file() or trained == "test":
        raise UserError(
            "task.dataset: expected a folder with files named after their splits, or a dataset on the Hub, trained on "
            f"another split than test, to have held-out rows, got {dataset!r}, split {trained!r}"
        )


def _check_arguments(function: RowFunction, given: Sequence[str], columns: Sequence[str]) -> None:
    """Raises a UserError if a function needs what it is not given, or would get a column twice."""
    arguments = function.arguments(dict.fromkeys([*given, *columns], ()))
    twice = [name for name in given if name in columns and name in arguments]
    if twice:
        raise UserError(
            f"dataset: expected no columns that {function} is passed anyway, got {twice}"
        )


@dataclass
class Task:
    """What the agents are trained on.

    Args:
        dataset: a `prompt` column with the query s0, text or chat messages of which the last is the
            user's; other columns reach the reward and the templates.
        reward: `reward(prompts, completions, **columns) -> list[float | None]`, called with the
            responses of all agents of an iteration, and for samples, held-out queries and
            counterfactual credit; `prompts` are the queries. Or several in a weighted sum: a list
            of `Reward`, which may be empty with a team reward.
        prompts: what each role reads.
        metrics: more numbers to record, by name: `metric(prompts, completions, rewards, **columns)
            -> list[float | None]` (`cory.task_metrics`), whose mean goes to metrics.jsonl.
        team_reward: `team_reward(prompts, chains, **columns) -> list[float]`, called as the
            reward is; `chains[i]` is the list of a chain's responses by role. Every role gets its
            chain's on top of the rewards of responses.
        extract: the answer that a completion gives, or None, for the votes of an evaluation
            (`maj@k`).
        kind: name of the registered kind that made it (`cory.tasks.kind`), by which commands find
            it again; empty for a task that was made in Python.

    Raises a UserError: no `prompt` column, an empty prompt or one of another kind, a column that a
    reward function would get twice, or a template that names a missing column.
    """

    dataset: datasets.Dataset
    reward: RewardFunction | Sequence[Reward]
    prompts: RolePrompts
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    team_reward: Function | TeamReward | None = None
    extract: Callable[[str], Hashable | None] | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name in (*RECORDED, *self.reward_metrics):
                raise UserError(f"metrics: expected a name that no other metric has, got {name!r}")
        if inspect.iscoroutinefunction(self.extract):
            raise UserError("extract: expected a function, got an async one")
        self.check_rows(self.dataset)

    def check_rows(self, dataset: datasets.Dataset) -> None:
        """Raises a UserError if these rows do not fit the functions and templates of the task."""
        names = dataset.column_names
        if "prompt" not in names:
            raise UserError(f"dataset: expected a column 'prompt', got {names}")
        for reward in self.rewards:
            _check_arguments(reward, ("prompts", "completions", "role"), names)
        if self.team is not None:
            _check_arguments(self.team, ("prompts", "chains"), names)
        for name, function in self.metrics.items():
            _check_arguments(
                Metric(function, name), ("prompts", "completions", "role", "rewards"), names
            )
        for row, prompt in enumerate(dataset["prompt"][:]):
            check_prompt(prompt, f"dataset, column 'prompt', row {row + 1}")
        self.prompts.check_columns(names)
        for name in {*self.prompts.columns()} & {*names}:
            for row, value in enumerate(dataset[name][:]):
                if value is None:
                    raise UserError(
                        f"dataset, column {name!r}, row {row + 1}: expected a value for a role's prompt, got null"
                    )

    def render(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        responses: Sequence[Sequence[str]] | None = None,
    ) -> list[Any]:
        """A role's prompts, one for each row of `columns`.

        `responses`: of each earlier role, in order, its response to each row. None: the pioneer's
        prompts.
        """
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        if responses is None:
            return [self.prompts.render(role, row) for row in rows]
        chains = list(zip(*responses, strict=True)) if responses else [()] * len(rows)
        return [
            self.prompts.render(role, row, chain) for row, chain in zip(rows, chains, strict=True)
        ]

    def with_roles(self, roles: Sequence[RoleConfig]) -> "Task":
        """The task with the names and prompts that a run's settings give its roles
        (`Config.roles`).

        Raises a UserError if one of the prompts names what there is not.
        """
        if tuple(roles) == self.prompts.roles:
            return self
        return replace(self, prompts=replace(self.prompts, roles=tuple(roles)))

    def fingerprint(self) -> dict[str, Any]:
        """Identifies this task in a run's config.yaml: its kind, reward, templates and data, by name and hash."""
        return {
            "task": self.kind,
            **self.fingerprint_of_reward(),
            "prompts": {"pioneer": self.prompts.pioneer, "observer": self.prompts.observer},
            "dataset_sha256": data_hash(self.dataset),
            "rows": len(self.dataset),
        }

    def fingerprint_of_reward(self) -> dict[str, str]:
        """The reward's name and the hash of its source; of several the names with their weights,
        and the hashes.

        Likewise of the team reward, if there is one.
        """
        names = []
        for reward in self.rewards:
            name = _recorded_name(reward)
            names.append(name if reward.weight == 1 else f"{reward.weight} * {name}")
        hashes = [_recorded_hash(reward) for reward in self.rewards]
        identity = {"reward": " + ".join(names), "reward_sha256": "+".join(hashes)}
        if self.team is not None:
            identity["team_reward"] = _recorded_name(self.team)
            identity["team_reward_sha256"] = _recorded_hash(self.team)
        return identity

    def models(self) -> Models:
        """What identifies the models that the reward functions load, and name in an attribute
        `models`.

        That is a mapping of a setting, or any name, to a Hub id or local folder; or to a pair of
        the name by which it is recorded, such as `tiny`, and its folder.
        """
        models: Models = {}
        for reward in [*self.rewards, *([self.team] if self.team else [])]:
            for key, model in getattr(reward.function, "models", {}).items():
                name, source = (model, model) if isinstance(model, str) else model
                models[key] = {"name": name, "identity": model_identity(source)}
        return models

    @property
    def rewards(self) -> Sequence[Reward]:
        """The reward functions with their weights."""
        return self.reward if isinstance(self.reward, Sequence) else [Reward(self.reward)]

    @property
    def team(self) -> TeamReward | None:
        """The team reward, if there is one."""
        if self.team_reward is None or isinstance(self.team_reward, TeamReward):
            return self.team_reward
        return TeamReward(self.team_reward)

    @property
    def reward_metrics(self) -> list[str]:
        """The names of the metrics of each reward function, where there are several."""
        return (
            [f"reward_{name}" for name in reward_names(self.rewards)]
            if len(self.rewards) > 1
            else []
        )

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[Prompt], reward: RewardFunction, role_prompts: RolePrompts
    ) -> "Task":
        """A task on a plain list of queries."""
        return cls(datasets.Dataset.from_dict({"prompt": list(prompts)}), reward, role_prompts)

    def batch(self, k: int, size: int, seed: int) -> dict[str, list[Any]]:
        """The columns of iteration `k`: each pass over the data is a permutation drawn from (seed,
        pass).

        Rows that do not fill a last batch sit out that pass.
        """
        batches = len(self.dataset) // size
        order = (
            Stream(seed, Purpose.QUERIES, iteration=k // batches)
            .numpy()
            .permutation(len(self.dataset))
        )
        start = k % batches * size
        return self.dataset[order[start : start + size].tolist()]


def _recorded_name(reward: Reward | TeamReward) -> str:
    return reward.name or function_name(reward.function)


def _recorded_hash(reward: Reward | TeamReward) -> str:
    return reward.sha256 or source_hash(reward.function)
