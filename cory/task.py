"""What a run trains on: queries, rewards, and what each role reads."""

import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import datasets
from transformers import PreTrainedTokenizerBase

from cory.config import HELD_OUT_REWARDS, Config, RoleConfig
from cory.errors import UserError
from cory.identity import Models, data_hash, function_name, model_identity, source_hash
from cory.learners.records import UpdateStats
from cory.metrics import TITLES
from cory.models.load import find, load_tokenizer
from cory.models.text import check_lengths, encode, without
from cory.rewards import Function, Reward, Rewards, accepted_columns, as_rewards
from cory.roles import Prompt, RolePrompts, check_prompt, placeholders
from cory.streams import Purpose, Stream

if TYPE_CHECKING:
    from cory.agent import Agent

# Names in metrics.jsonl and of an evaluation's columns that a task's metrics cannot have.
RECORDED = {
    *TITLES,
    *(field.name for field in fields(UpdateStats)),
    *HELD_OUT_REWARDS,
    *(f"{name}_before" for name in HELD_OUT_REWARDS),
    "iteration",
    "agent",
    "role",
    "flags",
    "name",
    "greedy",
    "copied",
}
# What functions are passed besides the dataset's columns.
PASSED = ("prompts", "completions", "completion_ids", "chains", "role", "rewards")


