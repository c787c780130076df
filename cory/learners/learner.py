"""The base class of all learners: one update of one agent in the response window.

* Logits, KL and entropy exist only at response positions (`cory/policies/window.py`): the others are masked.
* If the batch is one mini-batch, the first epoch's pass also gives the old log-probabilities.
* The reference is read in batches of its own, statistics leave the device once, micro-batches fit the memory.
* No dropout in sampling or any pass, so the first epoch's probability ratio is 1.
"""

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig
from cory.errors import one_of
from cory.learners import losses
from cory.learners.optimizer import load_tensors, tensors_of
from cory.learners.trl_parts import RunningMoments
from cory.policies import sharding, window
from cory.policies.engine import difference
from cory.policies.families import check_model
from cory.policies.sampling import pad_token, sample
from cory.policies.window import Window
from cory.run import processes
from cory.run.guards import NotFinite

# Elements of a (rows, R, vocabulary) array at a time where no gradient needs all of them: PASS_CHUNK for a pass of the
# reference, which many rows make efficient; READ_CHUNK for element-wise arithmetic, which is as fast with a few.
PASS_CHUNK = {"cpu": 2**24, "cuda": 2**28}
READ_CHUNK = {"cpu": 2**20, "cuda": 2**28}
PASS_COST = {"cpu": 64, "cuda": 8192}  # what one more pass costs, in padded tokens
PRECISIONS = ("fp32", "bf16")
ON_NONFINITE = ("stop", "skip")
T = TypeVar("T")


class Rows(NamedTuple):
    """A forward pass's outputs: logprobs and values (rows, R), all_logprobs (rows, R, vocabulary); values: PPO only."""

    logprobs: Tensor
    all_logprobs: Tensor
    values: Tensor | None


