"""The parts of TRL's trainer, adapted: policy with value head, settings, KL controller."""

import warnings
from dataclasses import asdict
from typing import TypeAlias

import torch
import trl
from peft import PeftModel
from trl.trainer import AdaptiveKLController, FixedKLController, RunningMoments

from cory.config import PPOConfig
from cory.errors import UserError
from cory.models import window
from cory.models.lora import LanguageModel
from cory.parallel import distributed


class PolicyWithValueHead(trl.AutoModelForCausalLMWithValueHead):
    """TRL's policy with a value head on the last hidden layer (Eq. 10), evaluated in the response window."""

    def __init__(self, pretrained_model: LanguageModel) -> None:
        if not any(hasattr(pretrained_model, name) for name in self.lm_head_namings):
            came = f"a model of type {pretrained_model.config.model_type}"
            raise UserError(
                f"model.name: expected a model whose head TRL finds, {self.lm_head_namings}, got {came}"
            )
        sizes = ("hidden_size", "word_embed_proj_dim")
        if not any(hasattr(pretrained_model.config, name) for name in sizes):
            came = f"a model of type {pretrained_model.config.model_type}"
            raise UserError(
                f"model.name: expected a model whose configuration has one of {sizes}, which TRL's value head reads, "
                f"got {came}. The other algorithms need no value head"
            )
        super().__init__(pretrained_model)
        # TRL's own loading sets it, which we do without.
        self.is_peft_model = isinstance(pretrained_model, PeftModel)

    def forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        width: int,
        index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (batch, R, vocabulary) and values (batch, R), float32, at the last `width`
        positions, or at those of `index`. See `window.forward`.
        """
        logits, hidden = window.forward(
            self.pretrained_model, input_ids, mask, position_ids, width, index=index
        )
        values = self.v_head(hidden).squeeze(-1).float()  # Eq. 10
        return logits.float(), values


# Settings that TRL does not have.
OURS = ("micro_batch", "value_head_init", "cliprange_high")
# Settings that TRL names differently.
TRL_NAMES = {
    "adaptive_kl": "adap_kl_ctrl",
    "kl_target": "target",
    "kl_horizon": "horizon",
    "reward_scaling": "use_score_scaling",
    "reward_normalization": "use_score_norm",
}


def trl_config(ppo: PPOConfig) -> trl.PPOConfig:
    """The settings under TRL's names; batches are one process's share."""
    settings = {
        TRL_NAMES.get(name, name): value for name, value in asdict(ppo).items() if name not in OURS
    }
    for name in ("batch_size", "mini_batch_size"):
        settings[name] //= distributed.world_size()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`PPOConfig` is deprecated", category=FutureWarning
        )
        # TRL would move every policy to the process's device. Agents may have others.
        return trl.PPOConfig(accelerator_kwargs={"device_placement": False}, **settings)


KLController: TypeAlias = AdaptiveKLController | FixedKLController
RewardMoments: TypeAlias = RunningMoments  # mean and deviation of all training rewards so far


def make_kl_controller(ppo: PPOConfig) -> KLController:
    """TRL's controller of the KL coefficient, as its trainer makes it."""
    if ppo.adaptive_kl:
        return AdaptiveKLController(ppo.init_kl_coef, ppo.kl_target, ppo.kl_horizon)
    return FixedKLController(ppo.init_kl_coef)
