"""The agents of a run in their chain, and their base, answering one query at a time."""

import gc
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from cory.agent import make_agents
from cory.chat.config import ChatConfig
from cory.config import Config, ModelConfig, UserError, changed, expect
from cory.evaluation import reply
from cory.evaluation.evaluator import reward_differs
from cory.policies.load import ModelPool, choose_device
from cory.prompts import RolePrompts, check_prompt, placeholders
from cory.rewards import score
from cory.roles import role_name
from cory.run import checkpoint
from cory.run.checkpoint import RunState
from cory.run.evaluation_settings import agent_models, run_config
from cory.run.identity import check_models, policy_models
from cory.run.settings import read_settings
from cory.task import Task
from cory.tasks.kinds import kind_of


class Answer(NamedTuple):
    """A response, who gave it (`base`, or an agent as a role), and its task reward, None where there is none."""

    who: str
    text: str
    reward: float | None


class Chain:
    """A run's agents in their roles, beside their base. All models stay in memory.

    Args:
        folder: with the run's config.yaml and its agents. config: the run's settings. settings: of the chat.
        task: prompts and reward; of its data only the form of a prompt is used. device: of the models.

    Raises a UserError: `settings.order` or a change of settings does not fit the run.
    """

    def __init__(self, folder: Path, config: Config, settings: ChatConfig, task: Task, device: torch.device) -> None:
        self.task, self.seed, self.device = task, settings.seed, device
        self.notes: list[str] = []  # what the user should know; who shows them empties the list
        self.said: set[str] = set()
        self.transfer = config.cory.knowledge_transfer
        self.sampling = config.sampling.after_training(settings.sampling)
        self.agents = list(agent_models(folder, config, settings.model).values())
        count = len(self.agents)
        self.order = settings.order or [1 + role % count for role in range(config.cory.roles)]
        known = all(1 <= number <= count for number in self.order)
        expect(known, "order", f"numbers of the run's agents, 1 to {count}", self.order)
        self.bases: list[tuple[str, ModelConfig]] = []
        for number, (_, _, base) in enumerate(self.agents, 1):
            if base not in [known for _, known in self.bases]:
                self.bases.append((f"base of agent_{number}" if self.bases else "base", base))
        self.pools: dict[str, ModelPool] = {}  # one for each model, so that none is loaded twice

    @property
    def speakers(self) -> list[str]:
        """Who answers a query: the bases, then the agents in their roles."""
        roles = [f"agent_{number} as {role_name(role)}" for role, number in enumerate(self.order)]
        return [name for name, _ in self.bases] + roles

    def exchange(self) -> None:
        """Rotates the order by one role, as a role exchange does (Eq. 5)."""
        self.order = [*self.order[1:], self.order[0]]

    def forget(self) -> None:
        """Frees the models, which are loaded again when they are needed: after an interruption they may be in parts."""
        self.pools.clear()

    def ask(self, query: str) -> list[Answer]:
        """The responses to a query, in the order of `speakers`.

        Args:
            query: text, or a JSON object with `prompt` and the other columns of the run's data.

        Raises a UserError: the query is empty, too long for a model, or lacks a column that a role's prompt names.
        """
        row = self.row(query)
        check_prompt(row["prompt"], "query")
        self.task.prompts.check_columns(row)
        columns = {name: [value] for name, value in row.items()}
        texts = [self._respond((base, None, base), columns, None, 0) for _, base in self.bases]
        read = None
        for role, number in enumerate(self.order):
            texts.append(self._respond(self.agents[number - 1], columns, read, role))
            read = texts[-1] if self.transfer else None
        rewards = self._rewards(row, texts)
        return [Answer(*each) for each in zip(self.speakers, texts, rewards, strict=True)]

    def row(self, query: str) -> dict[str, Any]:
        """A query's columns. Where the run's prompts are chat messages, a text is the last of them."""
        if query.lstrip().startswith("{"):
            try:
                row = json.loads(query)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and "prompt" in row:
                return row
        first = self.task.dataset[0]["prompt"]
        chat = isinstance(first, list)
        return {"prompt": [*first[:-1], {**first[-1], "content": query}] if chat else query}

    def _respond(
        self,
        agent: tuple[ModelConfig, Path | None, ModelConfig],
        columns: Mapping[str, Sequence[Any]],
        read: str | None,
        role: int,
    ) -> str:
        model, adapter, _ = agent
        with self.pools.setdefault(str(model), ModelPool(self.device)).loaded(model, adapter, model) as loaded:
            responses = reply(
                loaded, self.task, columns, self.sampling, None if read is None else [read],
                seed=self.seed * 1_000_003 + role, chat_template=model.chat_template, kl=False,
            )  # fmt: skip
        return responses.completions[0]

    def _rewards(self, row: Mapping[str, Any], texts: Sequence[str]) -> Sequence[float | None]:
        columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
        columns["role"] = [role_name(max(0, place - len(self.bases))) for place in range(len(texts))]
        if not self.task.reward:
            return [None] * len(texts)
        try:
            return score(self.task.reward, [row["prompt"]] * len(texts), texts, columns).tolist()
        except UserError as error:
            self.note(f"No rewards: {error}")
            return [None] * len(texts)

    def note(self, text: str) -> None:
        """Keeps a note for the user, unless it was said before."""
        if text not in self.said:
            self.said.add(text)
            self.notes.append(text)