@dataclass
class OldPolicy:
    """The batch under the policy that sampled it, all (batch, R); `graphs`: its passes, if training reuses them."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kl: Tensor
    advantages: Tensor
    returns: Tensor
    graphs: list[Rows] = field(default_factory=list, kw_only=True)

    def rows(self, index: Sequence[int], width: int) -> "OldPolicy":
        """The rows `index`, in that order, cut to `width` tokens."""
        names = ("logprobs", "ref_logprobs", "values", "kl", "advantages", "returns")
        return OldPolicy(*(getattr(self, name)[index, :width] for name in names))


class Learner:
    """One agent's learner. A subclass defines advantages and losses, and sets these before `__init__`:

    `model` (wrapped for the processes), `optimizer`, `accelerator`, `kl_ctl` (TRL's controller of the KL coefficient)
    and `optional_peft_ctx` (switches the adapters off).

    Args:
        config: TRL's PPOConfig, from `trl_config`; its batches are one process's share.
        ref_model: the frozen reference; may be shared by several learners. None: the policy with its adapters off.
        tokenizer: of the policy.
        micro_batch: rows of a mini-batch in one forward and backward pass; `auto`: all that fit into memory.
        precision: `bf16` for autocast, else `fp32`.
        on_nonfinite: `stop` raises NotFinite if a loss or gradient is not finite, `skip` leaves out that optimizer
            step. Neither changes the weights.

    Raises a UserError if there is no such precision or reaction.
    """

    STATS: tuple[str, ...]  # statistics of a mini-batch, under TRL's names
    model: Any
    optimizer: Any
    accelerator: Any
    kl_ctl: Any
    optional_peft_ctx: Any

    def __init__(
        self,
        config: Any,
        ref_model: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        micro_batch: int | str = "auto",
        precision: str = "fp32",
        on_nonfinite: str = "stop",
    ) -> None:
        one_of("precision", PRECISIONS, precision)
        one_of("guards.on_nonfinite", ON_NONFINITE, on_nonfinite)
        self.config, self.tokenizer, self.pad_id = config, tokenizer, pad_token(tokenizer)
        self.ref_model = None if ref_model is None else sharding.placed(ref_model, self.accelerator.device)
        self.model_params = [p for p in self.model.parameters() if p.requires_grad]
        self.running = RunningMoments(self.accelerator)
        self.checkpointed_layers = [m for m in self.model.modules() if getattr(m, "gradient_checkpointing", False)]
        self.pass_cost = PASS_COST.get(self.accelerator.device.type, PASS_COST["cpu"])
        self.fixed_micro_batch = micro_batch != "auto"
        size = config.mini_batch_size
        self.micro_batch = min(size, int(micro_batch)) if self.fixed_micro_batch else size
        self.precision, self.on_nonfinite = precision, on_nonfinite
        self.skipped_steps = self.dropped_steps = 0  # optimizer steps of the last update: left out, without a gradient
        self.gradient_norms: list[float] = []  # of the others
        self.parts: list[dict[str, float]] = []  # KL and length of each of the update's batches
        self.optimizer_steps = 0  # in this process

    @property
    def policy(self) -> PreTrainedModel:
        """The causal language model inside."""
        return self.accelerator.unwrap_model(self.model).pretrained_model

    def _advantages(self, old: OldPolicy, scores: Tensor, mask: Tensor, parts: int) -> Tensor:
        """Fills in `old.advantages` and what belongs to them; returns the KL's part of the rewards, (rows, R)."""
        raise NotImplementedError

    def _losses(self, new: Rows, entropies: Tensor, old: OldPolicy, mask: Tensor, scale: Tensor) -> Any:
        """A named tuple of sums over response tokens, whose first is trained; `scale`: a response's mean length."""
        raise NotImplementedError

    def _loss(self, terms: Any) -> Tensor:
        """What is minimized, from sums or means of the losses."""
        return terms[0]

    def _moments(self, old: OldPolicy, index: list[int], mask: Tensor) -> list[Tensor]:
        """Further statistics of a mini-batch."""
        return []

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def generate(self, queries: Sequence[Tensor], settings: SamplingConfig, longest: int) -> list[Tensor]:
        """Samples one response per query, in one batch (TRL: batches of 4). See `sample`."""
        self.model.eval()  # TRL leaves dropout on after the first step, and would sample from another policy
        with self._autocast(), sharding.gathered(self.policy):
            return sample(self.policy, self.tokenizer, queries, settings, longest)

    def check_model(self, samples: bool) -> None:
        """Raises a UserError if the policy is not right in padded batches. See `families.check_model`."""
        self.model.eval()
        with self._autocast(), sharding.gathered(self.policy):
            check_model(self.policy, self.tokenizer, samples)

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Tensor,
        parts: int = 1,
        sampled: Sequence[Tensor] = (),
    ) -> dict[str, float]:
        """One update: advantages, `ppo_epochs` passes of optimizer steps over the batch, and the KL coefficient.

        Args:
            queries, responses: token ids, one 1-d tensor per row, none empty. scores: (rows,) training rewards.
            parts: how many batches of `batch_size` rows these are, one for each role of the agent.
            sampled: log-probabilities of the responses' tokens by the engine that sampled them; empty without one.

        Returns TRL's scalar statistics under its names; `self.parts` has KL and length of each batch.
        Raises a ValueError if there are not `parts * batch_size` rows, and NotFinite: see `on_nonfinite`.
        """
        size = parts * self.config.batch_size
        if not len(queries) == len(responses) == len(scores) == size:
            came = f"{len(queries)}, {len(responses)} and {len(scores)}"
            raise ValueError(f"expected {parts} * batch_size = {size} queries, responses and scores, got {came}")
        self.model.eval()  # no dropout in any pass, as in TRL, so that the first epoch's probability ratio is 1
        for layer in self.checkpointed_layers:
            layer.training = True  # recomputing is for training mode only; dropout inside the layers stays off
        batch = window.pack(queries, responses, self.pad_id)
        mask = batch.response_mask
        scores, running = self._scaled(scores.to(mask.device, torch.float32))
        old = self._retrying(lambda: self._old(batch))
        by_engine = {"engine_difference": difference(old.logprobs, sampled, mask)} if sampled else {}
        with torch.no_grad():
            penalties = self._advantages(old, scores, mask, parts)
        steps: list[Tensor] = []  # `STATS` of each mini-batch; empty where every optimizer step was skipped
        self.skipped_steps, self.dropped_steps, self.gradient_norms = 0, 0, []
        for _ in range(self.config.ppo_epochs):
            order = np.random.permutation(size).tolist()
            for start in range(0, size, self.config.backward_batch_size):
                steps += self._optimize(batch, old, order[start : start + self.config.backward_batch_size])
        # Sums over the batch first: they are over the processes, too.
        sums = [(old.kl * mask).sum(), (-old.logprobs * mask).sum(), (penalties * mask).sum(), mask.sum(), scores.sum()]
        each = [x.sum() for pair in zip((old.kl * mask).chunk(parts), mask.chunk(parts), strict=True) for x in pair]
        averages = torch.stack(steps).mean(0) if steps else torch.full((len(self.STATS),), math.nan, device=mask.device)
        numbers = torch.cat([processes.all_reduce_sum(torch.stack([*sums, *each])), averages]).tolist()
        kl, entropies, penalty, tokens, score, *means = numbers
        rows = size * processes.world_size()
        share = parts / rows
        self.parts = [{"kl": means[i] * share, "response_tokens": means[i + 1] * share} for i in range(0, 2 * parts, 2)]
        stats = dict(zip(self.STATS, means[2 * parts :], strict=True)) | {
            "objective/kl": kl / rows,
            "objective/entropy": entropies / rows,
            "objective/kl_coef": self.kl_ctl.value,
            "ppo/mean_non_score_reward": penalty / tokens,
            "ppo/mean_scores": score / rows,
            "tokens/responses_len_mean": tokens / rows,
            "gradient_norm": statistics.fmean(self.gradient_norms) if self.gradient_norms else math.nan,
            "skipped_steps": self.skipped_steps,
            "dropped_steps": self.dropped_steps,
            **by_engine,
        }
        self.running = running
        if math.isfinite(stats["objective/kl"]):
            self.kl_ctl.update(stats["objective/kl"], rows)
        return stats

    @torch.no_grad()
    def log_ratios(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> tuple[list[float], Tensor]:
        """Each response's KL to the reference, and log(pi / pi_0) of its tokens, (rows, R), under today's policy."""
        batch = window.pack(queries, responses, self.pad_id)
        old = self._retrying(lambda: self._old(batch, train=False))
        return (old.kl * batch.response_mask).sum(1).tolist(), old.logprobs - old.ref_logprobs

    def _scaled(self, scores: Tensor) -> tuple[Tensor, RunningMoments]:
        """Training rewards after the optional scaling, normalization and clipping, and the moments with them."""
        running, clip = copy.copy(self.running), self.config.score_clip
        if self.config.use_score_scaling:
            running.update(scores)
            centred = scores - running.mean.to(scores) if self.config.use_score_norm else scores
            scores = centred / (running.std.to(scores) + torch.finfo(scores.dtype).eps)
        return scores if clip is None else scores.clip(-clip, clip), running

    def _forward(self, rows: Window) -> Rows:
        return self._pass(self.model, rows)

    def _reference(self, rows: Window) -> Rows:
        with self.optional_peft_ctx():
            return self._pass(self.ref_model or self.model, rows)

    def _pass(self, model: torch.nn.Module, rows: Window) -> Rows:
        with self._autocast():
            logits, values = model(*rows[:4])
        logprobs, all_logprobs = losses.TokenLogprobs.apply(logits, rows.response_ids)
        return Rows(logprobs, all_logprobs, values)

    def _chunk(self, batch: Window, elements: dict[str, int]) -> int:
        """The most rows whose log-probabilities (rows, R, vocabulary) have at most `elements` (by device) elements."""
        width = max(batch.response_lengths) * self.policy.config.get_text_config().vocab_size
        return max(1, min(self.micro_batch, elements.get(batch.input_ids.device.type, elements["cpu"]) // width))

    def _micro_batches(self, batch: Window, index: Sequence[int]) -> list[tuple[list[int], Window]]:
        """Splits the rows `index` into parts that fit into memory; with several processes, into as few as possible."""
        alone = processes.world_size() == 1 or (len(index) > self.micro_batch and not sharding.is_sharded(self.policy))
        return batch.parts(index, self.micro_batch, self.pass_cost if alone else math.inf)

    def _old(self, batch: Window, train: bool = True) -> OldPolicy:
        """The batch under the policy that sampled it, and its KL to the reference.

        Where the batch is one mini-batch that fits, these are also the first epoch's passes, unless `train` is off.
        """
        old = OldPolicy(*(torch.zeros_like(batch.response_mask, dtype=torch.float32) for _ in range(6)))
        all_rows = range(len(batch.input_ids))
        chunk = sharding.least(self._chunk(batch, PASS_CHUNK))
        whole = train and self.micro_batch >= len(all_rows)
        parts = self._micro_batches(batch, all_rows) if whole else [(i, batch.rows(i)) for i in batch.by_length(chunk)]
        for index, rows in parts:
            with torch.set_grad_enabled(whole):
                output = self._forward(rows)
            if whole:
                old.graphs.append(output)
            with torch.no_grad():
                for part in rows.by_length(chunk):
                    some = rows.rows(part)
                    at, width = [index[i] for i in part], some.response_ids.shape[1]
                    ref = self._reference(some)
                    old.kl[at, :width] = self._kl(output, part, ref, self._chunk(some, READ_CHUNK))
                    old.ref_logprobs[at, :width] = ref.logprobs
                    old.logprobs[at, :width] = output.logprobs[part, :width]
                    if output.values is not None:
                        old.values[at, :width] = output.values[part, :width]
        return old

    def _kl(self, output: Rows, part: list[int], ref: Rows, size: int) -> Tensor:
        """KL (rows, R) of the rows `part` of a pass to the reference's pass over them, `size` rows at a time."""
        kind, width = self.config.kl_penalty, ref.logprobs.shape[1]
        if kind != "full":
            return losses.kl_penalty(kind, output.logprobs[part, :width], ref.logprobs)
        mine = (output.all_logprobs[part[start : start + size], :width] for start in range(0, len(part), size))
        pairs = zip(mine, ref.all_logprobs.split(size), strict=True)
        return torch.cat([losses.kl_penalty(kind, *pair) for pair in pairs])

    def _optimize(self, batch: Window, old: OldPolicy, index: list[int]) -> list[Tensor]:
        """One optimizer step on the rows `index`: the statistics (`STATS`) of each of its mini-batches."""
        size = self.config.mini_batch_size
        minis = [index[start : start + size] for start in range(0, len(index), size)]

        def backward() -> list[Tensor]:
            self.optimizer.zero_grad()
            return [self._backward(batch, old, mini, last=mini is minis[-1]) for mini in minis]

        stats = self._retrying(backward)
        gradients = [p.grad for p in self.model_params if p.grad is not None]
        norm = sharding.whole(get_total_norm(gradients))
        # Statistics and gradients are those of all processes, so that all of them decide the same.
        table = torch.stack(stats)
        checked = torch.stack([norm, table[:, self.STATS.index("ppo/policy/ratio")].max(), table.sum()])
        gradient_norm, ratio, total = checked.tolist()  # the step's only wait for the device
        if not math.isfinite(gradient_norm + total):
            self.optimizer.zero_grad()
            if self.on_nonfinite == "skip":
                self.skipped_steps += 1
                return []
            rows = self._rows_not_finite(batch, old, index)
            if not math.isfinite(total):
                raise NotFinite("the loss", sorted(rows))
            for mini in minis:
                rows |= self._rows_of_gradient(batch, old, mini)
            raise NotFinite("the gradient", sorted(rows))
        self.gradient_norms.append(gradient_norm)
        if ratio > self.config.ratio_threshold:  # TRL drops the mini-batch alone where several make a step
            self.dropped_steps += 1
            torch._foreach_zero_(gradients)
        if self.config.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model_params, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer_steps += 1
        self.optimizer.zero_grad()
        return stats

    def _backward(self, batch: Window, old: OldPolicy, index: list[int], last: bool) -> Tensor:
        """Adds a mini-batch's gradient, in micro-batches weighted by their tokens; returns its statistics."""
        # Gradients are averaged over the processes, so each one's sum is divided by the mean of their tokens.
        tokens = processes.all_reduce_sum(batch.response_mask[index].sum()) / processes.world_size()
        graphs, old.graphs = old.graphs, []
        parts = self._micro_batches(batch, index)
        sums = torch.zeros((), device=batch.input_ids.device)
        for number, (part, rows) in enumerate(parts):
            sampled = old if rows is batch else old.rows(part, rows.response_ids.shape[1])
            synced = last and number + 1 == len(parts)  # several processes exchange gradients once per step
            with nullcontext() if synced else self.accelerator.no_sync(self.model):
                new = graphs.pop(0) if graphs else self._forward(rows)
                entropies = losses.entropy(new.all_logprobs, self._chunk(rows, READ_CHUNK))
                terms = self._losses(new, entropies, sampled, rows.response_mask, tokens / len(index))
                # accelerate divides by the gradient accumulation steps
                self.accelerator.backward(self._loss(terms) / tokens)
            del new
            sums = sums + torch.stack(terms).detach()
        means = processes.all_reduce_sum(sums) / processes.world_size() / tokens
        moments = self._moments(old, index, batch.response_mask[index])
        return torch.cat([means, torch.stack([self._loss(means), *moments])])

    @torch.no_grad()
    def _rows_not_finite(self, batch: Window, old: OldPolicy, index: list[int]) -> set[int]:
        """The rows with a number that is not finite, of the policy that sampled or of the one being trained."""
        finite = torch.stack([old.logprobs, old.values, old.kl]).isfinite().all(0).all(-1)
        bad = set((~finite).nonzero().flatten().tolist())
        for part in batch.by_length(self.micro_batch, index):
            new = self._forward(batch.rows(part))
            finite = (new.logprobs if new.values is None else new.logprobs + new.values).isfinite().all(-1)
            bad |= {part[row] for row in (~finite).nonzero().flatten().tolist()}
        return bad

    def _rows_of_gradient(self, batch: Window, old: OldPolicy, index: list[int]) -> set[int]:
        """The rows of a mini-batch whose gradient is not finite.

        The gradients of weights are sums over rows. That of the embedded tokens, which the backward pass reaches last,
        has each row by itself, and a number that is not finite comes through to it. No gradient of a weight is made, so
        nothing is exchanged between processes that hold whole agents.
        """
        bad: set[int] = set()
        embedded: list[Tensor] = []

        def keep(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
            embedded.append(output.requires_grad_())  # below adapters nothing is trained

        tokens = batch.response_mask[index].sum()
        hook = self.policy.get_input_embeddings().register_forward_hook(keep)
        try:
            for part in batch.by_length(self.micro_batch, index):
                rows = batch.rows(part)
                sampled = old.rows(part, rows.response_ids.shape[1])
                with self.accelerator.no_sync(self.model):
                    new = self._forward(rows)
                    entropies = losses.entropy(new.all_logprobs, self._chunk(rows, READ_CHUNK))
                    terms = self._losses(new, entropies, sampled, rows.response_mask, tokens / len(index))
                    (gradient,) = torch.autograd.grad(self._loss(terms) / tokens, embedded.pop())
                finite = gradient.isfinite().flatten(1).all(1)
                bad |= {part[row] for row in (~finite).nonzero().flatten().tolist()}
        finally:
            hook.remove()
        return bad

    def _retrying(self, compute: Callable[[], T]) -> T:
        """Runs `compute()`; halves the micro-batch and repeats if memory runs out."""
        while True:
            try:
                return compute()
            except RuntimeError as error:
                fixed = self.fixed_micro_batch or processes.world_size() > 1  # other processes would wait in vain
                if fixed or self.micro_batch == 1 or not should_reduce_batch_size(error):
                    raise
            self.micro_batch = (self.micro_batch + 1) // 2
            clear_device_cache(garbage_collection=True)
            what = f"Out of memory: continuing with {self.micro_batch} rows at a time. Updates still use the whole "
            warnings.warn(f"{what}mini-batch. To start this way: ppo.micro_batch {self.micro_batch}", stacklevel=2)

    def scale_learning_rate(self, factor: float) -> None:
        """Makes the learning rate `factor` times that of the settings."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor

    def restart(self) -> None:
        """Resets Adam's moments, the KL coefficient and the reward moments, as a new trainer would."""
        self.optimizer.state.clear()
        self.kl_ctl.value = self.config.init_kl_coef
        self.running = RunningMoments(self.accelerator)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Trained weights and the optimizer's state; the KL coefficient, reward moments and micro-batch as json."""
        moments = {key: float(getattr(self.running, key)) for key in ("mean", "std", "var", "count")}
        numbers = {"kl_coef": self.kl_ctl.value, "moments": moments, "micro_batch": self.micro_batch}
        return tensors_of(self._trained(), self.optimizer), numbers

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Loads what `save_state` returned. If a tensor is missing or misfits, raises a ValueError, nothing changed."""
        load_tensors(tensors, self._trained(), self.optimizer)
        self.kl_ctl.value = float(numbers["kl_coef"])
        self.micro_batch = min(self.micro_batch, int(numbers["micro_batch"]))  # that of more processes is smaller
        self.running = RunningMoments(self.accelerator)
        if numbers["moments"]["count"] >= 1:  # else no reward has been seen
            for key, value in numbers["moments"].items():
                setattr(self.running, key, torch.tensor(value) if key in ("mean", "std") else value)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, in the optimizer's order."""
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: parameter for parameter in self.model_params}
