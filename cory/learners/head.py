"""The output layer in chunks of positions, where a micro-batch times the vocabulary is large.

A pass that runs the whole output layer makes arrays (rows, R, vocabulary): logits, log-probabilities,
gradients. Here the model stops at the hidden states that its output layer reads. A chunk of them is
projected, its log-probabilities are read, and are dropped. The backward pass makes them again, a
chunk at a time, by `torch.utils.checkpoint`.

The numbers are those of the whole arrays but for rounding. A backward pass costs one more
projection, the full KL two.
"""

from typing import NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cory.learners import losses
from cory.metrics import full_kl
from cory.models.lora import LanguageModel
from cory.parallel import sharding

# Elements of an array over the vocabulary at a time, where no gradient needs more: passes of the
# reference, KL and entropy; with the output layer in chunks, every pass. It bounds the memory where
# the vocabulary is large.
CHUNK = {"cpu": 2**24, "cuda": 2**28}
# The largest (rows, R, vocabulary) array of a micro-batch, in elements, that is made whole: 1 GiB of
# float32 on a CPU, 4 GiB on a GPU. A pass needs several at a time.
WHOLE = {"cpu": 2**28, "cuda": 2**30}


class ChunkedHead(NamedTuple):
    """The output layer of a pass, and what it reads.

    layer: from hidden states to logits. hidden: (rows, R, width). positions: of a chunk.
    temperature: by which the logits are divided.
    """

    layer: nn.Module
    hidden: Tensor
    positions: int
    temperature: float

    def select(self, rows: Tensor, width: int) -> "ChunkedHead":
        """The rows of these indices, cut to `width` tokens."""
        return self._replace(hidden=self.hidden[rows, :width])

    def token_logprobs(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens `ids`, which carry the gradient, and entropies in nats,
        which do not; all (rows, R).
        """
        chunks = zip(self._chunks(), ids.flatten().split(self.positions), strict=True)
        parts = [
            # The layer has no dropout, so the state of random numbers need not be kept.
            checkpoint(self._of_tokens, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs).view_as(ids), torch.cat(entropies).view_as(ids)

    @torch.no_grad()
    def kl(self, reference: "ChunkedHead") -> Tensor:
        """KL(pi, pi_0) over the vocabulary (Eq. 2), in nats, (rows, R).

        `reference`: of a pass over the same tokens.
        """
        parts = [
            full_kl(
                self._logits(hidden).log_softmax(-1),
                reference._logits(other).log_softmax(-1),
            )
            for hidden, other in zip(self._chunks(), reference._chunks(), strict=True)
        ]
        return torch.cat(parts).view(self.hidden.shape[:2])

    def _chunks(self) -> tuple[Tensor, ...]:
        return self.hidden.flatten(0, 1).split(self.positions)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32, as those of the learners' policies, over the temperature."""
        return self.layer(hidden).float() / self.temperature

    def _of_tokens(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities and entropies (positions,) of a chunk."""
        logprobs, all_logprobs = losses.TokenLogprobs.apply(self._logits(hidden), ids)
        return logprobs, losses.entropy(all_logprobs, rows=len(all_logprobs))


def limit(sizes: dict[str, int], device: torch.device) -> int:
    """The entry of `CHUNK` or `WHOLE` for a device."""
    return sizes.get(device.type, sizes["cpu"])


def positions_at_a_time(
    model: LanguageModel,
    device: torch.device,
    rows: int,
    max_new_tokens: int,
    whole: dict[str, int],
) -> int | None:
    """The positions of a chunk, or None where passes make arrays (rows, R, vocabulary) whole.

    They do where such an array has at most `whole` elements, where the policy is sharded, as its
    output layer is put together for a whole pass only, and where the model changes what the output
    layer gives.

    Args:
        device: where the model computes.
        rows: of a micro-batch.
        max_new_tokens: of a response.
        whole: `WHOLE`, or `CHUNK` where memory has run out.
    """
    vocabulary = model.config.get_text_config().vocab_size
    if rows * max_new_tokens * vocabulary <= limit(whole, device):
        return None
    if sharding.is_sharded(model) or not ends_with_output_layer(model, device):
        return None
    return max(1, limit(CHUNK, device) // vocabulary)


@torch.no_grad()
def ends_with_output_layer(model: LanguageModel, device: torch.device) -> bool:
    """Whether a model's logits are what its output layer gives, neither scaled nor capped nor cut.

    Tried with a pass over one token, in which a ramp takes the place of the layer's output.
    """
    ramps: list[Tensor] = []

    def replace(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        ramp = torch.linspace(-1000, 1000, output.shape[-1], device=output.device)
        ramps.append(ramp.to(output.dtype).expand_as(output).clone())
        return ramps[-1].clone()  # models may change it in place

    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    hook = model.get_output_embeddings().register_forward_hook(replace)
    try:
        logits = model(input_ids=token, use_cache=False).logits
    finally:
        hook.remove()
    return torch.equal(logits.float(), ramps[-1].float())


def output_layer(model: LanguageModel) -> nn.Module:
    """A model's output layer; without its adapter where adapters are off at the moment."""
    layer = model.get_output_embeddings()
    if isinstance(layer, BaseTunerLayer) and layer.disable_adapters:
        return layer.get_base_layer()
    return layer
