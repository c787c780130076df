"""Beginnings that prompts share, read once."""

import pytest
import torch
from tiny_models import SIZE, tiny

from cory.models.window import BY_POSITIONS, forward, pack, share_prompts, whole_mask

LENGTHS = [5, 1, 3, 7, 2, 4, 6, 5]
EXAMPLES = torch.arange(40, 68)


def prompts_of_groups():
    """Rows of a prompt need not stand together, and prompts may have different numbers of rows."""
    prompts = [torch.arange(3, 33), torch.arange(4, 24), torch.arange(5, 45)]
    return [prompts[number] for number in (0, 1, 0, 2, 1, 0, 1, 1)]


def prompts_with_examples():
    """The last one is all that the others share."""
    rests = [torch.randint(3, 40, (length,)) for length in (4, 1, 6, 3, 5, 2, 4)]
    return [torch.cat([EXAMPLES, rest]) for rest in rests] + [EXAMPLES]


def prompts_with_two_kinds_of_examples():
    prompts = [torch.cat([EXAMPLES, torch.randint(3, 40, (2,))]) for _ in range(5)]
    return prompts + [torch.cat([EXAMPLES.flip(0)[:20], torch.tensor([i])]) for i in (7, 9, 7)]


def batch(prompts=prompts_of_groups):
    torch.manual_seed(0)
    responses = [torch.randint(3, 40, (length,)) for length in LENGTHS]
    return pack(prompts(), responses, 0)


def plainly(model, window):
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
def test_a_response_sees_its_prompt_and_itself(name, prompts, rows):
    """Logits, hidden states and gradients are those of rows with a prompt each."""
    model = tiny(name, **SIZE).double()
    window = batch(prompts)
    assert len(share_prompts(model, window).input_ids) == rows
    outputs, gradients = [], []
    for way in (plainly, shared):
        model.zero_grad()
        logits, hidden = way(model, window)
        tokens = window.response_mask.bool()
        logprobs = logits.log_softmax(-1).gather(-1, window.response_ids[..., None])[tokens]
        (logprobs * torch.arange(1, len(logprobs) + 1)[:, None]).mean().backward()
        outputs.append((logits[tokens], hidden[tokens]))
        gradients.append([p.grad for p in model.parameters()])
    # Some families compute norms and rotations in float32.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_a_batch_is_laid_out_only_where_that_is_less_work():
    model = tiny("gpt2", **SIZE)
    responses = [torch.arange(3, 8)] * 8
    alone = pack([torch.arange(3 + i, 13 + i) for i in range(8)], responses, 0)
    assert share_prompts(model, alone) is None
    # Behind one another, long responses attend to more than they save; many stand behind several copies.
    long = pack([torch.tensor([3])] * 8, [torch.arange(3, 40)] * 8, 0)
    assert share_prompts(model, long) is None
    many = pack([torch.arange(3, 33)] * 16, [torch.arange(3, 13)] * 16, 0)
    assert 1 < len(share_prompts(model, many).input_ids) < 16


def test_models_that_count_padding_or_have_other_masks_are_read_as_before():
    assert share_prompts(tiny("bloom", **SIZE), batch()) is None
    model = tiny("gpt2", **SIZE)
    model.set_attn_implementation("eager")
    assert share_prompts(model, batch()) is None
