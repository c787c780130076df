"""What a run trains on: queries, rewards, and what each role reads."""

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
        row_per_branch: whether each of a run's `branches` has a row of its own: so many rows, one
            after the other, are then one query in training, and what the first role reads is the
            same in all of them.

    Raises a UserError: no reward, no `prompt` column, an empty prompt or one of another kind, a
    column of a name that functions are passed anyway, or one that a function or a template needs is
    missing.
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
        """What a role of a chain reads, row by row (Eq. 3). Responses that leave no room for an answer are halved.

        Rare, as the trainer checks that responses of full length fit; but broken text can take more tokens to read than
        it took to write. A row that is too long even without responses is kept; the agent refuses it.

        Args:
            columns: of the rows, `prompt` among them.
            earlier: of each earlier role, in order, its responses; None: the role reads the query alone.
            encode: from prompts to their token ids, as the model reads them.
            special: the model's control tokens, which are removed from the responses: another model can spell them.
            context: tokens that the model can attend to; None: any number.
            max_new_tokens: of the role's answer.
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
                if length > room and any(of_role[row] for of_role in texts)
            ]
            if not too_long:
                return prompts
            if self.prompts.function(role) is not None:  # it is called once per row
                raise UserError(
                    f"prompt of {self.prompts.name(role)}, row {too_long[0] + 1}: expected at most {room} tokens, so "
                    f"that its response fits the context, got {lengths[too_long[0]]}"
                )
            for row in too_long:
                for of_role in texts:
                    of_role[row] = of_role[row][: len(of_role[row]) // 2]

    def _rendered(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        responses: Sequence[Sequence[str]] | None,
    ) -> list[Any]:
        """A role's prompts. Raises a UserError if a function has returned something else."""
        prompts = self.prompts.render_rows(role, columns, responses)
        if self.prompts.function(role) is not None:
            for row, prompt in enumerate(prompts):
                check_prompt(prompt, f"prompt of {self.prompts.name(role)}, row {row + 1}")
        return prompts

    def with_roles(self, roles: Sequence[RoleConfig]) -> "Task":
        """The task with the names and prompts that a run's settings give its roles
        (`Config.roles`).

        Raises a UserError if one of the prompts names what there is not, or if the task has other roles already.
        """
        if tuple(roles) == self.prompts.roles:
            return self
        if self.prompts.roles:
            raise UserError(
                "roles: expected in the settings those of the task's prompts, "
                f"{[self.prompts.name(role) for role in range(len(self.prompts.roles))]}, got "
                f"{[role.name for role in roles]}"
            )
        return replace(self, prompts=replace(self.prompts, roles=tuple(roles)))

    def fingerprint(self) -> dict[str, Any]:
        """Identifies this task in a run's config.yaml: its kind, reward, templates and data, by name and hash."""
        return {
            "task": self.kind,
            **self.fingerprint_of_reward(),
            # Functions are null.
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
        """The hashes of the files of roles' prompts that are functions; empty without any."""
        functions = [self.prompts.pioneer, self.prompts.observer]
        hashes = [source_hash(function) for function in functions if not isinstance(function, str)]
        return "+".join([*hashes, *(loaded.sha256 for loaded in self.prompts.code.values())])

    def fingerprint_of_reward(self) -> dict[str, str]:
        """The reward's name and the hash of its source; of several the names with their weights,
        and the hashes.

        Likewise of the team reward, empty if there is none.
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
        for row, prompt in enumerate(prompts):  # the dataset takes lists of one type
            check_prompt(prompt, f"prompts, row {row + 1}")
        return cls(datasets.Dataset.from_dict({"prompt": list(prompts)}), reward, role_prompts)

    def rows_per_query(self, branches: int) -> int:
        """How many rows, one after the other, are one query in training."""
        return branches if self.row_per_branch else 1

    def batch(self, k: int, size: int, seed: int, rows_per_query: int = 1) -> dict[str, list[Any]]:
        """The columns of the `size` queries of iteration `k`, with `rows_per_query` rows for each: each
        pass over the data is a permutation of the queries drawn from (seed, pass).

        Queries that do not fill a last batch sit out that pass.
        """
        queries = len(self.dataset) // rows_per_query
        batches = queries // size
        order = Stream(seed, Purpose.QUERIES, iteration=k // batches).numpy().permutation(queries)
        start = k % batches * size
        first_rows = order[start : start + size] * rows_per_query
        rows = [first + row for first in first_rows.tolist() for row in range(rows_per_query)]
        return self.dataset[rows]


def draw_batch(task: Task, config: Config, k: int) -> Batch:
    """This process's part of the queries of iteration `k`, each as often as its group has chains."""
    rows_per_query = task.rows_per_query(config.branches)
    drawn = task.batch(k, config.queries_per_iteration, config.seed, rows_per_query)
    responses_of_process = distributed.share_of_rows(config.ppo.batch_size // config.branches)
    columns = {}
    branch_columns = {}
    for name, values in drawn.items():
        # A row for each branch: its own, or that of the query.
        rows = repeated(values, config.branches // rows_per_query)
        queries = [rows[i : i + config.branches] for i in range(0, len(rows), config.branches)]
        of_responses = repeated(queries, config.chains_per_query)[responses_of_process]
        columns[name] = [branches[0] for branches in of_responses]
        branch_columns[name] = list(itertools.chain(*of_responses))

    max_new_tokens = response_limit(
        config.seed, k, config.sampling.min_new_tokens, config.sampling.max_new_tokens
    )
    return Batch(columns, max_new_tokens, branch_columns)


def _recorded_name(reward: Reward) -> str:
    return reward.name or function_name(reward.function)


def _recorded_hash(reward: Reward) -> str:
    return reward.sha256 or source_hash(reward.function)
