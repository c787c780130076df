"""The notes example: its reward, data and settings, and an iteration on a hardly trained model."""

import doctest
import importlib
import json

import pytest
from conftest import ROOT, imported

from cory.build import make_agents
from cory.code_files import load_code
from cory.command import load
from cory.own_task import OwnConfig, make_task
from cory.run.folder import read_rows
from cory.trainer import CoryTrainer
from study.experiment_file import read_experiment
from study.plan import plan

EXAMPLE = ROOT / "examples/notes"
SETTINGS = ["notes.yaml", "toy.yaml", "questions.yaml"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The example's data and a model that was trained for two steps."""
    folder = tmp_path_factory.mktemp("notes")
    make = imported(EXAMPLE, "make")
    make.SIZE["positions"] = 256  # room for the worked examples in questions.yaml's prompts
    make.make(folder, texts=200, steps=2)
    return folder


def settings(world, name, **flags):
    flags = {"task.dataset": world, "model.name": world / "model", "device": "cpu"} | flags
    if name == "questions.yaml":
        flags |= {
            "task.dataset": world / "questions.jsonl",
            "task.eval_dataset": world / "test.jsonl",
        }
    config = load(OwnConfig, EXAMPLE / name, [f"--{key}={value}" for key, value in flags.items()])
    return config


def test_only_the_right_answer_is_rewarded():
    rewards = imported(EXAMPLE, "rewards")
    assert doctest.testmod(rewards).failed == 0
    pets = {"role": ["answerer"] * 3, "answer": ["cats"] * 3}
    assert rewards.reward([""] * 3, [" cats", " cats, dogs", ""], **pets) == [1.0, 0.0, 0.0]


def test_no_held_out_listing_is_trained_on(world):
    make = imported(EXAMPLE, "make")
    train, test, fresh = (read_rows(world / f"{split}.jsonl") for split in make.ROWS)
    assert [len(split) for split in (train, test, fresh)] == list(make.ROWS.values())
    assert not {row["listing"] for row in train} & {row["listing"] for row in [*test, *fresh]}
    # Listings differ in the flat's facts and not only in the order of sentences.
    values = [
        tuple(flat[fact] for fact in make.FACTS) for flat in make.flats(make.random.Random(0))
    ]
    assert len(set(values)) == sum(make.ROWS.values())

    for row in [*train, *test, *fresh]:
        assert row["answer"] in row["listing"] and len(row["lead"].split()) == 8
        assert row["listing"].startswith(row["lead"] + " ")
    assert {row["question"] for row in test} == set(make.QUESTIONS.values())


def test_questions_jsonl_asks_all_four_questions_about_each_listing(world):
    make = imported(EXAMPLE, "make")
    train = read_rows(world / "train.jsonl")
    questions = read_rows(world / "questions.jsonl")
    assert len(questions) == 4 * len(train)
    for number, row in enumerate(train):
        listing_rows = questions[4 * number : 4 * number + 4]
        assert row in listing_rows
        assert {other["listing"] for other in listing_rows} == {row["listing"]}
        assert [other["question"] for other in listing_rows] == list(make.QUESTIONS.values())
        assert len({other["answer"] for other in listing_rows}) == 4


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *((name, [{"LISTING"}, {"NOTE", "QUESTION"}]) for name in SETTINGS),
        ("lead.yaml", [{"LEAD", "QUESTION"}]),
    ],
)
def test_a_role_reads_only_its_part(world, name, read, monkeypatch):
    """The note-taker reads the listing, the answerer the note and the question.

    In lead.yaml, a single agent answers from the first words of the listing.
    """
    monkeypatch.chdir(ROOT)
    config = settings(world, name)
    task = make_task(config).with_roles(config.roles)
    row = {key: [key.upper()] for key in ("listing", "lead", "question", "answer")}
    row["prompt"] = row["listing"]
    for role, expected in enumerate(read):
        (prompt,) = task.prompts.render_rows(role, row, [[" NOTE"]][:role])
        words = {"LISTING", "LEAD", "QUESTION", "ANSWER", "NOTE"}
        assert {word for word in words if word in prompt} == expected