@contextmanager
def opened(settings: ChatConfig) -> Iterator[tuple[str, Chain]]:
    """A run's chain, and a line that says what it is.

    Raises a UserError: no such run, it has neither saved agents nor a valid checkpoint, or a setting does not fit it.
    """
    path = Path(settings.run)
    run = path.parent.parent if (path / "manifest.json").exists() else path
    made_of = read_settings(run)
    kind, module = kind_of(made_of)
    config = run_config(kind, run)
    config.device = settings.device
    if settings.task:
        expect(module is not None, "task", "none, as the run has no task block", settings.task)
        config.task = changed(config.task, settings.task)  # type: ignore[attr-defined]
    device = choose_device(settings.device)
    with _saved_agents(path, run, config) as (folder, iterations):
        task, why_not = _task(made_of, config, module, device)
        recorded = (made_of.get("fingerprint") or {}).get("models") or {}
        check_models(recorded, policy_models(config), str(run))
        check_models(recorded, task.models(), str(run), chosen=True)
        chain = Chain(folder, config, settings, task, device)
        if why_not or (why_not := reward_differs(run, made_of.get("fingerprint") or {}, task)):
            chain.note(why_not)
        yield f"{run.name}: {config.method()} after {iterations}", chain


def _task(made_of: Mapping[str, Any], config: Config, module: str | None, device: torch.device) -> tuple[Task, str]:
    """The run's prompts and reward. Where the reward cannot be had, without it, and why."""
    templates = (made_of.get("fingerprint") or {}).get("prompts") or {}
    prompts = RolePrompts(**templates)
    columns = {*placeholders(prompts.pioneer, "pioneer"), *placeholders(prompts.observer, "observer"), "prompt"}
    nothing = Task(Dataset.from_dict({name: ["-"] for name in columns - {"response"}}), [], prompts)
    if module is None:
        return nothing, "No rewards: the run was started from Python, and its folder does not hold the reward."
    try:
        own = {} if module == "cory.tasks.own" else {"dataset": nothing.dataset}  # others need no data for a reward
        task = importlib.import_module(module).make_task(config, device, **own)
    except UserError as error:
        return nothing, f"No rewards: {error}"
    return (replace(task, prompts=prompts) if templates else task), ""


@contextmanager
def _saved_agents(path: Path, run: Path, config: Config) -> Iterator[tuple[Path, str]]:
    """A folder with config.yaml and the agents, and after how many iterations they are.

    Those of a run that has not ended are written from a checkpoint: the newest valid one, or the one that `path` is.
    """
    if path == run and (run / "summary.json").exists():
        yield run, f"{json.loads((run / 'summary.json').read_text(encoding='utf-8'))['iterations']} iterations"
        return
    names = [f"agent_{number + 1}" for number in range(config.cory.num_agents)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / run.name
        try:
            found = checkpoint.newest(run, names) if path == run else (path, checkpoint.read(path, names))
            if found is None:
                raise UserError(f"{run}: expected a run that has ended, or has a valid checkpoint, got one without")
            _write_agents(found, config, folder)
        except (checkpoint.Damaged, FileNotFoundError) as error:  # a run that goes on removes old checkpoints
            raise UserError(f"{path}: expected a valid checkpoint, got: {error}") from None
        shutil.copy(run / "config.yaml", folder)
        gc.collect()  # the agents' optimizers
        yield folder, f"{found[1].iteration} of {config.iterations} iterations (checkpoint {found[0].name})"


def _write_agents(found: tuple[Path, RunState], config: Config, folder: Path) -> None:
    """Writes the agents of a checkpoint into folders, as a run does at its end."""
    agents = make_agents(config)
    checkpoint.load(*found, agents)
    for agent in agents:
        agent.save(folder / agent.name)
