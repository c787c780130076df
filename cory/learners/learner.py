"""The base class of all learners: one update of one agent on its rollouts, one rollout per role that it holds.

`Learner.update` is the algorithm. The methods that it calls follow it in order.

* Logits, KL and entropy are computed only at response positions (`cory/models/window.py`); the loss masks padding.
  R is the length of the longest response in tokens.
* The number of rows per pass is chosen to fit in memory, separately for passes with and without gradient
  (`memory.py`).
* Dropout is off in every pass, so the first epoch's probability ratio is 1. In bf16 the ratio is only close to 1,
  because the rounding of a row's logits depends on the other rows in the pass.
"""

import copy
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.errors import NotFinite
from cory.learners import losses
from cory.learners.adaptive import KLController, RewardMoments
from cory.learners.engine import EngineSamples, compare_samples
from cory.learners.losses import LossTerms
from cory.learners.memory import PassSize, recompute_in_eval
from cory.learners.records import (
    BatchSizes,
    Experience,
    ForwardPass,
    OldPolicy,
    Step,
    Targets,
    UpdateStats,
)
from cory.learners.saved_state import load_tensors, tensors_of
from cory.metrics import full_kl
from cory.models import window
from cory.models.lora import LanguageModel
from cory.models.prefixes import share_prompts
from cory.models.text import pad_token
from cory.models.window import PassInputs, Window
from cory.parallel import distributed, sharding
from cory.parallel.devices import autocast, to_device
from cory.rollout import Rollout


