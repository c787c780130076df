"""The ways of one CORY iteration that are timed side by side: ours, stock TRL, and a minimal hand-written baseline.

ours: `CoryTrainer`. stock: trl.PPOTrainer 0.11.4 for each agent, with the same settings, its own `generate` in batches
of 4 (its default) or all at once, roles exchanged by pointer. minimal: plain torch and transformers, one `generate` per
agent, one pass of the reward model, one of the reference, and forward and backward passes over exactly the response
window with a fused Adam step each: no KL, no advantages, no statistics, no text.
"""

import ctypes
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape, make_config, make_models, make_task

PHASES = ("generate", "reward", "learn")
Seconds = dict[str, float]


class Clock:
    """Seconds by phase, the device's queue included."""

    def __init__(self) -> None:
        self.seconds: Seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        import torch

        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - started


def memory_as(name: str) -> None:
    """The C library's memory settings for a way: a process has one set of them, and cory's would speed up stock TRL.

    ours and minimal have cory's. stock has what glibc itself arrives at in such a process: arrays above 32 MiB get
    pages of their own, which go back to the system when they are freed.
    """
    import torch

    from cory.parallel import devices

    if sys.platform != "linux" or torch.cuda.is_available():
        return
    if name.startswith("stock"):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 65536)  # M_MMAP_MAX
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 64 << 20)  # M_TRIM_THRESHOLD
    else:
        devices.configure(torch.device("cpu"))


