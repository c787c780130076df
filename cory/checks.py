"""Checks that a task's data, functions and templates fit together, and fit the configuration and the agents.

Each check raises a UserError before training begins.
"""

import inspect
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from cory.config import Config, role_name
from cory.errors import UserError
from cory.learners.records import UpdateStats
from cory.metrics import HELD_OUT_REWARDS, TITLES
from cory.models.text import check_lengths
from cory.rewards import Function, Reward, accepted_columns
from cory.roles import RolePrompts

if TYPE_CHECKING:
    from cory.agent import Agent

CHAT_ROLES = ("system", "user", "assistant")
# Names that a task's metrics cannot have, since metrics.jsonl, an evaluation's table or its rows use them.
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
    "group",
    "seed",
    "answers",
    "greedy",
    "copied",
}
# Arguments that rewards and metrics receive in addition to the dataset's columns.
PASSED = ("prompts", "completions", "completion_ids", "chains", "role", "rewards")


# Checks of a task: its functions, rows and templates


def check_functions(
    rewards: Sequence[Reward], team: Reward | None, metrics: Iterable[str], extract: Any
) -> None:
    """Checks that there is a reward, that names differ, and that `extract` is not async."""
    if not rewards and team is None:
        raise UserError("task.reward: expected a reward or a team_reward, got neither")
    names = [reward.short_name for reward in rewards]
    if len({*names}) < len(names):
        raise UserError(
            f"task.reward: expected functions of different names, got {names}. Rename one in its file, or with "
            "Reward(function, name=...)"
        )
    reward_metrics = [f"reward_{name}" for name in names] if len(names) > 1 else []
    for name in metrics:
        if name in RECORDED or name in reward_metrics:
            raise UserError(f"task.metrics: expected a name that no other metric has, got {name!r}")
    if inspect.iscoroutinefunction(extract):
        raise UserError("task.extract: expected a function, got an async one")


def check_answer(answer: object) -> None:
    """Checks that votes can be counted for an answer that `task.extract` returned."""
    if not isinstance(answer, Hashable):
        raise UserError(
            f"task.extract: expected an answer such as a string or a number, or None, got {answer!r}"
        )


def check_rows(
    dataset: Dataset,
    rewards: Sequence[Reward],
    team: Reward | None,
    metrics: Mapping[str, Function],
    prompts: RolePrompts,
) -> None:
    """Checks that rows have prompts and all columns that functions and templates use."""
    names = dataset.column_names
    if "prompt" not in names:
        raise UserError(f"dataset: expected a column 'prompt', got {names}")
    reserved = [name for name in PASSED if name in names]
    if reserved:
        raise UserError(
            f"dataset: expected no column named like an argument of rewards, got {reserved}"
        )
    others = [name for name in names if name != "prompt"]
    arguments = ["prompts", "completions", "role", *others]
    for reward in rewards:
        accepted_columns(f"reward {reward}", reward.function, ["completion_ids", *arguments])
    for name, function in metrics.items():
        accepted_columns(f"metric {name}", function, ["rewards", *arguments])
    if team is not None:
        accepted_columns(f"team reward {team}", team.function, ["prompts", "chains", *others])
    for row, prompt in enumerate(dataset["prompt"][:]):
        check_prompt(prompt, f"dataset, column 'prompt', row {row + 1}")
    check_templates(prompts, names)
    for name in {*prompts.columns()} & {*names}:
        for row, value in enumerate(dataset[name][:]):
            if value is None:
                raise UserError(
                    f"dataset, column {name!r}, row {row + 1}: expected a value, got null. A role's prompt contains it"
                )


