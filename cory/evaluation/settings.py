"""Settings of an evaluation, and the runs that it names. Importing this does not import torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from cory.cli.settings import as_config, read_settings
from cory.config import Config, ModelConfig, Settings, changed
from cory.errors import UserError
from cory.run.identity import Models, check_models, model_identity
from cory.run.output import lock, new_folder, remove_partial, replace_text

FREE = ("device", "output", "ks", "shown", "identities")  # may differ when an evaluation is continued
C = TypeVar("C", bound=Config)


@dataclass
class EvaluationConfig(Settings):
    """What to compare, and on what.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents).
        base: The model that KL is measured to, shown first. null: the first run's, or the first model.
        task: Changes to the first run's `task` block: --task.dataset, --task.reward_model, ...
        model: Changes to the `model` block of every model: --model.chat_template, --model.quantization, ...
        sampling: Changes to the first run's `sampling` block: --sampling.temperature, --sampling.max_new_tokens, ...
        split: The held-out split.
        queries: Number of queries, from the first. 0: all.
        samples: Responses sampled for each query.
        ks: The k of pass@k, at most `samples`, for rewards of 0 and 1. Empty: none.
        greedy: Also answer each query once with the likeliest tokens.
        kl_coef: eta of the combined reward. null: the first run's initial KL coefficient, or 0.3.
        batch_size: Responses that are sampled at a time.
        precision: fp32, or bf16: autocast, faster where the hardware has it; weights keep their type.
        seed: Of the choice of queries and of sampling.
        device: auto, cpu, cuda, cuda:N or mps.
        output: Folder of the results; one that was begun with the same settings is continued, also with more models.
            null: a new one.
        shown: Queries whose responses are shown side by side.
    """

    models: list[str] = Field(default_factory=list)
    base: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)
    split: str = "test"
    queries: NonNegativeInt = 500
    samples: PositiveInt = 1
    ks: list[int] = Field(default_factory=list)
    greedy: bool = False
    kl_coef: float | None = None
    batch_size: PositiveInt = 100
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    device: str = "auto"
    output: str | None = None
    shown: NonNegativeInt = 5

    def check(self) -> None:
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise UserError(f"pass@k: expected k from 1 to the number of samples, {self.samples}, got {k}")


def run_agents(folder: Path) -> dict[str, Path]:
    """A run's saved agents, named RUN/agent_1, ...; empty if it is no run. Raises a UserError if it has not ended.

    Without a summary it has not ended, whatever agents lie there: they may be those of a run that has gone back since.
    """
    if not (folder / "config.yaml").exists():
        return {}
    agents = agent_folders(folder)
    if not agents or not (folder / "summary.json").exists():
        raise UserError(
            f"{folder}: expected a run with saved agents, got one that has not ended (--resume continues it)"
        )
    return agents


def agent_folders(folder: Path) -> dict[str, Path]:
    """The agents in a folder, in their order: by their names in an evaluation, FOLDER/agent_1, ..."""
    agents = [path for path in folder.glob("agent_*") if path.is_dir() and path.name[6:].isdigit()]
    agents.sort(key=lambda path: int(path.name[6:]))
    return {f"{folder.name}/{agent.name}": agent for agent in agents}


def agent_models(
    agents: Mapping[str, Path], config: Config, changes: Mapping[str, Any]
) -> dict[str, tuple[ModelConfig, Path | None, ModelConfig]]:
    """How saved agents of a run are loaded: by name the model's settings, an adapter's folder or None, and the base."""
    found: dict[str, tuple[ModelConfig, Path | None, ModelConfig]] = {}
    for agent, path in agents.items():
        model = config.of_agent(int(path.name.removeprefix("agent_")) - 1).model
        own = changed(replace(model, name=config.resolve(model.name)), changes)
        full = replace(own, name=str(path), revision=None, quantization="none")
        found[agent] = (own, path, own) if (path / "adapter_config.json").exists() else (full, None, own)
    return found


def run_config(kind: type[Config], run: Path) -> Config:
    """A run's settings, without its task's block where `kind` has none."""
    settings = read_settings(run)
    if "task" not in kind.__dataclass_fields__:
        settings.pop("task", None)
    return as_config(kind, settings, run / "config.yaml")


def trained(models: Sequence[str]) -> dict[str, str]:
    """For each run among the models, a hash of its results and its agents, which differs if it was trained again."""
    ends = {}
    for name in models:
        with suppress(OSError, ValueError):
            summary = json.loads((Path(name) / "summary.json").read_text(encoding="utf-8"))
            results: list[Any] = [summary.get(key) for key in ("iterations", "agents", "samples")]
            results += [model_identity(str(agent)) for agent in run_agents(Path(name)).values()]
            text = json.dumps(results)
            ends[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return ends


def extends(models: Sequence[str], before: Mapping[str, Any]) -> bool:
    """Whether an evaluation with the settings `before` can go on with these models, more or fewer.

    The first model and run must be the same, as they decide on base, prompts and sampling; runs must be unchanged.
    """

    def first(names: Sequence[str]) -> list[str]:
        return [*names[:1], *[name for name in names if (Path(name) / "config.yaml").exists()][:1]]

    then, now = before.get("models") or [], trained(models)
    was, rows = before.get("trained", now), {Path(name).name: name for name in then}  # a folder's name is that of rows
    return first(models) == first(then) and all(
        rows[Path(name).name] == name and was.get(name) == now.get(name) for name in models if Path(name).name in rows
    )


def begun_settings(folder: Path) -> dict[str, Any]:
    """The settings with which an evaluation was begun. Raises a UserError if the folder is not one of an evaluation."""
    content: Any = None
    with suppress(OSError, ValueError):
        content = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"models", "split", "queries", "samples"} <= content.keys():
        raise UserError(
            f"output: expected a new folder or one of an evaluation, got {str(folder)!r}, whose settings.json is not "
            "that of an evaluation"
        )
    return content


def in_words(key: str, before: Any, now: Any) -> str:
    """What differs from the settings with which an evaluation was begun."""
    if key == "trained":
        again = [run for run, end in now.items() if (before or {}).get(run, end) != end]
        return f"{', '.join(again)} trained again since" if again else "other runs"
    if key == "reward_sha256":
        return "another reward"
    if key == "queries_sha256":
        return "other queries"
    return f"{key} {before!r} -> {now!r}"


def queries_hash(queries: Sequence[str]) -> str:
    """The start of the SHA-256 of an evaluation's queries, in their order."""
    return hashlib.sha256(json.dumps(list(queries)).encode()).hexdigest()[:16]


