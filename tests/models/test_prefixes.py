"""A prefix that several prompts share is encoded only once."""

import pytest
import torch
from conftest import make_gpt2
from tiny_models import SIZE, rows, tiny

from cory.config import SamplingConfig
from cory.models.prefixes import read_stems, response_logits, share_prompts, stems_of
from cory.models.sample import sample
from cory.models.window import BY_POSITIONS, forward, pack, whole_mask

LENGTHS = [5, 1, 3, 7, 2, 4, 6, 5]
EXAMPLES = torch.arange(40, 68)
PREFIX = "some very fine or awful acting and music"
WITH_PREFIX = [
    f"{PREFIX}{more}" for more in ("", " a", " a bad story", " the film was a good", " a")
]
WITHOUT_PREFIX = ["the film was", "a good story", "bad film"]


def prompts_of_groups():
    """Returns three prompts in eight rows. Each prompt has a different number of rows, which are not all adjacent."""
    prompts = [torch.arange(3, 33), torch.arange(4, 24), torch.arange(5, 45)]
    return [prompts[number] for number in (0, 1, 0, 2, 1, 0, 1, 1)]


def prompts_with_examples():
    """Returns prompts that begin with the same examples; the last one is these examples alone."""
    rests = [torch.randint(3, 40, (length,)) for length in (4, 1, 6, 3, 5, 2, 4)]
    return [torch.cat([EXAMPLES, rest]) for rest in rests] + [EXAMPLES]


def prompts_with_two_kinds_of_examples():
    prompts = [torch.cat([EXAMPLES, torch.randint(3, 40, (2,))]) for _ in range(5)]
    return prompts + [torch.cat([EXAMPLES.flip(0)[:20], torch.tensor([i])]) for i in (7, 9, 7)]


def batch(prompts=prompts_of_groups):
    torch.manual_seed(0)
    responses = [torch.randint(3, 40, (length,)) for length in LENGTHS]
    return pack(prompts(), responses, 0)


def whole_rows(model, window):
    mask = whole_mask(model, window.attention_mask, window.input_ids.shape[1], window.is_padded)
    width = window.response_ids.shape[1]
    return forward(model, window.input_ids, mask, window.position_ids, width)


def shared(model, window):
    laid_out = share_prompts(model, window)
    return forward(
        model,
        laid_out.input_ids,
        laid_out.mask,
        laid_out.position_ids,
        laid_out.width,
        index=laid_out.predicting,
    )


@pytest.mark.parametrize(
    ("name", "prompts", "rows"),
    [
        *((name, prompts_of_groups, 3) for name in BY_POSITIONS),
        ("gpt2", prompts_with_examples, 1),
        ("llama", prompts_with_two_kinds_of_examples, 2),
    ],
)
def test_a_response_attends_only_to_its_prompt_and_itself(name, prompts, rows):
    """Logits, hidden states and gradients are the same as with one prompt per row."""
    model = tiny(name, **SIZE).double()
    window = batch(prompts)
    assert len(share_prompts(model, window).input_ids) == rows
    outputs, gradients = [], []
    for run_model in (whole_rows, shared):
        model.zero_grad()
        logits, hidden = run_model(model, window)
        tokens = window.response_mask.bool()
        logprobs = logits.log_softmax(-1).gather(-1, window.response_ids[..., None])[tokens]
        (logprobs * torch.arange(1, len(logprobs) + 1)[:, None]).mean().backward()
        outputs.append((logits[tokens], hidden[tokens]))
        gradients.append([p.grad for p in model.parameters()])
    # Some families compute norms and rotations in float32.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_prompts_are_shared_only_if_that_saves_work():
    model = tiny("gpt2", **SIZE)
    responses = [torch.arange(3, 8)] * 8
    alone = pack([torch.arange(3 + i, 13 + i) for i in range(8)], responses, 0)
    assert share_prompts(model, alone) is None
    # In a shared row, attention between long responses costs more than a prompt of one token saves.
    long = pack([torch.tensor([3])] * 8, [torch.arange(3, 40)] * 8, 0)
    assert share_prompts(model, long) is None
    # Many responses are spread over several copies of their prompt.
    many = pack([torch.arange(3, 33)] * 16, [torch.arange(3, 13)] * 16, 0)
    assert 1 < len(share_prompts(model, many).input_ids) < 16


