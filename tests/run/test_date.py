"""Chat templates show the date of a run's first start, also when the run is resumed or evaluated later."""

from copy import deepcopy
from dataclasses import replace
from datetime import date

import pytest
from conftest import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

import cory.agent
import cory.run.checkpoint
from cory import Callback, evaluate
from cory.config import EvaluationConfig, ModelConfig
from cory.models.text import encode

DATED = "{{ strftime_now('%Y-%m-%d') }}|{% for m in messages %}{{ m.content }}{% endfor %}|"
LONG_AGO = "2001-02-03"


@pytest.mark.parametrize(
    "template",
    [
        "{% set form = '%Y-%m-%d' %}{{ strftime_now(form) }}",
        "{{ strftime_now(format='%Y-%m-%d') }}",
        "{% set now = strftime_now %}{{ now('%Y-%m-%d') }}",
        "{% macro day(form='%Y-%m-%d') %}{{ strftime_now(form) }}{% endmacro %}{{ day() }}",
        "{{ strftime_now('%Y' ~ '-%m-%d') }}",
    ],
)
def test_a_template_gets_the_given_date_however_it_asks_for_it(tokenizer, template):
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template
    (ids,) = encode(tokenizer, ["a film"], chat_template=True, date=LONG_AGO)
    assert tokenizer.decode(ids) == LONG_AGO
    (ids,) = encode(tokenizer, ["a film"], chat_template=True)
    assert tokenizer.decode(ids) == date.today().isoformat()


class Prompts(Callback):
    """Collects all encoded prompts as texts, without padding."""

    def __init__(self):
        self.texts = []

    def on_iteration_end(self, trainer, iteration):
        for rollout, agent in zip(iteration.rollouts, iteration.chain, strict=True):
            self.texts += [agent.tokenizer.decode(ids) for ids in rollout.prompt_ids]


@pytest.fixture
def dated_config(config, policy_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(policy_folder).save_pretrained(tmp_path / "model")
    model = ModelConfig(str(tmp_path / "model"), chat_template=True)
    return replace(config, model=model, iterations=1)


def train(config):
    """Trains and returns the run's folder and its prompts."""
    prompts = Prompts()
    return make_trainer(config, callbacks=[prompts]).train().folder, prompts.texts


def test_a_run_that_is_continued_or_evaluated_on_another_day_has_the_same_prompts(
    dated_config, monkeypatch, tmp_path
):
    class FirstDay(date):
        @classmethod
        def today(cls):
            return date.fromisoformat(LONG_AGO)

    with monkeypatch.context() as patch:
        patch.setattr(cory.run.checkpoint, "date", FirstDay)
        folder, texts = train(dated_config)
    assert texts
    assert all(text.startswith(f"{LONG_AGO}|") for text in texts)

    for iterations in (2, 3):  # resumed twice, since each start writes config.yaml again
        _, texts = train(replace(dated_config, iterations=iterations, resume=str(folder)))
        assert texts
        assert all(text.startswith(f"{LONG_AGO}|") for text in texts)

    seen = []
    sample = cory.agent.sample

    def spy(model, tokenizer, prompt_ids, *rest, **options):
        seen.extend(tokenizer.decode(ids) for ids in prompt_ids)
        return sample(model, tokenizer, prompt_ids, *rest, **options)

    monkeypatch.setattr(cory.agent, "sample", spy)
    chosen = EvaluationConfig(device="cpu", queries=4, output=str(tmp_path / "table"))
    evaluate([folder], make_trainer(dated_config).task, chosen)
    assert seen
    assert all(text.startswith(f"{LONG_AGO}|") for text in seen)
