"""The forward passes of an update: policy and reference in the response window, as many rows at a time as the memory
takes.

* Logits, KL and entropy exist only at response positions (`cory/models/window.py`): the others are
  masked.
* The reference is read in batches of its own, and micro-batches fit the memory.
* No dropout in any pass, so the first epoch's probability ratio is 1 (in bf16 nearly: a row's logits are rounded,
  and differ with the rows that are read beside it).
"""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from cory.config import Config
from cory.learners import head, losses
from cory.learners.head import ChunkedHead
from cory.learners.update import EvaluatedBatch, ForwardPass
from cory.models import window
from cory.models.lora import LanguageModel
from cory.models.window import Window, recompute_in_eval, share_prompts
from cory.parallel import distributed, sharding
from cory.parallel.devices import autocast, is_out_of_memory, to_device

T = TypeVar("T")


class Passes:
    """The forward passes of a learner's policy and its reference.

    Args:
        model: the policy in its wrapper on its device, as the accelerator has prepared it.
        reference: pi_0 in its wrapper, frozen. None: the policy with its adapters off.
        accelerator: has prepared the model.
        config: the run's settings.
        device: where the passes run.
        mini_batch_size: rows of a mini-batch in this process; a micro-batch is no larger.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        accelerator: Accelerator,
        config: Config,
        device: torch.device,
        mini_batch_size: int,
    ) -> None:
        self.model = model
        # The causal language model inside.
        self.policy: LanguageModel = accelerator.unwrap_model(model).pretrained_model
        self.reference = None if reference is None else sharding.placed(reference, device)
        self.accelerator = accelerator
        self.config = config
        self.device = device
        self.checkpointed_layers = recompute_in_eval(model)
        self.micro_batch = mini_batch_size
        if config.ppo.micro_batch != "auto":
            self.micro_batch = min(mini_batch_size, config.ppo.micro_batch)
        self.lacked_memory_for_one_row = False

        self.model.eval()
        # In a chunk of the output layer; None: it is run whole.
        self.positions_at_a_time = self._positions_at_a_time(head.WHOLE)
        if self.positions_at_a_time is not None:
            warnings.warn(
                f"Large vocabulary: the output layer runs in chunks of {self.positions_at_a_time} "
                "positions. Where a smaller ppo.micro_batch fits without, it takes less time",
                stacklevel=3,
            )

    def use_chunks(self) -> bool:
        """Runs the output layer in chunks from now on, as memory ran out with one row; whether that is possible."""
        self.positions_at_a_time = self._positions_at_a_time(head.CHUNK)
        self.lacked_memory_for_one_row = self.positions_at_a_time is not None
        return self.lacked_memory_for_one_row

    def switch_dropout_off(self) -> None:
        """In every pass, as in TRL, so that the first epoch's probability ratio is 1."""
        self.model.eval()
        for layer in self.checkpointed_layers:
            # Transformers recomputes in training mode only. The layer itself runs in `eval()`.
            layer.training = True

    def forward(self, batch: Window) -> ForwardPass:
        """A forward pass of the policy."""
        return self._pass(self.model, batch)

    def entropies(self, forward_pass: ForwardPass, batch: Window) -> Tensor:
        """(rows, R): the entropy at each response position of a pass over `batch`."""
        if forward_pass.entropies is not None:
            return forward_pass.entropies
        assert forward_pass.all_logprobs is not None
        return losses.entropy(forward_pass.all_logprobs, self._rows_at_a_time(batch))

    @torch.no_grad()
    def evaluate(self, batch: Window) -> EvaluatedBatch:
        """The batch under the current policy, and its KL to the reference."""
        old = EvaluatedBatch.zeros(batch)
        rows_of_pass = self._rows_of_pass(batch)
        for indices in batch.by_length(rows_of_pass):
            policy_batch = batch.select(indices)
            policy = self.forward(policy_batch)
            self._fill(old, indices, policy_batch, policy, rows_of_pass)
            del policy  # before the next pass, as both may hold (rows, R, vocabulary) numbers
        return old

    def evaluate_with_graph(self, batch: Window) -> tuple[EvaluatedBatch, ForwardPass]:
        """As `evaluate`, by one pass over all rows, which is returned with its graph."""
        old = EvaluatedBatch.zeros(batch)
        (indices,) = batch.by_length(len(batch.input_ids))
        policy_batch = batch.select(indices)
        policy = self.forward(policy_batch)
        self._fill(old, indices, policy_batch, policy, self._rows_of_pass(batch))
        return old, policy

    def retrying(self, compute: Callable[[], T]) -> T:
        """Runs `compute()`; makes passes smaller and repeats if memory runs out."""
        # Other processes would wait in vain.
        is_fixed = self.config.ppo.micro_batch != "auto" or distributed.world_size() > 1
        while True:
            try:
                return compute()
            except RuntimeError as error:
                if is_fixed or not is_out_of_memory(error):
                    raise
                # The frames of its traceback hold what the pass has computed.
                failure = error.with_traceback(None)
            clear_device_cache(garbage_collection=True)
            if not self._make_smaller():
                raise failure

    def _pass(self, model: torch.nn.Module, batch: Window) -> ForwardPass:
        if self.positions_at_a_time is None:
            with autocast(self.device, self.config.precision):
                logits, values = model(*self._inputs(batch))
            logprobs, all_logprobs = losses.TokenLogprobs.apply(logits, batch.response_ids)
            return ForwardPass(logprobs, values, all_logprobs)

        with autocast(self.device, self.config.precision):
            hidden, values = model(*self._inputs(batch), run_head=False)
            layer = head.output_layer(self.accelerator.unwrap_model(model).pretrained_model)
            chunked = ChunkedHead(layer, hidden, self.positions_at_a_time)
            logprobs, entropies = chunked.token_logprobs(batch.response_ids)
        return ForwardPass(logprobs, values, head=chunked, entropies=entropies)

    def _inputs(self, batch: Window) -> tuple[Tensor, Tensor | None, Tensor, int, Tensor | None]:
        """What a pass reads, with each prompt once where rows share it and that is less work."""
        shared = share_prompts(self.policy, batch)
        if shared is not None:
            return shared
        mask = window.whole_mask(
            self.policy, batch.attention_mask, batch.input_ids.shape[1], batch.is_padded
        )
        return batch.input_ids, mask, batch.position_ids, batch.response_ids.shape[1], None

    def _reference_forward(self, batch: Window) -> ForwardPass:
        """A forward pass of the reference (Eq. 8: pi_0 under the agent's own prompts)."""
        if self.reference is not None:
            return self._pass(self.reference, batch)
        with self.policy.disable_adapter():
            return self._pass(self.model, batch)

    @torch.no_grad()
    def _fill(
        self,
        old: EvaluatedBatch,
        indices: list[int],
        policy_batch: Window,
        policy: ForwardPass,
        rows_of_pass: int,
    ) -> None:
        """Writes a pass of the policy, whose rows have these indices, and its KL to the reference into `old`.

        The reference is read in batches of its own, of `rows_of_pass`, whatever the policy's are.
        """
        for chunk in policy_batch.by_length(rows_of_pass):
            chunk_batch = policy_batch.select(chunk)
            reference = self._reference_forward(chunk_batch)
            width = chunk_batch.response_ids.shape[1]
            rows = to_device(torch.tensor(chunk), self.device)
            in_batch = to_device(torch.tensor([indices[i] for i in chunk]), self.device)
            old.kl[in_batch, :width] = self._kl(policy, reference, rows)
            old.ref_logprobs[in_batch, :width] = reference.logprobs
            old.logprobs[in_batch, :width] = policy.logprobs[rows, :width]
            if policy.values is not None:
                old.values[in_batch, :width] = policy.values[rows, :width]
            del reference  # before its next pass

    def _kl(self, policy: ForwardPass, reference: ForwardPass, rows: Tensor) -> Tensor:
        """KL (rows, R) to the reference's pass, over these rows of the policy's."""
        kind = self.config.ppo.kl_penalty
        width = reference.logprobs.shape[1]
        if kind != "full":
            return losses.kl_penalty(kind, policy.logprobs[rows, :width], reference.logprobs)
        if policy.head is not None and reference.head is not None:
            with autocast(self.device, self.config.precision):
                return policy.head.select(rows, width).kl(reference.head)
        assert policy.all_logprobs is not None and reference.all_logprobs is not None
        return losses.kl_penalty(kind, policy.all_logprobs[rows, :width], reference.all_logprobs)

    def _positions_at_a_time(self, whole: dict[str, int]) -> int | None:
        """See `head.positions_at_a_time`. `whole`: the largest array that is made whole."""
        with autocast(self.device, self.config.precision):
            return head.positions_at_a_time(
                self.policy, self.device, self.micro_batch, self.config.longest_response, whole
            )

    def _rows_at_a_time(self, batch: Window) -> int:
        """The most rows of a pass without gradient: as many as a micro-batch has, but if the output
        layer is run whole at most those whose log-probabilities (rows, R, vocabulary) are a chunk.
        """
        if self.positions_at_a_time is not None:
            return self.micro_batch
        row = max(batch.response_lengths) * self.policy.config.get_text_config().vocab_size
        return max(1, min(self.micro_batch, head.limit(head.CHUNK, batch.input_ids.device) // row))

    def _rows_of_pass(self, batch: Window) -> int:
        """As `_rows_at_a_time`; of a sharded policy the same in all processes, which run equally many passes."""
        rows = self._rows_at_a_time(batch)
        return sharding.least(rows) if sharding.is_sharded(self.policy) else rows

    def _make_smaller(self) -> bool:
        """Halves the micro-batch. From one row on, whose arrays over the vocabulary are larger than
        a chunk, the output layer is run in chunks, which take more time. False: nothing is left.
        """
        if self.micro_batch > 1:
            self.micro_batch = (self.micro_batch + 1) // 2
            warnings.warn(
                f"Out of memory: continuing with {self.micro_batch} rows at a time. Updates still "
                f"use the whole mini-batch. To start this way: ppo.micro_batch {self.micro_batch}",
                stacklevel=3,
            )
            return True

        if self.positions_at_a_time is not None or not self.use_chunks():
            return False
        warnings.warn(
            "Out of memory: continuing with the output layer in chunks of "
            f"{self.positions_at_a_time} positions",
            stacklevel=3,
        )
        return True
