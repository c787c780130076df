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
        dataset: rows with a `prompt` column that holds the query s0: text, or chat messages ending with the
            user's. The reward and the templates can use the other columns.
        reward: `reward(prompts, completions, **columns) -> list[float | None]`, where `prompts` are the queries. It
            is called with the responses of all agents in an iteration, and for samples, held-out queries and
            counterfactual credit. A list of functions, or of `Reward` with weights, is summed; it may be empty
            with a team reward.
        prompts: what each role reads.
        metrics: additional metrics by name, `metric(prompts, completions, rewards, **columns) -> list[float | None]`;
            their means are recorded in metrics.jsonl.
        team_reward: `team_reward(prompts, chains, **columns) -> list[float]`, called whenever the reward is;
            `chains[i]` lists a chain's responses by role. Every role receives it on top of its own reward.
        extract: returns the answer that a completion gives, or None; used for an evaluation's votes (`maj@k`).
        kind: name of the registered kind (`cory.task_kinds`) that made the task and lets commands find it again;
            empty for a task made in Python.
        row_per_branch: whether each of a run's `branches` has its own row. In training, that many consecutive rows
            form one query, and the first role reads the same text in all of them.

    Raises a UserError if there is no reward; if the `prompt` column is missing, or a prompt is empty or of another
    type; if a column has a reserved name; or if a function or a template needs a missing column.
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
        """Returns a role's prompts, one per row (Eq. 3), halving responses that leave no room for an answer.

        Halving is rare: the trainer checks that responses of full length fit, but broken text can take more tokens to
        read than it took to write. A row that is too long even without responses is kept; the agent refuses it.

        Args:
            columns: the rows' columns, including `prompt`.
            earlier: the earlier roles' responses, one list per role. None: the role reads the query alone.
            encode: maps prompts to their token ids, as the model reads them.
            special: the model's control tokens. They are removed from the responses, since another model can spell
                them as ordinary text.
            context: the model's context length in tokens; None: unlimited.
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
            if self.prompts.function(role) is not None:  # it is called only once per row
                raise UserError(
                    f"prompt of {self.prompts.name(role)}, row {too_long[0] + 1}: expected at most {room} tokens, so "
                    f"that its response fits the context, got {lengths[too_long[0]]}"
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
        """Renders a role's prompts. Raises a UserError if a prompt function returned anything but a prompt."""
        prompts = self.prompts.render_rows(role, columns, responses)
        if self.prompts.function(role) is not None:
            for row, prompt in enumerate(prompts):
                check_prompt(prompt, f"prompt of {self.prompts.name(role)}, row {row + 1}")
        return prompts

    def with_roles(self, roles: Sequence[RoleConfig]) -> "Task":
        """Returns the task with the role names and prompts of a run's settings (`Config.roles`).

        Raises a UserError if a prompt has an unknown placeholder, or if the task already has other roles.
        """
        if tuple(roles) == self.prompts.roles:
            return self
        if self.prompts.roles:
            raise UserError(
                "roles: expected the settings to list the roles of the task's prompts, "
                f"{[self.prompts.name(role) for role in range(len(self.prompts.roles))]}, got "
                f"{[role.name for role in roles]}"
            )
        return replace(self, prompts=replace(self.prompts, roles=tuple(roles)))

    def fingerprint(self) -> dict[str, Any]:
        """Returns the names and hashes that identify the task in a run's config.yaml: kind, reward, templates, data."""
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
        """Returns the hashes of the files that define prompt functions; empty if there are none."""
        functions = [self.prompts.pioneer, self.prompts.observer]
        hashes = [source_hash(function) for function in functions if not isinstance(function, str)]
        return "+".join([*hashes, *(loaded.sha256 for loaded in self.prompts.code.values())])

    def fingerprint_of_reward(self) -> dict[str, str]:
        """Returns names and source hashes of the reward and the team reward; the latter's are empty if there is none.

        Several rewards are joined, with their weights.
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
        """Identifies the models that reward functions load and list in an attribute `models`.

        The attribute maps a setting, or any name, to a Hub id or local folder, or to a pair of recorded name
        (such as `tiny`) and folder.
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
        """The metric name of each reward function; empty if there is only one."""
        if len(self.rewards) < 2:
            return []
        return [f"reward_{reward.short_name}" for reward in self.rewards]

    def columns_read(self) -> list[str]:
        """Returns the dataset's columns that templates and rewards name, except the query."""
        named = {*self.prompts.columns()}
        for reward in [*self.rewards, *([self.team] if self.team else [])]:
            named |= {*inspect.signature(reward.function).parameters}
        return [name for name in self.dataset.column_names if name in named - {"prompt"}]

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[Prompt], reward: Rewards, role_prompts: RolePrompts
    ) -> "Task":
        """Returns a task on a plain list of queries."""
        for row, prompt in enumerate(prompts):  # before `from_dict`, which requires a single type
            check_prompt(prompt, f"prompts, row {row + 1}")
        return cls(datasets.Dataset.from_dict({"prompt": list(prompts)}), reward, role_prompts)

    def rows_per_query(self, branches: int) -> int:
        """Returns how many consecutive rows form one query in training."""
        return branches if self.row_per_branch else 1

    def batch(self, k: int, size: int, seed: int, rows_per_query: int = 1) -> dict[str, list[Any]]:
        """Returns the columns of the `size` queries of iteration `k`, with `rows_per_query` rows per query.

        Each pass over the data is a permutation of the queries, drawn from (seed, pass). Queries that do not fill a
        last batch are skipped in that pass.
        """
        queries = len(self.dataset) // rows_per_query
        batches = queries // size
        order = Stream(seed, Purpose.QUERIES, iteration=k // batches).numpy().permutation(queries)
        start = k % batches * size
        first_rows = order[start : start + size] * rows_per_query
        rows = [first + row for first in first_rows.tolist() for row in range(rows_per_query)]
        return self.dataset[rows]


def draw_batch(task: Task, config: Config, k: int) -> Batch:
    """Returns this process's queries of iteration `k`, each repeated once per chain of its group."""
    rows_per_query = task.rows_per_query(config.branches)
    drawn = task.batch(k, config.queries_per_iteration, config.seed, rows_per_query)
    responses_of_process = distributed.share_of_rows(config.ppo.batch_size // config.branches)
    columns = {}
    branch_columns = {}
    for name, values in drawn.items():
        # One row per branch: the branch's own, or the query's repeated.
        rows = repeated(values, config.branches // rows_per_query)
        queries = [rows[i : i + config.branches] for i in range(0, len(rows), config.branches)]
        chain_queries = repeated(queries, config.chains_per_query)[responses_of_process]
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
