"""One agent's PPO: TRL's PPOTrainer (0.11.4) in the response window. Only this file and trl_parts.py use TRL internals.

`step()` computes what TRL's does (tests compare the two). Differences are listed in `cory/learners/learner.py`, and:

* constructing a trainer leaves the random streams alone (TRL reseeds everything);
* agents share one frozen reference; gradient clipping works after the first step, and reward scaling works at all.
"""

import warnings
from typing import Any
from unittest.mock import patch

import trl
import trl.trainer.ppo_trainer as trl_ppo
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cory.learners import losses
from cory.learners.learner import Learner, OldPolicy, Rows
from cory.learners.optimizer import make_optimizer
from cory.learners.trl_parts import PolicyWithValueHead


class PPOTrainer(Learner, trl.PPOTrainer):
    """TRL's PPOTrainer in the response window.

    Args:
        config: TRL's PPOConfig, e.g. from `trl_config`.
        model: the policy.
        ref_model, tokenizer, options: see `Learner`.
        optimizer: name and options of one of torch's; default Adam.
    """

    STATS = (
        *(f"ppo/{name.replace('_', '/', 1)}" for name in losses.LossStats._fields),
        *(f"ppo/{name}" for name in ("loss/total", "returns/mean", "returns/var", "val/mean", "val/var")),
    )

    def __init__(
        self,
        config: trl.PPOConfig,
        model: PolicyWithValueHead,
        ref_model: PolicyWithValueHead | None,
        tokenizer: PreTrainedTokenizerBase,
        *options: Any,
        optimizer: tuple[str, dict[str, Any]] = ("Adam", {}),
        **named: Any,
    ) -> None:
        made = make_optimizer(model, config.learning_rate, *optimizer)
        with (
            warnings.catch_warnings(),
            # TRL reseeds everything here, so that making an agent would restart every random stream of the run.
            patch.object(trl_ppo, "set_seed", lambda seed: None),
            # It would also wrap the reference to exchange gradients that it does not have.
            patch.object(trl_ppo, "create_reference_model", lambda *args, **kwargs: None),
        ):
            for message in ("`PPOTrainer` is deprecated", "No dataset is provided", "`is_gradient_checkpointing`"):
                warnings.filterwarnings("ignore", message=message)
            trl.PPOTrainer.__init__(
                self, config=config, model=model, ref_model=None, tokenizer=tokenizer, optimizer=made
            )
        Learner.__init__(self, config, ref_model, tokenizer, *options, **named)

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `losses.gae`."""
        return losses.gae(values, rewards, mask, self.config.gamma, self.config.lam, self.config.whiten_rewards)

    def _advantages(self, old: OldPolicy, scores: Tensor, mask: Tensor, parts: int) -> Tensor:
        """GAE (Eq. 12) on token rewards (Eq. 2)."""
        rewards, penalties = losses.token_rewards(scores, old.kl, mask, self.kl_ctl.value)
        old.values, old.advantages, old.returns = self.compute_advantages(old.values, rewards, mask)
        return penalties

    def _losses(self, new: Rows, entropies: Tensor, old: OldPolicy, mask: Tensor, scale: Tensor) -> losses.LossStats:
        """The clipped losses of policy and values (Eq. 11, 13)."""
        assert new.values is not None
        sampled = [old.logprobs, old.values, old.advantages, old.returns]
        clips = self.config.cliprange, self.config.cliprange_value
        return losses.ppo_losses((new.logprobs, new.values, entropies), sampled, mask, *clips)

    def _loss(self, terms: Any) -> Tensor:
        return terms[0] + self.config.vf_coef * terms[1]

    def _moments(self, old: OldPolicy, index: list[int], mask: Tensor) -> list[Tensor]:
        return [m for x in (old.returns, old.values) for m in losses.mean_and_variance(x[index], mask)]
