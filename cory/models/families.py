"""Checks that padding and the cache do not change a model's log-probabilities.

Sampling and training use padded batches. A model that reads padding as text, or a cache that is passed on wrongly,
silently gives the log-probabilities of another text.
"""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig
from cory.errors import UserError
from cory.models.prefixes import response_logits
from cory.models.sample import sample
from cory.models.text import pad_token
from cory.parallel.sharding import device_of
from cory.streams import Purpose, Stream

# Model types that use only attention. tests/models/test_families.py checks them, so runs skip the check.
TESTED = (
    "bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "mistral", "mixtral",
    "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
PROMPTS, RESPONSES = (2, 5, 9), (5, 3, 7)  # tokens
# Largest accepted change due to padding, relative to the change from leaving out a text's first token. In tiny
# models, rounding to bfloat16 gives up to 0.07; reading padding, or losing the cache, gives 0.2 to 760.
LIMIT = 0.1


@torch.no_grad()
def check_model(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, samples: bool = True
) -> None:
    """Compares a small padded batch, and a few sampled tokens, with passes over single texts.

    Models of a type in `TESTED` are skipped if they use transformers' own code. The model must be in `eval()`.

    Args:
        samples: whether to check sampling, too; False if an inference engine samples.

    Raises a UserError that names the model's type if log-probabilities differ by more than rounding.
    """
    is_in_transformers = type(model.config).__module__.startswith("transformers.models.")
    if is_in_transformers and model.config.model_type in TESTED:
        return
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(sum(PROMPTS + RESPONSES)) * 37 % (vocabulary - 5) + 5
    texts = tokens.split(PROMPTS + RESPONSES)
    queries = list(texts[: len(PROMPTS)])
    responses = list(texts[len(PROMPTS) :])
    logits = response_logits(model, queries, responses, pad_token(tokenizer))
    _compare(model, "in a padded batch", logits, queries, responses)
    if samples:
        queries = [*queries, queries[0]]  # a repeated query, as with several responses per query
        generator = Stream(seed=0, purpose=Purpose.MODEL_CHECK).torch()
        sampled = sample(
            model,
            tokenizer,
            queries,
            SamplingConfig(1, max(RESPONSES)),
            generator,
            ends=(),
            keep_logits=True,
        )
        logits_seen = [torch.stack(row) for row in sampled.logits]
        _compare(model, "while sampling in a padded batch", logits_seen, queries, sampled.responses)


def _compare(
    model: PreTrainedModel,
    case: str,
    logits: Sequence[Tensor] | Tensor,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
) -> None:
    """Raises a UserError if the responses' logits change when each text runs alone.

    Args:
        logits: logits (T, vocabulary) of each response, with T at least the response's length.
    """
    differences, scales = [], []
    for row, query, response in zip(logits, queries, responses, strict=True):
        text = torch.cat([query, response])
        in_batch = row[: len(response)].float().log_softmax(-1)
        alone = _alone(model, text, len(response))
        without_first = _alone(model, text[1:], len(response))
        differences.append((in_batch - alone).abs().mean(-1))
        scales.append((without_first - alone).abs().mean(-1))
    difference = torch.cat(differences).mean().item()
    scale = torch.cat(scales).mean().item()
    if not difference <= LIMIT * scale + 1e-6:  # also true for NaN
        raise UserError(
            "model.name: expected a model whose outputs do not depend on padding, got one of type "
            f"{model.config.model_type}: {case}, its log-probabilities differ by {difference:.2g} nats a token from "
            f"those of the text alone. The limit is {LIMIT * scale:.2g}, a tenth of the change from leaving out the "
            "text's first token"
        )


def _alone(model: PreTrainedModel, text: Tensor, count: int) -> Tensor:
    """Returns log-probabilities (count, vocabulary) at a text's last `count` tokens, from one plain pass."""
    logits = model(input_ids=text[None, :-1].to(device_of(model)), use_cache=False).logits
    return logits[0, -count:].float().log_softmax(-1)
