"""A task with several questions about each text. Observers that read the same response get different questions."""

from dataclasses import replace

import datasets
from conftest import count_good, sentences

from cory.build import make_agents
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer

PROMPTS = RolePrompts(observer="{prompt}{response} {question} was")
QUESTIONS = ["plot", "music", "acting"]


def rows_of(texts, questions=QUESTIONS):
    """Returns a row for each question about each text. All answers differ."""
    return [
        {"prompt": text, "question": question, "answer": f"good {number} {question}"}
        for number, text in enumerate(texts)
        for question in questions
    ]


def make_questions(config, reward=count_good, callbacks=(), **changes) -> CoryTrainer:
    """Returns a trainer on ten texts. Each text has one question for each of `config.branches` observers."""
    if config.cory.credit == "information":  # the length limit must fit the answers
        sampling = replace(config.sampling, min_new_tokens=10, max_new_tokens=10)
        config = replace(config, sampling=sampling)
    texts = [" ".join(text.split()[:4]) for text in sentences(10)]
    rows = rows_of(texts, QUESTIONS[: config.branches])
    arguments = {"row_per_branch": True} | changes
    task = Task(datasets.Dataset.from_list(rows), reward, PROMPTS, **arguments)
    return CoryTrainer(config, make_agents(config), task, callbacks=callbacks)