class Bench:
    """The models and the data of a shape, from which each way makes what it needs.

    A way is a function of the iteration that returns its seconds by phase.
    """

    def __init__(self, shape: Shape, folder: Path, device: str, precision: str) -> None:
        import torch

        from cory.parallel.devices import choose_device, configure

        self.shape, self.precision = shape, precision
        self.device = choose_device(device)
        configure(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # which measurements of time and memory are of
        self.policy, self.reward_model = make_models(shape, folder)
        self.config = make_config(shape, self.policy, device, precision)
        self.task = make_task(shape, self.reward_model, self.device)

    def load(self) -> tuple[Any, Any]:
        from cory.models.load import load_policy

        policy, tokenizer = load_policy(self.config.model, self.device)
        return policy.to(self.device), tokenizer

    def ours(self) -> Callable[[int], Seconds]:
        """`CoryTrainer`."""
        from cory.agent import make_agents
        from cory.callbacks.metrics import measure
        from cory.run.clock import timed
        from cory.trainer import CoryTrainer

        agents = make_agents(self.config)
        trainer = CoryTrainer(self.config, agents, self.task)

        def iteration(k: int) -> Seconds:
            done = trainer.iteration(k)
            # Statistics of the update are part of every way's update.
            with timed(done.seconds, "learn"):
                measure(trainer, done)
            done.seconds["learn"] += done.seconds["record"]
            return {phase: done.seconds[phase] for phase in PHASES}

        iteration.agents, iteration.trainer = agents, trainer  # type: ignore[attr-defined]
        return iteration

    def stock(self, generate_batch: int) -> Callable[[int], Seconds]:
        """A stock trl.PPOTrainer for each agent, in the authors' loop."""
        import torch
        import trl
        from transformers import AutoModelForCausalLM

        from cory.learners.trl_parts import trl_config

        def with_value_head(model: Any) -> Any:
            wrapped = trl.AutoModelForCausalLMWithValueHead(model)
            wrapped.is_peft_model = False
            return wrapped.to(self.device)

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(self.policy)  # as a user of TRL loads it

        reference, tokenizer = with_value_head(load()).requires_grad_(False), self.load()[1]
        trainers = []
        for _ in range(self.shape.agents):
            model = load()
            settings = trl_config(self.config.ppo, 0)
            if self.precision == "bf16":
                settings.accelerator_kwargs = {"mixed_precision": "bf16"}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainers.append(
                    trl.PPOTrainer(
                        config=settings,
                        model=with_value_head(model),
                        ref_model=reference,
                        tokenizer=tokenizer,
                    )
                )
        options = {
            "min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "max_new_tokens": self.shape.response,
            "pad_token_id": self.shape.vocabulary - 1,
        }  # fmt: skip

        def iteration(k: int) -> Seconds:
            clock, shape = Clock(), self.shape
            queries = self.task.batch(k, shape.batch, 0)["prompt"]
            texts: list[list[str]] = []
            rollouts = []
            for role, trainer in enumerate(trainers):
                prompts = [
                    self.task.prompts.render(
                        role, {"prompt": query}, [rows[row] for rows in texts] if role else None
                    )
                    for row, query in enumerate(queries)
                ]
                with clock("generate"):
                    ids = [
                        torch.tensor(tokenizer(p)["input_ids"], device=self.device) for p in prompts
                    ]
                    out = trainer.generate(
                        ids, batch_size=generate_batch, return_prompt=False, **options
                    )
                    texts.append([tokenizer.decode(row, skip_special_tokens=True) for row in out])
                rollouts.append((ids, out))
            with clock("reward"):
                rewards = [self.task.reward(queries, text) for text in texts]
                total = [torch.tensor(sum(row)) for row in zip(*rewards, strict=True)]
            for trainer, (ids, out) in zip(trainers, rollouts, strict=True):
                with clock("learn"):
                    trainer.step(ids, list(out), total)
            return clock.seconds

        iteration.trainers = trainers  # type: ignore[attr-defined]
        return iteration

    def minimal(self) -> Callable[[int], Seconds]:
        """The minimal baseline: see the module."""
        import torch
        import torch.nn.functional as F
        from transformers import AutoModelForSequenceClassification, GenerationConfig

        from cory.models import window

        shape = self.shape
        reference = self.load()[0].eval().requires_grad_(False)
        reward = (
            AutoModelForSequenceClassification.from_pretrained(self.reward_model)
            .to(self.device)
            .eval()
        )
        agents = []
        for _ in range(shape.agents):
            model = self.load()[0].eval()
            agents.append((model, torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)))
        settings = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=shape.response,
            pad_token_id=shape.vocabulary - 1,
        )
        tokenizer = self.load()[1]

        def autocast() -> Any:
            return torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.precision == "bf16"
            )

        def iteration(k: int) -> Seconds:
            clock = Clock()
            asked = self.task.batch(k, shape.batch // shape.group, 0)["prompt"]
            queries = tokenizer([query for query in asked for _ in range(shape.group)])["input_ids"]
            originals = prompts = [torch.tensor(ids, device=self.device) for ids in queries]
            extra = torch.ones(shape.observer, dtype=torch.long, device=self.device)
            rollouts: list[tuple[list[Any], list[Any]]] = []
            for role, (model, _) in enumerate(agents):
                if role:
                    pairs = zip(originals, rollouts[-1][1], strict=True)
                    prompts = [torch.cat([extra, query, response]) for query, response in pairs]
                with clock("generate"), torch.no_grad(), autocast():
                    ids, mask = window.pad(prompts, 0, "left")
                    out = model.generate(
                        input_ids=ids, attention_mask=mask, generation_config=settings
                    )
                    out = out[:, ids.shape[1] :]
                rollouts.append((prompts, list(out)))
            with clock("reward"), torch.no_grad():
                ids, mask = window.pad(
                    [
                        torch.cat(pair)
                        for _, rows in rollouts
                        for pair in zip(originals, rows, strict=True)
                    ],
                    0,
                    "right",
                )
                reward(input_ids=ids, attention_mask=mask)
            for (model, optimizer), (asked, answered) in zip(agents, rollouts, strict=True):
                with clock("learn"):
                    minimal_update(
                        model, optimizer, reference, asked, answered, shape.epochs, autocast
                    )
            return clock.seconds

        def minimal_update(model, optimizer, reference, asked, answered, epochs, autocast) -> None:  # type: ignore[no-untyped-def]
            batch = window.pack(asked, answered, 0)
            width = batch.response_ids.shape[1]
            with torch.no_grad(), autocast():
                window.forward(reference, *batch[:3], width)
            for _ in range(epochs):
                with autocast():
                    logits, _ = window.forward(model, *batch[:3], width)
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch.response_ids.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        iteration.agents = agents  # type: ignore[attr-defined]
        iteration.update = lambda asked, answered: minimal_update(  # type: ignore[attr-defined]
            *agents[-1], reference, asked, answered, shape.epochs, autocast
        )
        return iteration

    def way(self, name: str) -> Callable[[int], Seconds]:
        """By name: ours, minimal, stock (batches of 4) or stock_all."""
        memory_as(name)
        if name.startswith("stock"):
            return self.stock(4 if name == "stock" else self.shape.batch)
        return {"ours": self.ours, "minimal": self.minimal}[name]()

    def update(self, name: str) -> Callable[[int], Seconds]:
        """One PPO update of one agent, on prompts of the observer's lengths and random responses."""
        import numpy as np
        import torch

        from cory.models.rollout import Rollout

        shape, rng = self.shape, np.random.default_rng(0)
        context = shape.observer + shape.response
        lengths = rng.integers(shape.query[0] + context, shape.query[1] + context + 1, shape.batch)
        asked, answered = (
            [
                torch.tensor(rng.integers(0, shape.vocabulary - 2, n), device=self.device)
                for n in sizes
            ]
            for sizes in (lengths, [shape.response] * shape.batch)
        )
        scores = torch.randn(shape.batch)
        way = self.way(name)
        if name == "minimal":
            step = way.update  # type: ignore[attr-defined]
        elif name == "ours":
            agent = way.agents[-1]  # type: ignore[attr-defined]

            def step(prompt_ids: Any, response_ids: Any) -> Any:
                texts = [""] * len(prompt_ids)
                return agent.learn(
                    [Rollout(texts, texts, prompt_ids, response_ids)],
                    [scores],
                    np.random.default_rng(0),
                )
        else:
            trainer = way.trainers[-1]  # type: ignore[attr-defined]

            def step(prompt_ids: Any, response_ids: Any) -> Any:
                return trainer.step(prompt_ids, response_ids, list(scores))

        def iteration(k: int) -> Seconds:
            clock = Clock()
            with clock("learn"):
                step(asked, answered)
            return clock.seconds

        return iteration
