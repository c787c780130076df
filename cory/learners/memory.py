"""How much a forward pass reads at a time; less where memory runs out."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache

from cory.config import Config
from cory.learners import head
from cory.models.lora import LanguageModel
from cory.models.window import Window
from cory.parallel import distributed
from cory.parallel.devices import autocast, is_out_of_memory

P = ParamSpec("P")
T = TypeVar("T")


class PassSize:
    """Rows of a pass, and positions of its output layer.

    Args:
        policy: the causal language model, on `device`.
        config: the run's settings.
        device: where the passes run.
        mini_batch_size: rows of a mini-batch in this process.

    Attributes:
        micro_batch: rows of a pass with gradient, at most a mini-batch.
        positions_at_a_time: in a chunk of the output layer; None: it is run whole.
    """

    def __init__(
        self, policy: LanguageModel, config: Config, device: torch.device, mini_batch_size: int
    ) -> None:
        self.policy = policy
        self.config = config
        self.device = device
        self.micro_batch = mini_batch_size
        if config.ppo.micro_batch != "auto":
            self.micro_batch = min(mini_batch_size, config.ppo.micro_batch)
        self.lacked_memory_for_one_row = False

        self.positions_at_a_time = self._positions_at_a_time(head.WHOLE)
        if self.positions_at_a_time is not None:
            warnings.warn(
                f"Large vocabulary: the output layer runs in chunks of {self.positions_at_a_time} "
                "positions. Where a smaller ppo.micro_batch fits without, it takes less time",
                stacklevel=3,
            )

    def rows_without_gradient(self, window: Window) -> int:
        """The most rows of a pass without gradient: as many as a micro-batch has, but if the output
        layer is run whole at most those whose log-probabilities (rows, R, vocabulary) are a chunk.
        """
        if self.positions_at_a_time is not None:
            return self.micro_batch
        row = max(window.response_lengths) * self.policy.config.get_text_config().vocab_size
        return max(1, min(self.micro_batch, head.limit(head.CHUNK, self.device) // row))

    def retrying(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `compute`; makes passes smaller and repeats if memory runs out."""
        # Other processes would wait in vain.
        is_fixed = self.config.ppo.micro_batch != "auto" or distributed.world_size() > 1
        while True:
            try:
                return compute(*args, **kwargs)
            except RuntimeError as error:
                if is_fixed or not is_out_of_memory(error):
                    raise
                # The frames of its traceback hold what the pass has computed.
                failure = error.with_traceback(None)
            clear_device_cache(garbage_collection=True)
            if not self._make_smaller():
                raise failure

    def state(self) -> dict[str, Any]:
        """What memory has allowed so far, for a checkpoint."""
        return {
            "micro_batch": self.micro_batch,
            "lacked_memory_for_one_row": self.lacked_memory_for_one_row,
        }

    def load_state(self, numbers: Mapping[str, Any]) -> None:
        """Loads what `state` returned, unless the settings fix the size."""
        if self.config.ppo.micro_batch != "auto":
            return
        # That of more processes is smaller.
        self.micro_batch = min(self.micro_batch, int(numbers["micro_batch"]))
        if numbers["lacked_memory_for_one_row"]:
            self._use_chunks()

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

        if self.positions_at_a_time is not None or not self._use_chunks():
            return False
        warnings.warn(
            "Out of memory: continuing with the output layer in chunks of "
            f"{self.positions_at_a_time} positions",
            stacklevel=3,
        )
        return True

    def _use_chunks(self) -> bool:
        """Runs the output layer in chunks from now on, as memory ran out with one row; whether that is possible."""
        self.positions_at_a_time = self._positions_at_a_time(head.CHUNK)
        self.lacked_memory_for_one_row = self.positions_at_a_time is not None
        return self.lacked_memory_for_one_row

    def _positions_at_a_time(self, whole: dict[str, int]) -> int | None:
        """See `head.positions_at_a_time`. `whole`: the largest array that is made whole."""
        with autocast(self.device, self.config.precision):
            return head.positions_at_a_time(
                self.policy, self.device, self.micro_batch, self.config.longest_response, whole
            )
