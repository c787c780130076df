"""The sums' example: its rule, its data, its settings."""

import doctest
import importlib
import json
import sys
import types

import pytest
from conftest import ROOT

from cory.cli.load import load
from cory.tasks.config import OwnConfig
from cory.tasks.own import make_task

EXAMPLE = ROOT / "examples/arithmetic"


def imported(name):
    """A module of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        sys.modules.pop(name, None)
        module = importlib.import_module(name)
    sys.modules.pop(name)
    return module


def test_the_rule():
    assert doctest.testmod(imported("rewards")).failed == 0


def test_held_out_sums_are_not_trained_on_and_make_a_task(tmp_path, monkeypatch):
    make = imported("make")
    drawn = [{"question": f"{i % 60} + 1 =", "answer": str(i % 60 + 1)} for i in range(90)]
    gym = types.SimpleNamespace(create_dataset=lambda name, **options: drawn)
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setattr(make, "ROWS", {"train": 40, "test": 10})
    make.make(tmp_path)
    train, test = (
        [json.loads(line) for line in open(tmp_path / f"{split}.jsonl")]
        for split in ("train", "test")
    )
    assert (len(train), len(test)) == (40, 10) and not {r["prompt"] for r in train} & {
        r["prompt"] for r in test
    }
    monkeypatch.chdir(ROOT)
    config = load(OwnConfig, EXAMPLE / "sums.yaml", ["--task.dataset", str(tmp_path)])
    task = make_task(config)
    columns = task.dataset[:1]
    assert task.render(1, columns, [[" 1."]]) == [
        "Question: What is 3 + 5? Answer: 3 + 5 = 8.\nQuestion: 0 + 1 = Reference: 1. Answer:"
    ]
    (reward,) = task.rewards
    assert reward.function(columns["prompt"], [" 0 + 1 = 1"], answer=columns["answer"]) == [1.0]
