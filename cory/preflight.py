"""What must hold before a run begins: checked before anything is written or trained."""

from collections.abc import Sequence

from datasets import Dataset

from cory.agent import Agent
from cory.config import Config
from cory.errors import UserError
from cory.models.text import check_lengths
from cory.parallel import distributed
from cory.task import Task


def held_out_rows(config: Config, task: Task, dataset: Dataset | None) -> Dataset | None:
    """The first `config.eval_queries` rows, equally many for each process; None without `config.eval_every`.

    Raises:
        UserError: there are none, or their columns or prompts do not fit the task.
    """
    if not config.eval_every:
        return None
    if dataset is None:
        raise UserError("eval_every: expected an eval_dataset, got none")
    rows = distributed.even(min(config.eval_queries, len(dataset)))
    if rows == 0:
        raise UserError(
            f"eval_every: expected held-out rows, at least one for each process, got {rows}"
        )
    dataset = dataset.select(range(rows))
    task.check_rows(dataset)
    return dataset


def check_run(
    config: Config, agents: Sequence[Agent], task: Task, held_out: Dataset | None
) -> None:
    """Raises a UserError if agents, task or held-out rows do not fit the settings or one another."""
    if len(agents) != config.cory.num_agents:
        raise UserError(
            f"cory.num_agents: expected the number of agents, {len(agents)}, got {config.cory.num_agents}"
        )
    if not task.rewards and task.team is None:
        raise UserError("task.reward: expected a reward function, or a team_reward, got neither")
    _check_number_of_rows(config, task)

    # One check per tokenizer and context length.
    distinct = {(id(agent.tokenizer), agent.context_length): agent for agent in agents}
    for what, dataset in (("", task.dataset), ("held-out rows: ", held_out)):
        if dataset is not None:
            for role in _roles_with_distinct_prompts(config, task):
                for agent in distinct.values():
                    _check_prompt_lengths(config, task, dataset, role, agent, what)


def _check_number_of_rows(config: Config, task: Task) -> None:
    if len(task.dataset) >= config.queries_per_iteration:
        return
    size = "ppo.batch_size"
    if config.chains_per_query > 1:
        size += " / group_size"
    if config.branches > 1:
        size += " / branches"
    raise UserError(
        f"dataset: expected at least {size} = {config.queries_per_iteration} rows, got {len(task.dataset)}"
    )


def _roles_with_distinct_prompts(config: Config, task: Task) -> list[int]:
    """The roles whose prompts, or the tokens that they and the responses add, are not those of a role before."""
    roles: dict[tuple[str, int], int] = {}
    for role in range(config.cory.num_roles):
        added = sum(_token_budget(config, task, role))
        roles.setdefault((task.prompts.template(role), added), role)
    return list(roles.values())


def _token_budget(config: Config, task: Task, role: int) -> tuple[int, int]:
    """The most tokens of the responses that a role reads, and of its own."""
    common = config.sampling.max_new_tokens
    limits = [task.prompts.settings(index).max_new_tokens or common for index in range(role + 1)]
    read = task.prompts.reads(role) if config.cory.knowledge_transfer else []
    return sum(limits[index] for index in read), limits[role]


def _check_prompt_lengths(
    config: Config, task: Task, dataset: Dataset, role: int, agent: Agent, what: str
) -> None:
    """Raises a UserError, which begins with `what`, if a prompt plus the longest response exceeds the context; later
    roles also read responses.
    """
    columns = dataset[:]
    reads_responses = role > 0 and config.cory.knowledge_transfer
    empty = [[""] * len(dataset)] * role
    prompts = task.render(role, columns, empty if reads_responses else None)
    read, written = _token_budget(config, task, role)
    lengths = [len(ids) for ids in agent.encode(prompts)]
    try:
        check_lengths(lengths, read + written, agent.context_length, prompts)
    except UserError as error:
        reads = f", which also reads responses of up to {read} tokens" if read else ""
        where = f"{what}{agent.name} as {task.prompts.name(role)}{reads}"
        raise UserError(f"{where}: {error}") from None
