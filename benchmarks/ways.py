"""Implementations of one CORY iteration, called ways, to be timed side by side.

* ours: `CoryTrainer`.
* stock: a trl.PPOTrainer 0.11.4 for each agent, with the same settings. It generates in batches of 4, TRL's default;
  stock_all generates in a single batch.
* minimal: examples/minimal.py, which uses plain torch and transformers.
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
    """Measures seconds by phase, including work queued on the device."""

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
    """Sets the C library's memory settings for a way. They apply to the whole process.

    ours and minimal use cory's settings. stock does not, as they would speed up TRL, too. It uses the settings that
    glibc reaches by itself in such a process: arrays above 32 MiB get their own pages, which return to the system when
    freed.
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
    """Makes the ways for a shape, with its models and data.

    A way is a function that runs the iteration with a given index and returns its seconds by phase.
    """

    def __init__(self, shape: Shape, folder: Path, device: str, precision: str) -> None:
        import torch

        from cory.parallel.devices import choose_device, configure

        self.shape, self.precision = shape, precision
        self.device = choose_device(device)
        configure(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the device whose time and memory are measured
        self.policy, self.reward_model = make_models(shape, folder, self.device)
        self.config = make_config(shape, self.policy, device, precision)
        self.task = make_task(shape, self.reward_model, self.device)

    def load(self) -> tuple[Any, Any]:
        from cory.models.load import load_policy

        policy, tokenizer = load_policy(self.config.model, self.device)
        return policy.to(self.device), tokenizer

    def ours(self) -> Callable[[int], Seconds]:
        """Makes the way that uses `CoryTrainer`."""
        from cory.build import make_agents
        from cory.trainer import CoryTrainer

        agents = make_agents(self.config)
        trainer = CoryTrainer(self.config, agents, self.task)

        def iteration(k: int) -> Seconds:
            timings = trainer.iteration(k).timings
            seconds = {phase: timings[f"seconds_{phase}"] for phase in PHASES}
            # Every way counts the update's statistics as part of the update.
            seconds["learn"] += timings["seconds_record"]
            return seconds

        iteration.agents = agents  # type: ignore[attr-defined]
        return iteration

    def stock(self, generate_batch: int) -> Callable[[int], Seconds]:
        """Makes the way that uses a stock trl.PPOTrainer for each agent, in the loop of the CORY paper's code."""
        import torch
        import trl
        from transformers import AutoModelForCausalLM

        from cory.learners.ppo import trl_config

        def with_value_head(model: Any) -> Any:
            wrapped = trl.AutoModelForCausalLMWithValueHead(model)
            wrapped.is_peft_model = False
            return wrapped.to(self.device)

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(self.policy)  # as a user of TRL would

        reference, tokenizer = with_value_head(load()).requires_grad_(False), self.load()[1]
        trainers = []
        for _ in range(self.shape.agents):
            model = load()
            settings = trl_config(self.config.ppo)
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
                prompts = self.prompts(role, queries, texts)
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

        return iteration

    def minimal(self) -> Callable[[int], Seconds]:
        """Makes the way that uses `examples/minimal.py`, and sets its constants to the shape's."""
        import torch

        from examples import minimal

        shape = self.shape
        if shape.algorithm != "ppo":
            raise SystemExit(f"minimal: expected a shape with PPO, got {shape.algorithm}")
        minimal.REWARD_MODEL = self.reward_model
        minimal.DEVICE = str(self.device)
        minimal.RESPONSE_TOKENS = shape.response
        minimal.PPO_EPOCHS = shape.epochs
        minimal.KL_PENALTY = shape.kl_penalty
        minimal.LEARNING_RATE = self.config.ppo.learning_rate

        reference, tokenizer = self.load()
        reference.eval().requires_grad_(False)
        agents = [
            minimal.make_agent(f"LLM {n}", self.load()[0].eval(), tokenizer)
            for n in range(shape.agents)
        ]
        reward = minimal.load_reward()

        def autocast() -> Any:
            return torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.precision == "bf16"
            )

        def iteration(k: int) -> Seconds:
            clock = Clock()
            queries = self.task.batch(k, shape.batch, 0)["prompt"]
            texts: list[list[str]] = []
            rollouts = []
            for role, agent in enumerate(agents):
                prompts = self.prompts(role, queries, texts)
                with clock("generate"), autocast():
                    rollout, responses = minimal.respond(agent, prompts)
                texts.append(responses)
                rollouts.append(rollout)
            with clock("reward"):
                spaced = [query + " " for query in queries]
                rewards = torch.stack([reward(spaced, responses) for responses in texts]).sum(0)
            for agent, rollout in zip(agents, rollouts, strict=True):
                with clock("learn"), autocast():
                    minimal.ppo_update(agent, reference, rollout, rewards)
            return clock.seconds

        return iteration

    def prompts(self, role: int, queries: list[str], texts: list[list[str]]) -> list[str]:
        """Returns a role's prompts. `texts` has the responses of each earlier role."""
        return [
            self.task.prompts.render(
                role, {"prompt": query}, [rows[row] for rows in texts] if role else None
            )
            for row, query in enumerate(queries)
        ]

    def way(self, name: str) -> Callable[[int], Seconds]:
        """Makes a way by name: ours, minimal, stock (batches of 4) or stock_all."""
        memory_as(name)
        if name.startswith("stock"):
            return self.stock(4 if name == "stock" else self.shape.batch)
        return {"ours": self.ours, "minimal": self.minimal}[name]()
