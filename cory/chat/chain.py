"""The agents of a run in their chain, and their base, answering one query at a time."""

import gc
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from cory.agent import make_agents
from cory.chat.config import ChatConfig
from cory.cli.settings import read_settings
from cory.config import Config, ModelConfig, changed
from cory.errors import UserError, expect
from cory.evaluation.evaluator import reward_differs
from cory.evaluation.responses import reply
from cory.evaluation.settings import agent_folders, agent_models, run_config
from cory.models.load import ModelPool
from cory.parallel.devices import choose_device
from cory.prompts import RolePrompts, check_prompt, placeholders, text_of
from cory.rewards import MissingColumns, score
from cory.roles import role_name
from cory.run import checkpoint
from cory.run.checkpoint import RunState
from cory.run.identity import check_models, policy_models
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
        task: prompts and reward. device: of the models.
        known: data sets of the run, whose queries bring their other columns along, such as a gold answer.

    Raises a UserError: `settings.order` or a change of settings does not fit the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        settings: ChatConfig,
        task: Task,
        device: torch.device,
        known: Sequence[Dataset] = (),
    ) -> None:
        self.task, self.seed, self.device = task, settings.seed, device
        self.further = further_columns(task)  # what reward and prompts read besides the query
        self.columns: dict[str, Any] = {}  # values of further columns, for queries that have none
        self.known = known
        self.places: dict[str, tuple[int, int]] = {}  # of the known queries, by their text: data set and row
        if self.further:
            for number, dataset in enumerate(known):
                for row, prompt in enumerate(dataset["prompt"]):
                    self.places.setdefault(_on_one_line(text_of(prompt)), (number, row))
        self.notes: list[str] = []  # what the user should know; who shows them empties the list
        self.said: set[str] = set()
        self.transfer = config.cory.knowledge_transfer
        self.sampling = config.sampling.after_training(settings.sampling)
        self.agents = list(agent_models(agent_folders(folder), config, settings.model).values())
        count = len(self.agents)
        self.order = settings.order or [1 + role % count for role in range(config.cory.roles)]
        within = all(1 <= number <= count for number in self.order)
        expect(within, "order", f"numbers of the run's agents, 1 to {count}", self.order)
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
        missing = [name for name in template_columns(self.task.prompts) if name not in row]
        if missing:
            raise UserError(f"query: expected {' and '.join(missing)}, which the prompts name. {self._remedy(missing)}")
        columns = {name: [value] for name, value in row.items()}
        texts = [self._respond((base, None, base), columns, None, 0) for _, base in self.bases]
        read = None
        for role, number in enumerate(self.order):
            texts.append(self._respond(self.agents[number - 1], columns, read, role))
            read = texts[-1] if self.transfer else None
        rewards = self._rewards(row, texts)
        return [Answer(*each) for each in zip(self.speakers, texts, rewards, strict=True)]

    def row(self, query: str) -> dict[str, Any]:
        """A query's columns: its own, then those of `columns`.

        A query of the run's data has the columns of its row. Where the run's prompts are chat messages, another text is
        the last of them.
        """
        if query.lstrip().startswith("{"):
            try:
                row = json.loads(query)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and "prompt" in row:
                return self.columns | row
        place = self.places.get(_on_one_line(query))
        if place is not None:
            number, index = place
            return self.columns | self.known[number][index]
        first = self.task.dataset[0]["prompt"]
        if isinstance(first, list):
            return {**self.columns, "prompt": [*first[:-1], {**first[-1], "content": query}]}
        return {**self.columns, "prompt": query}

    def set_column(self, name: str, text: str) -> None:
        """Sets a further column for queries that do not have it; an empty text removes it.

        Raises a UserError: reward and prompts read no such column, or the text does not fit the column's other values.
        """
        if name not in self.further:
            raise UserError(f"set: expected a column that reward or prompts read, among {self.further}, got {name!r}")
        example = self.task.dataset[0][name]
        value: Any = text
        if text and not isinstance(example, str):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                raise UserError(f"set {name}: expected a value like {json.dumps(example)}, got {text!r}") from None
        if text:
            self.columns[name] = value
        else:
            self.columns.pop(name, None)

    def _remedy(self, missing: Sequence[str]) -> str:
        """How a query gets columns that it lacks."""
        example = next(iter(self.places), None)
        of_data = "" if example is None else f"Queries of the run's data bring it along, such as:\n{example}\n"
        name = missing[0]
        return f"{of_data}For your own, set it: /set {name}=VALUE in the terminal, the field {name} in the page."

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
        except MissingColumns as error:
            needed = " and ".join(error.names)
            self.note(f"No reward for this query, as the reward also needs its {needed}. {self._remedy(error.names)}")
        except UserError as error:
            self.note(f"No rewards: {error}")
        return [None] * len(texts)

    def note(self, text: str) -> None:
        """Keeps a note for the user, unless it was said before."""
        if text not in self.said:
            self.said.add(text)
            self.notes.append(text)


