"""REINFORCE, RLOO, GRPO and its variants: an agent learns from how its response compares with
others, without a value head.

Each query is answered by `group_size` chains. A role's baseline comes from the chains' rewards in
that role, so each role of a chain of any length has its own baseline. With one agent, this is the
ordinary algorithm. Where chains branch, an observer's baseline comes from the other observers of
the same response.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cory.algorithms import GROUP_ALGORITHMS
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
from cory.parallel import distributed
from cory.parallel.devices import to_device


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
    ) -> tuple[Tensor, None]:
        """Logits (batch, R, vocabulary), float32, at the last `width` positions, or at those of
        `index`. See `window.forward`.
        """
        logits, _ = window.forward(
            self.pretrained_model, input_ids, mask, position_ids, width, index=index
        )
        return logits.float(), None


class GroupLearner(Learner):
    """One agent's learner by `config.algorithm`, one of `GROUP_ALGORITHMS`; formulas:
    `group_advantages`, `group_losses`.

    The KL to the reference acts where the algorithm has it: in the `reward` each response loses
    `eta * sum_t log(pi / pi_0)` (k1, sampled); the `loss` gets eta times the k3 estimate times the probability ratio.

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
        optimizer = make_optimizer(wrapped, config.ppo.learning_rate)
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
        self.rule = GROUP_ALGORITHMS[config.algorithm]

    def row_weights(self, rollouts: Sequence[Rollout]) -> Tensor:
        """As of every learner, but for DAPO: 0 where a response was cut at its limit, and a mean over
        tokens in place of responses.
        """
        weights = super().row_weights(rollouts)
        lengths = [len(ids) for rollout in rollouts for ids in rollout.response_ids]
        if self.rule.needs_end:
            finished = [ended for rollout in rollouts for ended in rollout.finished]
            weights = weights * to_device(torch.tensor(finished), self.device)
            lengths = [n * ended for n, ended in zip(lengths, finished, strict=True)]
        if self.rule.loss_over == "batch":
            # The loss is a mean over responses, so it is divided by the mean number of tokens in
            # one, over all processes.
            tokens = to_device(torch.tensor(sum(lengths)), self.device)
            tokens = distributed.all_reduce_sum(tokens) / distributed.world_size()
            weights = weights * len(lengths) / tokens.clamp(min=1)
        return weights

    def targets(
        self, old: Evaluation, rewards: Tensor, mask: Tensor, rollouts: Sequence[Rollout]
    ) -> Targets:
        """An advantage for each response, the same at all its tokens."""
        sizes = [len(rollout.completions) for rollout in rollouts]
        groups = [
            rollout.branches if rollout.branches > 1 else self.config.chains_per_query
            for rollout in rollouts
        ]
        shares = [
            losses.share_of_equal_groups(of_role, group) if group > 1 else None
            for of_role, group in zip(rewards.split(sizes), groups, strict=True)
        ]
        if self.rule.kl_in == "reward":
            log_ratios = (old.logprobs - old.ref_logprobs) * mask
            rewards = rewards - (self.kl_controller.value * log_ratios).sum(1)
        advantages = [
            losses.group_advantages(
                of_role, self.config.algorithm, self.config.chains_per_query, rollout.branches
            )
            for of_role, rollout in zip(rewards.split(sizes), rollouts, strict=True)
        ]
        return Targets(torch.cat(advantages)[:, None] * mask, frac_reward_zero_std=shares)

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
            kl_coef=self.kl_controller.value if self.rule.kl_in == "loss" else 0.0,
            cliprange_high=self.ppo.cliprange_high,
        )
        loss = terms.loss / responses
        return terms.over(tokens)._replace(loss=loss, policy_loss=loss)