class Learner(ABC):
    """One agent's learner: its policy, optimizer, KL controller and reward moments. A subclass
    defines advantages and loss.

    Args:
        model: the policy on its device, wrapped by the subclass (for PPO, with a value head) and prepared by the
            accelerator.
        optimizer: the optimizer of the model's trained parameters, prepared by the accelerator.
        accelerator: exchanges gradients between processes. It moves no models or tensors, because an agent's device
            can differ from the process's.
        kl_controller: updates the KL coefficient; for PPO it is the TRL trainer's own controller.
        reference: the frozen pi_0, wrapped like the policy and on the same device; several learners may share it.
            If None, the reference is the policy with its adapters off.
        tokenizer: the policy's tokenizer.
        config: the run's settings. Its batch sizes are totals over all processes; the attributes `batch_size` and
            `mini_batch_size` are per process.
        device: where the agent computes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: AcceleratedOptimizer,
        accelerator: Accelerator,
        kl_controller: KLController,
        reference: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
    ) -> None:
        self.model = model
        # The causal language model inside the wrapper.
        self.policy: LanguageModel = accelerator.unwrap_model(model).pretrained_model
        self.reference = reference
        self.optimizer = optimizer
        self.accelerator = accelerator
        self.kl_controller = kl_controller
        self.reward_moments = RewardMoments()
        self.tokenizer = tokenizer
        self.config = config
        self.ppo = config.ppo
        self.device = device

        self.batch_size = config.ppo.batch_size // distributed.world_size()
        self.mini_batch_size = config.ppo.mini_batch_size // distributed.world_size()
        self.model_params = [p for p in model.parameters() if p.requires_grad]

        self.checkpointed_layers = recompute_in_eval(model)
        self.model.eval()
        self.pass_size = PassSize(self.policy, config, device)

    @abstractmethod
    def targets(
        self, old: OldPolicy, rewards: Tensor, mask: Tensor, rollouts: Sequence[Rollout]
    ) -> Targets:
        """Returns advantages, and any other targets of the loss, from all rollouts' training rewards.

        Args:
            old: outputs of the policy that sampled the rows.
            rewards: training rewards (batch,), after scaling.
            mask: (batch, R), 1 at response tokens.
            rollouts: the agent's rollouts, whose rows follow one another in the batch.
        """

    @abstractmethod
    def loss_terms(
        self,
        new: ForwardPass,
        entropies: Tensor,
        rows: Experience,
        sizes: BatchSizes,
    ) -> LossTerms:
        """Returns the rows' contribution to the mini-batch's mean loss and its statistics.

        Args:
            new: outputs of the policy being trained.
            entropies: entropies (rows, R) of `new`.
            rows: some rows of the update's experience.
            sizes: numbers of tokens and responses in the mini-batch.
        """

    def row_weights(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Returns each row's weight in the loss, (rows,). Each rollout has the same total weight."""
        return to_device(_role_weights(rollouts), self.device)

    def update(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[Tensor],
        shuffle: np.random.Generator,
        warmth: float = 1.0,
    ) -> list[UpdateStats]:
        """Runs one update: computes advantages, trains for `ppo_epochs` epochs, and updates the KL coefficient.

        Args:
            rollouts: the agent's rollouts, one per role. Each has `batch_size` rows. With `branches` observer
                responses to each pioneer response, a pioneer's rollout has only `batch_size / branches`.
            rewards: training rewards (rows,), one tensor per rollout.
            shuffle: draws the order of the rows in each epoch.
            warmth: factor on the learning rate, below 1 during warmup.

        Returns statistics for each rollout.

        Raises a ValueError if a rollout has the wrong number of rows. Raises NotFinite if a loss or gradient is not
        finite, before the optimizer step that would use it.
        """
        self._check_rows(rollouts, rewards)
        self._switch_dropout_off()

        # Log-probabilities, KL to the reference and values under the policy that sampled the rows.
        batch = self._pack(rollouts)
        old = self.pass_size.retrying(self._evaluate_old, batch)
        engine = None
        if rollouts[0].logprobs:
            sampling = self.config.sampling
            engine = compare_samples(rollouts, old.logprobs, batch.response_mask, sampling)

        # Advantages from the training rewards and the KL, and each row's weight in the loss.
        scaled_rewards, reward_moments = self._scale(torch.cat(list(rewards)))
        targets = self.targets(old, scaled_rewards, batch.response_mask, rollouts)
        if engine is not None:
            targets.advantages = targets.advantages * engine.weights
        row_weights = self.row_weights(rollouts)
        experience = Experience(batch, old, targets, row_weights)

        for group in self.optimizer.param_groups:
            group["lr"] = self.ppo.learning_rate * warmth
        # Each epoch splits all rows, in a new order, over its optimizer steps.
        steps: list[Step] = []
        for _ in range(self.ppo.ppo_epochs):
            order = shuffle.permutation(len(row_weights)).tolist()
            for indices in _even_parts(order, self._steps_per_epoch(len(row_weights))):
                step = self.pass_size.retrying(self._gradients, experience, indices)
                _check_finite(step, rollouts)
                self._optimizer_step(step)
                steps.append(step)

        # The reward moments and the KL coefficient change only after all steps have succeeded.
        stats = self._statistics(experience, rollouts, steps, engine)
        self.reward_moments = reward_moments
        self._update_kl_coef(stats)
        return stats

    # Evaluation of the policy that sampled

    def _check_rows(self, rollouts: Sequence[Rollout], rewards: Sequence[Tensor]) -> None:
        for rollout, reward in zip(rollouts, rewards, strict=True):
            sizes = (len(rollout.prompt_ids), len(rollout.response_ids), len(reward))
            if sizes not in [
                (self.batch_size,) * 3,
                (self.batch_size // self.config.branches,) * 3,
            ]:
                raise ValueError(
                    f"rollout: expected {self.batch_size} prompts, responses and rewards "
                    f"({self.batch_size // self.config.branches} for a pioneer), got {sizes}"
                )

    def _switch_dropout_off(self) -> None:
        """Switches dropout off for all passes, as TRL does, so that the first epoch's probability ratio is 1."""
        self.model.eval()
        for layer in self.checkpointed_layers:
            # Transformers recomputes only layers whose `training` flag is set. `memory.py` clears the flag while these
            # layers run, so they apply no dropout.
            layer.training = True

    def _pack(self, rollouts: Sequence[Rollout]) -> Window:
        """Packs the rows of all rollouts, one rollout after the other."""
        prompt_ids = [ids for rollout in rollouts for ids in rollout.prompt_ids]
        response_ids = [ids for rollout in rollouts for ids in rollout.response_ids]
        return window.pack(prompt_ids, response_ids, pad_token(self.tokenizer), self.device)

    def _evaluate_old(self, batch: Window) -> OldPolicy:
        """Returns log-probabilities, values and KL to the reference under the policy that sampled the batch.

        If the batch fits into one micro-batch, the forward pass is kept with its graph. The first optimizer step
        reuses the pass, as weights and row order are the same.
        """
        # A micro-batch is never larger than a mini-batch, so a batch that fits into a micro-batch takes a single step
        # per epoch.
        fits = self.pass_size.micro_batch >= len(batch.input_ids)
        if not fits or self.ppo.gradient_accumulation_steps > 1:
            return self.compare_with_reference(batch)

        old = OldPolicy.zeros(batch)
        (indices,) = batch.by_length(len(batch.input_ids))
        rows = batch.select(indices)
        old.first_pass = self.forward(rows)
        self._fill(old, indices, rows, old.first_pass, self._evaluation_rows(batch))
        return old

    @torch.no_grad()
    def compare_with_reference(self, batch: Window) -> OldPolicy:
        """Returns log-probabilities, values and KL to the reference under the current policy, without gradient."""
        old = OldPolicy.zeros(batch)
        rows_at_a_time = self._evaluation_rows(batch)
        for indices in batch.by_length(rows_at_a_time):
            rows = batch.select(indices)
            policy = self.forward(rows)
            self._fill(old, indices, rows, policy, rows_at_a_time)
            del policy  # frees memory: two arrays (rows, R, vocabulary) may not fit
        return old

    @torch.no_grad()
    def response_kls(self, rollout: Rollout) -> list[float]:
        """Returns each response's KL to the reference under the current policy, in nats."""
        batch = self._pack([rollout])
        current = self.pass_size.retrying(self.compare_with_reference, batch)
        kls: list[float] = (current.kl * batch.response_mask).sum(1).tolist()
        return kls

    def _evaluation_rows(self, batch: Window) -> int:
        """Returns the number of rows in a pass without gradient.

        With a sharded policy, all ranks use the same number, as they must run equally many passes.
        """
        rows = self.pass_size.rows_without_gradient(batch)
        return sharding.all_reduce_min(rows) if sharding.is_sharded(self.policy) else rows

    @torch.no_grad()
    def _fill(
        self,
        old: OldPolicy,
        indices: list[int],
        rows: Window,
        policy: ForwardPass,
        rows_at_a_time: int,
    ) -> None:
        """Writes the policy's outputs for `rows`, and its KL to the reference, into `old` at `indices`.

        The reference takes `rows_at_a_time` rows per pass, even if the policy took more.
        """
        for chunk in rows.by_length(rows_at_a_time):
            chunk_rows = rows.select(chunk)
            reference = self._reference_forward(chunk_rows)
            width = chunk_rows.response_ids.shape[1]
            in_pass = to_device(torch.tensor(chunk), self.device)
            in_batch = to_device(torch.tensor([indices[i] for i in chunk]), self.device)
            old.kl[in_batch, :width] = self._kl(policy, reference, in_pass)
            old.ref_logprobs[in_batch, :width] = reference.logprobs
            old.logprobs[in_batch, :width] = policy.logprobs[in_pass, :width]
            if policy.values is not None:
                old.values[in_batch, :width] = policy.values[in_pass, :width]
            del reference  # frees its memory for the next pass

    def _kl(self, policy: ForwardPass, reference: ForwardPass, rows: Tensor) -> Tensor:
        """Returns the KL to the reference (Eq. 2), in nats: (rows, R).

        `ppo.kl_penalty` (names as in TRL) selects `full`, KL(pi, pi_0) over the vocabulary, or `kl`, its one-sample
        estimate log(pi / pi_0) of the sampled token.

        Args:
            rows: indices of the reference's rows in the policy's pass.
        """
        width = reference.logprobs.shape[1]
        if self.ppo.kl_penalty == "kl":
            return policy.logprobs[rows, :width] - reference.logprobs
        return full_kl(policy.all_logprobs[rows, :width], reference.all_logprobs)

    # Forward passes

    def forward(self, rows: Window) -> ForwardPass:
        """Runs a forward pass of the policy."""
        return self._pass(self.model, rows)

    def _reference_forward(self, rows: Window) -> ForwardPass:
        """Runs a forward pass of the reference (Eq. 8: pi_0 under the agent's own prompts)."""
        if self.reference is not None:
            return self._pass(self.reference, rows)
        with self.policy.disable_adapter():
            return self._pass(self.model, rows)

    def _pass(self, model: torch.nn.Module, rows: Window) -> ForwardPass:
        """Runs a wrapped model and computes log-probabilities from its logits.

        The model gives logits (rows, R, vocabulary) and values (rows, R) at the response positions.
        """
        with autocast(self.device, self.config.precision):
            logits, values = model(*self._inputs(rows))
        # Log-probabilities describe the sampled distribution, so they use the sampling temperature.
        logprobs, all_logprobs = losses.TokenLogprobs.apply(
            logits, rows.response_ids, self.config.sampling.temperature
        )
        return ForwardPass(logprobs, values, all_logprobs)

    def _inputs(self, rows: Window) -> PassInputs:
        """Returns the inputs of a pass; shared prompt prefixes are encoded once if this saves work."""
        shared = share_prompts(self.policy, rows)
        if shared is not None:
            return shared
        mask = window.whole_mask(
            self.policy, rows.attention_mask, rows.input_ids.shape[1], rows.is_padded
        )
        return PassInputs(rows.input_ids, mask, rows.position_ids, rows.response_ids.shape[1])

    # Rewards

    def _scale(self, rewards: Tensor) -> tuple[Tensor, RewardMoments]:
        """Scales and normalizes training rewards if configured; also returns the updated moments.

        `self.reward_moments` stays unchanged, since the update may still fail.
        """
        rewards = to_device(rewards.float(), self.device)
        moments = copy.copy(self.reward_moments)
        if self.ppo.reward_scaling:
            moments.update(rewards)
            if self.ppo.reward_normalization:
                rewards = rewards - moments.mean
            # If all rewards so far are equal, their standard deviation is rounding error: do not divide by it.
            if moments.std > 1e-6 * abs(moments.mean):
                rewards = rewards / (moments.std + torch.finfo(rewards.dtype).eps)
        return rewards, moments

    # Optimizer steps

    def _steps_per_epoch(self, num_rows: int) -> int:
        """Returns the number of optimizer steps in an epoch over `num_rows` rows."""
        mini_batches = self.ppo.gradient_accumulation_steps
        steps = math.ceil(num_rows / (self.mini_batch_size * mini_batches))
        # With branches, the rows may not divide evenly into steps. If mini-batches have one row, some could then be
        # empty, so fewer steps are taken.
        return min(steps, max(1, num_rows // mini_batches))

    def _gradients(self, experience: Experience, indices: list[int]) -> Step:
        """Computes the parameters' gradients for one optimizer step over the rows at `indices`.

        The rows form one mini-batch, or several with gradient accumulation.
        """
        self.optimizer.zero_grad()
        mini_batches = _even_parts(indices, self.ppo.gradient_accumulation_steps)
        last = len(mini_batches) - 1
        terms = [
            self._backward(experience, mini_batch, last=number == last)
            for number, mini_batch in enumerate(mini_batches)
        ]
        # Gathered from all shards, so that all ranks agree on whether the step is finite.
        norm = sharding.whole(
            get_total_norm([p.grad for p in self.model_params if p.grad is not None])
        )
        sum_of_terms = torch.stack([term.vector() for term in terms]).sum()
        largest_ratio = torch.stack([term.ratio for term in terms]).max()
        # The only point in a step that waits for the device.
        return Step(terms, *torch.stack([norm, sum_of_terms, largest_ratio]).tolist())

    def _backward(self, experience: Experience, indices: list[int], last: bool) -> LossTerms:
        """Accumulates a mini-batch's gradient over micro-batches and returns the mini-batch's loss terms.

        Args:
            last: whether this is the optimizer step's last mini-batch.
        """
        batch = experience.window
        # Gradients are averaged over ranks. Sums over tokens are therefore divided by the mean number of tokens per
        # rank, and sums over responses by the number of responses per rank, which is the same on all ranks.
        response_tokens = torch.tensor(sum(batch.response_lengths[i] for i in indices))
        tokens = (
            distributed.all_reduce_sum(to_device(response_tokens, self.device))
            / distributed.world_size()
        )
        sizes = BatchSizes(tokens, responses=len(indices))
        sums = torch.zeros((), device=batch.input_ids.device)
        micro_batches = list(batch.by_length(self.pass_size.micro_batch, indices))
        for number, micro_indices in enumerate(micro_batches):
            rows = experience.select(micro_indices)
            # Ranks exchange gradients once per step, in the last backward pass.
            exchange = last and number + 1 == len(micro_batches)
            with nullcontext() if exchange else self.accelerator.no_sync(self.model):
                new = experience.old.take_first_pass()
                if new is None:
                    new = self.forward(rows.window)
                entropies = losses.entropy(
                    new.all_logprobs, self.pass_size.rows_without_gradient(rows.window)
                )
                terms = self.loss_terms(new, entropies, rows, sizes)
                # `accelerator.backward` would divide by the accumulation steps of the Accelerator created last.
                (terms.loss / self.ppo.gradient_accumulation_steps).backward()
            del new  # frees its memory for the next micro-batch
            sums = sums + terms.vector()
        return LossTerms(*(distributed.all_reduce_sum(sums) / distributed.world_size()))

    def _is_dropped(self, step: Step) -> bool:
        return step.largest_ratio > self.ppo.ratio_threshold

    def _optimizer_step(self, step: Step) -> None:
        """Applies the accumulated gradient to the weights."""
        if self._is_dropped(step):
            # A dropped step has gradient zero; Adam's momentum still moves the weights. If a step accumulates several
            # mini-batches, TRL zeroes only the gradient of the mini-batch with the large ratio.
            torch._foreach_zero_([p.grad for p in self.model_params if p.grad is not None])
        if self.ppo.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model_params, self.ppo.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    # Statistics

    def _statistics(
        self,
        experience: Experience,
        rollouts: Sequence[Rollout],
        steps: Sequence[Step],
        engine: EngineSamples | None,
    ) -> list[UpdateStats]:
        """Returns each rollout's statistics, over all processes."""
        old = experience.old
        mask = experience.mask
        returns = experience.targets.returns
        explained_variance = None
        if returns is not None:
            explained_variance = losses.explained_variance(old.values, returns, mask).item()
        equal_groups = experience.targets.frac_reward_zero_std or [None] * len(rollouts)

        # Means over the mini-batches of all epochs.
        terms = torch.stack([term.vector() for step in steps for term in step.terms]).mean(0)
        means = LossTerms(*terms.cpu())
        return [
            UpdateStats(
                kl=kl,
                kl_coef=self.kl_controller.value,
                entropy=means.entropy.item(),
                policy_loss=means.policy_loss.item(),
                value_loss=None if means.value_loss is None else means.value_loss.item(),
                explained_variance=explained_variance,
                clip_fraction=means.clip_fraction.item(),
                gradient_norm=statistics.fmean(step.gradient_norm for step in steps),
                dropped_steps=sum(map(self._is_dropped, steps)),
                response_tokens=length,
                engine_difference=engine and engine.difference,
                engine_ratio=engine and engine.ratio,
                engine_capped=engine and engine.capped,
                frac_reward_zero_std=share,
            )
            for (kl, length), share in zip(
                _rollout_means(old, mask, rollouts), equal_groups, strict=True
            )
        ]

    def _update_kl_coef(self, stats: Sequence[UpdateStats]) -> None:
        """Updates the KL coefficient from the reported KL, averaged over the rollouts.

        An update counts as one batch, regardless of the agent's number of roles and of branches.
        """
        kl = statistics.fmean(rollout_stats.kl for rollout_stats in stats)
        if math.isfinite(kl):
            self.kl_controller.update(kl, self.ppo.batch_size)

    # State

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and reward moments to their initial values."""
        self.optimizer.state.clear()
        self.kl_controller.value = self.ppo.init_kl_coef
        self.reward_moments = RewardMoments()

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns the trained weights and optimizer state, and separately the KL coefficient and reward moments."""
        numbers = {
            "kl_coef": self.kl_controller.value,
            "moments": asdict(self.reward_moments),
        }
        return tensors_of(self._trained(), self.optimizer), numbers

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores the result of `save_state`.

        Raises a ValueError, and changes nothing, if a weight is missing or does not fit.
        """
        load_tensors(tensors, self._trained(), self.optimizer)
        self.kl_controller.value = float(numbers["kl_coef"])
        self.reward_moments = RewardMoments(**numbers["moments"])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Returns the trained parameters by name, in the optimizer's order."""
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: parameter for parameter in self.model_params}


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Adam:
    """Returns a fused Adam (one kernel for all operations) on the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=learning_rate, fused=True)


def _check_finite(step: Step, rollouts: Sequence[Rollout]) -> None:
    """Raises NotFinite, which names agent and roles, if a loss or the gradient is not finite."""
    if math.isfinite(step.gradient_norm + step.sum_of_terms):
        return
    roles = " and ".join(rollout.role for rollout in rollouts)
    quantity = "gradient" if math.isfinite(step.sum_of_terms) else "loss"
    raise NotFinite(f"{rollouts[0].agent} as {roles}: the {quantity} is not finite")


def _even_parts(indices: list[int], parts: int) -> list[list[int]]:
    """Splits the indices, in order, into parts whose lengths differ by at most 1.

    `batch_size` rows always divide evenly; only branches give other numbers of rows.
    """
    bounds = [len(indices) * part // parts for part in range(parts + 1)]
    return [indices[start:end] for start, end in itertools.pairwise(bounds)]


def _role_weights(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns row weights (mean 1) that give every rollout the same total weight.

    All weights are 1 if rollouts have equal sizes. With branches, a pioneer's rows weigh more, because there are fewer.
    """
    sizes = torch.tensor([len(rollout.completions) for rollout in rollouts])
    weights = sizes.sum() / (len(sizes) * sizes)
    return weights.repeat_interleave(sizes)


def _rollout_means(
    old: OldPolicy, mask: Tensor, rollouts: Sequence[Rollout]
) -> list[tuple[float, float]]:
    """Returns each rollout's mean KL per response and mean response length in tokens, over all processes.

    The KL is measured under the sampling policy, before the first optimizer step.
    """
    sizes = [len(rollout.completions) for rollout in rollouts]
    kls = [kl.sum() for kl in (old.kl * mask).split(sizes)]
    tokens = [tokens.sum() for tokens in mask.split(sizes)]
    sums = distributed.all_reduce_sum(torch.stack([*kls, *tokens]))
    kl_sums, token_sums = sums.view(2, -1).tolist()
    rows = [size * distributed.world_size() for size in sizes]
    return [
        (kl / count, token_sum / count)
        for kl, token_sum, count in zip(kl_sums, token_sums, rows, strict=True)
    ]
