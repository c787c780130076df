"""One agent's PPO: TRL's PPOTrainer (0.11.4) in the response window. Only it and trl_parts.py touch TRL's internals.

`step()` is TRL's arithmetic (the tests compare the two). Where it departs from TRL, and why:

* logits, values, KL and entropy exist only at response positions (`cory/policies/window.py`): the others are masked;
* where one mini-batch is the batch, the first epoch's pass also gives the old log-probabilities;
* the reference is read in batches of its own, statistics leave the device once, micro-batches fit the memory;
* no dropout in sampling or any pass; constructing a trainer leaves the random streams alone (TRL reseeds everything);
* agents share one frozen reference; gradient clipping works after the first step, and reward scaling works at all.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import trl
import trl.trainer.ppo_trainer as trl_ppo
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig
from cory.learners import losses
from cory.learners.trl_parts import PolicyWithValueHead, RunningMoments
from cory.policies import window
from cory.policies.sampling import pad_token, sample
from cory.policies.window import Window
from cory.run import processes
from cory.run.guards import NotFinite

# The statistics of a mini-batch, under TRL's names.
STATS = [f"ppo/{name.replace('_', '/', 1)}" for name in losses.LossStats._fields]
STATS += [f"ppo/{name}" for name in ("loss/total", "returns/mean", "returns/var", "val/mean", "val/var")]
# Elements of a (rows, R, vocabulary) array at a time where no gradient needs all of them: PASS_CHUNK for a pass of the
# reference, which many rows make efficient; READ_CHUNK for element-wise arithmetic, which is as fast with a few.
PASS_CHUNK = {"cpu": 2**24, "cuda": 2**28}
READ_CHUNK = {"cpu": 2**20, "cuda": 2**28}
PASS_COST = {"cpu": 64, "cuda": 8192}  # what one more pass costs, in padded tokens
T = TypeVar("T")


class Rows(NamedTuple):
    """What a pass gives: logprobs and values (rows, R), all_logprobs (rows, R, vocabulary)."""

    logprobs: Tensor
    all_logprobs: Tensor
    values: Tensor


@dataclass
class OldPolicy:
    """The batch under the policy that sampled it, all (batch, R); `graphs`: its passes, where training reuses them."""

    logprobs: Tensor
    values: Tensor
    kl: Tensor
    advantages: Tensor
    returns: Tensor
    graphs: list[Rows] = field(default_factory=list, kw_only=True)


class PPOTrainer(trl.PPOTrainer):
    """TRL's PPOTrainer in the response window.

    Args:
        config: TRL's PPOConfig, e.g. from `trl_config`.
        model: the policy.
        ref_model: the frozen reference; may be shared by several trainers. None: the policy with its adapters off.
        tokenizer: gives TRL its pad token; the numbers do not depend on its padding side.
        micro_batch: rows of a mini-batch in one forward and backward pass; `auto`: all that fit into memory.
        precision: `bf16` for autocast, else `fp32`.
        on_nonfinite: `stop` raises NotFinite where a loss or gradient is not finite, `skip` leaves that optimizer step
            out. The weights are not touched by either.
    """

    def __init__(
        self,
        config: trl.PPOConfig,
        model: PolicyWithValueHead,
        ref_model: PolicyWithValueHead | None,
        tokenizer: PreTrainedTokenizerBase,
        micro_batch: int | str = "auto",
        precision: str = "fp32",
        on_nonfinite: str = "stop",
    ) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        fused = all(p.is_floating_point() for p in trained)  # one kernel instead of one for each operation
        optimizer = torch.optim.Adam(trained, lr=config.learning_rate, fused=fused)
        with (
            warnings.catch_warnings(),
            # TRL reseeds everything here, so that making an agent would restart every random stream of the run.
            patch.object(trl_ppo, "set_seed", lambda seed: None),
            # It would also wrap the reference to exchange gradients that it has not.
            patch.object(trl_ppo, "create_reference_model", lambda *args, **kwargs: None),
        ):
            for message in ("`PPOTrainer` is deprecated", "No dataset is provided", "`is_gradient_checkpointing`"):
                warnings.filterwarnings("ignore", message=message)
            super().__init__(config=config, model=model, ref_model=None, tokenizer=tokenizer, optimizer=optimizer)
        self.ref_model = None if ref_model is None else ref_model.to(self.accelerator.device)
        # TRL keeps a generator here, empty after one use: only the first step would clip its gradients.
        self.model_params = [p for p in self.model.parameters() if p.requires_grad]
        self.running = RunningMoments(self.accelerator)
        self.checkpointed_layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
        self.pad_id = pad_token(tokenizer)
        self.pass_cost = PASS_COST.get(self.accelerator.device.type, PASS_COST["cpu"])
        self.fixed_micro_batch = micro_batch != "auto"
        size = config.mini_batch_size
        self.micro_batch = min(size, int(micro_batch)) if self.fixed_micro_batch else size
        self.precision, self.on_nonfinite = precision, on_nonfinite
        self.skipped_steps = self.dropped_steps = 0  # optimizer steps of the last update: left out, without a gradient
        self.gradient_norms: list[float] = []  # of the others
        self.optimizer_steps = 0  # in this process

    @property
    def policy(self) -> PreTrainedModel:
        """The causal language model inside."""
        return self.accelerator.unwrap_model(self.model).pretrained_model

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def generate(self, queries: Sequence[Tensor], settings: SamplingConfig, longest: int) -> list[Tensor]:
        """Samples one response per query, in one batch (TRL: batches of 4). See `sample`."""
        self.model.eval()  # TRL leaves dropout on after the first step, and would sample from another policy
        with self._autocast():
            return sample(self.policy, self.tokenizer, queries, settings, longest)

    def step(self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Tensor) -> dict[str, float]:
        """One PPO update: token rewards (Eq. 2), advantages (Eq. 12), clipped losses (Eq. 11, 13), KL coefficient.

        Args:
            queries, responses: token ids, one 1-d tensor per row, none empty. scores: (batch,) training rewards.

        Returns TRL's statistics, by its names, of those that are one number.

        Raises:
            ValueError: not `batch_size` rows.
            NotFinite: see `on_nonfinite`.
        """
        size = self.config.batch_size
        if not len(queries) == len(responses) == len(scores) == size:
            came = f"{len(queries)}, {len(responses)} and {len(scores)}"
            raise ValueError(f"expected batch_size = {size} queries, responses and scores, got {came}")
        self.model.eval()  # no dropout in any pass, as in TRL, so that the first epoch's probability ratio is 1
        for layer in self.checkpointed_layers:
            layer.training = True  # recomputing is for training mode only; dropout inside the layers stays off
        batch = window.pack(queries, responses, self.pad_id)
        mask = batch.response_mask
        scores = self._scaled(scores.to(mask.device, torch.float32))
        old = self._retrying(lambda: self._old(batch))
        with torch.no_grad():
            rewards, penalties = losses.token_rewards(scores, old.kl, mask, self.kl_ctl.value)
            old.values, old.advantages, old.returns = self.compute_advantages(old.values, rewards, mask)
        steps: list[Tensor] = []  # STATS of each mini-batch; empty where every optimizer step was skipped
        self.skipped_steps, self.dropped_steps, self.gradient_norms = 0, 0, []
        for _ in range(self.config.ppo_epochs):
            order = np.random.permutation(size).tolist()
            for start in range(0, size, self.config.backward_batch_size):
                steps += self._optimize(batch, old, order[start : start + self.config.backward_batch_size])
        # Sums over the batch first: they are over the processes, too.
        sums = [(old.kl * mask).sum(), (-old.logprobs * mask).sum(), (penalties * mask).sum(), mask.sum(), scores.sum()]
        averages = torch.stack(steps).mean(0) if steps else torch.full((len(STATS),), math.nan, device=mask.device)
        numbers = torch.cat([processes.all_reduce_sum(torch.stack(sums)), averages]).tolist()
        kl, entropies, penalty, tokens, score, *means = numbers
        rows = size * processes.world_size()
        stats = dict(zip(STATS, means, strict=True)) | {
            "objective/kl": kl / rows,
            "objective/entropy": entropies / rows,
            "objective/kl_coef": self.kl_ctl.value,
            "ppo/mean_non_score_reward": penalty / tokens,
            "ppo/mean_scores": score / rows,
            "tokens/responses_len_mean": tokens / rows,
            "gradient_norm": statistics.fmean(self.gradient_norms) if self.gradient_norms else math.nan,
            "skipped_steps": self.skipped_steps,
            "dropped_steps": self.dropped_steps,
        }
        if math.isfinite(stats["objective/kl"]):
            self.kl_ctl.update(stats["objective/kl"], rows)
        return stats

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `losses.gae`."""
        return losses.gae(values, rewards, mask, self.config.gamma, self.config.lam, self.config.whiten_rewards)

    def _scaled(self, scores: Tensor) -> Tensor:
        """Training rewards after the optional scaling, normalization and clipping."""
        if self.config.use_score_scaling:
            self.running.update(scores)
            centred = scores - self.running.mean.to(scores) if self.config.use_score_norm else scores
            scores = centred / (self.running.std.to(scores) + torch.finfo(scores.dtype).eps)
        clip = self.config.score_clip
        return scores if clip is None else scores.clip(-clip, clip)

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
        """The rows `index` in micro-batches of similar length each, as many as save more padding than they cost."""
        counts = {-(-len(index) // self.micro_batch)}
        if processes.world_size() == 1 or len(index) > self.micro_batch:
            counts |= {1, 2, 4, 8}
        sizes = sorted({-(-len(index) // count) for count in counts}, reverse=True)
        splits = [list(batch.by_length(size, index)) for size in sizes if size <= self.micro_batch]
        parts = min(splits, key=lambda split: sum(batch.padded_tokens(part) + self.pass_cost for part in split))
        if len(parts) == 1 and len(index) == len(batch.input_ids):
            return [(list(range(len(index))), batch)]
        return [(part, batch.rows(part)) for part in parts]

    def _old(self, batch: Window) -> OldPolicy:
        """The batch under the policy that sampled it, and its KL to the reference.

        Where the batch is one mini-batch that fits, these are also the training passes of the first epoch.
        """
        old = OldPolicy(*(torch.zeros_like(batch.response_mask, dtype=torch.float32) for _ in range(5)))
        all_rows = range(len(batch.input_ids))
        chunk = self._chunk(batch, PASS_CHUNK)
        whole = self.micro_batch >= len(all_rows)
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
                    old.kl[at, :width] = self._kl(output, part, self._reference(some), self._chunk(some, READ_CHUNK))
                    old.logprobs[at, :width] = output.logprobs[part, :width]
                    old.values[at, :width] = output.values[part, :width]
        return old

    def _kl(self, output: Rows, part: list[int], ref: Rows, size: int) -> Tensor:
        """KL (rows, R) of the rows `part` of a pass to the reference's pass over them, `size` rows at a time."""
        kind, width = self.config.kl_penalty, ref.logprobs.shape[1]
        if kind != "full":
            return losses.kl_penalty(kind, output.logprobs[part, :width], ref.logprobs)
        logprobs = (output.all_logprobs[part[start : start + size], :width] for start in range(0, len(part), size))
        pairs = zip(logprobs, ref.all_logprobs.split(size), strict=True)
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
        norm = get_total_norm(gradients)
        # Statistics and gradients are those of all processes, so that all of them decide the same.
        table = torch.stack(stats)
        checked = torch.stack([norm, table[:, STATS.index("ppo/policy/ratio")].max(), table.sum()])
        gradient_norm, ratio, total = checked.tolist()  # the step's only wait for the device
        if not math.isfinite(gradient_norm + total):
            self.optimizer.zero_grad()
            if self.on_nonfinite == "skip":
                self.skipped_steps += 1
                return []
            what = "the gradient" if math.isfinite(total) else "the loss"
            raise NotFinite(what, self._rows_not_finite(batch, old, index))
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
        sums = torch.zeros(len(losses.LossStats._fields), device=batch.input_ids.device)
        clips = self.config.cliprange, self.config.cliprange_value
        for number, (part, rows) in enumerate(parts):
            width = rows.response_ids.shape[1]
            sampled = [old.logprobs, old.values, old.advantages, old.returns]
            if rows is not batch:
                sampled = [x[part, :width] for x in sampled]
            synced = last and number + 1 == len(parts)  # several processes exchange gradients once per step
            with nullcontext() if synced else self.accelerator.no_sync(self.model):
                new = graphs.pop(0) if graphs else self._forward(rows)
                trained = new.logprobs, new.values, losses.entropy(new.all_logprobs, self._chunk(rows, READ_CHUNK))
                terms = losses.ppo_losses(trained, sampled, rows.response_mask, *clips)
                # accelerate divides by the gradient accumulation steps
                self.accelerator.backward((terms.loss_policy + self.config.vf_coef * terms.loss_value) / tokens)
            del new, trained
            sums += torch.stack(terms).detach()
        mask = batch.response_mask[index]
        moments = [m for x in (old.returns, old.values) for m in losses.mean_and_variance(x[index], mask)]
        means = processes.all_reduce_sum(sums) / processes.world_size() / tokens
        total = means[0] + self.config.vf_coef * means[1]
        return torch.cat([means, torch.stack([total, *moments])])

    @torch.no_grad()
    def _rows_not_finite(self, batch: Window, old: OldPolicy, index: list[int]) -> list[int]:
        """The rows with a number that is not finite, of the policy that sampled or of the one being trained."""
        finite = torch.stack([old.logprobs, old.values, old.kl]).isfinite().all(0).all(-1)
        bad = set((~finite).nonzero().flatten().tolist())
        for part in batch.by_length(self.micro_batch, index):
            new = self._forward(batch.rows(part))
            finite = (new.logprobs.isfinite() & new.values.isfinite()).all(-1)
            bad |= {part[row] for row in (~finite).nonzero().flatten().tolist()}
        return sorted(bad)

    def _retrying(self, compute: Callable[[], T]) -> T:
        """`compute()`, in smaller and smaller micro-batches as long as memory runs out."""
        while True:
            try:
                return compute()
            except RuntimeError as error:
                fixed = self.fixed_micro_batch or processes.world_size() > 1  # other processes would wait in vain
                if fixed or self.micro_batch == 1 or not should_reduce_batch_size(error):
                    raise
            self.micro_batch = (self.micro_batch + 1) // 2
            clear_device_cache(garbage_collection=True)
            update = "The update is that of the whole mini-batch still."
            advice = f"{update} ppo.micro_batch {self.micro_batch} starts a run this way."
            warnings.warn(f"Out of memory: {self.micro_batch} rows at a time from now on. {advice}", stacklevel=2)

    def restart(self) -> None:
        """Forgets Adam's moments, the KL coefficient and the reward moments, as a new trainer would."""
        self.optimizer.state.clear()
        self.kl_ctl.value = self.config.init_kl_coef
        self.running = RunningMoments(self.accelerator)

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Trained weights and Adam's moments, and the KL coefficient, reward moments and micro-batch as json."""
        tensors = {}
        for name, parameter in self._trained().items():
            tensors[f"weights/{name}"] = parameter.detach().contiguous()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"adam/{name}/{key}"] = value.contiguous()
        moments = {key: float(getattr(self.running, key)) for key in ("mean", "std", "var", "count")}
        return tensors, {"kl_coef": self.kl_ctl.value, "moments": moments, "micro_batch": self.micro_batch}

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Loads what `save_state` returned; a ValueError, and no change, where a tensor is missing or misfits."""
        trained = self._trained()
        for name in tensors:
            if name.split("/")[1] not in trained:
                raise ValueError(f"unknown tensor {name}")
        for name, parameter in trained.items():
            saved = tensors.get(f"weights/{name}")
            if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
                came = None if saved is None else (tuple(saved.shape), saved.dtype)
                raise ValueError(f"expected {(tuple(parameter.shape), parameter.dtype)} for {name}, got {came}")
        self.optimizer.state.clear()
        for name, parameter in trained.items():
            parameter.detach().copy_(tensors[f"weights/{name}"])
            adam = {key.rsplit("/", 1)[1]: x for key, x in tensors.items() if key.startswith(f"adam/{name}/")}
            if adam:
                self.optimizer.state[parameter] = {key: x.to(parameter.device) for key, x in adam.items()}
        self.kl_ctl.value = float(numbers["kl_coef"])
        self.micro_batch = int(numbers["micro_batch"])
        self.running = RunningMoments(self.accelerator)
        if numbers["moments"]["count"] >= 1:  # else no reward has been seen
            for key, value in numbers["moments"].items():
                setattr(self.running, key, torch.tensor(value) if key in ("mean", "std") else value)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, in the optimizer's order."""
        model = self.accelerator.unwrap_model(self.model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: parameter for parameter in self.model_params}
