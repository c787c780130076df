"""REINFORCE, RLOO, GRPO and its variants: learning from comparisons between responses, without a value head.

`group_size` chains of agents answer each query, with one response per role. Each role has its own baseline, computed
from the chains' rewards in that role. With one agent, this is the ordinary algorithm. With `branches`, several observer
responses follow each pioneer response; their baseline is computed from their own rewards.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.learners.adaptive import KLController
from cory.learners.algorithms import (
    GROUP_ALGORITHMS,
    ResponseTokens,
    group_advantages,
    share_of_equal_groups,
)
from cory.learners.learner import Learner, make_optimizer
from cory.learners.losses import LossTerms, total
from cory.learners.records import BatchSizes, Experience, ForwardPass, OldPolicy, Targets
from cory.models.window import WindowPolicy
from cory.parallel.devices import to_device
from cory.rollout import Rollout


class GroupLearner(Learner):
    """One agent's learner for `config.algorithm`; `cory/learners/algorithms.py` has the formulas.

    Args:
        wrapped: the policy on its device, without a value head.
        reference, tokenizer, config, device: see `Learner`. Settings for values and GAE are ignored.
    """

    wrapper = WindowPolicy

    def __init__(
        self,
        wrapped: WindowPolicy,
        reference: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
    ) -> None:
        # By default, accelerate would move the policy to the process's device; agents may use other devices.
        accelerator = Accelerator(device_placement=False)
        optimizer = make_optimizer(wrapped, config.ppo.learning_rate)
        model, optimizer = accelerator.prepare(wrapped, optimizer)
        super().__init__(
            model=model,
            optimizer=optimizer,
            accelerator=accelerator,
            kl_controller=KLController(config.ppo),
            reference=reference,
            tokenizer=tokenizer,
            config=config,
            device=device,
        )
        self.algorithm = GROUP_ALGORITHMS[config.algorithm](config)

    def row_weights(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Returns each response's weight (rows,) in the loss, which is a mean over responses."""
        lengths = [len(ids) for rollout in rollouts for ids in rollout.response_ids]
        finished = [ended for rollout in rollouts for ended in rollout.finished]
        return self.algorithm.weights(
            super().row_weights(rollouts),
            to_device(torch.tensor(lengths), self.device),
            to_device(torch.tensor(finished), self.device),
        )

    def targets(
        self, old: OldPolicy, rewards: Tensor, mask: Tensor, rollouts: Sequence[Rollout]
    ) -> Targets:
        """Returns one advantage per response, repeated at all its tokens."""
        sizes = [len(rollout.completions) for rollout in rollouts]
        chains = self.config.chains_per_query
        # With branches, the observer responses to one pioneer response form a group. A pioneer's rollout is recognized
        # by its size: it has fewer rows than `batch_size`.
        branches = [self.config.branches if size == self.batch_size else 1 for size in sizes]
        groups = [count if count > 1 else chains for count in branches]
        shares = [
            share_of_equal_groups(role_rewards, group) if group > 1 else None
            for role_rewards, group in zip(rewards.split(sizes), groups, strict=True)
        ]
        if self.algorithm.kl_in_reward:
            log_ratios = (old.logprobs - old.ref_logprobs) * mask  # k1, an estimate of the KL
            rewards = rewards - (self.kl_controller.value * log_ratios).sum(1)
        advantages = [
            group_advantages(role_rewards, self.config.algorithm, chains, count)
            for role_rewards, count in zip(rewards.split(sizes), branches, strict=True)
        ]
        return Targets(torch.cat(advantages)[:, None] * mask, frac_reward_zero_std=shares)

    def loss_terms(
        self,
        new: ForwardPass,
        entropies: Tensor,
        rows: Experience,
        sizes: BatchSizes,
    ) -> LossTerms:
        """The clipped loss, averaged over responses."""
        response_tokens = ResponseTokens(
            logprobs=new.logprobs,
            old_logprobs=rows.old.logprobs,
            ref_logprobs=rows.old.ref_logprobs,
            advantages=rows.targets.advantages,
            mask=rows.mask,
        )
        terms = self.algorithm.losses(response_tokens, self.kl_controller.value)
        loss = (rows.weights * terms.losses).sum() / sizes.responses
        return LossTerms(
            loss=loss,
            policy_loss=loss,
            entropy=total(entropies, rows.mask) / sizes.tokens,
            clip_fraction=total(terms.is_clipped, rows.mask) / sizes.tokens,
            ratio=total(terms.ratio.detach(), rows.mask) / sizes.tokens,
        )
