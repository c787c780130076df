"""Memory of a pass: how many rows it reads at a time, fewer where memory runs out, and what it recomputes."""

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

# The largest array (rows, R, vocabulary) of a pass, in elements: 1 GiB of float32 on a CPU, 4 GiB on
# a GPU. A pass needs several at a time: logits, log-probabilities, gradients.
LARGEST = {"cpu": 2**28, "cuda": 2**30}
# The same where fewer rows cost little: passes of the reference, KL and entropy.
LARGEST_WITHOUT_GRADIENT = {"cpu": 2**24, "cuda": 2**28}


def rows_within(
    largest: Mapping[str, int], device: torch.device, model: LanguageModel, positions: int
) -> int:
    """The most rows, but at least one, whose array (rows, positions, vocabulary) is within a limit.

    `largest`: elements by type of device, `LARGEST` or `LARGEST_WITHOUT_GRADIENT`.
    """
    vocabulary = model.config.get_text_config().vocab_size
    elements = largest.get(device.type, largest["cpu"])
    return max(1, elements // (positions * vocabulary))


class PassSize:
    """Rows of a pass.

    Args:
        policy: the causal language model, on `device`.
        config: the run's settings.
        device: where the passes run.

    Attributes:
        micro_batch: rows of a pass with gradient, at most this process's share of a mini-batch.
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
        """The most rows of a pass without gradient: of a micro-batch, those whose log-probabilities
        (rows, R, vocabulary) are within `LARGEST_WITHOUT_GRADIENT`.
        """
        longest = max(window.response_lengths)
        rows = rows_within(LARGEST_WITHOUT_GRADIENT, self.device, self.policy, longest)
        return min(self.micro_batch, rows)

    def retrying(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `compute`; with `ppo.micro_batch: auto`, halves the rows and repeats if memory runs out.

        Raises a UserError if it runs out with a single row.
        """
        # Other processes would wait in vain.
        is_fixed = self.config.ppo.micro_batch != "auto" or distributed.world_size() > 1
        while True:
            try:
                return compute(*args, **kwargs)
            except RuntimeError as error:
                if is_fixed or not is_out_of_memory(error):
                    raise
                # The frames of its traceback hold what the pass has computed.
                failure = error.with_traceback(None)
            clear_device_cache(garbage_collection=True)
            self._halve(failure)

    def _halve(self, failure: RuntimeError) -> None:
        """Halves the micro-batch. Raises a UserError, caused by `failure`, if it is a single row."""
        if self.micro_batch == 1:
            raise UserError(
                "ppo.micro_batch: expected memory for at least one row at a time, got too little. Use "
                "model.gradient_checkpointing, lora.rank or precision: bf16, or shorten sampling.max_new_tokens "
                "or the prompts"
            ) from failure
        self.micro_batch = (self.micro_batch + 1) // 2
        warnings.warn(
            f"Out of memory: continuing with {self.micro_batch} rows at a time. Updates still "
            f"use the whole mini-batch. To start this way: ppo.micro_batch {self.micro_batch}",
            stacklevel=3,
        )


def recompute_in_eval(model: nn.Module) -> list[nn.Module]:
    """Makes the layers with gradient checkpointing compute and recompute in `eval()`; returns them.

    Transformers recomputes a layer in training mode only, in which some layers drop out by themselves
    (OPT, Falcon, XGLM: `dropout(..., training=self.training)`). None has gradient checkpointing where
    it is off. Raises a UserError if the model has it in code of its own.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
    if modules and not layers:
        raise UserError(
            "model.gradient_checkpointing: expected a model of transformers' GradientCheckpointingLayers, "
            f"got a {type(modules[0]).__name__}. Set it to false"
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_checkpoint, layer)
    return layers


def _checkpoint(layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """`forward(*args)` of a layer in training mode, computed and recomputed in `eval()`."""

    def in_eval(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(in_eval, *args, use_reentrant=False)
