"""REINFORCE, RLOO and GRPO: an agent learns from how its response compares with others, without a value head.

Each query is answered by `group_size` chains. A role's baseline comes from the other chains' rewards in that role, so
each role of a chain of any length has its own baseline. With one agent, this is the ordinary algorithm.
"""

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.errors import one_of
from cory.learners import losses
from cory.learners.learner import Learner, OldPolicy, Rows
from cory.learners.optimizer import make_optimizer
from cory.learners.trl_parts import kl_controller
from cory.policies import window

KL_PLACES = ("reward", "loss")


class WindowPolicy(torch.nn.Module):
    """A policy, evaluated in the response window; no values."""

    def __init__(self, pretrained_model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, None]:
        """Logits (batch, R, vocabulary), float32, of the first four fields of a `Window`."""
        ids, mask, positions, response_ids = tensors
        logits, _ = window.forward(self.pretrained_model, ids, mask, positions, response_ids.shape[1])
        return logits.float(), None


class GroupLearner(Learner):
    """One agent's REINFORCE, RLOO or GRPO.

    Args:
        config: TRL's PPOConfig, from `trl_config`; its keys for values and GAE are ignored.
        model: the policy.
        ref_model, tokenizer, options: see `Learner`.
        algorithm: `grpo`, `dr_grpo`, `rloo` or `reinforce`; their formulas: `losses.group_advantages`, `group_losses`.
        group_size: chains per query. longest: most tokens of a response, for `dr_grpo`.
        kl_in: `reward`: each response's reward loses `eta * sum_t log(pi / pi_0)` (k1, sampled); `loss`: the loss gets
            eta times the k3 estimate.
        optimizer: name and options of one of torch's.

    Raises a UserError if one of these names is unknown.
    """

    STATS = (*(f"ppo/{name.replace('_', '/', 1)}" for name in losses.PolicyStats._fields), "ppo/loss/total")

    def __init__(
        self,
        config: Any,
        model: WindowPolicy,
        ref_model: WindowPolicy | None,
        tokenizer: PreTrainedTokenizerBase,
        *options: Any,
        algorithm: str = "grpo",
        group_size: int = 4,
        longest: int = 1,
        kl_in: str = "reward",
        optimizer: tuple[str, dict[str, Any]] = ("Adam", {}),
        **named: Any,
    ) -> None:
        one_of("algorithm", losses.ALGORITHMS, algorithm)
        one_of("ppo.kl_in", KL_PLACES, kl_in)
        self.algorithm, self.group_size, self.longest, self.kl_in = algorithm, group_size, longest, kl_in
        self.accelerator = Accelerator(gradient_accumulation_steps=config.gradient_accumulation_steps)
        made = make_optimizer(model, config.learning_rate, *optimizer)
        policy = model.pretrained_model
        self.optional_peft_ctx = policy.disable_adapter if isinstance(policy, PeftModel) else nullcontext
        self.model, self.optimizer = self.accelerator.prepare(model, made)
        self.kl_ctl = kl_controller(config)
        super().__init__(config, ref_model, tokenizer, *options, **named)

    def _advantages(self, old: OldPolicy, scores: Tensor, mask: Tensor, parts: int) -> Tensor:
        """An advantage for each response, the same at all its tokens."""
        penalties = torch.zeros_like(old.kl)
        if self.kl_in == "reward":
            penalties = -self.kl_ctl.value * (old.logprobs - old.ref_logprobs) * mask
        rewards = scores + penalties.sum(1)
        advantages = losses.group_advantages(rewards, self.algorithm, self.group_size, parts)
        old.advantages = advantages[:, None] * mask
        return penalties

    def _losses(self, new: Rows, entropies: Tensor, old: OldPolicy, mask: Tensor, scale: Tensor) -> losses.PolicyStats:
        """The clipped loss; times `scale`, so that a mean over tokens is one over responses."""
        coef = self.kl_ctl.value if self.kl_in == "loss" else 0.0
        sampled = old.logprobs, old.ref_logprobs, old.advantages
        settings = self.algorithm, self.config.cliprange, self.longest, coef
        stats = losses.group_losses((new.logprobs, entropies), sampled, mask, *settings)
        return stats._replace(loss_policy=stats.loss_policy * scale)
