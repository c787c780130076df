"""One agent's PPO: TRL's PPOTrainer (0.11.4) with the response window. The only file that touches TRL's internals.

What departs from TRL's behaviour, each with its reason at the place:

* logits, values, KL and entropy exist only at response positions (`cory/window.py`);
* sampling runs in `eval()` and in one batch, whatever the tokenizer's padding side;
* constructing a trainer leaves the random streams alone;
* agents share one frozen reference;
* gradient clipping works after the first step, and reward scaling works at all;
* optimizer, KL coefficient and reward moments can be restarted (only for `reset_on_exchange`).
"""

import warnings
from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.nn.functional as F
import trl
import trl.trainer.ppo_trainer as trl_ppo
import trl.trainer.utils as trl_utils
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.core import logprobs_from_logits

from cory import window
from cory.config import PPOConfig
from cory.sampling import pad_token, sample

KL_CHUNK = 2**24  # elements of (rows, responses, vocabulary) for which the full KL is computed at a time


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
    """The settings under TRL's names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`PPOConfig` is deprecated", category=FutureWarning)
        return trl.PPOConfig(
            seed=seed,
            learning_rate=ppo.learning_rate,
            batch_size=ppo.batch_size,
            mini_batch_size=ppo.mini_batch_size,
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


class PPOTrainer(trl.PPOTrainer):
    """TRL's PPOTrainer in the response window.

    `step(queries, responses, scores)` is TRL's own: rewards and advantages (Eq. 2, 12), clipped losses (Eq. 11, 13),
    adaptive KL coefficient. It takes the (batch, R) tensors made here as it takes its own (batch, length) ones.

    Args:
        config: TRL's PPOConfig, e.g. from `trl_config`.
        model: the policy.
        ref_model: the frozen reference; may be shared by several trainers. None: the policy with its adapters off.
        tokenizer: gives TRL its pad token; the numbers do not depend on its padding side.
    """

    def __init__(
        self,
        config: trl.PPOConfig,
        model: PolicyWithValueHead,
        ref_model: PolicyWithValueHead | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        with warnings.catch_warnings(), patch.object(trl_ppo, "set_seed", lambda seed: None):
            # TRL reseeds everything here, so that making an agent would restart every random stream of the run.
            warnings.filterwarnings("ignore", message="`PPOTrainer` is deprecated", category=FutureWarning)
            warnings.filterwarnings("ignore", message="No dataset is provided", category=UserWarning)
            super().__init__(config=config, model=model, ref_model=ref_model, tokenizer=tokenizer)
        # TRL keeps a generator here, empty after one use: only the first step would clip its gradients.
        self.model_params = [p for p in self.model.parameters() if p.requires_grad]
        self.running = RunningMoments(self.accelerator)
        self.checkpointed_layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
        self.pad_id = pad_token(tokenizer)

    @property
    def policy(self) -> PreTrainedModel:
        """The causal language model inside."""
        return self.accelerator.unwrap_model(self.model).pretrained_model

    def generate(self, query_tensor: Sequence[torch.Tensor], generation_config: GenerationConfig) -> list[torch.Tensor]:
        """Samples one response per query, in one batch (TRL: batches of 4). See `sample`."""
        self.model.eval()  # TRL leaves dropout on after the first step, and would sample from another policy
        return sample(self.policy, self.tokenizer, query_tensor, generation_config)

    def _pass_mode(self, model: torch.nn.Module) -> None:
        """No dropout in any pass, as in TRL, so that the first epoch's probability ratio is 1."""
        model.eval()
        if torch.is_grad_enabled():
            # Layers recompute activations in training mode only. Just their own flag: dropout inside them stays off.
            for layer in self.checkpointed_layers:
                layer.training = True

    def prepare_model_inputs(
        self, queries: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The response window; TRL pads query and response as one text, on the tokenizer's side."""
        return window.pack(queries, responses, self.pad_id)._asdict()

    def batched_forward_pass(
        self,
        model: torch.nn.Module,
        queries: Sequence[torch.Tensor],
        responses: Sequence[torch.Tensor],
        model_inputs: dict[str, torch.Tensor],
        return_logits: bool = False,
        response_masks: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """One pass in mini-batches over the response window; TRL's covers every position and masks most of them.

        Returns:
            logprobs (batch, R), logits (batch, R, vocabulary) or None, values (batch, R) and mask (batch, R).
        """
        self._pass_mode(model)
        mask = model_inputs["response_mask"]
        if response_masks is not None:
            mask = mask * window.pad(response_masks, 0, "right")[0]
        all_logprobs, all_logits, all_values = [], [], []
        for rows in range(0, len(mask), self.config.mini_batch_size):
            inputs = {name: value[rows : rows + self.config.mini_batch_size] for name, value in model_inputs.items()}
            logits, values = model(**inputs)
            all_logprobs.append(logprobs_from_logits(logits, inputs["response_ids"]))
            all_values.append(values)
            if return_logits:
                all_logits.append(logits)
        return (
            torch.cat(all_logprobs),
            torch.cat(all_logits) if return_logits else None,
            torch.cat(all_values),
            mask,
        )

    def compute_rewards(
        self, scores: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, masks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Eq. 2: `-eta * KL` at every response token, plus the score at the last one. TRL loops over rows.

        Args:
            scores: (batch,) training rewards.
            logprobs, ref_logprobs: (batch, R), or (batch, R, vocabulary) for the full KL.
            masks: (batch, R).

        Returns:
            rewards, KL part of the rewards, and KL, each (batch, R).
        """
        rows = max(1, KL_CHUNK // logprobs[0].numel())  # bounds the memory of the full KL
        kls = torch.cat(
            [self._kl_penalty(p, ref) for p, ref in zip(logprobs.split(rows), ref_logprobs.split(rows), strict=True)]
        )
        non_score_rewards = -self.kl_ctl.value * kls
        last = masks.shape[1] - 1 - masks.flip(1).argmax(1, keepdim=True)
        rewards = non_score_rewards.scatter_add(1, last, scores[:, None].to(non_score_rewards.dtype))
        return rewards, non_score_rewards, kls

    def _kl_penalty(self, logprob: torch.Tensor, ref_logprob: torch.Tensor) -> torch.Tensor:
        if self.config.kl_penalty == "full":  # KL(pi, pi_0) over the vocabulary (Eq. 2)
            return F.kl_div(ref_logprob, logprob, log_target=True, reduction="none").sum(-1)
        return super()._kl_penalty(logprob, ref_logprob)

    def loss(self, old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns):  # type: ignore[no-untyped-def]
        """TRL's clipped losses (Eq. 11, 13); logits serve its entropy statistic only, so they need no graph."""
        if self.checkpointed_layers:
            self._pass_mode(self.model)  # TRL has just turned dropout on, and the recomputation is yet to come
        return super().loss(old_logprobs, values, logits.detach(), vpreds, logprobs, mask, advantages, returns)

    def restart(self) -> None:
        """Forgets Adam's moments, the KL coefficient and the reward moments, as a new trainer would."""
        self.optimizer.state.clear()
        self.kl_ctl.value = self.config.init_kl_coef
        self.running = RunningMoments(self.accelerator)