def check_prompt(prompt: Any, where: str) -> None:
    """Checks that a query is non-empty text, or chat messages ending with the user's."""
    if isinstance(prompt, str) and prompt:
        return
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict)
        and message.get("role") in CHAT_ROLES
        and isinstance(message.get("content"), str)
        for message in prompt
    )
    if not (is_chat and prompt and prompt[-1]["role"] == "user" and prompt[-1]["content"]):
        raise UserError(
            f"{where}: expected non-empty text, or chat messages {{role, content}} with roles among "
            f"{', '.join(CHAT_ROLES)} that end with a non-empty message of the user, got {prompt!r}"
        )


def check_templates(prompts: RolePrompts, columns: Iterable[str]) -> None:
    """Checks that each template has placeholders, and that each placeholder is a column, an earlier role or predefined.

    Also checks that no role is named like a column, since a template could not tell them apart.
    """
    columns = set(columns)
    for role in range(max(2, len(prompts.roles))):
        settings = prompts.settings(role)
        if settings.name in columns:
            raise UserError(
                f"roles.{role}.name: expected a name that is no column of the dataset, {sorted(columns)}, got "
                f"{settings.name!r}"
            )
        if prompts.function(role) is not None:
            continue
        where = f"roles.{role}.prompt"
        if settings.prompt is None:
            where = f"{role_name(min(role, 1))} prompt"
        allowed = {"prompt", *columns}
        if role > 0:
            allowed |= {"response", "responses", *map(prompts.name, range(role))}
        names = prompts.placeholders(role)
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            got = f"{{{unknown[0]}}}" if unknown else repr(prompts.template(role))
            raise UserError(f"{where}: expected placeholders among {sorted(allowed)}, got {got}")


# Checks of a task with a configuration and its agents


def check_fits(
    config: Config,
    agents: Sequence["Agent"],
    prompts: RolePrompts,
    dataset: Dataset,
    held_out: Dataset | None,
    rows_per_query: int,
) -> None:
    """Checks that rows suffice for an iteration, have what `cory.credit` needs, and fit the agents' context lengths.

    Args:
        dataset: training rows.
        held_out: held-out rows, if any.
        rows_per_query: number of consecutive training rows that form one query.
    """
    size = rows_per_query
    if size > 1:
        _check_queries(dataset, prompts, size)
    if len(dataset) < config.queries_per_iteration * size:
        unit = "rows" if size == 1 else f"queries of {size} rows"
        raise UserError(
            "dataset: expected at least ppo.batch_size / (group_size * branches) = "
            f"{config.queries_per_iteration} {unit}, got {len(dataset) // size}"
        )
    distinct = {(id(agent.tokenizer), agent.context_length): agent for agent in agents}
    if config.cory.credit == "information" and config.cory.num_roles > 1:
        _check_answers(config, distinct.values(), prompts, dataset)
    _check_contexts(config, [*distinct.values()], prompts, dataset, held_out)


def _check_queries(dataset: Dataset, prompts: RolePrompts, size: int) -> None:
    """Checks that the `size` rows of each query agree in all columns that the first role reads."""
    if len(dataset) % size:
        raise UserError(
            f"dataset: expected a multiple of branches = {size} rows with task.row_per_branch: true, got {len(dataset)}"
        )
    read = prompts.placeholders(0)
    for name in dict.fromkeys(["prompt", *read]):
        values = dataset[name][:]
        for row, value in enumerate(values):
            first = row - row % size
            if value != values[first]:
                raise UserError(
                    f"dataset, column {name!r}, row {row + 1}: expected the value of row {first + 1}, got {value!r}. "
                    f"With task.row_per_branch, {size} consecutive rows form one query of the first role"
                )


