"""Roles that settings define: names, prompt templates, length limits, and errors."""

import functools
import json
from dataclasses import replace

import datasets
import pytest
from conftest import PROMPTS, count_good, make_trainer

from cory.build import make_agents
from cory.config import CoryConfig, RoleConfig
from cory.errors import UserError
from cory.roles import RolePrompts
from cory.run.folder import read_rows
from cory.task import Task
from cory.trainer import CoryTrainer

ROLES = [
    RoleConfig(name="writer", max_new_tokens=4),
    RoleConfig(name="critic", prompt="{writer} is it good? {prompt}", stop=["a"]),
    RoleConfig(prompt="{responses}|{response}|{critic}|{label}", max_new_tokens=9),
]
THREE = CoryConfig(num_agents=3, exchange_period=1)


@pytest.fixture
def three(config):
    """A trainer with three roles on rows with labels, and the list of roles that its reward gets."""
    seen = []

    def reward(prompts, completions, role):
        seen.extend(role)
        return count_good(prompts, completions)

    return make_trainer(replace(config, cory=THREE, roles=ROLES), reward), seen


def test_each_role_has_the_name_prompt_and_limits_of_its_settings(three):
    trainer, seen = three
    iteration = trainer.iteration(1)
    writer, critic, last = iteration.rollouts
    assert [rollout.role for rollout in iteration.rollouts] == ["writer", "critic", "observer_2"]
    assert seen == ["writer"] * 8 + ["critic"] * 8 + ["observer_2"] * 8
    queries, labels = iteration.batch.columns["prompt"], iteration.batch.columns["label"]
    assert writer.prompts == queries
    assert critic.prompts == [
        f"{w} is it good? {q}" for w, q in zip(writer.completions, queries, strict=True)
    ]
    chains = zip(writer.completions, critic.completions, labels, strict=True)
    assert last.prompts == [f"{w}\n\n{c}|{c}|{c}|{label}" for w, c, label in chains]
    longest = [max(map(len, rollout.response_ids)) for rollout in iteration.rollouts]
    # The critic has no limit of its own, so its limit is drawn between 3 and 6.
    assert longest[0] == 4 and 3 <= longest[1] <= 6 and longest[2] == 9
    assert not any("a" in text for text in critic.completions)  # the critic's stop string
    assert any("a" in text for text in [*writer.completions, *last.completions])


@pytest.mark.parametrize("period", [5, 0])
def test_metrics_and_samples_have_names_and_columns_of_roles(three, period):
    """With fixed roles, only the first agent is also sampled solo."""
    trainer, _ = three
    cory = replace(THREE, exchange_period=period)
    trainer.config = replace(trainer.config, iterations=1, cory=cory)
    folder = trainer.train().folder
    for name in ("metrics", "samples"):
        rows = read_rows(folder / f"{name}.jsonl")
        assert {row["role"] for row in rows} == {"writer", "critic", "observer_2"}
    before = json.loads((folder / "summary.json").read_text())["samples"]["before"]
    solo = ["agent_1"] if period == 0 else ["agent_1", "agent_2", "agent_3"]
    assert set(before) == {*solo, "chain"}
    columns = [{"label": label} for label in trainer.task.dataset["label"][:4]]
    assert [sample["columns"] for sample in before["chain"]] == 3 * columns


def test_counterfactual_responses_use_each_roles_prompt_without_earlier_responses(three):
    trainer, seen = three
    trainer.config.cory = replace(THREE, credit="counterfactual")
    prompts = []
    for agent in trainer.agents:
        respond = agent.respond
        agent.respond = lambda *args, respond=respond: prompts.append(args[0][0]) or respond(*args)
    iteration = trainer.iteration(0)
    query, label = iteration.batch.columns["prompt"][0], iteration.batch.columns["label"][0]
    assert prompts[3:] == [f" is it good? {query}", f"\n\n|||{label}"]
    assert seen[24:] == ["critic"] * 8 + ["observer_2"] * 8


def test_templates_can_name_every_earlier_role():
    prompts = RolePrompts(observer="{pioneer} {response} {responses} {prompt}")
    row = {"prompt": "q"}
    assert prompts.render(1, row, ["a"]) == "a a a q"
    assert prompts.render(2, row, ["a", "b"]) == "a b a\n\nb q"
    assert prompts.render(2, row) == "q"  # without responses, only the query is left
    assert prompts.reads(1) == [0, 0, 0] and prompts.reads(2) == [0, 1, 0, 1]
    named_roles = RolePrompts(
        roles=(
            RoleConfig(name="a"),
            RoleConfig(prompt="{label}{x}"),
            RoleConfig(prompt="{a}{observer}"),
        )
    )
    assert named_roles.render(2, row | {"label": 1}, ["{observer}", "two"]) == "{observer}two"
    assert named_roles.columns() == ["label", "x"] and named_roles.reads(1) == []


def test_all_earlier_responses_are_shortened_in_proportion():
    """Tokens that a chat template adds count, too."""

    def encode(prompts, template=0):
        return [[0] * template + list(prompt) for prompt in prompts]

    only_responses = RoleConfig(prompt="{responses}")
    prompts = RolePrompts(roles=(RoleConfig(), only_responses, only_responses))
    rows = {"prompt": ["q", "q"]}
    task = Task(datasets.Dataset.from_dict(rows), count_good, prompts)
    chains = [["a" * 40, "a"], ["b" * 20, "b"]]
    fitted = task.prompts_of_role(2, rows, chains, encode, [], context=40, max_new_tokens=8)
    assert fitted == ["a" * 20 + "\n\n" + "b" * 10, "a\n\nb"]
    with_template = functools.partial(encode, template=10)
    assert task.prompts_of_role(1, {"prompt": ["q"]}, [["a" * 30]], with_template, [], 40, 5) == [
        "a" * 15
    ]


def test_roles_of_a_task_that_are_missing_in_the_settings_are_refused(config):
    """If they were accepted, the observer would read the default prompt."""
    prompts = RolePrompts(roles=(RoleConfig(name="writer"), RoleConfig(prompt="Edit {writer}")))
    rows = datasets.Dataset.from_dict({"prompt": ["a"] * 8})
    task = Task(rows, count_good, prompts)
    with pytest.raises(UserError, match=r"^roles: .*writer"):
        CoryTrainer(config, make_agents(config), task)


@pytest.mark.parametrize(
    ("key", "roles"),
    [
        (r"roles\.1\.prompt", [{}, {"prompt": "{writer}"}]),
        (r"roles\.0\.prompt", [{"prompt": "{response}"}, {}]),
        (r"roles\.1\.prompt", [{}, {"prompt": "{observer}"}]),
        (r"roles\.1\.prompt", [{}, {"prompt": "Answer."}]),
        (
            "dataset",
            [
                {"max_new_tokens": 40},
                {"prompt": "{response} {pioneer} {prompt}", "max_new_tokens": 20},
            ],
        ),
    ],
)
def test_templates_that_do_not_fit_are_refused_before_training(config, key, roles):
    """In the last case, a role's prompt is longer than the context."""
    with pytest.raises(UserError, match=f"^{key}: "):
        make_trainer(replace(config, roles=roles))


def test_a_role_with_the_name_of_a_column_is_refused():
    rows = datasets.Dataset.from_dict({"prompt": ["a"] * 8, "label": [1] * 8})
    with pytest.raises(UserError, match=r"^roles\.0\.name: "):
        Task(rows, count_good, PROMPTS).with_roles([RoleConfig(name="label"), RoleConfig()])
