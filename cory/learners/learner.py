"""The base class of all learners: one update of one agent on its rollouts.

`Learner.update` is the algorithm. Its steps stand below it, in the order in which it takes them.

* Logits, KL and entropy exist only at response positions (`cory/models/window.py`): the others are
  masked.
* The reference is read in batches of its own, and micro-batches fit the memory (`memory.py`).
* No dropout in any pass, so the first epoch's probability ratio is 1 (in bf16 nearly: a row's logits are rounded,
  and differ with the rows that are read beside it).
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
        model: the policy in its wrapper on its device, as the accelerator has prepared it.
        optimizer: of the model's trained parameters, as the accelerator has prepared it.
        accelerator: exchanges gradients between processes. It places nothing, as its device is that
            of the process.
        kl_controller: of the KL coefficient; PPO's is TRL's.
        reference: pi_0 in its wrapper on the same device, frozen; may be shared by several learners.
            None: the policy with its adapters off.
        tokenizer: of the policy.
        config: the run's settings. Batches are over all processes there, and one process's share
            here.
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
        # The causal language model inside.
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
        """Advantages, and what else the loss needs, from the (batch,) training rewards of all
        rollouts together.

        Args:
            mask: (batch, R), 1 where there is a response token.
            rollouts: whose rows these are, one rollout after the other.
        """

    @abstractmethod
    def loss_terms(
        self,
        new: ForwardPass,
        entropies: Tensor,
        rows: Experience,
        sizes: BatchSizes,
    ) -> LossTerms:
        """What is minimized, and the statistics: some rows' part of the mini-batch's means.

        Args:
            new: these rows under the policy being trained.
            entropies: (rows, R), of `new`.
            sizes: of the mini-batch.
        """

    def row_weights(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(rows,), the weight of each row in the loss: rollouts of different sizes count alike."""
        return to_device(_role_weights(rollouts), self.device)

    def update(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[Tensor],
        shuffle: np.random.Generator,
        warmth: float = 1.0,
    ) -> list[UpdateStats]:
        """One update: advantages, `ppo_epochs` passes of optimizer steps over the rows, and the KL
        coefficient.

        Args:
            rollouts: of the agent, one for each of its roles; each has `batch_size` rows, but for a pioneer after whom
                the chain branches, which has `batch_size / branches`.
            rewards: of each rollout, the (rows,) training rewards.
            shuffle: draws the order of the rows in each epoch.
            warmth: the share of the learning rate that is used.

        Returns the statistics of each rollout. Raises a ValueError if the number of rows is
        another, and NotFinite if a loss or gradient is not finite; the weights are then as before
        that optimizer step.
        """
        self._check_rows(rollouts, rewards)
        self._switch_dropout_off()

        # The rows under the policy that sampled them: log-probabilities, KL to the reference, values.
        batch = self._pack(rollouts)
        old = self.pass_size.retrying(self._evaluate_old, batch)
        engine = None
        if rollouts[0].logprobs:
            sampling = self.config.sampling
            engine = compare_samples(rollouts, old.logprobs, batch.response_mask, sampling)

        # Advantages, from the training rewards and that KL; the loss's weight of each row.
        scaled_rewards, reward_moments = self._scale(torch.cat(list(rewards)))
        targets = self.targets(old, scaled_rewards, batch.response_mask, rollouts)
        if engine is not None:
            targets.advantages = targets.advantages * engine.weights
        row_weights = self.row_weights(rollouts)
        experience = Experience(batch, old, targets, row_weights)

        for group in self.optimizer.param_groups:
            group["lr"] = self.ppo.learning_rate * warmth
        # Each epoch reads all rows in a new order, some in each optimizer step.
        steps: list[Step] = []
        for _ in range(self.ppo.ppo_epochs):
            order = shuffle.permutation(len(row_weights)).tolist()
            for indices in _even_parts(order, self._steps_per_epoch(len(row_weights))):
                step = self.pass_size.retrying(self._gradients, experience, indices)
                _check_finite(step, rollouts)
                self._optimizer_step(step)
                steps.append(step)

        # What stays: the reward moments and the KL coefficient move once the steps have succeeded.
        stats = self._statistics(experience, rollouts, steps, engine)
        self.reward_moments = reward_moments
        self._update_kl_coef(stats)
        return stats

    # The rows under the policy that sampled them

    def _check_rows(self, rollouts: Sequence[Rollout], rewards: Sequence[Tensor]) -> None:
        for rollout, reward in zip(rollouts, rewards, strict=True):
            sizes = (len(rollout.prompt_ids), len(rollout.response_ids), len(reward))
            if sizes not in [
                (self.batch_size,) * 3,
                (self.batch_size // self.config.branches,) * 3,
            ]:
                raise ValueError(
                    f"expected {self.batch_size} prompts, responses and rewards of a rollout (of a pioneer: "
                    f"{self.batch_size // self.config.branches}), got {sizes}"
                )

    def _switch_dropout_off(self) -> None:
        """In every pass, as in TRL, so that the first epoch's probability ratio is 1."""
        self.model.eval()
        for layer in self.checkpointed_layers:
            # Transformers recomputes in training mode only. The layer itself runs in `eval()`.
            layer.training = True

    def _pack(self, rollouts: Sequence[Rollout]) -> Window:
        """The rows of all rollouts, one rollout after the other."""
        prompt_ids = [ids for rollout in rollouts for ids in rollout.prompt_ids]
        response_ids = [ids for rollout in rollouts for ids in rollout.response_ids]
        return window.pack(prompt_ids, response_ids, pad_token(self.tokenizer), self.device)

    def _evaluate_old(self, batch: Window) -> OldPolicy:
        """The batch under the current policy; with the pass and its graph, if the batch is one
        micro-batch: the weights have not changed before the first optimizer step, and it reads the
        rows in the same order.
        """
        # A micro-batch is at most a mini-batch, so a batch that fits into it makes one optimizer step.
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
        """The batch under the current policy, and its KL to the reference."""
        old = OldPolicy.zeros(batch)
        rows_at_a_time = self._evaluation_rows(batch)
        for indices in batch.by_length(rows_at_a_time):
            rows = batch.select(indices)
            policy = self.forward(rows)
            self._fill(old, indices, rows, policy, rows_at_a_time)
            del policy  # before the next pass, as both may hold (rows, R, vocabulary) numbers
        return old

    @torch.no_grad()
    def response_kls(self, rollout: Rollout) -> list[float]:
        """The KL of each response to the reference, in nats, under the current policy."""
        batch = self._pack([rollout])
        current = self.pass_size.retrying(self.compare_with_reference, batch)
        kls: list[float] = (current.kl * batch.response_mask).sum(1).tolist()
        return kls

    def _evaluation_rows(self, batch: Window) -> int:
        """Rows of a pass without gradient; of a sharded policy the same in all processes, which run
        equally many passes.
        """
        rows = self.pass_size.rows_without_gradient(batch)
        return sharding.least(rows) if sharding.is_sharded(self.policy) else rows

    @torch.no_grad()
    def _fill(
        self,
        old: OldPolicy,
        indices: list[int],
        rows: Window,
        policy: ForwardPass,
        rows_at_a_time: int,
    ) -> None:
        """Writes a pass of the policy over `rows`, which have these indices, and its KL to the reference into `old`.

        The reference reads `rows_at_a_time`, however many the policy has read.
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
            del reference  # before its next pass

    def _kl(self, policy: ForwardPass, reference: ForwardPass, rows: Tensor) -> Tensor:
        """The KL (rows, R) of Eq. 2 to the reference's pass, in nats, over these rows of the policy's.

        `ppo.kl_penalty`, with TRL's names: `full`: KL(pi, pi_0) over the vocabulary; `kl`: log(pi / pi_0)
        of the sampled token, its one-sample estimate.
        """
        width = reference.logprobs.shape[1]
        if self.ppo.kl_penalty == "kl":
            return policy.logprobs[rows, :width] - reference.logprobs
        return full_kl(policy.all_logprobs[rows, :width], reference.all_logprobs)

    # Forward passes

    def forward(self, rows: Window) -> ForwardPass:
        """A forward pass of the policy."""
        return self._pass(self.model, rows)

    def _reference_forward(self, rows: Window) -> ForwardPass:
        """A forward pass of the reference (Eq. 8: pi_0 under the agent's own prompts)."""
        if self.reference is not None:
            return self._pass(self.reference, rows)
        with self.policy.disable_adapter():
            return self._pass(self.model, rows)

    def _pass(self, model: torch.nn.Module, rows: Window) -> ForwardPass:
        """A pass of a wrapped model: logits (rows, R, vocabulary) and values (rows, R) at the response
        positions, and from them the log-probabilities.
        """
        with autocast(self.device, self.config.precision):
            logits, values = model(*self._inputs(rows))
        # Log-probabilities are those of the distribution that was sampled.
        logprobs, all_logprobs = losses.TokenLogprobs.apply(
            logits, rows.response_ids, self.config.sampling.temperature
        )
        return ForwardPass(logprobs, values, all_logprobs)

    def _inputs(self, rows: Window) -> PassInputs:
        """What a pass reads, with each prompt once where rows share it and that is less work."""
        shared = share_prompts(self.policy, rows)
        if shared is not None:
            return shared
        mask = window.whole_mask(
            self.policy, rows.attention_mask, rows.input_ids.shape[1], rows.is_padded
        )
        return PassInputs(rows.input_ids, mask, rows.position_ids, rows.response_ids.shape[1])

    # Rewards

    def _scale(self, rewards: Tensor) -> tuple[Tensor, RewardMoments]:
        """Training rewards after the optional scaling and normalization, and the moments
        with them.

        The learner's own moments stay, as the update may still fail.
        """
        rewards = to_device(rewards.float(), self.device)
        moments = copy.copy(self.reward_moments)
        if self.ppo.reward_scaling:
            moments.update(rewards)
            if self.ppo.reward_normalization:
                rewards = rewards - moments.mean
            # Rewards that are all alike have no deviation but that of rounding.
            if moments.std > 1e-6 * abs(moments.mean):
                rewards = rewards / (moments.std + torch.finfo(rewards.dtype).eps)
        return rewards, moments

    # Optimizer steps

    def _steps_per_epoch(self, num_rows: int) -> int:
        """As few optimizer steps as the rows take, and no more than leave each mini-batch a row."""
        mini_batches = self.ppo.gradient_accumulation_steps
        steps = math.ceil(num_rows / (self.mini_batch_size * mini_batches))
        # Branches give numbers of rows that are no multiple of a step's. With mini-batches of one row,
        # some mini-batches of so many steps would have none.
        return min(steps, max(1, num_rows // mini_batches))

    def _gradients(self, experience: Experience, indices: list[int]) -> Step:
        """Computes the gradient of an optimizer step, on the parameters, over the rows of these
        indices: a mini-batch, or with gradient accumulation several.
        """
        self.optimizer.zero_grad()
        mini_batches = _even_parts(indices, self.ppo.gradient_accumulation_steps)
        last = len(mini_batches) - 1
        terms = [
            self._backward(experience, mini_batch, last=number == last)
            for number, mini_batch in enumerate(mini_batches)
        ]
        # Losses and gradients are those of all processes, so that all of them decide the same.
        norm = sharding.whole(
            get_total_norm([p.grad for p in self.model_params if p.grad is not None])
        )
        sum_of_terms = torch.stack([term.vector() for term in terms]).sum()
        largest_ratio = torch.stack([term.ratio for term in terms]).max()
        # The step's only wait for the device.
        return Step(terms, *torch.stack([norm, sum_of_terms, largest_ratio]).tolist())

    def _backward(self, experience: Experience, indices: list[int], last: bool) -> LossTerms:
        """Adds a mini-batch's gradient, in micro-batches; returns the means of its terms.

        `last`: whether it is the last mini-batch of the optimizer step.
        """
        batch = experience.window
        # Gradients are averaged over the processes, so each one's sums are divided by the mean of
        # their tokens, and by its own responses, which are as many in each.
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
            # Several processes exchange gradients once per step.
            exchange = last and number + 1 == len(micro_batches)
            with nullcontext() if exchange else self.accelerator.no_sync(self.model):
                new = experience.old.take_first_pass()
                if new is None:
                    new = self.forward(rows.window)
                entropies = losses.entropy(
                    new.all_logprobs, self.pass_size.rows_without_gradient(rows.window)
                )
                terms = self.loss_terms(new, entropies, rows, sizes)
                # Not `accelerator.backward`, whose number of mini-batches is that of the Accelerator made last.
                (terms.loss / self.ppo.gradient_accumulation_steps).backward()
            del new  # before the next micro-batch needs its memory
            sums = sums + terms.vector()
        return LossTerms(*(distributed.all_reduce_sum(sums) / distributed.world_size()))

    def _is_dropped(self, step: Step) -> bool:
        return step.largest_ratio > self.ppo.ratio_threshold

    def _optimizer_step(self, step: Step) -> None:
        """Moves the weights by the gradient that they have."""
        if self._is_dropped(step):
            # Zero gradient; Adam's momentum still moves the weights. TRL does the same, but for the
            # gradient of that mini-batch alone where several make a step.
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
        """The statistics of each rollout, over all processes."""
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
        """The coefficient follows the reported KL, on average over the rollouts. It moves alike in each update, however
        many roles the agent had and branches followed it.
        """
        kl = statistics.fmean(rollout_stats.kl for rollout_stats in stats)
        if math.isfinite(kl):
            self.kl_controller.update(kl, self.ppo.batch_size)

    # State

    def restart(self) -> None:
        """Resets the optimizer's state, the KL coefficient and the reward moments, as a new trainer would."""
        self.optimizer.state.clear()
        self.kl_controller.value = self.ppo.init_kl_coef
        self.reward_moments = RewardMoments()

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Trained weights and the optimizer's state; the KL coefficient and reward moments as json."""
        numbers = {
            "kl_coef": self.kl_controller.value,
            "moments": asdict(self.reward_moments),
        }
        return tensors_of(self._trained(), self.optimizer), numbers

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Loads what `save_state` returned. If a weight is missing or misfits, raises a ValueError, nothing changed."""
        load_tensors(tensors, self._trained(), self.optimizer)
        self.kl_controller.value = float(numbers["kl_coef"])
        self.reward_moments = RewardMoments(**numbers["moments"])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, in the optimizer's order."""
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: parameter for parameter in self.model_params}


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Adam:
    """Adam on the trained parameters; fused: one kernel instead of one for each operation."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=learning_rate, fused=True)


def _check_finite(step: Step, rollouts: Sequence[Rollout]) -> None:
    """Raises NotFinite, which names agent and roles, if a loss or the gradient is not finite."""
    if math.isfinite(step.gradient_norm + step.sum_of_terms):
        return
    roles = " and ".join(rollout.role for rollout in rollouts)
    what = "gradient" if math.isfinite(step.sum_of_terms) else "loss"
    raise NotFinite(f"{rollouts[0].agent} as {roles}: the {what} is not finite")


def _even_parts(indices: list[int], parts: int) -> list[list[int]]:
    """Splits the indices, in their order, into parts whose lengths differ by at most 1.

    They are equally long where there are `batch_size` rows. Other numbers come from branches.
    """
    bounds = [len(indices) * part // parts for part in range(parts + 1)]
    return [indices[start:end] for start, end in itertools.pairwise(bounds)]


def _role_weights(rollouts: Sequence[Rollout]) -> Tensor:
    """A weight for each row, 1 on average, by which rollouts of different sizes count alike; of equal sizes all are 1.

    A pioneer's response stands for as many chains as branch after it.
    """
    sizes = torch.tensor([len(rollout.completions) for rollout in rollouts])
    weights = sizes.sum() / (len(sizes) * sizes)
    return weights.repeat_interleave(sizes)


def _rollout_means(
    old: OldPolicy, mask: Tensor, rollouts: Sequence[Rollout]
) -> list[tuple[float, float]]:
    """Of each rollout, over the rows of all processes: the mean KL of a response to the reference, and its mean
    length in tokens.

    Both are of the policy that sampled: before the first optimizer step.
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
