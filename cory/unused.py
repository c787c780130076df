"""What a run would not use: settings that nothing reads, and agents that never have a role.

It is said when the run begins, so that nobody takes such a setting for tried.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cory.config import Config, CoryConfig
from cory.plural import counted

_said: set[str] = set()  # in this process, as the command says it before the trainer does


def warn_of_unused(config: Config) -> None:
    """Warns of settings that differ from their defaults though nothing reads them, and of agents without a role."""
    settings = asdict(config)
    defaults = asdict(Config())
    by_reason: dict[str, list[str]] = {}
    for key, reason in unread(settings).items():
        if _value(settings, key) != _value(defaults, key):
            by_reason.setdefault(reason, []).append(key)
    for reason, keys in by_reason.items():
        _say(f"nothing reads {', '.join(keys)}, as {reason}.")
    idle = _agents_without_a_role(config.cory, config.iterations)
    if idle:
        agents = counted(config.cory.num_agents, "agent")
        iterations = counted(config.iterations, "iteration")
        _say(f"cory.exchange_period: {idle} of {agents} will have no role in {iterations}.")


def _say(warning: str) -> None:
    if warning not in _said:
        _said.add(warning)
        print(f"Warning: {warning}", file=sys.stderr)


def unread(settings: Mapping[str, Any]) -> dict[str, str]:
    """The keys that nothing reads in a run with these settings, and why.

    Without those about several agents where a single one is trained, as a file serves both.
    """
    has_several = settings["cory"]["num_agents"] > 1
    algorithm = settings["algorithm"]
    lora = settings["lora"]
    ranks = [
        agent["lora"].get("rank", lora["rank"]) for agent in settings["agents"] if agent["trained"]
    ]
    has_adapters = any(ranks or [lora["rank"]])

    result = {}

    def note(is_unread: bool, reason: str, *keys: str) -> None:
        if is_unread:
            result.update(dict.fromkeys(keys, reason))

    note(
        algorithm != "ppo",
        f"algorithm: {algorithm} has no value head",
        "ppo.gamma",
        "ppo.lam",
        "ppo.whiten_rewards",
        "ppo.cliprange_value",
        "ppo.vf_coef",
        "ppo.value_head_init",
    )
    note(
        settings["ppo"]["init_kl_coef"] == 0,
        "ppo.init_kl_coef is 0",
        "ppo.adaptive_kl",
        "ppo.kl_target",
        "ppo.kl_horizon",
        "ppo.kl_in",
    )
    note(
        not settings["ppo"]["adaptive_kl"],
        "ppo.adaptive_kl is false",
        "ppo.kl_target",
        "ppo.kl_horizon",
    )
    note(
        not has_adapters,
        "lora.rank is 0",
        "lora.alpha",
        "lora.target_modules",
        "lora.shared_base",
        "lora.merge",
    )
    note(
        has_several and settings["cory"]["exchange"] == "none",
        "cory.exchange is none",
        "cory.exchange_period",
    )
    note(
        has_several and settings["cory"]["credit"] == "own",
        "cory.credit is own",
        "cory.weight",
    )
    note(settings["eval_every"] == 0, "eval_every is 0", "eval_queries")
    note(
        settings["sampling"]["engine"] == "native",
        "sampling.engine is native",
        "sampling.engine_url",
        "sampling.engine_folder",
    )
    note(settings["parallel"]["shard"] == "none", "parallel.shard is none", "parallel.gather")
    note(settings["hub"]["push"] is None, "hub.push is null", "hub.public")
    return result


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    block, _, name = key.rpartition(".")
    return settings[block][name] if block else settings[name]


def _agents_without_a_role(cory: CoryConfig, iterations: int) -> int:
    """How many members of a population are in no period's chain (`RoleSchedule`)."""
    if not cory.exchanges_roles:
        return 0  # and so no population
    exchanges = (iterations - 1) // cory.exchange_period
    return max(0, cory.num_agents - cory.num_roles - exchanges)