def _check_answers(
    config: Config, agents: Iterable["Agent"], prompts: RolePrompts, dataset: Dataset
) -> None:
    """Checks that each row's `answer` is a text that fits the second role's smallest length limit.

    `cory.credit: information` computes the log-likelihood of this answer.
    """
    names = dataset.column_names
    if "answer" not in names:
        raise UserError(
            f"dataset: expected a column 'answer' with cory.credit: information, got {names}"
        )
    answers = dataset["answer"][:]
    for row, answer in enumerate(answers):
        if not isinstance(answer, str) or not answer:
            raise UserError(
                f"dataset, column 'answer', row {row + 1}: expected a text with cory.credit: information, got "
                f"{answer!r}"
            )

    # Each iteration draws the longest response's length. The answer must fit even the smallest draw.
    limit = prompts.settings(1).max_new_tokens or config.sampling.min_new_tokens
    rendered = dataset["prompt"][:]
    if prompts.function(1) is None:  # a prompt function may be called only with real responses
        rendered = prompts.render_rows(1, dataset[:], [[""] * len(answers)])
    for agent in agents:
        for row, ids in enumerate(agent.encode_responses(rendered, answers)):
            if len(ids) > limit:
                raise UserError(
                    f"dataset, column 'answer', row {row + 1}: expected at most {limit} tokens, the smallest length "
                    f"limit of {prompts.name(1)}, got {len(ids)}"
                )


def _check_contexts(
    config: Config,
    agents: Sequence["Agent"],
    prompts: RolePrompts,
    dataset: Dataset,
    held_out: Dataset | None,
) -> None:
    """Checks that prompts fit each agent's context length, with the longest responses that a role reads and writes.

    Args:
        agents: one agent per tokenizer and context length, the run's first agent first.
    """
    # For each dataset with rows that are too long: their number, and the query length up to which all rows fit.
    counts: list[str] = []
    fitting: list[int] = []
    longest = (0, "")  # of the longest prompt: tokens beyond the context, and a description
    for kind, rows in (("rows", dataset), ("held-out rows", held_out)):
        if rows is None:
            continue
        too_long: set[int] = set()
        for role in range(config.cory.num_roles):
            if prompts.function(role) is not None:
                continue  # a prompt function may be called only with real responses
            reads = prompts.reads(role) if config.cory.knowledge_transfer else []
            responses = sum(
                prompts.settings(index).max_new_tokens or config.sampling.max_new_tokens
                for index in [*reads, role]
            )
            for agent in agents:
                context = agent.context_length or sys.maxsize
                lengths = _prompt_lengths(config, prompts, rows, role, agent)
                too_long |= {
                    row for row, length in enumerate(lengths) if length + responses > context
                }
                which = (
                    f"{agent.name}'s prompt as {prompts.name(role)} has {max(lengths)} tokens; the responses that it "
                    f"reads and writes have up to {responses}; the context has {context}"
                )
                longest = max(longest, (max(lengths) + responses - context, which))
        if too_long:
            counts.append(f"{len(too_long)} of {len(rows)} {kind}")
            queries = _prompt_lengths(config, prompts, rows, 0, agents[0])
            fitting.append(min(queries[row] for row in too_long) - 1)
    if not counts:
        return
    queries = _prompt_lengths(config, prompts, dataset, 0, agents[0])
    longest_kept = max((length for length in queries if length <= min(fitting)), default=0)
    remedy = f"Prompts of at most {longest_kept} tokens fit: see task.max_prompt_tokens"
    if not longest_kept:
        remedy = (
            "No row would be left: lower sampling.min_new_tokens and max_new_tokens, or the roles' limits, or shorten "
            "the prompts' templates"
        )
    raise UserError(
        f"dataset: expected prompts that fit the context with their responses, got {' and '.join(counts)} that are too "
        f"long (the longest: {longest[1]}). {remedy}"
    )


def _prompt_lengths(
    config: Config, prompts: RolePrompts, rows: Dataset, role: int, agent: "Agent"
) -> list[int]:
    """Returns the token lengths of prompts with empty responses. Raises a UserError if a prompt has no tokens."""
    reads_responses = role > 0 and config.cory.knowledge_transfer
    empty = [[""] * len(rows)] * role if reads_responses else None
    rendered = prompts.render_rows(role, rows[:], empty)
    lengths = [len(ids) for ids in agent.encode(rendered)]
    check_lengths(lengths, 0, None, rendered)
    return lengths