def output_folder(
    settings: EvaluationConfig,
    name: str,
    reward: str,
    identities: Models,
    queries: Sequence[str],
    locks: ExitStack,
) -> Path:
    """The folder of the results: a new one, or one that was begun with the same settings; else a UserError.

    `reward`: the hash of its source. `identities`: of base, reward model and models that are no runs. `queries`: their
    texts, as responses are stored by the number of their query. The runs must be unchanged, too. The folder is locked
    until `locks` is closed.
    """
    known = asdict(settings) | {"reward_sha256": reward, "queries_sha256": queries_hash(queries)}
    known |= {"trained": trained(settings.models), "identities": identities}
    folder = Path(settings.output) if settings.output else None
    if folder is not None and (folder / "settings.json").exists():
        before = begun_settings(folder)
        lock(folder, locks)
        before = begun_settings(folder)  # as a process that had the lock until now has left them
        remove_partial(folder)
        check_models(before.get("identities", {}), identities, f"the evaluation in {folder}")
        extended = extends(settings.models, before)
        free = (*FREE, "models", "trained") if extended else FREE
        changed = [key for key in known if known[key] != before.get(key) and key not in free]
        if changed:
            raise UserError(
                f"output: expected the settings with which {str(folder)!r} was begun, "
                f"got {'; '.join(in_words(key, before.get(key), known[key]) for key in changed)}"
            )
        if extended:
            known["models"] = list(dict.fromkeys([*before["models"], *settings.models]))
            known["trained"] = before.get("trained", {}) | known["trained"]
            known["identities"] = before.get("identities", {}) | identities
    else:
        folder = new_folder(settings.output, name, locks)
    replace_text(folder / "settings.json", json.dumps(known, indent=2))
    return folder
