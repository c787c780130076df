"""The base class of all learners: one update of one agent on its rollouts. Its passes: `cory/learners/passes.py`."""

import copy
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from cory.learners.losses import LossTerms
from cory.learners.optimizer import load_tensors, tensors_of
from cory.learners.passes import Passes
from cory.learners.stats import UpdateStats
from cory.learners.trl_parts import KLController, RewardMoments
from cory.learners.update import EvaluatedBatch, ForwardPass, StepGradients, Targets, Update
from cory.models import window
from cory.models.rollout import Rollout
from cory.models.text import pad_token
from cory.models.vllm import difference
from cory.models.window import Window
from cory.parallel import distributed, sharding
from cory.parallel.devices import to_device


class Learner(ABC):
    """One agent's learner: its policy, optimizer, KL controller and reward moments. A subclass
    defines the loss.

    Args:
        model: the policy in its wrapper on its device, as the accelerator has prepared it.
        optimizer: of the model's trained parameters, as the accelerator has prepared it.
        accelerator: exchanges gradients between processes. It places nothing, as its device is that
            of the process.
        kl_controller: TRL's controller of the KL coefficient.
        reference: pi_0 in its wrapper, frozen; may be shared by several learners. None: the policy
            with its adapters off.
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
        self.optimizer = optimizer
        self.accelerator = accelerator
        self.kl_controller = kl_controller
        self.device = device
        self.tokenizer = tokenizer
        self.config = config
        self.ppo = config.ppo

        self.batch_size = config.ppo.batch_size // distributed.world_size()
        self.mini_batch_size = config.ppo.mini_batch_size // distributed.world_size()
        self.passes = Passes(model, reference, accelerator, config, device, self.mini_batch_size)
        self.policy = self.passes.policy  # the causal language model inside

        self.model_params = [p for p in model.parameters() if p.requires_grad]
        self.reward_moments = RewardMoments(accelerator)
        # In this process.
        self.optimizer_steps = 0

    @abstractmethod
    def targets(
        self, old: EvaluatedBatch, rewards: Tensor, mask: Tensor, rollouts: Sequence[Rollout]
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
        old: EvaluatedBatch,
        targets: Targets,
        mask: Tensor,
        weights: Tensor,
        tokens: Tensor,
        responses: int,
    ) -> LossTerms:
        """What is minimized, and the statistics: some rows' part of the mini-batch's means.

        Args:
            new: these rows under the policy being trained; `old`, `targets`: the same rows.
            entropies, mask: (rows, R).
            weights: (rows,), by which each row's part of the loss is multiplied.
            tokens, responses: response tokens and responses of the mini-batch.
        """

    def update(
        self, rollouts: Sequence[Rollout], rewards: Sequence[Tensor], shuffle: np.random.Generator
    ) -> list[UpdateStats]:
        """One update: advantages, `ppo_epochs` passes of optimizer steps over the rows, and the KL
        coefficient.

        Args:
            rollouts: of the agent, one for each of its roles; each has `batch_size` rows, but for a pioneer after whom
                the chain branches, which has `batch_size / branches`.
            rewards: of each rollout, the training rewards of its rows.
            shuffle: draws the order of the rows in each epoch.

        Returns the statistics of each rollout. Raises a ValueError if the number of rows is
        another, and NotFinite if a loss or gradient is not finite; the weights are then as before
        that optimizer step.
        """
        self._check_rows(rollouts, rewards)
        self.passes.switch_dropout_off()
        update = self._prepare(rollouts, rewards)

        num_rows = len(update.batch.input_ids)
        num_steps = self._steps_per_epoch(num_rows)
        for _ in range(self.ppo.ppo_epochs):
            order = shuffle.permutation(num_rows).tolist()
            for indices in _even_parts(order, num_steps):
                self._optimizer_step(update, indices)

        stats = self._statistics(update)
        self.reward_moments = update.reward_moments
        # The coefficient follows the reported KL, on average over the rollouts. It moves alike in each update, however
        # many roles the agent had and branches followed it.
        kl = statistics.fmean(rollout_stats.kl for rollout_stats in stats)
        if math.isfinite(kl):
            self.kl_controller.update(kl, self.ppo.batch_size)
        return stats

    @torch.no_grad()
    def response_kls(self, rollout: Rollout) -> list[float]:
        """The KL of each response to the reference, in nats, under the current policy."""
        batch = window.pack(
            rollout.prompt_ids, rollout.response_ids, pad_token(self.tokenizer), self.device
        )
        current = self.passes.retrying(lambda: self.passes.evaluate(batch))
        kls: list[float] = (current.kl * batch.response_mask).sum(1).tolist()
        return kls

    def _check_rows(self, rollouts: Sequence[Rollout], rewards: Sequence[Tensor]) -> None:
        for rollout, reward in zip(rollouts, rewards, strict=True):
            expected = self.batch_size * rollout.branches // self.config.branches
            if not len(rollout.prompt_ids) == len(rollout.response_ids) == len(reward) == expected:
                size = "batch_size" if expected == self.batch_size else "batch_size / branches"
                raise ValueError(
                    f"expected {size} = {expected} prompts, responses and rewards of each rollout, "
                    f"got {len(rollout.prompt_ids)}, {len(rollout.response_ids)} and {len(reward)}"
                )

    def _steps_per_epoch(self, num_rows: int) -> int:
        """As few optimizer steps as the rows take, and no more than leave each mini-batch a row."""
        mini_batches = self.ppo.gradient_accumulation_steps
        steps = math.ceil(num_rows / (self.mini_batch_size * mini_batches))
        # Branches give numbers of rows that are no multiple of a step's. With mini-batches of one row,
        # some mini-batches of so many steps would have none.
        return min(steps, max(1, num_rows // mini_batches))

    def _prepare(self, rollouts: Sequence[Rollout], rewards: Sequence[Tensor]) -> Update:
        """The update before its first step."""
        prompt_ids = [ids for rollout in rollouts for ids in rollout.prompt_ids]
        response_ids = [ids for rollout in rollouts for ids in rollout.response_ids]
        batch = window.pack(prompt_ids, response_ids, pad_token(self.tokenizer), self.device)
        mask = batch.response_mask
        old, first_pass = self.passes.retrying(lambda: self._evaluate(batch))

        training_rewards = to_device(torch.cat(list(rewards)).float(), self.device)
        training_rewards, reward_moments = self._scale(training_rewards)
        with torch.no_grad():
            targets = self.targets(old, training_rewards, mask, rollouts)
        weights = to_device(_role_weights(rollouts), self.device)

        engine_logprobs = [logprobs for rollout in rollouts for logprobs in rollout.logprobs]
        engine_difference = None
        if engine_logprobs:
            engine_difference = difference(old.logprobs, engine_logprobs, mask)
        return Update(
            rollouts, batch, old, targets, weights, reward_moments, engine_difference, first_pass
        )

    def _evaluate(self, batch: Window) -> tuple[EvaluatedBatch, ForwardPass | None]:
        """The batch under the current policy; and the pass with its graph, if it is also that of the
        first mini-batch (`_backward`).
        """
        # A micro-batch is at most a mini-batch, so a batch that fits into it makes one optimizer step.
        fits = self.passes.micro_batch >= len(batch.input_ids)
        if fits and self.ppo.gradient_accumulation_steps == 1:
            return self.passes.evaluate_with_graph(batch)
        return self.passes.evaluate(batch), None

    def _scale(self, rewards: Tensor) -> tuple[Tensor, RewardMoments]:
        """Training rewards after the optional scaling, normalization and clipping, and the moments
        with them.

        The learner's own moments stay, as the update may still fail.
        """
        moments = copy.copy(self.reward_moments)
        if self.ppo.reward_scaling:
            moments.update(rewards)
            if self.ppo.reward_normalization:
                rewards = rewards - moments.mean
            # Rewards that are all alike have no deviation but that of rounding.
            if moments.std > 1e-6 * abs(moments.mean):
                rewards = rewards / (moments.std + torch.finfo(rewards.dtype).eps)
        if self.ppo.reward_clip is not None:
            rewards = rewards.clip(-self.ppo.reward_clip, self.ppo.reward_clip)
        return rewards, moments

    def _statistics(self, update: Update) -> list[UpdateStats]:
        """The statistics of each rollout, over all processes."""
        kls, lengths = update.rollout_means()
        terms = update.term_means()
        explained_variance = update.explained_variance()
        return [
            UpdateStats(
                kl=kl,
                kl_coef=self.kl_controller.value,
                entropy=terms["entropy"],
                policy_loss=terms["policy_loss"],
                value_loss=terms.get("value_loss"),
                explained_variance=explained_variance,
                clip_fraction=terms["clip_fraction"],
                gradient_norm=statistics.fmean(update.gradient_norms),
                dropped_steps=update.dropped_steps,
                response_tokens=length,
                engine_difference=update.engine_difference,
            )
            for kl, length in zip(kls, lengths, strict=True)
        ]

    def _optimizer_step(self, update: Update, indices: list[int]) -> None:
        """One optimizer step on these rows: a mini-batch, or with gradient accumulation several."""
        mini_batches = _even_parts(indices, self.ppo.gradient_accumulation_steps)
        step = self.passes.retrying(lambda: self._gradients(update, mini_batches))

        if not math.isfinite(step.norm + step.sum_of_terms):
            self.optimizer.zero_grad()
            roles = " and ".join(rollout.role for rollout in update.rollouts)
            what = "gradient" if math.isfinite(step.sum_of_terms) else "loss"
            raise NotFinite(f"{update.rollouts[0].agent} as {roles}: the {what} is not finite")

        update.terms += step.terms
        update.gradient_norms.append(step.norm)
        if step.largest_ratio > self.ppo.ratio_threshold:
            # Zero gradient; Adam's momentum still moves the weights. TRL does the same, but for the
            # gradient of that mini-batch alone where several make a step.
            update.dropped_steps += 1
            torch._foreach_zero_([p.grad for p in self.model_params if p.grad is not None])
        if self.ppo.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model_params, self.ppo.max_grad_norm)
        self.optimizer.step()
        self.optimizer_steps += 1
        self.optimizer.zero_grad()

    def _gradients(self, update: Update, mini_batches: list[list[int]]) -> StepGradients:
        """Computes the gradient of an optimizer step, on the parameters, by its mini-batches' indices."""
        self.optimizer.zero_grad()
        last = len(mini_batches) - 1
        terms = [
            self._backward(update, indices, last=number == last)
            for number, indices in enumerate(mini_batches)
        ]
        # Losses and gradients are those of all processes, so that all of them decide the same.
        norm = sharding.whole(
            get_total_norm([p.grad for p in self.model_params if p.grad is not None])
        )
        sum_of_terms = torch.stack([term.vector() for term in terms]).sum()
        largest_ratio = torch.stack([term.ratio for term in terms]).max()
        # The step's only wait for the device.
        return StepGradients(terms, *torch.stack([norm, sum_of_terms, largest_ratio]).tolist())

    def _backward(self, update: Update, indices: list[int], last: bool) -> LossTerms:
        """Adds a mini-batch's gradient, in micro-batches; returns the means of its terms.

        `last`: whether it is the last mini-batch of the optimizer step.
        """
        batch = update.batch
        # Gradients are averaged over the processes, so each one's sums are divided by the mean of
        # their tokens, and by its own responses, which are as many in each.
        response_tokens = torch.tensor(sum(batch.response_lengths[i] for i in indices))
        tokens = (
            distributed.all_reduce_sum(to_device(response_tokens, self.device))
            / distributed.world_size()
        )
        sums = torch.zeros((), device=batch.input_ids.device)
        micro_batches = list(batch.by_length(self.passes.micro_batch, indices))
        for number, micro_indices in enumerate(micro_batches):
            micro_batch = batch.select(micro_indices)
            # Several processes exchange gradients once per step.
            exchange = last and number + 1 == len(micro_batches)
            with nullcontext() if exchange else self.accelerator.no_sync(self.model):
                # The weights have not changed since the first pass, and it has the rows in the same
                # order.
                new = update.take_first_pass()
                if new is None:
                    new = self.passes.forward(micro_batch)
                terms = self.terms_of_rows(
                    update, new, micro_indices, micro_batch, tokens, len(indices)
                )
                # Not `accelerator.backward`, whose number of mini-batches is that of the Accelerator made last.
                (terms.loss / self.ppo.gradient_accumulation_steps).backward()
            del new  # before the next micro-batch needs its memory
            sums = sums + terms.vector()
        return LossTerms(*(distributed.all_reduce_sum(sums) / distributed.world_size()))

    def terms_of_rows(
        self,
        update: Update,
        new: ForwardPass,
        indices: list[int],
        micro_batch: Window,
        tokens: Tensor,
        responses: int,
    ) -> LossTerms:
        """The `loss_terms` of a micro-batch, whose rows have these indices in the batch."""
        entropies = self.passes.entropies(new, micro_batch)
        width = micro_batch.response_ids.shape[1]
        old = update.old.select(indices, width)
        targets = update.targets.select(indices, width)
        weights = update.weights[to_device(torch.tensor(indices), self.device)]
        return self.loss_terms(
            new, entropies, old, targets, micro_batch.response_mask, weights, tokens, responses
        )

    def scale_learning_rate(self, factor: float) -> None:
        """Makes the learning rate `factor` times that of the settings."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.ppo.learning_rate * factor

    def restart(self) -> None:
        """Resets the optimizer's state, the KL coefficient and the reward moments, as a new trainer would."""
        self.optimizer.state.clear()
        self.kl_controller.value = self.ppo.init_kl_coef
        self.reward_moments = RewardMoments(self.accelerator)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Trained weights and the optimizer's state; the KL coefficient, reward moments and sizes of passes as json."""
        moments = self.reward_moments
        numbers = {
            "kl_coef": self.kl_controller.value,
            "moments": {
                "mean": moments.mean,
                "std": moments.std,
                "var": moments.var,
                "count": moments.count,
            },
            "micro_batch": self.passes.micro_batch,
            "lacked_memory_for_one_row": self.passes.lacked_memory_for_one_row,
        }
        return tensors_of(self._trained(), self.optimizer), numbers

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Loads what `save_state` returned. If a tensor is missing or misfits, raises a ValueError, nothing changed."""
        load_tensors(tensors, self._trained(), self.optimizer)
        self.kl_controller.value = float(numbers["kl_coef"])
        if self.ppo.micro_batch == "auto":  # that of more processes is smaller
            self.passes.micro_batch = min(self.passes.micro_batch, int(numbers["micro_batch"]))
            if numbers.get("lacked_memory_for_one_row"):
                self.passes.use_chunks()
        self.reward_moments = RewardMoments(self.accelerator, **numbers["moments"])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, in the optimizer's order."""
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: parameter for parameter in self.model_params}


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
