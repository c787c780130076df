"""The agents of a run in their chain, and their base, answering one query at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from cory.chat.config import ChatConfig
from cory.config import Config, ModelConfig
from cory.errors import UserError
from cory.evaluation.agents import Weights, agent_folders, agent_weights
from cory.evaluation.responses import LoadedModel, reply
from cory.models.load import adapter_tokenizer, attach, load_answering
from cory.prompts import check_prompt, text_of
from cory.rewards import MissingColumns, score, score_chains
from cory.task import Task


class Answer(NamedTuple):
    """A response, who gave it (`base`, or an agent as a role), and its task reward, None where there is none.

    `team_reward`: with the chain's last response, the team reward of the chain.
    """

    who: str
    text: str
    reward: float | None
    team_reward: float | None = None

    @property
    def rewards(self) -> str:
        """The rewards in words; empty where there is none."""
        words = []
        if self.reward is not None:
            words.append(f"reward {self.reward:+.2f}")
        if self.team_reward is not None:
            words.append(f"team reward {self.team_reward:+.2f}")
        return ", ".join(words)


class Chain:
    """A run's agents in their roles, beside their base. All models stay in memory.

    Args:
        folder: with the run's config.yaml and its agents.
        config: the run's settings.
        settings: of the chat.
        task: prompts and reward.
        device: of the models.
        datasets: data of the run, whose queries bring their other columns along, such as a gold answer.
        prompt_column: what the dataset calls the query.

    Attributes:
        order: the number of the agent, from 1, in each role.
        further_columns: what reward and prompts read besides the query.
        columns: values of further columns, for queries that have none.
        notes: what the user should know; who shows them empties the list.

    Raises a UserError: `settings.order` or a change of settings does not fit the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        settings: ChatConfig,
        task: Task,
        device: torch.device,
        datasets: Sequence[Dataset] = (),
        prompt_column: str = "prompt",
    ) -> None:
        self.task = task
        self.seed = settings.seed
        self.device = device
        self.knowledge_transfer = config.cory.knowledge_transfer
        self.prompt_column = prompt_column
        self.sampling = config.sampling.after_training(settings.sampling)
        self.agents = list(agent_weights(agent_folders(folder), config, settings.model).values())
        self.num_roles = config.cory.num_roles
        self.order = self._order(settings.order, self.num_roles)
        self.bases = self._bases()
        # With their tokenizers, so that none is loaded twice.
        self.models: dict[str, tuple[Any, Any]] = {}

        self.further_columns = further_columns(task)
        self.columns: dict[str, Any] = {}
        self.rows = self._rows_by_query(datasets) if self.further_columns else {}

        self.notes: list[str] = []
        self.noted: set[str] = set()

    def _order(self, order: list[int] | None, roles: int) -> list[int]:
        count = len(self.agents)
        if order is None:
            return [1 + role % count for role in range(roles)]
        if not all(1 <= number <= count for number in order):
            raise UserError(
                f"order: expected numbers of the run's agents, 1 to {count}, got {order}"
            )
        return order

    def _bases(self) -> dict[str, ModelConfig]:
        """The agents' base models by name; agents of one model have the same."""
        bases: dict[str, ModelConfig] = {}
        for number, weights in enumerate(self.agents, 1):
            if weights.base not in bases.values():
                name = f"base of agent_{number}" if bases else "base"
                bases[name] = weights.base
        return bases

    def _rows_by_query(self, datasets: Sequence[Dataset]) -> dict[str, tuple[Dataset, int]]:
        """Where the queries of the run's data are, by their text: the dataset and the row."""
        rows: dict[str, tuple[Dataset, int]] = {}
        for dataset in datasets:
            for row, prompt in enumerate(dataset["prompt"]):
                rows.setdefault(_on_one_line(text_of(prompt)), (dataset, row))
        return rows

    @property
    def speakers(self) -> list[str]:
        """Who answers a query: the bases, then the agents in their roles."""
        roles = [
            f"agent_{number} as {self.task.prompts.name(role)}"
            for role, number in enumerate(self.order)
        ]
        return [*self.bases, *roles]

    def exchanged(self, order: Sequence[int]) -> list[int]:
        """The order after a role exchange, which moves each role on to the next agent (Eq. 5)."""
        return [1 + number % len(self.agents) for number in order]

    def forget(self) -> None:
        """Frees the models, which are loaded again when they are needed: after an interruption they may be in parts."""
        self.models.clear()

    def ask(self, query: str) -> list[Answer]:
        """The responses to a query, in the order of `speakers`.

        Args:
            query: text, or a JSON object with the columns of the run's data; the query is `prompt`, or as the run's
                dataset calls it (`task.prompt_column`).

        Raises a UserError: the query is empty, too long for a model, or lacks a column that a role's prompt names.
        """
        row = self.row(query)
        check_prompt(row["prompt"], "query")
        missing = [name for name in self.task.prompts.columns() if name not in row]
        if missing:
            raise UserError(
                f"query: expected {' and '.join(missing)}, which the prompts name. {self._remedy(missing)}"
            )

        columns = {name: [value] for name, value in row.items()}
        texts = [
            self._respond(Weights(base, None, base), columns, None, 0)
            for base in self.bases.values()
        ]
        read: list[str] = []
        for role, number in enumerate(self.order):
            text = self._respond(self.agents[number - 1], columns, read or None, role)
            texts.append(text)
            if self.knowledge_transfer:
                read.append(text)
        rewards = self._rewards(row, texts)
        answers = [
            Answer(who, text, reward)
            for who, text, reward in zip(self.speakers, texts, rewards, strict=True)
        ]
        team_reward = self._team_reward(row, texts[len(self.bases) :])
        return [*answers[:-1], answers[-1]._replace(team_reward=team_reward)]

    def row(self, query: str) -> dict[str, Any]:
        """A query's columns: its own, then those of `columns`.

        A query of the run's data has the columns of its row.
        """
        if query.lstrip().startswith("{"):
            try:
                row = json.loads(query)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and self.prompt_column in row:
                row.setdefault("prompt", row[self.prompt_column])
            if isinstance(row, dict) and "prompt" in row:
                return self.columns | row | {"prompt": self._as_prompt(row["prompt"])}
        place = self.rows.get(_on_one_line(query))
        if place is not None:
            dataset, index = place
            return self.columns | dataset[index]
        return self.columns | {"prompt": self._as_prompt(query)}

    def _as_prompt(self, query: Any) -> Any:
        """A query as the run's data have them.

        Where these are chat messages, a text is the user's turn after the first row's system message: the other turns
        of that row belong to its own conversation.
        """
        first = self.task.dataset[0]["prompt"]
        if isinstance(query, str) and isinstance(first, list):
            system = takewhile(lambda message: message["role"] == "system", first)
            return [*system, {"role": "user", "content": query}]
        return query

    def read_besides(self, query: str) -> dict[str, Any]:
        """The columns that the prompts name besides the query, as far as `query` has them."""
        row = self.row(query)
        return {name: row[name] for name in self.task.prompts.columns() if name in row}

    def set_column(self, name: str, text: str) -> None:
        """Sets a further column for queries that do not have it; an empty text removes it.

        Raises a UserError: reward and prompts read no such column, or the text does not fit the column's values, which
        are texts, numbers or booleans.
        """
        if name not in self.further_columns:
            raise UserError(
                f"set: expected a column that reward or prompts read, among {self.further_columns}, got {name!r}"
            )
        if not text:
            self.columns.pop(name, None)
            return
        example = next((value for value in self.task.dataset[name] if value is not None), None)
        if not isinstance(example, (str, int, float)):  # a bool is an int
            raise UserError(
                f"set {name}: expected a column of texts, numbers or booleans, got one with {example!r}"
            )
        if isinstance(example, str):
            self.columns[name] = text
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(example, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(example):
            raise UserError(
                f"set {name}: expected a value like {json.dumps(example)}, got {text!r}"
            )
        self.columns[name] = value

    def _remedy(self, missing: Sequence[str]) -> str:
        """How a query gets columns that it lacks."""
        example = next(iter(self.rows), None)
        of_data = (
            ""
            if example is None
            else f"Queries of the run's data bring it along, such as:\n{example}\n"
        )
        name = missing[0]
        return f"{of_data}For your own, set it: /set {name}=VALUE in the terminal, the field {name} in the page."

    def _respond(
        self,
        weights: Weights,
        columns: Mapping[str, Sequence[Any]],
        read: Sequence[str] | None,
        role: int,
    ) -> str:
        """A response. `read`: those of the earlier roles."""
        with self._loaded(weights) as loaded:
            responses = reply(
                loaded,
                self.task,
                columns,
                self.sampling,
                read=None if read is None else [[text] for text in read],
                role=role,
                seed=self.seed * 1_000_003 + role,
                chat_template=weights.model.chat_template,
                kl=False,
            )
        return responses.completions[0]

    @contextmanager
    def _loaded(self, weights: Weights) -> Iterator[LoadedModel]:
        """The model to answer with, which stays in memory; an adapter is on it for the response. It has no base, as no
        KL is computed.
        """
        key = str(weights.model)
        if key not in self.models:
            self.models[key] = load_answering(weights.model, self.device, merge=True)
        policy, tokenizer = self.models[key]
        if weights.adapter is None:
            yield policy, policy, tokenizer
            return
        with_adapter = attach(policy, weights.adapter)
        try:
            yield (
                with_adapter.eval(),
                None,
                adapter_tokenizer(weights.adapter, with_adapter, tokenizer),
            )
        finally:
            with_adapter.unload()  # in place: the model is as it was

    def _rewards(self, row: Mapping[str, Any], texts: Sequence[str]) -> Sequence[float | None]:
        """The task rewards of the bases' responses, as pioneers, and of each role's."""
        nothing = [None] * len(texts)
        if not self.task.reward:
            return nothing
        columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
        roles = [0] * len(self.bases) + list(range(len(self.order)))
        columns["role"] = [self.task.prompts.name(role) for role in roles]
        try:
            return score(self.task.reward, [row["prompt"]] * len(texts), texts, columns).tolist()
        except MissingColumns as error:
            needed = " and ".join(error.names)
            self.note(
                f"No reward for this query, as the reward also needs its {needed}. {self._remedy(error.names)}"
            )
        except UserError as error:
            self.note(f"No rewards: {error}")
        return nothing

    def _team_reward(self, row: Mapping[str, Any], chain: list[str]) -> float | None:
        """The team reward of the roles' responses; None without one, or if `order` has more roles or fewer."""
        team = self.task.team
        if team is None or len(chain) != self.num_roles:
            return None
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        try:
            return score_chains(team, [row["prompt"]], [chain], columns).item()
        except MissingColumns as error:
            needed = " and ".join(error.names)
            self.note(
                f"No team reward for this query, as it also needs its {needed}. {self._remedy(error.names)}"
            )
        except UserError as error:
            self.note(f"No team reward: {error}")
        return None

    def note(self, text: str) -> None:
        """Keeps a note for the user, unless it was kept before."""
        if text not in self.noted:
            self.noted.add(text)
            self.notes.append(text)


def further_columns(task: Task) -> list[str]:
    """The columns of a task's data that its prompts and its rewards read, besides the query."""
    given = ("prompts", "completions", "role")
    columns = [name for name in task.dataset.column_names if name != "prompt"]
    read = set(task.prompts.columns())
    for reward in task.rewards:
        read |= set(reward.arguments(dict.fromkeys([*given, *columns], ())))
    if task.team is not None:
        read |= set(task.team.arguments(dict.fromkeys(["prompts", "chains", *columns], ())))
    return [name for name in columns if name in read]


def _on_one_line(text: str) -> str:
    """A text as it can be typed: without line breaks and repeated spaces."""
    return " ".join(text.split())
