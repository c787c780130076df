"""REINFORCE, RLOO and GRPO: an agent learns from how its response compares with others, without a
value head.

Each query is answered by `group_size` chains. A role's baseline comes from the other chains'
rewards in that role, so each role of a chain of any length has its own baseline. With one agent,
this is the ordinary algorithm. Where chains branch, an observer's baseline comes from the other
observers of the same response.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.learners import losses
from cory.learners.learner import Learner
from cory.learners.losses import LossTerms
from cory.learners.optimizer import make_optimizer
from cory.learners.records import Evaluation, Experience, ForwardPass, Targets
from cory.learners.trl_parts import make_kl_controller
from cory.models import window
from cory.models.lora import LanguageModel
from cory.models.rollout import Rollout


class WindowPolicy(torch.nn.Module):
    """A policy, evaluated in the response window; no values."""

    def __init__(self, pretrained_model: LanguageModel) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model

    def forward(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        position_ids: Tensor,
        width: int,
        index: Tensor | None = None,
        run_head: bool = True,
    ) -> tuple[Tensor, None]:
        """Logits (batch, R, vocabulary), float32, at the last `width` positions, or at those of
        `index`; without `run_head` the hidden states there. See `window.forward`.
        """
        logits, hidden = window.forward(
            self.pretrained_model,
            input_ids,
            mask,
            position_ids,
            width,
            index=index,
            run_head=run_head,
        )
        return logits.float() if run_head else hidden, None


class GroupLearner(Learner):
    """One agent's REINFORCE, RLOO or GRPO, by `config.algorithm`; formulas: `group_advantages`,
    `group_losses`.

    The KL to the reference acts where `config.ppo.kl_in` says:

    * `reward`: each response's reward loses `eta * sum_t log(pi / pi_0)` (k1, sampled);
    * `loss`: the loss gets eta times the k3 estimate;
    * `auto`: the loss for GRPO and Dr. GRPO, else the reward.

    Args:
        wrapped: the policy on its device, without a value head.
        reference, tokenizer, config, device: see `Learner`. The settings of values and GAE are
            ignored.
    """

    def __init__(
        self,
        wrapped: WindowPolicy,
        reference: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
    ) -> None:
        # It would place the policy on the process's device. Agents may have others.
        accelerator = Accelerator(device_placement=False)
        optimizer = make_optimizer(wrapped, config.ppo)
        model, optimizer = accelerator.prepare(wrapped, optimizer)
        super().__init__(
            model=model,
            optimizer=optimizer,
            accelerator=accelerator,
            kl_controller=make_kl_controller(config.ppo),
            reference=reference,
            tokenizer=tokenizer,
            config=config,
            device=device,
        )
        self.kl_in: str = config.ppo.kl_in
        if self.kl_in == "auto":
            self.kl_in = "loss" if config.algorithm in ("grpo", "dr_grpo") else "reward"

    def targets(
        self, old: Evaluation, rewards: Tensor, mask: Tensor, rollouts: Sequence[Rollout]
    ) -> Targets:
        """An advantage for each response, the same at all its tokens."""
        if self.kl_in == "reward":
            log_ratios = (old.logprobs - old.ref_logprobs) * mask
            rewards = rewards - (self.kl_controller.value * log_ratios).sum(1)
        rewards_by_role = rewards.split([len(rollout.completions) for rollout in rollouts])
        advantages = [
            losses.group_advantages(
                of_role, self.config.algorithm, self.config.chains_per_query, rollout.branches
            )
            for of_role, rollout in zip(rewards_by_role, rollouts, strict=True)
        ]
        return Targets(torch.cat(advantages)[:, None] * mask)

    def loss_terms(
        self,
        new: ForwardPass,
        entropies: Tensor,
        rows: Experience,
        tokens: Tensor,
        responses: int,
    ) -> LossTerms:
        """The clipped loss, whose mean is over responses."""
        terms = losses.group_losses(
            logprobs=new.logprobs,
            entropies=entropies,
            old_logprobs=rows.old.logprobs,
            ref_logprobs=rows.old.ref_logprobs,
            advantages=rows.targets.advantages,
            mask=rows.mask,
            weights=rows.weights,
            algorithm=self.config.algorithm,
            cliprange=self.ppo.cliprange,
            max_new_tokens=self.config.sampling.max_new_tokens,
            kl_coef=self.kl_controller.value if self.kl_in == "loss" else 0.0,
        )
        loss = terms.loss / responses
        return terms.over(tokens)._replace(loss=loss, policy_loss=loss)
