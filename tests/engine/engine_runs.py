"""Training runs whose responses an inference engine samples."""

from dataclasses import replace

from conftest import make_trainer

from cory.config import Config, LoraConfig
from cory.run.folder import read_rows


def train(config: Config) -> list[dict]:
    """Trains and returns the run's metrics records."""
    return read_rows(make_trainer(config).train().folder / "metrics.jsonl")


def learner(config: Config, algorithm: str, rank: int) -> Config:
    """Returns the settings with the given algorithm and LoRA rank."""
    group = {"algorithm": algorithm, "group_size": 1 if algorithm == "ppo" else 4}
    return replace(config, lora=LoraConfig(rank=rank), **group)
