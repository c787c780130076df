"""Limits the memory of a pass: rows per pass, retries with fewer rows, and gradient checkpointing."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from cory.config import Config
from cory.errors import UserError
from cory.models.lora import LanguageModel
from cory.models.window import Window
from cory.parallel import distributed
from cory.parallel.devices import is_out_of_memory

P = ParamSpec("P")
T = TypeVar("T")

# Limit for an array (rows, response tokens, vocabulary) of a pass, in elements: 1 GiB of float32 on a CPU, 4 GiB on
# a GPU. A pass holds several at once: logits, log-probabilities, gradients.
LARGEST = {"cpu": 2**28, "cuda": 2**30}
# A lower limit for reference, KL and entropy, where small passes cost little time.
LARGEST_WITHOUT_GRADIENT = {"cpu": 2**24, "cuda": 2**28}


def rows_within(
    largest: Mapping[str, int], device: torch.device, model: LanguageModel, positions: int
) -> int:
    """Returns how many rows, at least one, keep an array (rows, positions, vocabulary) within a limit.

    Args:
        largest: the limit in elements by device type, `LARGEST` or `LARGEST_WITHOUT_GRADIENT`.
    """
    vocabulary = model.config.get_text_config().vocab_size
    elements = largest.get(device.type, largest["cpu"])
    return max(1, elements // (positions * vocabulary))


class PassSize:
    """The number of rows per pass.

    Args:
        policy: the causal language model, on `device`.
        config: the run's settings.
        device: where the passes run.

    Attributes:
        micro_batch: rows per pass with gradient, at most this process's share of a mini-batch.
    """

    def __init__(self, policy: LanguageModel, config: Config, device: torch.device) -> None:
        self.policy = policy
        self.config = config
        self.device = device
        rows = config.ppo.micro_batch
        if rows == "auto":
            rows = rows_within(LARGEST, device, policy, config.longest_response)
        self.micro_batch = min(config.ppo.mini_batch_size // distributed.world_size(), rows)

    def rows_without_gradient(self, window: Window) -> int:
        """Returns the rows per pass without gradient: at most a micro-batch, and few enough that their
        log-probabilities (rows, R, vocabulary) fit in `LARGEST_WITHOUT_GRADIENT`.
        """
        longest = max(window.response_lengths)
        rows = rows_within(LARGEST_WITHOUT_GRADIENT, self.device, self.policy, longest)
        return min(self.micro_batch, rows)

    def retrying(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `compute`; with `ppo.micro_batch: auto`, halves the rows and retries if memory runs out.

        Raises a UserError if a single row does not fit.
        """
        # With several ranks, the others would wait forever for a rank that retries.
        is_fixed = self.config.ppo.micro_batch != "auto" or distributed.world_size() > 1
        while True:
            try:
                return compute(*args, **kwargs)
            except RuntimeError as error:
                if is_fixed or not is_out_of_memory(error):
                    raise
                # Drop the traceback, whose frames keep the pass's tensors alive.
                failure = error.with_traceback(None)
            clear_device_cache(garbage_collection=True)
            self._halve(failure)

    def _halve(self, failure: RuntimeError) -> None:
        """Halves the micro-batch. Raises a UserError, caused by `failure`, if it is already a single row."""
        if self.micro_batch == 1:
            raise UserError(
                "ppo.micro_batch: expected memory for at least one row at a time, got too little. Use "
                "model.gradient_checkpointing, lora.rank or precision: bf16, or shorten sampling.max_new_tokens "
                "or the prompts"
            ) from failure
        self.micro_batch = (self.micro_batch + 1) // 2
        warnings.warn(
            f"Out of memory: continuing with {self.micro_batch} rows per pass. Each optimizer step still "
            f"uses the whole mini-batch. To avoid this retry, set ppo.micro_batch to {self.micro_batch}",
            stacklevel=3,
        )


def recompute_in_eval(model: nn.Module) -> list[nn.Module]:
    """Sets layers that use gradient checkpointing to compute and recompute in `eval()`; returns these layers.

    Transformers recomputes only layers in training mode, but in this mode some layers apply dropout (OPT, Falcon,
    XGLM: `dropout(..., training=self.training)`). The result is empty if gradient checkpointing is off.

    Raises a UserError if the model implements gradient checkpointing in its own code.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
    if modules and not layers:
        raise UserError(
            "model.gradient_checkpointing: expected a model built from transformers' GradientCheckpointingLayer, "
            f"got a {type(modules[0]).__name__}. Set this key to false"
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_checkpoint, layer)
    return layers


def _checkpoint(layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """Computes and recomputes `forward(*args)` in `eval()`, for a layer in training mode."""

    def in_eval(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(in_eval, *args, use_reentrant=False)
