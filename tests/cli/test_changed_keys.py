"""Changes to a block of a run's settings on a command line: `--task.KEY VALUE` of evaluations and chats."""

import pytest

from cory.cli.arguments import Arguments, typed
from cory.config import ModelConfig, SamplingConfig, changed
from cory.errors import UserError
from cory.evaluation.settings import EvaluationConfig
from cory.own_task import OwnTaskConfig


def parsed(*argv: str):
    parser = Arguments("")
    parser.add_class_arguments(EvaluationConfig, skip={"models"})
    return parser.of(argv)


@pytest.mark.parametrize(
    ("argv", "block", "values"),
    [
        (["--task.pioneer_prompt", "Ask: {prompt}"], OwnTaskConfig, {"pioneer_prompt": "Ask: {prompt}"}),
        (["--task.pioneer_prompt=[a, {prompt}]"], OwnTaskConfig, {"pioneer_prompt": "[a, {prompt}]"}),
        (["--task", '{pioneer_prompt: "Ask: {prompt}"}'], OwnTaskConfig, {"pioneer_prompt": "Ask: {prompt}"}),
        (["--task.eval_dataset", "null"], OwnTaskConfig, {"eval_dataset": None}),
        (
            ["--task.reward", "[a.py:b, c.py:d]", "--task.reward_weights", "[1, 0.5]"],
            OwnTaskConfig,
            {"reward": ["a.py:b", "c.py:d"], "reward_weights": [1.0, 0.5]},
        ),
        (["--model.revision", "1234567"], ModelConfig, {"revision": "1234567"}),
        (["--model.chat_template", "{thinking: false}"], ModelConfig, {"chat_template": {"thinking": False}}),
        (
            ["--sampling.temperature", "0.7", "--sampling.stop", '["\\n", ": "]'],
            SamplingConfig,
            {"temperature": 0.7, "stop": ["\n", ": "]},
        ),
    ],
)  # fmt: skip
def test_values_have_the_types_of_their_keys(argv, block, values):
    assert typed(block, getattr(parsed(*argv), block.block)) == values


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sampling.temperatur", "1"], "unknown key 'temperatur'. Did you mean 'temperature'"),
        (["--sampling.temperature", "hot"], "sampling.temperature: expected .*number, got 'hot'"),
        (["--sampling.temperature"], "sampling.temperature: expected a value, got none"),
        (["--sampling.temperature", "--greedy"], "sampling.temperature: expected a value, got none"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(argv, message):
    with pytest.raises(UserError, match=message):
        changed(SamplingConfig(), typed(SamplingConfig, parsed(*argv).sampling))


@pytest.mark.parametrize("key", ["rewards", "check", "block"])  # a property, a method, of the class
def test_a_name_that_is_no_key_is_unknown(key):
    with pytest.raises(UserError, match=f"task: unknown key '{key}'"):
        changed(OwnTaskConfig(), {key: "x"})