def test_no_prompts_are_shared_by_bloom_or_with_eager_attention():
    """Bloom's distances between tokens include padding; eager attention takes a mask of another form."""
    assert share_prompts(tiny("bloom", **SIZE), batch()) is None
    model = tiny("gpt2", **SIZE)
    model.set_attn_implementation("eager")
    assert share_prompts(model, batch()) is None


# Prefixes that are encoded before the rest of the prompts


def test_prefixes_of_neighbouring_prompts_are_chosen_to_save_tokens():
    def shared(prompts):
        stems = stems_of(prompts)
        assert all(prompt[: len(stem)] == stem for prompt, stem in zip(prompts, stems, strict=True))
        return list(map(len, stems))

    three = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 4, 7)]
    assert shared(three) == [4, 4, 4]
    assert shared([*three, (9,)]) == [4, 4, 4, 0]
    # Compared with a group of three and a single prompt, a group of four encodes 1, 2 and 3 once less, 4 twice more.
    assert shared([*three, (1, 2, 3, 8)]) == [3] * 4
    # Here a group of four would encode only 1 once less, and 2, 3 and 4 twice more.
    assert shared([*three, (1, 8, 8)]) == [4, 4, 4, 2]
    # The last prompt token is left out, since it predicts the response.
    assert shared([(1, 2), (1, 2), (1, 2)]) == [1, 1, 1]
    assert shared([(1, 2, 3, 4, 5), (1, 2, 3, 4)]) == [
        3,
        3,
    ]  # 4 predicts the shorter prompt's response
    # A common first token alone does not make one group.
    other = (1, 5, 5, 5, 5, 5)
    assert shared([other, *three]) == [5, 4, 4, 4]


@pytest.mark.parametrize(
    "prompts", [WITH_PREFIX, WITH_PREFIX + WITHOUT_PREFIX, WITHOUT_PREFIX, ["a", *WITH_PREFIX]]
)
def test_encoding_prefixes_once_changes_no_logits(tokenizer, prompts):
    model = make_gpt2(tokenizer)
    queries = rows(tokenizer, prompts)
    torch.manual_seed(0)
    responses = [
        torch.randint(3, 40, (length,)) for length in (5, 1, 3, 7, 2, 4, 6, 5)[: len(queries)]
    ]
    packed = pack(queries, responses, 0)
    with torch.no_grad():
        expected = forward(model, *packed[:3], packed.response_ids.shape[1])[0]
    logits = response_logits(model, queries, responses, 0)
    for row, response in enumerate(responses):
        torch.testing.assert_close(
            logits[row, : len(response)], expected[row, : len(response)], rtol=0, atol=2e-5
        )


def test_sampling_gives_the_logits_of_its_tokens(tokenizer):
    model = make_gpt2(tokenizer)
    queries = rows(tokenizer, [*WITHOUT_PREFIX, *WITHOUT_PREFIX, *WITH_PREFIX])
    # Many end tokens, so that responses end at different times.
    model.generation_config.eos_token_id = model.config.eos_token_id = list(range(3, 300, 3))
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
def test_prefixes_are_encoded_once_by_models_that_use_position_ids(name, changes, shares):
    """Models that count padding in distances between tokens encode every prompt whole."""
    policy, queries = (
        tiny(name, **SIZE, **changes),
        [torch.arange(3, 33), torch.arange(3, 24), torch.arange(3, 40)],
    )
    responses = [torch.tensor(ids) for ids in ([5, 6, 7], [8], [9, 10, 11, 12])]
    stems = read_stems(policy, [tuple(query.tolist()) for query in queries], 0)
    assert (stems is not None) == shares
    logits = response_logits(policy, queries, responses, 0)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        with torch.no_grad():
            alone = policy(torch.cat([query, response])[None, :-1]).logits[0, -len(response) :]
        torch.testing.assert_close(logits[row, : len(response)], alone, rtol=0, atol=2e-4)
