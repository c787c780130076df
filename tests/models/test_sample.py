"""Sampling draws the same tokens as transformers' `generate`, also if rows end at different times."""

import pytest
import torch
from conftest import make_gpt2
from tiny_models import rows
from transformers import GenerationConfig

from cory.config import SamplingConfig
from cory.models.sample import draw, sample
from cory.models.text import end_tokens
from cory.models.window import pad

PROMPTS = ["the film was a good", "a", "some very fine or awful acting and music", "bad story"]


@pytest.fixture
def model(tokenizer):
    return make_gpt2(tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        SamplingConfig(1, 12, temperature=0.7),
        SamplingConfig(1, 12, top_p=0.8, repetition_penalty=1.3),
        SamplingConfig(1, 12, temperature=1.5, top_k=50, top_p=0.9, repetition_penalty=1.1),
    ],
)
def test_sampling_draws_the_same_tokens_as_generate(model, tokenizer, settings, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    monkeypatch.setattr(
        torch, "multinomial", lambda probabilities, num_samples: draw(probabilities, generator)
    )
    queries = rows(tokenizer, [PROMPTS[2], *PROMPTS, PROMPTS[0]])  # two prompts occur twice
    # The model's own generation settings are ignored.
    model.generation_config = GenerationConfig(
        temperature=0.1, top_k=1, max_length=3, eos_token_id=0
    )
    responses = sample(
        model, tokenizer, queries, settings, torch.Generator().manual_seed(3), ends=()
    ).responses
    model.generation_config = GenerationConfig()
    ids, mask = pad(queries, 0, "left")
    ids = torch.where(mask.bool(), ids, ids[:, -1:])
    generated = model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            do_sample=True, max_new_tokens=12, pad_token_id=0, temperature=settings.temperature,
            top_k=settings.top_k, top_p=settings.top_p, repetition_penalty=settings.repetition_penalty,
        ),
    )  # fmt: skip
    assert torch.equal(torch.stack(responses), generated[:, ids.shape[1] :])


def test_a_repeated_prompt_is_encoded_once(model, tokenizer):
    read = []
    model.register_forward_pre_hook(
        lambda _, __, given: read.append(
            (len(given["attention_mask"]), given["attention_mask"].shape[-1])
        ),
        with_kwargs=True,
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    queries = rows(tokenizer, [*PROMPTS, *PROMPTS, PROMPTS[1]])
    responses = sample(
        model, tokenizer, queries, SamplingConfig(1, 3), torch.Generator(), ends=()
    ).responses
    width = max(map(len, queries))
    assert read == [(4, width), (9, width + 1), (9, width + 2)]
    assert len({tuple(response.tolist()) for response in responses}) == 9


def test_tokens_are_drawn_as_often_as_they_are_likely():
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.3, 0.0, 0.075, 0.0])
    n = 200_000
    drawn = draw(weights.expand(n, -1), torch.Generator().manual_seed(0))
    assert drawn.shape == (n, 1)
    counts = torch.bincount(drawn[:, 0], minlength=8)
    assert not counts[weights == 0].any()
    spread = (weights * (1 - weights) / n).sqrt()
    assert ((counts / n - weights).abs() <= 4 * spread).all()
    wide = torch.randn(64, 50257).softmax(-1)
    assert (
        abs(
            wide.gather(1, draw(wide, torch.Generator())).log().mean()
            - (wide * wide.log()).sum(1).mean()
        )
        < 0.5
    )


def test_rows_that_leave_the_batch_change_no_other_row(model, tokenizer, monkeypatch):
    """A row's greedy response is the same in a batch and alone. Most rows end early and leave the batch."""
    queries = rows(tokenizer, PROMPTS * 3)
    for i, query in enumerate(queries):
        queries[i] = torch.cat([query, torch.tensor([5 + i])])  # no two prompts are equal
    likeliest = SamplingConfig(1, 20, top_k=1)
    free = sample(model, tokenizer, queries, likeliest, torch.Generator(), ends=()).responses
    ends = [int(row[t]) for row, t in zip(free, (1, 3, 6, 10, 15), strict=False)]
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])),
        with_kwargs=True,
    )
    together = sample(model, tokenizer, queries, likeliest, torch.Generator(), ends=ends).responses
    assert max(sizes) == len(queries) and sizes[-1] < len(queries)
    alone = [
        sample(model, tokenizer, [query], likeliest, torch.Generator(), ends=ends).responses[0]
        for query in queries
    ]
    assert len({len(row) for row in alone}) > 2
    for row, expected, whole in zip(together, alone, free, strict=True):
        assert row.tolist() == expected.tolist()
        first = next((i + 1 for i, token in enumerate(whole.tolist()) if token in ends), 20)
        assert row.tolist() == whole[:first].tolist()


def test_end_tokens_are_those_of_model_and_tokenizer(model, tokenizer):
    """An adapter's tokenizer may have an end token that its base model does not list."""
    end = tokenizer.eos_token_id
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(model, tokenizer) == [7, 9, end]
    model.generation_config.eos_token_id = end
    assert end_tokens(model, tokenizer) == [end]
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_tokens(model, tokenizer) == [end]


def test_a_repetition_penalty_sees_no_padding(model, tokenizer):
    """A greedy response that contains the pad token is the same alone and beside a longer prompt."""
    settings = SamplingConfig(1, 10, top_k=1, repetition_penalty=5.0)
    short, long = rows(tokenizer, ["a", "some very fine or awful acting and music"])
    bias = torch.zeros(len(tokenizer))
    bias[tokenizer.pad_token_id] = 3.0
    model.lm_head.register_forward_hook(lambda module, args, output: output + bias)
    alone = sample(model, tokenizer, [short], settings, torch.Generator(), ends=()).responses[0]
    assert tokenizer.pad_token_id in alone
    assert torch.equal(
        sample(model, tokenizer, [short, long], settings, torch.Generator(), ends=()).responses[0],
        alone,
    )