def template_columns(prompts: RolePrompts) -> list[str]:
    """The columns that the roles' prompts name, besides the query."""
    names = [*placeholders(prompts.pioneer, "pioneer"), *placeholders(prompts.observer, "observer")]
    return [name for name in dict.fromkeys(names) if name not in ("prompt", "response")]


def further_columns(task: Task) -> list[str]:
    """The columns of a task's data that its prompts and its reward read, besides the query."""
    given = ("prompts", "completions", "role")
    columns = [name for name in task.dataset.column_names if name != "prompt"]
    read = set(template_columns(task.prompts))
    for reward in task.rewards:
        read |= set(reward.arguments(dict.fromkeys([*given, *columns], ())))
    return [name for name in columns if name in read]


def _on_one_line(text: str) -> str:
    """A text as it can be typed: without line breaks and repeated spaces."""
    return " ".join(text.split())


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
    config = config.on(settings.device)
    if settings.task:
        expect(module is not None, "task", "none, as the run has no task block", settings.task)
        config.task = changed(config.task, settings.task)  # type: ignore[attr-defined]
    device = choose_device(settings.device)
    with _saved_agents(path, run, config) as (folder, iterations):
        task, known, why_not = _task(made_of, config, module, device)
        recorded = (made_of.get("fingerprint") or {}).get("models") or {}
        check_models(recorded, policy_models(config), str(run))
        check_models(recorded, task.models(), str(run), chosen=True)
        chain = Chain(folder, config, settings, task, device, known)
        if why_not or (why_not := reward_differs(run, made_of.get("fingerprint") or {}, task)):
            chain.note(why_not)
        yield f"{run.name}: {config.method()} after {iterations}", chain


def _task(
    made_of: Mapping[str, Any], config: Config, module: str | None, device: torch.device
) -> tuple[Task, list[Dataset], str]:
    """The run's prompts and reward, its data where they need it, and why there are no rewards, if there are none."""
    templates = (made_of.get("fingerprint") or {}).get("prompts") or {}
    prompts = RolePrompts(**templates)
    nothing = Task(_stand_in(["prompt", *template_columns(prompts)]), [], prompts)
    if module is None:
        return nothing, [], "No rewards: the run was started from Python, and its folder does not hold the reward."
    make_task = importlib.import_module(module).make_task
    known: list[Dataset] = []
    why_not = ""
    try:
        if module == "cory.tasks.own":
            task = make_task(config, device)
            known = [task.dataset]
        else:
            task, known, why_not = _built_in(make_task, config, device, nothing.dataset)
    except UserError as error:
        return nothing, [], f"No rewards: {error}"
    if known:
        with suppress(UserError):  # held-out queries, where there are any
            known.append(make_task(config, device, getattr(config.task, "eval_split", "test")).dataset)  # type: ignore[attr-defined]
    return (replace(task, prompts=prompts) if templates else task), known, why_not


def _built_in(
    make_task: Callable[..., Task], config: Config, device: torch.device, stand_in: Dataset
) -> tuple[Task, list[Dataset], str]:
    """As `_task`, of a task that can be made without its data, which is loaded only if the reward needs more of it."""
    try:
        return make_task(config, device, dataset=stand_in), [], ""
    except MissingColumns as error:
        needed = error.names
    try:
        task = make_task(config, device)
        return task, [task.dataset], ""
    except UserError as error:
        task = make_task(config, device, dataset=_stand_in([*stand_in.column_names, *needed]))
        return task, [], f"Queries of the run's data are not known by their text: {error}"


def _stand_in(columns: Sequence[str]) -> Dataset:
    """A row in place of the data, for a task whose prompts and reward alone are used."""
    return Dataset.from_dict({name: ["-"] for name in columns})


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
