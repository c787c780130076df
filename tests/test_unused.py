"""Settings that nothing reads, and agents without a role, are said."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT

from cory.cli.load import load
from cory.config import (
    Config,
    CoryConfig,
    HubConfig,
    LoraConfig,
    ParallelConfig,
    PPOConfig,
    SamplingConfig,
    keys,
)
from cory.schedule import RoleSchedule
from cory.tasks.kind import kind_of_script
from cory.unused import unread, warn_of_unused

OFF = Config(
    algorithm="grpo",
    ppo=PPOConfig(init_kl_coef=0.0),
    cory=CoryConfig(exchange="none", credit="own"),
)


@pytest.fixture
def said(capsys, monkeypatch):
    """What is said of some settings."""

    def texts(config: Config) -> list[str]:
        monkeypatch.setattr("cory.unused._said", set())
        warn_of_unused(config)
        warn_of_unused(config)
        return [line.removeprefix("Warning: ") for line in capsys.readouterr().err.splitlines()]

    return texts


def test_keys_are_those_of_the_settings():
    assert set(unread(asdict(OFF))) <= set(keys(Config))
    assert len(unread(asdict(OFF))) > 20


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"algorithm": "rloo", "ppo": PPOConfig(gamma=0.9, lam=1.0)},
            "nothing reads ppo.gamma, ppo.lam, as algorithm: rloo has no value head",
        ),
        ({"ppo": PPOConfig(adaptive_kl=False, kl_target=1.0)}, "ppo.kl_target, as ppo.adaptive_kl"),
        ({"ppo": PPOConfig(init_kl_coef=0.0, kl_horizon=9.0)}, "ppo.kl_horizon, as ppo.init_kl_c"),
        ({"lora": LoraConfig(alpha=8.0, merge=True)}, "lora.alpha, lora.merge, as lora.rank is 0"),
        ({"cory": CoryConfig(exchange="none", exchange_period=9)}, "cory.exchange_period, as"),
        ({"cory": CoryConfig(credit="own", weight=0.5)}, "cory.weight, as cory.credit is own"),
        ({"eval_queries": 9}, "eval_queries, as eval_every is 0"),
        ({"sampling": SamplingConfig(engine_folder="/tmp")}, "sampling.engine_folder, as sampl"),
        (
            {"parallel": ParallelConfig(gather="layer")},
            "parallel.gather, as parallel.shard is none",
        ),
        ({"hub": HubConfig(public=True)}, "hub.public, as hub.push is null"),
        (
            {
                "lora": LoraConfig(rank=8, alpha=8.0),
                "agents": [{"trained": False}, {"lora": {"rank": 0}}],
            },
            "lora.alpha, as lora.rank is 0",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_said(said, changes, text):
    config = replace(Config(), **changes)
    (sentence,) = said(config)
    assert re.search(text, sentence)


def test_settings_that_are_read_are_not_said(said):
    assert said(Config()) == said(OFF) == []
    assert said(Config(ppo=PPOConfig(gamma=0.9), lora=LoraConfig(rank=4, alpha=8.0))) == []
    alone = CoryConfig(1, exchange="none", exchange_period=9, credit="own", weight=0.5)
    assert said(Config(cory=alone)) == []
    assert said(Config(hub=HubConfig(base="org/base"))) == []  # by cory.push, later
    agents = [{"lora": {"rank": 4}}, {}]
    assert said(Config(agents=agents, lora=LoraConfig(alpha=8.0))) == []


@pytest.mark.parametrize("exchange", ["rotate"])
@pytest.mark.parametrize("period", [3, 5, 9, 10])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_agents_without_a_role_are_counted(said, exchange, period, length):
    schedule = RoleSchedule(5, period, length, exchange)
    idle = 5 - len({agent for k in range(10) for agent in schedule.order(k)})
    cory = CoryConfig(5, length, exchange, period)
    found = [text for text in said(Config(iterations=10, cory=cory)) if "role" in text]
    expected = f"cory.exchange_period: {idle} of 5 agents will have no role in 10 iterations."
    assert found == ([expected] if idle else [])


@pytest.mark.parametrize(
    "file",
    [file for task in ("imdb", "gsm8k") for file in sorted(Path(ROOT, "configs", task).iterdir())],
    ids=lambda file: f"{file.parent.name}/{file.stem}",
)
def test_shipped_configurations_are_read_whole(said, file):
    task = file.parent.name
    for script in ("cory.py", "ppo.py"):
        kind = kind_of_script(f"{task}_train/{script}")
        config = load(kind.config, file, [], single_agent=script == "ppo.py")
        assert said(config) == []
