"""Gradient checkpointing without dropout.

Transformers recomputes a layer in training mode only, in which some layers drop out by themselves
(OPT, Falcon, XGLM: `dropout(..., training=self.training)`). Here they run in `eval()`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_in_eval(model: nn.Module) -> list[nn.Module]:
    """Makes the layers with gradient checkpointing compute and recompute in `eval()`; returns them.

    Transformers recomputes those whose `training` is set. None has gradient checkpointing where it
    is off.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
    # The model around its layers has the attribute, too. One with code of its own may lack such
    # layers, and recompute its parts itself.
    layers = layers or modules
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
