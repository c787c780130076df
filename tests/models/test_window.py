"""The forward passes over the response window."""

import pytest
import torch
from conftest import make_gpt2
from tiny_models import SIZE, rows, tiny

from cory.config import SamplingConfig
from cory.models.sample import sample
from cory.models.window import (
    BY_POSITIONS,
    forward,
    pack,
    read_stems,
    response_logits,
    stems_of,
)

STEM = "some very fine or awful acting and music"
ALIKE = [f"{STEM}{more}" for more in ("", " a", " a bad story", " the film was a good", " a")]
APART = ["the film was", "a good story", "bad film"]


def test_stems_are_what_neighbours_share():
    def shared(prompts):
        stems = stems_of(prompts)
        assert all(prompt[: len(stem)] == stem for prompt, stem in zip(prompts, stems, strict=True))
        return list(map(len, stems))

    three = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 4, 7)]
    assert shared(three) == [4, 4, 4]
    assert shared([*three, (9,)]) == [4, 4, 4, 0]
    assert shared([*three, (1, 2, 3, 8)]) == [3] * 4  # two tokens are read once more to save three
    assert shared([*three, (1, 8, 8)]) == [4, 4, 4, 2]  # six would be read once more to save one
    # All but a token, which predicts the response.
    assert shared([(1, 2), (1, 2), (1, 2)]) == [1, 1, 1]
    assert shared([(1, 2, 3, 4, 5), (1, 2, 3, 4)]) == [3, 3]  # of the shorter one, too
    # That all prompts begin with the same token does not make it one group.
    other = (1, 5, 5, 5, 5, 5)
    assert shared([other, *three]) == [5, 4, 4, 4]


@pytest.mark.parametrize("prompts", [ALIKE, ALIKE + APART, APART, ["a", *ALIKE]])
def test_reading_beginnings_once_changes_no_logits(tokenizer, prompts):
    model = make_gpt2(tokenizer)
    queries = rows(tokenizer, prompts)
    torch.manual_seed(0)
    responses = [
        torch.randint(3, 40, (length,)) for length in (5, 1, 3, 7, 2, 4, 6, 5)[: len(queries)]
    ]
    packed = pack(queries, responses, 0)
    with torch.no_grad():
        expected = forward(model, *packed[:3], packed.response_ids.shape[1])[0]
    found = response_logits(model, queries, responses, 0)
    for row, response in enumerate(responses):
        torch.testing.assert_close(
            found[row, : len(response)], expected[row, : len(response)], rtol=0, atol=2e-5
        )


def test_sampling_gives_the_logits_of_its_tokens(tokenizer):
    model = make_gpt2(tokenizer)
    queries = rows(tokenizer, [*APART, *APART, *ALIKE])
    model.generation_config.eos_token_id = model.config.eos_token_id = list(
        range(3, 300, 3)
    )  # they end at different times
    settings = SamplingConfig(1, 6, temperature=0.5)
    generator = torch.Generator().manual_seed(1)
    responses, seen = sample(model, tokenizer, queries, settings, generator, keep_logits=True)
    again = sample(model, tokenizer, queries, settings, torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(responses, again.responses, strict=True))
    assert again.logits == [[] for _ in queries]
    assert len({len(response) for response in responses}) > 1
    expected = response_logits(model, queries, responses, 0)
    for row, response in enumerate(responses):
        torch.testing.assert_close(
            torch.stack(seen[row]), expected[row, : len(response)], rtol=0, atol=2e-5
        )


@pytest.mark.parametrize(
    ("name", "changes", "shares"),
    [
        *((name, {}, True) for name in BY_POSITIONS),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, False),
        ("mpt", {}, False),
    ],
)
def test_beginnings_are_read_once_by_models_that_go_by_positions(name, changes, shares):
    """And with each prompt where distances count padding."""
    policy, queries = (
        tiny(name, **SIZE, **changes),
        [torch.arange(3, 33), torch.arange(3, 24), torch.arange(3, 40)],
    )
    responses = [torch.tensor(ids) for ids in ([5, 6, 7], [8], [9, 10, 11, 12])]
    stems = read_stems(policy, [tuple(query.tolist()) for query in queries], 0)
    assert (stems is not None) == shares
    found = response_logits(policy, queries, responses, 0)
    for place, (query, response) in enumerate(zip(queries, responses, strict=True)):
        with torch.no_grad():
            alone = policy(torch.cat([query, response])[None, :-1]).logits[0, -len(response) :]
        torch.testing.assert_close(found[place, : len(response)], alone, rtol=0, atol=2e-4)
