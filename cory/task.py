"""A task: the queries, the rewards, and the prompts that each role reads."""

import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import datasets

from cory.checks import check_functions, check_prompt, check_rows
from cory.config import Config, RoleConfig
from cory.errors import UserError
from cory.identity import Models, data_hash, function_name, model_identity, source_hash
from cory.models.text import without
from cory.parallel import distributed
from cory.rewards import Function, Reward, Rewards, as_rewards
from cory.roles import Prompt, RolePrompts
from cory.rollout import Batch, repeated
from cory.streams import Purpose, Stream, response_limit


@dataclass
class Task:
    """Queries, rewards and prompts to train on.

    Args:
        dataset: rows with a `prompt` column that holds the query s0: text, or chat messages that end with the
            user's. The reward and the templates can use the other columns.
        reward: `reward(prompts, completions, **columns) -> list[float | None]`, where `prompts` are the queries. It
            scores training responses (all agents' in one call), samples, held-out responses, and the additional
            responses of counterfactual credit. Also accepts a list of functions, or of `Reward` with weights: the
            reward is then their weighted sum. The list may be empty if there is a team reward.
        prompts: each role's prompt, as a template or a function.
        metrics: additional metrics by name, `metric(prompts, completions, rewards, **columns) -> list[float | None]`;
            their means are recorded in metrics.jsonl.
        team_reward: `team_reward(prompts, chains, **columns) -> list[float]`, which scores whole chains; `chains[i]`
            lists a chain's responses by role. Every role receives it in addition to its own reward.
        extract: returns a completion's final answer, or None; used for majority votes in evaluations (`maj@k`).
        kind: name of the registered task kind (`cory.task_kinds`) that made the task; empty for a task made in Python.
            Evaluation and other commands use it to make the task again.
        row_per_branch: whether each observer response to a pioneer response has its own row; `Config.branches` is the
            number of these responses. If true, each query takes `branches` consecutive training rows, in which the
            pioneer reads the same text.

    Raises a UserError if there is no reward, the `prompt` column is missing or holds an invalid prompt, a column has a
    reserved name, or a function or template needs a missing column.
    """

    dataset: datasets.Dataset
    reward: Rewards
    prompts: RolePrompts
    metrics: Mapping[str, Function] = field(default_factory=dict)
    team_reward: Function | Reward | None = None
    extract: Callable[[str], Hashable | None] | None = None
    kind: str = ""
    row_per_branch: bool = False

    def __post_init__(self) -> None:
        check_functions(self.rewards, self.team, self.metrics, self.extract)
        self.prompts = self.prompts.loaded()
        self.check_rows(self.dataset)

    def check_rows(self, dataset: datasets.Dataset) -> None:
        """Raises a UserError if these rows do not fit the functions and templates of the task."""
        check_rows(dataset, self.rewards, self.team, self.metrics, self.prompts)

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
        """Returns a role's prompts, one per row (Eq. 3).

        If a prompt leaves no room for an answer, the earlier responses in it are cut to half their length, repeatedly.
        This is rare, since the trainer checks that full-length responses fit. However, broken text can have more tokens
        when it is encoded again than it had when sampled. A prompt that is too long even without responses is returned,
        and raises an error in `Agent.respond`.

        Args:
            columns: the rows' columns, including `prompt`.
            earlier: the earlier roles' responses, one list per role. None: the role reads only the query.
            encode: converts prompts to token ids.
            special: the model's control tokens. They are removed from the responses, since another model may have
                written them as ordinary text.
            context: the model's context length in tokens. None: unlimited.
            max_new_tokens: length limit of the role's answer.
        """
        if earlier is None:
            return self._rendered(0, columns, None)
        texts = [[without(special, text) for text in responses] for responses in earlier]
        room = math.inf if context is None else context - max_new_tokens
        while True:
            prompts = self._rendered(role, columns, texts)
            lengths = [len(ids) for ids in encode(prompts)]
            too_long = [
                row
                for row, length in enumerate(lengths)
                if length > room and any(role_texts[row] for role_texts in texts)
            ]
            if not too_long:
                return prompts
            if self.prompts.function(role) is not None:  # may be called only once per row
                raise UserError(
                    f"prompt of {self.prompts.name(role)}, row {too_long[0] + 1}: expected at most {room} tokens, "
                    f"got {lengths[too_long[0]]}. The response must fit the context, too"
                )
            for row in too_long:
                for role_texts in texts:
                    role_texts[row] = role_texts[row][: len(role_texts[row]) // 2]

    def _rendered(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        responses: Sequence[Sequence[str]] | None,
    ) -> list[Any]:
        """Renders a role's prompts. Raises a UserError if a prompt function does not return a prompt."""
        prompts = self.prompts.render_rows(role, columns, responses)
        if self.prompts.function(role) is not None:
            for row, prompt in enumerate(prompts):
                check_prompt(prompt, f"prompt of {self.prompts.name(role)}, row {row + 1}")
        return prompts

    def with_roles(self, roles: Sequence[RoleConfig]) -> "Task":
        """Returns the task with the role names and prompts that a run's settings define (`Config.roles`).

        Raises a UserError if a prompt has an unknown placeholder, or the task already has different roles.
        """
        if tuple(roles) == self.prompts.roles:
            return self
        if self.prompts.roles:
            raise UserError(
                "roles: expected the roles of the task's prompts, "
                f"{[self.prompts.name(role) for role in range(len(self.prompts.roles))]}, got "
                f"{[role.name for role in roles]}"
            )
        return replace(self, prompts=replace(self.prompts, roles=tuple(roles)))

    def fingerprint(self) -> dict[str, Any]:
        """Returns the names and hashes that identify the task's kind, reward, prompts and data in config.yaml."""
        return {
            "task": self.kind,
            **self.fingerprint_of_reward(),
            # Prompt functions are null here; `prompts_sha256` covers them.
            "prompts": {
                role: template if isinstance(template, str) else None
                for role, template in (
                    ("pioneer", self.prompts.pioneer),
                    ("observer", self.prompts.observer),
                )
            },
            "prompts_sha256": self.hash_of_prompts(),
            "dataset_sha256": data_hash(self.dataset),
            "rows": len(self.dataset),
            "row_per_branch": self.row_per_branch,
        }

    def hash_of_prompts(self) -> str:
        """Returns the joined hashes of the files that define prompt functions; empty if there are no functions."""
        functions = [self.prompts.pioneer, self.prompts.observer]
        hashes = [source_hash(function) for function in functions if not isinstance(function, str)]
        return "+".join([*hashes, *(loaded.sha256 for loaded in self.prompts.code.values())])

    def fingerprint_of_reward(self) -> dict[str, str]:
        """Returns names and source hashes of the reward and the team reward, empty if there is no team reward.

        For several rewards, the names are joined with their weights, and the hashes are joined.
        """
        names = [
            ("" if reward.weight == 1 else f"{reward.weight} * ") + _recorded_name(reward)
            for reward in self.rewards
        ]
        return {
            "reward": " + ".join(names),
            "reward_sha256": "+".join(map(_recorded_hash, self.rewards)),
            "team_reward": _recorded_name(self.team) if self.team else "",
            "team_reward_sha256": _recorded_hash(self.team) if self.team else "",
        }

    def models(self) -> Models:
        """Returns the identities of the models that reward functions load.

        A reward function lists its models in an attribute `models`. This maps a setting, or any name, to a Hub id or
        local folder, or to a pair: the name to record (such as `tiny`) and the folder.
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
        """The metric name of each reward function; empty if there is only one function."""
        if len(self.rewards) < 2:
            return []
        return [f"reward_{reward.short_name}" for reward in self.rewards]

    def columns_read(self) -> list[str]:
        """Returns the dataset's columns that templates or rewards use, except `prompt`."""
        named = {*self.prompts.columns()}
        for reward in [*self.rewards, *([self.team] if self.team else [])]:
            named |= {*inspect.signature(reward.function).parameters}
        return [name for name in self.dataset.column_names if name in named - {"prompt"}]

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[Prompt], reward: Rewards, role_prompts: RolePrompts
    ) -> "Task":
        """Returns a task whose dataset is a list of queries."""
        # Check now, since `from_dict` fails on prompts of different types.
        for row, prompt in enumerate(prompts):
            check_prompt(prompt, f"prompts, row {row + 1}")
        return cls(datasets.Dataset.from_dict({"prompt": list(prompts)}), reward, role_prompts)

    def rows_per_query(self, branches: int) -> int:
        """Returns how many consecutive rows form one query in training."""
        return branches if self.row_per_branch else 1

    def batch(self, k: int, size: int, seed: int, rows_per_query: int = 1) -> dict[str, list[Any]]:
        """Returns iteration `k`'s `size` queries, as columns with `rows_per_query` rows per query.

        Each pass over the data uses a new random order, which depends only on the seed and the number of the pass.
        Queries left over at the end of a pass, too few for a batch, are skipped in that pass.
        """
        queries = len(self.dataset) // rows_per_query
        batches = queries // size
        order = Stream(seed, Purpose.QUERIES, iteration=k // batches).numpy().permutation(queries)
        start = k % batches * size
        first_rows = order[start : start + size] * rows_per_query
        rows = [first + row for first in first_rows.tolist() for row in range(rows_per_query)]
        return self.dataset[rows]


def draw_batch(task: Task, config: Config, k: int) -> Batch:
    """Returns this process's queries in iteration `k`, with one copy of each query per chain that answers it."""
    rows_per_query = task.rows_per_query(config.branches)
    drawn = task.batch(k, config.queries_per_iteration, config.seed, rows_per_query)
    process_rows = distributed.share_of_rows(config.ppo.batch_size // config.branches)
    columns = {}
    branch_columns = {}
    for name, values in drawn.items():
        # One row per branch (an observer response). If the data has a single row per query, the branches share it.
        rows = repeated(values, config.branches // rows_per_query)
        queries = [rows[i : i + config.branches] for i in range(0, len(rows), config.branches)]
        chain_queries = repeated(queries, config.chains_per_query)[process_rows]
        columns[name] = [branches[0] for branches in chain_queries]
        branch_columns[name] = list(itertools.chain(*chain_queries))

    max_new_tokens = response_limit(
        config.seed, k, config.sampling.min_new_tokens, config.sampling.max_new_tokens
    )
    return Batch(columns, max_new_tokens, branch_columns)


def _recorded_name(reward: Reward) -> str:
    return reward.name or function_name(reward.function)


def _recorded_hash(reward: Reward) -> str:
    return reward.sha256 or source_hash(reward.function)
