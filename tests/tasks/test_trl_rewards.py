"""Reward functions with the signatures of TRL's documented examples run unchanged."""

import datasets
import pytest

from cory import evaluate
from cory.build import make_agents
from cory.config import EvaluationConfig
from cory.errors import UserError
from cory.rewards import Reward
from cory.roles import RolePrompts
from cory.run.folder import read_rows
from cory.task import Task
from cory.trainer import CoryTrainer

PROMPTS = RolePrompts(observer="{prompt}{response} {prompt}")
ROWS = datasets.Dataset.from_list(
    [
        {"prompt": f"the film was {word}", "solution": word[0]}
        for word in "good bad fine dull".split()
    ]
    * 4
)


def accuracy_reward(completions, solution, log_extra=None, **kwargs):
    """Returns 1 if the solution occurs in the text and 0 otherwise."""
    assert log_extra is None
    return [float(right in text) for text, right in zip(completions, solution, strict=True)]


class SoftOverlongPunishment:
    """A reward that is 0 up to `longest - soft` tokens and then falls to -1 at `longest` tokens."""

    def __init__(self, longest, soft):
        self.longest = longest
        self.soft = soft

    def __call__(self, completion_ids, **kwargs):
        over = [len(ids) - (self.longest - self.soft) for ids in completion_ids]
        return [-min(1.0, max(0.0, tokens / self.soft)) for tokens in over]


def get_repetition_penalty_reward(size, penalty):
    def repetition_penalty(completion_ids, **kwargs):
        rewards = []
        for ids in completion_ids:
            grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
            rewards.append(penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
        return rewards

    return repetition_penalty


def test_each_role_is_rewarded_for_its_own_tokens(config):
    overlong = SoftOverlongPunishment(longest=8, soft=8)
    repetition = get_repetition_penalty_reward(size=1, penalty=-1.0)
    rewards = [accuracy_reward, Reward(overlong, 0.5), repetition]
    trainer = CoryTrainer(config, make_agents(config), Task(ROWS, rewards, PROMPTS))
    iteration = trainer.iteration(0)

    solutions = iteration.batch.columns["solution"]
    for rollout, rewarded in zip(iteration.rollouts, iteration.task_rewards, strict=True):
        expected = []
        rows = zip(rollout.completions, rollout.response_ids, solutions, strict=True)
        for text, ids, solution in rows:
            repeated = 1 - len(set(ids.tolist())) / len(ids)
            expected.append(float(solution in text) - 0.5 * len(ids) / 8 - repeated)
        assert rewarded.tolist() == pytest.approx(expected)
    metrics = {"reward_accuracy_reward", "reward_SoftOverlongPunishment"}
    assert metrics | {"reward_repetition_penalty"} <= iteration.records[0].keys()


def test_an_evaluation_passes_token_ids_to_rewards(policy_folder, tmp_path):
    def length(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    settings = EvaluationConfig(queries=3, samples=2, output=str(tmp_path / "evaluation"))
    evaluate([policy_folder], Task(ROWS, [length], PROMPTS), settings)
    records = read_rows(tmp_path / "evaluation" / "responses.jsonl")
    assert all(record["rewards"] == record["tokens"] for record in records)


def test_unsupported_arguments_and_reward_model_names_are_refused():
    def curriculum(completions, trainer_state, **kwargs):
        return [0.0 for _ in completions]

    with pytest.raises(UserError, match=r"curriculum: .*trainer_state"):
        Task(ROWS, [accuracy_reward, curriculum], PROMPTS)
    with pytest.raises(UserError, match=r"task\.reward: .*reward-model"):
        Task(ROWS, "some/reward-model", PROMPTS)
