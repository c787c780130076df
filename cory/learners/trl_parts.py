"""TRL's parts that its trainer is made of, with what they need to work here: policy, settings, running moments."""

import warnings

import torch
import trl
import trl.trainer.utils as trl_utils
from peft import PeftModel
from transformers import PreTrainedModel

from cory.config import PPOConfig
from cory.policies import window
from cory.run import processes


class PolicyWithValueHead(trl.AutoModelForCausalLMWithValueHead):
    """TRL's policy with a value head on the last hidden layer (Eq. 10), evaluated in the response window."""

    def __init__(self, pretrained_model: PreTrainedModel | PeftModel) -> None:
        super().__init__(pretrained_model)
        self.is_peft_model = isinstance(pretrained_model, PeftModel)  # TRL's own loading sets it, which we do without

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        response_ids: torch.Tensor,
        **_: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (batch, R, vocabulary) and values (batch, R), float32; response_ids (batch, R) sets the window."""
        logits, hidden = window.forward(
            self.pretrained_model, input_ids, attention_mask, position_ids, response_ids.shape[1]
        )
        return logits.float(), self.v_head(hidden).squeeze(-1).float()


def trl_config(ppo: PPOConfig, seed: int) -> trl.PPOConfig:
    """The settings under TRL's names; batches are one process's share."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`PPOConfig` is deprecated", category=FutureWarning)
        return trl.PPOConfig(
            seed=seed,
            learning_rate=ppo.learning_rate,
            batch_size=ppo.batch_size // processes.world_size(),
            mini_batch_size=ppo.mini_batch_size // processes.world_size(),
            gradient_accumulation_steps=ppo.gradient_accumulation_steps,
            ppo_epochs=ppo.ppo_epochs,
            init_kl_coef=ppo.init_kl_coef,
            adap_kl_ctrl=ppo.adaptive_kl,
            target=ppo.kl_target,
            horizon=ppo.kl_horizon,
            kl_penalty=ppo.kl_penalty,
            gamma=ppo.gamma,
            lam=ppo.lam,
            cliprange=ppo.cliprange,
            cliprange_value=ppo.cliprange_value,
            vf_coef=ppo.vf_coef,
            max_grad_norm=ppo.max_grad_norm,
            ratio_threshold=ppo.ratio_threshold,
            use_score_scaling=ppo.reward_scaling,
            use_score_norm=ppo.reward_normalization,
            score_clip=ppo.reward_clip,
            whiten_rewards=ppo.whiten_rewards,
        )


class RunningMoments(trl_utils.RunningMoments):
    """Running moments of the training rewards, as tensors: TRL's step() cannot use its own floats."""

    def update(self, xs: torch.Tensor) -> tuple[float, float]:
        """Takes in (batch,) rewards; returns their mean and standard deviation."""
        batch_moments = super().update(xs)
        for name in ("mean", "std"):
            setattr(self, name, torch.as_tensor(getattr(self, name)))
        return batch_moments
