"""PPO for one agent: the update of `trl.PPOTrainer` (0.11.4), computed only at response positions.

`update()` computes the same as `trl.PPOTrainer.step()` (tests compare the two). docs/paper.md lists
the intended differences.

Only this file uses TRL.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
import trl
import trl.trainer.ppo_trainer as trl_ppo
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cory.config import Config, PPOConfig
from cory.errors import UserError
from cory.learners import losses
from cory.learners.learner import Learner, make_optimizer
from cory.learners.losses import LossTerms
from cory.learners.records import BatchSizes, Experience, ForwardPass, OldPolicy, Targets
from cory.models import window
from cory.models.lora import LanguageModel
from cory.parallel import distributed
from cory.rollout import Rollout


class PolicyWithValueHead(trl.AutoModelForCausalLMWithValueHead):
    """TRL's policy with a value head on the last hidden layer (Eq. 10), evaluated only at response positions."""

    def __init__(self, pretrained_model: LanguageModel) -> None:
        if not any(hasattr(pretrained_model, name) for name in self.lm_head_namings):
            got = f"a model of type {pretrained_model.config.model_type}"
            raise UserError(
                f"model.name: expected a model whose output layer is one of {self.lm_head_namings}, got {got}. "
                "TRL looks for these names"
            )
        sizes = ("hidden_size", "word_embed_proj_dim")
        if not any(hasattr(pretrained_model.config, name) for name in sizes):
            got = f"a model of type {pretrained_model.config.model_type}"
            raise UserError(
                f"model.name: expected a model whose configuration has one of {sizes}, got {got}. "
                "TRL's value head reads it; only PPO has a value head"
            )
        super().__init__(pretrained_model)
        # TRL sets this in its own loading code, which is not used here.
        self.is_peft_model = isinstance(pretrained_model, PeftModel)

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Returns float32 logits (rows, R, vocabulary) and values (rows, R); takes the fields of `PassInputs`."""
        logits, hidden = window.forward(self.pretrained_model, *inputs)
        values = self.v_head(hidden).squeeze(-1).float()  # Eq. 10
        return logits.float(), values


class PPOLearner(Learner):
    """PPO (Eq. 10 to 13), with the model, optimizer, accelerator and KL controller of a `trl.PPOTrainer`.

    Args:
        wrapped: the policy with a value head, on its device.
        reference, tokenizer, config, device: see `Learner`.
    """

    wrapper = PolicyWithValueHead

    def __init__(
        self,
        wrapped: PolicyWithValueHead,
        reference: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
    ) -> None:
        trainer = make_trainer(wrapped, tokenizer, config)
        super().__init__(
            model=trainer.model,
            optimizer=trainer.optimizer,
            accelerator=trainer.accelerator,
            kl_controller=trainer.kl_ctl,
            reference=reference,
            tokenizer=tokenizer,
            config=config,
            device=device,
        )
        self.trainer = trainer

    def targets(
        self, old: OldPolicy, rewards: Tensor, mask: Tensor, rollouts: Sequence[Rollout]
    ) -> Targets:
        """Computes GAE from token rewards.

        Advantages are whitened per role, so that a role's higher rewards do not count as advantages.
        """
        kl_coef = self.kl_controller.value
        token_rewards = losses.token_rewards(rewards, old.kl, mask, kl_coef)  # Eq. 2
        advantages, returns = [], []
        start = 0
        for rollout in rollouts:
            rows = slice(start, start + len(rollout.completions))
            role_advantages, role_returns = losses.gae(  # Eq. 12
                old.values[rows],
                token_rewards[rows],
                mask[rows],
                self.ppo.gamma,
                self.ppo.lam,
                scores_alike=losses.all_alike(rewards[rows]),
            )
            advantages.append(role_advantages)
            returns.append(role_returns)
            start = rows.stop
        return Targets(torch.cat(advantages), torch.cat(returns))

    def loss_terms(
        self,
        new: ForwardPass,
        entropies: Tensor,
        rows: Experience,
        sizes: BatchSizes,
    ) -> LossTerms:
        """The clipped losses of policy and values (Eq. 11, 13), averaged over response tokens."""
        old = rows.old
        targets = rows.targets
        assert new.values is not None and targets.returns is not None
        terms = losses.ppo_losses(
            logprobs=new.logprobs,
            values=new.values,
            entropies=entropies,
            old_logprobs=old.logprobs,
            old_values=old.values,
            advantages=targets.advantages,
            returns=targets.returns,
            mask=rows.mask,
            weights=rows.weights,
            cliprange=self.ppo.cliprange,
            cliprange_value=self.ppo.cliprange_value,
            vf_coef=self.ppo.vf_coef,
            cliprange_high=self.ppo.cliprange_high,
        )
        return terms.over(sizes.tokens)


# Settings that TRL does not have.
NOT_IN_TRL = ("micro_batch", "warmup_iterations", "value_head_init", "cliprange_high")
# Settings that TRL names differently.
TRL_NAMES = {
    "adaptive_kl": "adap_kl_ctrl",
    "kl_target": "target",
    "kl_horizon": "horizon",
    "reward_scaling": "use_score_scaling",
    "reward_normalization": "use_score_norm",
}


def trl_config(ppo: PPOConfig) -> trl.PPOConfig:
    """Returns the settings under TRL's names; batch sizes are per process."""
    settings = {
        TRL_NAMES.get(name, name): value
        for name, value in asdict(ppo).items()
        if name not in NOT_IN_TRL
    }
    for name in ("batch_size", "mini_batch_size"):
        settings[name] //= distributed.world_size()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`PPOConfig` is deprecated", category=FutureWarning
        )
        # TRL would move every policy to the process's device; agents may use other devices.
        return trl.PPOConfig(accelerator_kwargs={"device_placement": False}, **settings)


def make_trainer(
    wrapped: PolicyWithValueHead, tokenizer: PreTrainedTokenizerBase, config: Config
) -> trl.PPOTrainer:
    """Returns TRL's trainer for a wrapped policy, with our optimizer and without TRL's reference model."""
    with (
        warnings.catch_warnings(),
        # TRL reseeds the global generators here, which would restart the run's random streams.
        patch.object(trl_ppo, "set_seed", lambda seed: None),
        # TRL would also copy the policy as its reference, and prepare the frozen copy for exchanging gradients.
        patch.object(trl_ppo, "create_reference_model", lambda *args, **kwargs: None),
    ):
        for message in (
            "`PPOTrainer` is deprecated",
            "No dataset is provided",
            "`is_gradient_checkpointing`",
        ):
            warnings.filterwarnings("ignore", message=message)
        return trl.PPOTrainer(
            config=trl_config(config.ppo),
            model=wrapped,
            ref_model=None,
            tokenizer=tokenizer,
            optimizer=make_optimizer(wrapped, config.ppo.learning_rate),
        )
