"""Loads datasets from the Hub or from local files, and holds what a run trains on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from cory.errors import UserError, expect
from cory.models.load import find, quiet
from cory.prompts import Prompt, RolePrompts, check_prompt
from cory.rewards import Reward, RewardFunction
from cory.run import provenance
from cory.run.data_files import FORMATS, check_file
from cory.run.identity import Models, model_identity


def load_dataset(name: str, split: str, columns: Sequence[str], subset: str | None = None) -> datasets.Dataset:
    """One split of a dataset.

    Args:
        name: Hub id, local file (parquet, json lines, csv), or local folder with files named after their split.
        columns: the required ones. subset: configuration of a Hub dataset.

    Raises a UserError: it is missing, empty, cannot be read, or lacks a column.
    """
    check_file(name)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    where = find(name, "dataset", kind="dataset", cached=cache.is_dir())
    path = Path(name)
    if path.exists():
        files = [path] if path.is_file() else _files_of_split(path, split)
        formats = {FORMATS.get(file.suffix) for file in files}
        alike, kinds = len(formats) == 1 and None not in formats, f"files of one kind among {sorted(FORMATS)}"
        expect(alike, "dataset", kinds, [f.name for f in files])
        arguments = {"path": formats.pop(), "data_files": [str(file) for file in files], "split": "train"}
    else:
        arguments = {"path": name, "name": subset, "split": split, "revision": where.get("revision")}
    try:
        with quiet(datasets.utils.logging):
            loaded = datasets.load_dataset(**arguments)
    except Exception as error:  # every reader raises its own kind
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise UserError(f"dataset: expected {name!r} to be readable, got {type(error).__name__}: {reason}") from None
    if len(loaded) == 0:
        raise UserError(f"dataset: expected rows, got none in {name!r}, split {split!r}")
    for column in columns:
        names = loaded.column_names
        expect(column in names, "dataset", f"a column {column!r} in {name!r}", names)
    return loaded


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = [f for f in sorted([*folder.glob("*"), *folder.glob("data/*")]) if f.suffix in FORMATS]
    chosen = [f for f in files if f.stem == split or f.name.startswith((f"{split}-", f"{split}_", f"{split}."))]
    wanted = f"a file {split}.parquet, {split}.jsonl or {split}.csv in {str(folder)!r}"
    expect(bool(chosen), "dataset", wanted, [f.name for f in files])
    return chosen


def check_held_out(dataset: str, trained: str) -> None:
    """Raises a UserError if a dataset's split `test` was trained on: it is a single file, or `trained` is `test`."""
    apart = "a folder with files named after their splits, or a dataset on the Hub, trained on another split than test"
    shown = f"{dataset!r}, split {trained!r}"
    expect(not Path(dataset).is_file() and trained != "test", "eval_every: task.dataset", apart, shown)


@dataclass
class Task:
    """What the agents are trained on.

    Args:
        dataset: a `prompt` column with the query s0, text or chat messages of which the last is the user's; other
            columns reach the reward and the templates.
        reward: `reward(prompts, completions, **columns) -> list[float | None]`, called once per iteration with the
            responses of all agents; `prompts` are the queries. Or several in a weighted sum: a list of `Reward`.
        prompts: what each role reads.
        metrics: more numbers to record: name to a function of a completion, whose mean goes to metrics.jsonl.

    Raises a UserError: no `prompt` column, an empty prompt or one of another kind, a column that a reward function
    would get twice, or a template that names a missing column.
    """

    dataset: datasets.Dataset
    reward: RewardFunction | Sequence[Reward]
    prompts: RolePrompts
    metrics: dict[str, Callable[[str], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.dataset.column_names
        expect("prompt" in names, "dataset", "a column 'prompt'", names)
        given = ("prompts", "completions", "role")  # besides the dataset's columns
        for reward in self.rewards:
            taken = reward.arguments(dict.fromkeys([*given, *names], ()))
            twice = [name for name in given if name in names and name in taken]
            expect(not twice, "dataset", f"no columns that {reward} is passed anyway", twice)
        for row, prompt in enumerate(self.dataset["prompt"]):
            check_prompt(prompt, f"dataset, column 'prompt', row {row + 1}")
        self.prompts.check_columns(names)

    def render(
        self, role: int, columns: Mapping[str, Sequence[Any]], responses: Sequence[str] | None = None
    ) -> list[Any]:
        """A role's prompts, one for each row of `columns`; without `responses`, the pioneer's."""
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        texts = [None] * len(rows) if responses is None else responses
        return [self.prompts.render(role, row, text) for row, text in zip(rows, texts, strict=True)]

    def fingerprint(self) -> dict[str, Any]:
        """Identifies this task in a run's config.yaml: reward, templates and data, by name and hash."""
        data = {"dataset_sha256": provenance.data_hash(self.dataset), "rows": len(self.dataset)}
        return {**self.fingerprint_of_reward(), "prompts": asdict(self.prompts), **data}

    def fingerprint_of_reward(self) -> dict[str, str]:
        """The reward's name and the hash of its source; of several the names with their weights, and the hashes."""
        names = [
            ("" if each.weight == 1 else f"{each.weight} * ") + (each.name or provenance.function_name(each.function))
            for each in self.rewards
        ]
        hashes = [each.sha256 or provenance.source_hash(each.function) for each in self.rewards]
        return {"reward": " + ".join(names), "reward_sha256": "+".join(hashes)}

    def models(self) -> Models:
        """What identifies the models that the reward functions load, and name in an attribute `models`.

        That is a mapping of a setting, or any name, to a Hub id or local folder; or to a pair of the name by which it
        is recorded, such as `tiny`, and its folder.
        """
        models: Models = {}
        for reward in self.rewards:
            for key, model in getattr(reward.function, "models", {}).items():
                name, source = (model, model) if isinstance(model, str) else model
                models[key] = {"name": name, "identity": model_identity(source)}
        return models

    @property
    def rewards(self) -> Sequence[Reward]:
        """The reward functions with their weights."""
        return self.reward if isinstance(self.reward, Sequence) else [Reward(self.reward)]

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], reward: RewardFunction, role_prompts: RolePrompts) -> "Task":
        """A task on a plain list of queries."""
        return cls(datasets.Dataset.from_dict({"prompt": list(prompts)}), reward, role_prompts)

    def batch(self, k: int, size: int, seed: int) -> dict[str, list[Any]]:
        """The columns of iteration `k`: each pass over the data is a permutation drawn from (seed, pass).

        Rows that do not fill a last batch sit out that pass.
        """
        batches = len(self.dataset) // size
        order = np.random.default_rng([seed, k // batches]).permutation(len(self.dataset))
        start = k % batches * size
        return self.dataset[order[start : start + size].tolist()]
