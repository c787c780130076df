"""The same functions as transformers' and PyTorch's, with less work."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation

from cory import processes


def lean(model: PreTrainedModel) -> None:
    """Puts the modules of this file in place of a policy's; its parameters and their names stay."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                # In one kernel: transformers writes it as eight, half the time of a small model's update.
                setattr(module, name, GELUTanh())
    embedding = model.get_input_embeddings()
    if type(embedding) is torch.nn.Embedding and embedding.max_norm is None and not embedding.scale_grad_by_freq:
        embedding.__class__ = Embedding


class Embedding(torch.nn.Embedding):
    """An embedding whose gradient is added to the rows that were looked up.

    PyTorch makes an array of the whole vocabulary's size for it, fills it with zeros, and adds it all to the gradient
    that the output layer's weights, where they are the same, have already. Only on the CPU, where this matters and the
    sum is the same in every run; and in one process, as several exchange gradients while they are computed.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids to (batch, length, width)."""
        weight = self.weight
        plain = weight.device.type != "cpu" or not weight.requires_grad or processes.count() > 1
        if plain or not torch.is_grad_enabled() or self.padding_idx is not None:
            return super().forward(input)
        # An input that needs a gradient makes autograd call `backward`; the weights are no input, and get theirs there.
        return _Lookup.apply(input, weight.detach(), weight, torch.zeros((), requires_grad=True))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, values: torch.Tensor, weight: torch.nn.Parameter, needed: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return F.embedding(ids, values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        weight, grad = ctx.weight, grads[0]

        def add() -> None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(weight.grad.dtype))

        # At the end of the pass: by then the output layer has made the gradient, where it shares the weights.
        torch.autograd.Variable._execution_engine.queue_callback(add)
        return None, None, None, None