@dataclass
class Task:
    """What the agents are trained on.

    Args:
        dataset: a `prompt` column with the query s0, text or chat messages of which the last is the
            user's; other columns reach the reward and the templates.
        reward: `reward(prompts, completions, **columns) -> list[float | None]`, called with the
            responses of all agents of an iteration, and for samples, held-out queries and
            counterfactual credit; `prompts` are the queries. Or several in a weighted sum: a list
            of functions, or of `Reward` with weights, which may be empty with a team reward.
        prompts: what each role reads.
        metrics: more numbers to record, by name: `metric(prompts, completions, rewards, **columns)
            -> list[float | None]`, whose mean goes to metrics.jsonl.
        team_reward: `team_reward(prompts, chains, **columns) -> list[float]`, called as the
            reward is; `chains[i]` is the list of a chain's responses by role. Every role gets its
            chain's on top of the rewards of responses.
        extract: the answer that a completion gives, or None, for the votes of an evaluation
            (`maj@k`).
        kind: name of the registered kind that made it (`cory.task_kinds`), by which commands find
            it again; empty for a task that was made in Python.
        rows_per_query: how many rows, one after the other, are one query in training: what the
            first role reads is the same in all of them, and each is the row of one of `branches`.

    Raises a UserError: no reward, no `prompt` column, an empty prompt or one of another kind, a
    column of a name that functions are passed anyway, or one that a function or a template needs is
    missing; the rows of a query differ in what the first role reads.
    """

    dataset: datasets.Dataset
    reward: Rewards
    prompts: RolePrompts
    metrics: Mapping[str, Function] = field(default_factory=dict)
    team_reward: Function | Reward | None = None
    extract: Callable[[str], Hashable | None] | None = None
    kind: str = ""
    rows_per_query: int = 1

    def __post_init__(self) -> None:
        if not self.rewards and self.team is None:
            raise UserError("task.reward: expected a reward or a team_reward, got neither")
        names = [reward.short_name for reward in self.rewards]
        if len({*names}) < len(names):
            raise UserError(
                f"task.reward: expected functions of different names, got {names}. Rename one, in its file or by "
                "Reward(function, name=...)"
            )
        for name in self.metrics:
            if name in (*RECORDED, *self.reward_metrics):
                raise UserError(
                    f"task.metrics: expected a name that no other metric has, got {name!r}"
                )
        if inspect.iscoroutinefunction(self.extract):
            raise UserError("task.extract: expected a function, got an async one")
        self.check_rows(self.dataset)
        self._check_queries()

    def _check_queries(self) -> None:
        """Raises a UserError unless each `rows_per_query` rows have the same prompt, and are alike in the other columns
        that the first role reads.
        """
        size = self.rows_per_query
        if size < 1:
            raise UserError(f"task.rows_per_query: expected at least 1, got {size}")
        if size == 1:
            return
        if len(self.dataset) % size:
            raise UserError(
                f"dataset: expected a multiple of task.rows_per_query = {size} rows, got {len(self.dataset)}"
            )
        read = placeholders(self.prompts.template(0), self.prompts.name(0))
        for name in dict.fromkeys(["prompt", *read]):
            values = self.dataset[name][:]
            for row, value in enumerate(values):
                first = row - row % size
                if value != values[first]:
                    raise UserError(
                        f"dataset, column {name!r}, row {row + 1}: expected the value of row {first + 1}, as "
                        f"task.rows_per_query: {size} makes them one query of the first role, got {value!r}"
                    )

    def check_rows(self, dataset: datasets.Dataset) -> None:
        """Raises a UserError if these rows do not fit the functions and templates of the task."""
        names = dataset.column_names
        if "prompt" not in names:
            raise UserError(f"dataset: expected a column 'prompt', got {names}")
        twice = [name for name in PASSED if name in names]
        if twice:
            raise UserError(f"dataset: expected no columns {twice}, as rewards are passed them")
        others = [name for name in names if name != "prompt"]
        of_response = ["prompts", "completions", "role", *others]
        for reward in self.rewards:
            accepted_columns(f"reward {reward}", reward.function, ["completion_ids", *of_response])
        for name, function in self.metrics.items():
            accepted_columns(f"metric {name}", function, ["rewards", *of_response])
        if self.team is not None:
            accepted_columns(
                f"team reward {self.team}", self.team.function, ["prompts", "chains", *others]
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

    def prompts_of_role(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        earlier: Sequence[Sequence[str]] | None,
        encode: Callable[[list[Any]], list[list[int]]],
        special: Sequence[str],
        context: int | None,
        max_new_tokens: int,
    ) -> list[Any]:
        """What a role of a chain reads, row by row (Eq. 3). Responses that leave no room for an answer are halved.

        Rare, as the trainer checks that responses of full length fit; but broken text can take more tokens to read than
        it took to write. A row that is too long even without responses is kept; the agent refuses it.

        Args:
            columns: of the rows, `prompt` among them.
            earlier: of each earlier role, in order, its responses; None: the role reads the query alone.
            encode: from prompts to their token ids, as the model reads them.
            special: the model's special tokens, which are removed from the responses: another model can spell them.
            context: tokens that the model can attend to; None: any number.
            max_new_tokens: of the role's answer.
        """
        if earlier is None:
            return self.render(role, columns)
        texts = [[without(special, text) for text in responses] for responses in earlier]
        room = math.inf if context is None else context - max_new_tokens
        while True:
            prompts = self.render(role, columns, texts)
            too_long = [
                row
                for row, ids in enumerate(encode(prompts))
                if len(ids) > room and any(of_role[row] for of_role in texts)
            ]
            if not too_long:
                return prompts
            for row in too_long:
                for of_role in texts:
                    of_role[row] = of_role[row][: len(of_role[row]) // 2]

    def with_roles(self, roles: Sequence[RoleConfig]) -> "Task":
        """The task with the names and prompts that a run's settings give its roles
        (`Config.roles`).

        Raises a UserError if one of the prompts names what there is not, or if the task has other roles already.
        """
        if tuple(roles) == self.prompts.roles:
            return self
        if self.prompts.roles:
            own = [self.prompts.name(role) for role in range(len(self.prompts.roles))]
            raise UserError(
                f"roles: expected in the settings those of the task's prompts, {own}, got "
                f"{[role.name for role in roles]}"
            )
        return replace(self, prompts=replace(self.prompts, roles=tuple(roles)))

    def fingerprint(self) -> dict[str, Any]:
        """Identifies this task in a run's config.yaml: its kind, reward, templates and data, by name and hash."""
        return {
            "task": self.kind,
            **self.fingerprint_of_reward(),
            "prompts": {"pioneer": self.prompts.pioneer, "observer": self.prompts.observer},
            "dataset_sha256": data_hash(self.dataset),
            "rows": len(self.dataset),
            "rows_per_query": self.rows_per_query,
        }

    def fingerprint_of_reward(self) -> dict[str, str]:
        """The reward's name and the hash of its source; of several the names with their weights,
        and the hashes.

        Likewise of the team reward, empty if there is none.
        """
        names = []
        for reward in self.rewards:
            weight = "" if reward.weight == 1 else f"{reward.weight} * "
            names.append(weight + _recorded_name(reward))
        hashes = [_recorded_hash(reward) for reward in self.rewards]
        return {
            "reward": " + ".join(names),
            "reward_sha256": "+".join(hashes),
            "team_reward": _recorded_name(self.team) if self.team else "",
            "team_reward_sha256": _recorded_hash(self.team) if self.team else "",
        }

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
        return as_rewards(self.reward)

    @property
    def team(self) -> Reward | None:
        """The team reward, if there is one."""
        if self.team_reward is None or isinstance(self.team_reward, Reward):
            return self.team_reward
        return Reward(self.team_reward)

    @property
    def reward_metrics(self) -> list[str]:
        """The names of the metrics of each reward function, where there are several."""
        if len(self.rewards) < 2:
            return []
        return [f"reward_{reward.short_name}" for reward in self.rewards]

    def columns_read(self) -> list[str]:
        """The dataset's columns, besides the query, that templates and rewards name."""
        named = {*self.prompts.columns()}
        for reward in [*self.rewards, *([self.team] if self.team else [])]:
            named |= {*inspect.signature(reward.function).parameters}
        return [name for name in self.dataset.column_names if name in named - {"prompt"}]

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[Prompt], reward: Rewards, role_prompts: RolePrompts
    ) -> "Task":
        """A task on a plain list of queries."""
        return cls(datasets.Dataset.from_dict({"prompt": list(prompts)}), reward, role_prompts)

    def batch(self, k: int, size: int, seed: int) -> dict[str, list[Any]]:
        """The columns of the `size` queries of iteration `k`, with `rows_per_query` rows for each: each
        pass over the data is a permutation of the queries drawn from (seed, pass).

        Queries that do not fill a last batch sit out that pass.
        """
        queries = len(self.dataset) // self.rows_per_query
        batches = queries // size
        order = Stream(seed, Purpose.QUERIES, iteration=k // batches).numpy().permutation(queries)
        start = k % batches * size
        first_rows = order[start : start + size] * self.rows_per_query
        rows = [first + row for first in first_rows.tolist() for row in range(self.rows_per_query)]
        return self.dataset[rows]


def _recorded_name(reward: Reward) -> str:
    return reward.name or function_name(reward.function)


def _recorded_hash(reward: Reward) -> str:
    return reward.sha256 or source_hash(reward.function)


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """The first agent's tokenizer, in whose tokens queries are measured."""
    model = config.of_agent(0).model
    policy = config.resolve(model.name)
    return load_tokenizer(policy, find(policy, "model.name", model.revision))


def without_long_prompts(
    rows: datasets.Dataset, config: Config, pioneer_prompt: str
) -> datasets.Dataset:
    """The rows whose query, as the pioneer reads it, has at most `task.max_prompt_tokens` tokens.

    Says how many others are left out. Raises a UserError if all are.

    Args:
        config: with a `task` block that has this key.
        pioneer_prompt: the template of a pioneer without a prompt of its own in `config.roles`.
    """
    limit = config.task.max_prompt_tokens  # type: ignore[attr-defined]
    if limit is None:
        return rows
    prompts = RolePrompts(pioneer_prompt, roles=tuple(config.roles))
    prompts.check_columns(rows.column_names)
    queries = [prompts.render(0, row) for row in rows]
    chat_template = config.of_agent(0).model.chat_template
    # By any one date, if the template writes it: which rows are left out does not depend on the day.
    lengths = list(map(len, encode(tokenizer_of(config), queries, chat_template, "2000-01-01")))
    short = [row for row, length in enumerate(lengths) if length <= limit]
    if not short:
        raise UserError(
            f"task.max_prompt_tokens: expected at least {min(lengths)}, the tokens of the shortest prompt, got {limit}"
        )
    if len(short) < len(rows) and os.environ.get("RANK", "0") == "0":
        print(
            f"task.max_prompt_tokens: {len(rows) - len(short)} of {len(rows)} prompts are longer than {limit} tokens "
            f"(the longest {max(lengths)}) and are left out",
            file=sys.stderr,
        )
    return rows.select(short)


def check_fits(
    config: Config, agents: Sequence["Agent"], task: Task, held_out: datasets.Dataset | None
) -> None:
    """Raises a UserError if there are too few rows for an iteration, rows without what `cory.credit` needs, or prompts
    that exceed an agent's context with the longest responses.
    """
    size = task.rows_per_query
    if size not in (1, config.branches):
        raise UserError(f"branches: expected task.rows_per_query = {size}, got {config.branches}")
    if len(task.dataset) < config.queries_per_iteration * size:
        what = "rows" if size == 1 else f"queries of {size} rows"
        raise UserError(
            "dataset: expected at least ppo.batch_size / (group_size * branches) = "
            f"{config.queries_per_iteration} {what}, got {len(task.dataset) // size}"
        )
    distinct = {(id(agent.tokenizer), agent.context_length): agent for agent in agents}
    if config.cory.credit == "information" and config.cory.num_roles > 1:
        _check_answers(config, distinct.values(), task)
    counts = []  # of rows that are too long, in each dataset that has some
    fitting: list[int] = []  # the most tokens of a query up to which all rows of such a dataset fit
    longest = (0, "")  # by how many tokens it does not fit, and which prompt it is
    for what, rows in (("rows", task.dataset), ("held-out rows", held_out)):
        if rows is None:
            continue
        too_long: set[int] = set()
        for role, agent in itertools.product(range(config.cory.num_roles), distinct.values()):
            context = agent.context_length or sys.maxsize
            responses = _most_tokens(config, task, role)
            lengths = _prompt_lengths(config, task, rows, role, agent)
            too_long |= {row for row, length in enumerate(lengths) if length + responses > context}
            which = (
                f"{max(lengths)} tokens of the prompt of {agent.name} as {task.prompts.name(role)} + up to {responses} "
                f"of the responses that it reads and writes, in a context of {context}"
            )
            longest = max(longest, (max(lengths) + responses - context, which))
        if too_long:
            counts.append(f"{len(too_long)} of {len(rows)} {what}")
            queries = _prompt_lengths(config, task, rows, 0, agents[0])
            fitting.append(min(queries[row] for row in too_long) - 1)
    if not counts:
        return
    queries = _prompt_lengths(config, task, task.dataset, 0, agents[0])
    longest_kept = max((length for length in queries if length <= min(fitting)), default=0)
    remedy = f"Prompts of at most {longest_kept} tokens fit: see task.max_prompt_tokens"
    if not longest_kept:
        remedy = (
            "No row would be left: lower sampling.min_new_tokens and max_new_tokens, or those of the roles, or shorten "
            "the prompts' templates"
        )
    raise UserError(
        f"dataset: expected prompts that fit the context with their responses, got {' and '.join(counts)} that are too "
        f"long (the longest: {longest[1]}). {remedy}"
    )


def _check_answers(config: Config, agents: Iterable["Agent"], task: Task) -> None:
    """For `cory.credit: information`: raises a UserError unless each row has a text in the column `answer` that is no
    longer than a response of the second role always may be.
    """
    names = task.dataset.column_names
    if "answer" not in names:
        raise UserError(
            f"dataset: expected a column 'answer' with cory.credit: information, got {names}"
        )
    answers = task.dataset["answer"][:]
    for row, answer in enumerate(answers):
        if not isinstance(answer, str) or not answer:
            raise UserError(
                f"dataset, column 'answer', row {row + 1}: expected a text with cory.credit: information, got "
                f"{answer!r}"
            )

    # Prompts leave room for the shortest limit, so that the answer has room in every iteration.
    limit = task.prompts.settings(1).max_new_tokens or config.sampling.min_new_tokens
    prompts = task.render(1, task.dataset[:], [[""] * len(answers)])
    for agent in agents:
        for row, ids in enumerate(agent.encode_responses(prompts, answers)):
            if len(ids) > limit:
                raise UserError(
                    f"dataset, column 'answer', row {row + 1}: expected at most {limit} tokens, the smallest limit of "
                    f"{task.prompts.name(1)}'s responses, got {len(ids)}"
                )


def _limit(config: Config, task: Task, role: int) -> int:
    """The most tokens of a role's own responses."""
    return task.prompts.settings(role).max_new_tokens or config.sampling.max_new_tokens


def _most_tokens(config: Config, task: Task, role: int) -> int:
    """The most tokens of the responses that a role reads, and of its own."""
    read = task.prompts.reads(role) if config.cory.knowledge_transfer else []
    return sum(_limit(config, task, index) for index in [*read, role])


def _prompt_lengths(
    config: Config, task: Task, rows: datasets.Dataset, role: int, agent: "Agent"
) -> list[int]:
    """The tokens of each row's prompt, where all responses that stand in it are empty. Raises a UserError if one has
    none.
    """
    empty = [[""] * len(rows)] * role
    reads_responses = role > 0 and config.cory.knowledge_transfer
    prompts = task.render(role, rows[:], empty if reads_responses else None)
    lengths = [len(ids) for ids in agent.encode(prompts)]
    check_lengths(lengths, 0, None, prompts)
    return lengths