@pytest.mark.parametrize("credit", ["causal", "information"])
def test_a_note_is_rewarded_for_all_questions(world, tmp_path, monkeypatch, credit):
    """Four questions are answered from each note. With causal credit, the note earns the mean reward of the answers."""
    monkeypatch.chdir(ROOT)
    flags = {"output": tmp_path / "run", "cory.credit": credit}
    flags |= {"ppo.batch_size": 8, "ppo.mini_batch_size": 8}
    config = settings(world, "questions.yaml", **flags)
    trainer = CoryTrainer(config, make_agents(config), make_task(config))
    iteration = trainer.iteration(0)
    notes, answers = iteration.rollouts
    assert (len(notes.prompts), len(answers.prompts)) == (2, 8)
    questions = list(imported(EXAMPLE, "make").QUESTIONS.values())
    for prompt, question in zip(answers.prompts, questions * 2, strict=True):
        assert f"Question: {question}" in prompt.rpartition("Note:")[2]
    assert iteration.task_rewards[0].tolist() == [0, 0]
    if credit == "causal":
        mean = iteration.task_rewards[1].view(2, 4).mean(1)
        assert iteration.rewards[0].tolist() == mean.tolist()
    else:
        assert all(iteration.rewards[0].tolist())


@pytest.mark.parametrize(
    "name", ["experiment", "pilot", "pilot_eta", "credit_pilot", "credit", "credit_single"]
)
def test_the_experiments_can_be_planned(world, tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    changes = {"model.name": str(world / "model")}
    if not name.startswith("credit"):  # credit experiments read several data files
        changes["task.dataset"] = str(world)
    spec = read_experiment(EXAMPLE / f"{name}.yaml")
    for scale in spec.scales:
        runs = plan(spec, scale, changes, tmp_path)
        assert len(runs) == len({run.folder for run in runs}) >= len(spec.runs) - 2


def test_metrics_by_fact(monkeypatch):
    """`named_*` says whether a note contains the fact, `right_*` whether the answer about it is right."""
    monkeypatch.chdir(ROOT)
    names = [
        f"{kind}_{fact}" for kind in ("named", "right") for fact in ("street", "rooms", "pets")
    ]
    metrics = {
        name: load_code("task.metrics", f"examples/notes/metrics.py:{name}").value for name in names
    }
    columns = {
        "prompts": [""] * 4,
        "completions": [" 3 rooms, 13 cats", " no 3rd room", " 3", " dogs"],
        "rewards": [0.0, 0.0, 1.0, 0.0],
        "role": ["note_taker", "note_taker", "answerer", "answerer"],
        "question": [
            "How many rooms?",
            "How many rooms?",
            "How many rooms?",
            "Which pets are allowed?",
        ],
        "answer": ["3", "3", "3", "cats"],
        "listing": [""] * 4,
    }
    assert metrics["named_rooms"](**columns) == [1.0, 0.0, None, None]
    assert metrics["named_pets"](**columns) == [None] * 4
    street = columns | {
        "question": ["Which street?"] * 4,
        "answer": ["Ash Street", "3 Street", "", ""],
    }
    assert metrics["named_street"](**street) == [0.0, 0.0, None, None]
    street["completions"] = [" ash, 3, 650", " Ashen Street, 3 rooms", "", ""]
    assert metrics["named_street"](**street | {"answer": ["Ash Street"] * 4}) == [
        1.0,
        0.0,
        None,
        None,
    ]
    assert metrics["right_rooms"](**columns) == [None, None, 1.0, None]
    assert metrics["right_pets"](**columns) == [None, None, None, 0.0]


def test_the_number_of_facts_in_a_runs_notes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    facts = importlib.import_module("examples.notes.facts")
    ash = {"street": "Ash Street", "rooms": "3", "rent": "650", "pets": "none"}
    oak = {"street": "Oak Street", "rooms": "2", "rent": "900", "pets": "dogs"}
    flats = [
        flat | {"listing": name, "asked": "rent"}
        for flat, name in ((ash, "first"), (oak, "second"))
    ]
    monkeypatch.setattr(facts, "flats_of", lambda split: flats)
    notes = {
        "base": ["nothing", "a dog"],
        "run/agent_1": ["ash, 3 rooms, 650, none", "Oak, dogs"],
        "run/agent_2": ["Ash", "Oak"],
    }
    with open(tmp_path / "responses.jsonl", "w") as file:
        for model, texts in notes.items():
            for role, read in (("note_taker", None), ("answerer", model)):
                for query, text in enumerate(texts):
                    row = {
                        "model": model if read is None else f"{model} read",
                        "role": role,
                        "read": read,
                        "query": query,
                        "completions": [text if read is None else f" to {text}"],
                    }
                    file.write(json.dumps(row) + "\n")
    base, run = facts.note_lines(tmp_path / "responses.jsonl")
    assert (base["run"], base["notes_by_facts_named"]) == ("base", [2, 0, 0, 0, 0])
    assert (run["run"], run["notes_by_facts_named"]) == ("run", [0, 0, 1, 0, 1])
    assert run["first"][1] == {
        "listing": "second",
        "note": "Oak, dogs",
        "question": "What is the rent?",
        "answer": "to Oak, dogs",
        "right": "900",
    }
