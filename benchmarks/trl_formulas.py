"""Compares the group learners with TRL's trainers: advantages, loss and gradient of one update on the same batch.

    python benchmarks/trl_formulas.py --with trl FILE    # in an environment with trl 1.16: writes FILE
    python benchmarks/trl_formulas.py --with cory FILE   # in the project's environment: reads FILE

The first command uses `trl.GRPOTrainer` and `trl.RLOOTrainer`. Fixed responses replace generation; everything after
generation is TRL's unchanged code. The second command computes the same with `cory.learners.group`, and fails if a
number differs by more than 1e-6. The first command wrote tests/learners/trl_1_16_0.safetensors.

The batch has 3 queries with 4 responses each, of 1 to 9 tokens; every third response lacks an end token. The policy is
a small GPT-2. Its trained weights differ from the reference's, and so much from the sampling weights that ratios are
clipped.

TRL computes in float64, except that rewards (here multiples of 1/16) and log-probabilities are float32. All queries
have the same number of tokens: TRL passes no position ids to GPT-2, so left padding would shift its positions.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

GROUP, QUERIES, QUERY_TOKENS, LONGEST, VOCABULARY = 4, 3, 5, 9, 24
TOLERANCE = 1e-6
LENGTHS = (9, 4, 6, 1, 7, 2, 9, 5, 3, 8, 4, 6)  # tokens of each response
FINISHED = tuple(i % 3 != 0 for i in range(len(LENGTHS)))  # whether a response ends with END
END = VOCABULARY - 2
REWARDS = tuple(i / 16 for i in (4, -2, 1, 8, 0, 6, 6, -4, 3, 3, -8, 13))


@dataclass(frozen=True)
class Case:
    """One setting of a learner.

    Args:
        algorithm: cory's name of the algorithm; None if cory has no equivalent.
        trainer: TRL's trainer, grpo or rloo.
        beta: the KL coefficient.
        loss, scale: GRPO's `loss_type` and `scale_rewards`.
        kl_ratio: whether the k3 term is multiplied by the probability ratio, GRPO's `use_bias_correction_kl`.
        low, high: the clip range below and above 1, GRPO's `epsilon` and `epsilon_high`; `high` defaults to `low`.
        level: whether a `token` or a `sequence` has a probability ratio, GRPO's `importance_sampling_level`.
        needs_end: whether responses without an end token are left out of the loss, GRPO's `mask_truncated_completions`.
        correction, cap: settings for samples from an engine, GRPO's `vllm_importance_sampling_mode` and its `clip_max`.
    """

    algorithm: str | None
    trainer: str = "grpo"
    beta: float = 0.0
    loss: str = "grpo"
    scale: str = "group"
    kl_ratio: bool = True
    low: float = 0.2
    high: float | None = None
    level: str = "token"
    needs_end: bool = False
    correction: str | None = None
    cap: float = 3.0


CASES = {
    "grpo": Case("grpo"),
    "grpo, KL": Case("grpo", beta=0.04),
    "grpo, KL without ratio": Case(None, beta=0.04, kl_ratio=False),
    "grpo, higher clip": Case("grpo", high=0.28),
    "grpo, unscaled": Case(None, scale="none"),
    "dr_grpo": Case("dr_grpo", loss="dr_grpo", scale="none"),
    "dr_grpo, KL": Case("dr_grpo", beta=0.04, loss="dr_grpo", scale="none"),
    "dapo": Case("dapo", loss="dapo", needs_end=True),
    "dapo, KL, higher clip": Case("dapo", beta=0.04, loss="dapo", high=0.28, needs_end=True),
    "dapo, all responses": Case(None, loss="dapo"),
    "gspo": Case("gspo", low=0.02, level="sequence"),
    "gspo, higher clip": Case("gspo", low=0.02, high=0.03, level="sequence"),
    "grpo, KL, engine": Case("grpo", beta=0.04, correction="sequence_mask", cap=1.5),
    "grpo, engine, by token": Case("grpo", correction="token_truncate", cap=1.5),
    "dapo, engine, by token": Case(
        "dapo", loss="dapo", needs_end=True, correction="token_mask", cap=1.5
    ),
    "dr_grpo, KL, engine": Case(
        "dr_grpo", beta=0.04, loss="dr_grpo", scale="none", correction="sequence_truncate", cap=1.5
    ),
    "gspo, engine": Case("gspo", low=0.02, level="sequence", correction="sequence_mask", cap=1.5),
    "rloo": Case("rloo", "rloo"),
    "rloo, k1 in the reward": Case("rloo", "rloo", beta=0.05),
}


def make_policy() -> Any:
    """Makes a GPT-2 of 1,200 parameters without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    tokens = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": VOCABULARY - 1}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def make_inputs() -> dict[str, Any]:
    """Makes the inputs: weights (`old/NAME`, `new/NAME`, `reference/NAME`), `queries`, `responses` padded with -1,
    `rewards`, and an engine's `logprobs` for the response tokens.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def noise(shape: Any, scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    inputs: dict[str, torch.Tensor] = {}
    for name, parameter in make_policy().named_parameters():
        start = torch.ones_like(parameter) if ".ln_" in name and name.endswith("weight") else 0.0
        old = start + noise(parameter.shape, 0.4)
        inputs[f"old/{name}"] = old.detach()
        inputs[f"new/{name}"] = (old + noise(old.shape, 0.05)).detach()
        inputs[f"reference/{name}"] = (old + noise(old.shape, 0.1)).detach()
    queries = torch.randint(VOCABULARY - 2, (QUERIES, QUERY_TOKENS), generator=generator)
    responses = torch.randint(VOCABULARY - 2, (len(LENGTHS), LONGEST), generator=generator)
    beyond = torch.arange(LONGEST) >= torch.tensor(LENGTHS)[:, None]
    ends = torch.arange(LONGEST) == torch.tensor(LENGTHS)[:, None] - 1
    responses = responses.masked_fill(ends & torch.tensor(FINISHED)[:, None], END)
    inputs["queries"] = queries.repeat_interleave(GROUP, 0)
    inputs["responses"] = responses.masked_fill(beyond, -1)
    inputs["rewards"] = torch.tensor(REWARDS)
    policy = make_policy()
    load_weights(policy, inputs, "old")
    texts = torch.cat([inputs["queries"], responses], 1)
    with torch.no_grad():
        logits = policy(texts).logits[:, QUERY_TOKENS - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)
    inputs["logprobs"] = logprobs + noise(logprobs.shape, 0.55)
    return inputs


def load_weights(model: Any, inputs: dict[str, Any], which: str) -> None:
    """Copies one set of weights (`which`: old, new or reference) into the model, in the model's precision."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(inputs[f"{which}/{name}"])


def rows(inputs: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the token ids of queries and responses."""
    return inputs["queries"].tolist(), [
        [i for i in row if i >= 0] for row in inputs["responses"].tolist()
    ]


def engine_logprobs(inputs: dict[str, Any]) -> list[list[float]]:
    """Returns the engine's log-probabilities of each response's tokens."""
    return [row[:length] for row, length in zip(inputs["logprobs"].tolist(), LENGTHS, strict=True)]


def trl_results(case: Case, inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns `advantages` (batch,), `loss` (), and gradients `gradient/NAME`, as computed by TRL."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import GPT2LMHeadModel

    from benchmarks.shapes import word_tokenizer

    queries, responses = rows(inputs)
    base = trl.GRPOTrainer if case.trainer == "grpo" else trl.RLOOTrainer

    class Fixed(base):  # type: ignore[misc, valid-type]
        """TRL's trainer with fixed responses instead of generated ones."""

        def _generate(self, prompts: list[str]) -> Any:
            texts = [""] * len(prompts)
            if case.trainer == "rloo":
                return queries, responses, texts
            logprobs = None
            if case.correction is not None:
                logprobs = engine_logprobs(inputs)
            return queries, responses, None, texts, logprobs, {}, None, []

    grpo_settings = {
        "loss_type": case.loss,
        "scale_rewards": case.scale,
        "use_bias_correction_kl": case.kl_ratio,
        "epsilon": case.low,
        "epsilon_high": case.high,
        "importance_sampling_level": case.level,
        "mask_truncated_completions": case.needs_end,
        "vllm_importance_sampling_mode": case.correction or "sequence_mask",
        "vllm_importance_sampling_clip_max": case.cap,
    }
    settings = (trl.GRPOConfig if case.trainer == "grpo" else trl.RLOOConfig)(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(LENGTHS),
        num_generations=GROUP,
        num_iterations=2,  # with 1, GRPO uses the new policy as the old one
        max_completion_length=LONGEST,
        beta=case.beta,
        **(grpo_settings if case.trainer == "grpo" else {}),
    )
    model = make_policy()
    load_weights(model, inputs, "reference")
    model.save_pretrained(folder / "model")  # TRL loads the reference from here
    trainer = Fixed(
        model=GPT2LMHeadModel.from_pretrained(folder / "model", dtype=torch.float64),
        reward_funcs=lambda prompts, completions, **_: inputs["rewards"].tolist(),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [""] * QUERIES}),
        processing_class=word_tokenizer(VOCABULARY),
    )
    trainer.use_vllm = case.correction is not None  # set late: the constructor would start vLLM
    trainer.current_gradient_accumulation_steps = 1  # `train()` would set it
    trainer.model.train()
    load_weights(trainer.model, inputs, "old")
    batch = trainer._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    load_weights(trainer.model, inputs, "new")
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {f"gradient/{name}": p.grad for name, p in trainer.model.named_parameters()}
    return {"advantages": batch["advantages"], "loss": loss.detach(), **gradients}


def cory_results(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the same as `trl_results`, as computed by `cory.learners.group.GroupLearner`."""
    import torch

    from benchmarks.shapes import word_tokenizer
    from cory.config import Config, PPOConfig, SamplingConfig
    from cory.learners.engine import compare_samples
    from cory.learners.group import GroupLearner
    from cory.learners.records import Experience
    from cory.models import window
    from cory.models.text import pad_token
    from cory.models.window import WindowPolicy
    from cory.rollout import Rollout

    size = len(LENGTHS)
    ppo = PPOConfig(
        batch_size=size,
        mini_batch_size=size,
        init_kl_coef=case.beta,
        adaptive_kl=False,
        cliprange=case.low,
        cliprange_high=case.high,
    )
    sampling = SamplingConfig(
        max_new_tokens=LONGEST,
        engine_correction=case.correction or "none",  # type: ignore[arg-type]
        engine_correction_cap=case.cap,
    )
    config = Config(
        device="cpu",
        algorithm=case.algorithm,  # type: ignore[arg-type]
        group_size=GROUP,
        ppo=ppo,
        sampling=sampling,
    )
    policy, reference = make_policy(), make_policy().requires_grad_(False)
    load_weights(policy, inputs, "old")
    load_weights(reference, inputs, "reference")
    wrapped = WindowPolicy(policy).eval(), WindowPolicy(reference).eval()
    tokenizer = word_tokenizer(VOCABULARY)
    learner = GroupLearner(*wrapped, tokenizer, config, torch.device("cpu"))
    queries, responses = ([torch.tensor(ids) for ids in part] for part in rows(inputs))
    batch = window.pack(queries, responses, pad_token(tokenizer))
    old = learner.compare_with_reference(batch)
    rollout = Rollout([""] * size, [""] * size, queries, responses, finished=list(FINISHED))
    targets = learner.targets(old, inputs["rewards"], batch.response_mask, [rollout])
    advantages = targets.advantages[:, 0]
    if case.correction is not None:
        rollout.logprobs = [torch.tensor(row) for row in engine_logprobs(inputs)]
        engine = compare_samples([rollout], old.logprobs, batch.response_mask, sampling)
        assert engine is not None and engine.capped > 0
        targets.advantages = targets.advantages * engine.weights
    load_weights(policy, inputs, "new")
    experience = Experience(batch, old, targets, learner.row_weights([rollout]))
    terms = learner._backward(experience, list(range(size)), last=True)
    gradients = {f"gradient/{name}": p.grad for name, p in policy.named_parameters()}
    return {"advantages": advantages, "loss": terms.loss, **gradients}


def write_reference(path: Path) -> None:
    """Computes all cases with TRL and saves inputs and results. The file's metadata has settings and versions."""
    import torch
    import transformers
    import trl
    from safetensors.torch import save_file

    inputs = make_inputs()
    tensors = dict(inputs)
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            results = trl_results(case, inputs, Path(folder))
        tensors |= {f"{name}/{key}": value.float().contiguous() for key, value in results.items()}
        print(f"{name:24} loss {results['loss']:+.6f}", flush=True)
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    cases = {name: asdict(case) for name, case in CASES.items()}
    save_file(tensors, path, {"versions": json.dumps(versions), "cases": json.dumps(cases)})


def compare(path: Path) -> float:
    """Prints each case's largest differences in advantages, loss and gradient; returns the overall maximum."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        versions, cases = (json.loads(file.metadata()[key]) for key in ("versions", "cases"))
        reference = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{'largest difference':24} {'advantages':>12} {'loss':>12} {'gradient':>12}")
    largest = 0.0
    for name, settings in cases.items():
        case = Case(**settings)
        if case.algorithm is None:
            continue
        differences = dict.fromkeys(("advantages", "loss", "gradient"), 0.0)
        for key, value in cory_results(case, reference).items():
            kind = key.split("/")[0]
            difference = (value.double() - reference[f"{name}/{key}"]).abs().max().item()
            differences[kind] = max(differences[kind], difference)
        print(f"{name:24}", *(f"{difference:12.1e}" for difference in differences.values()))
        largest = max(largest, *differences.values())
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="library", choices=["trl", "cory"], required=True)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.library == "trl":
        write_reference(options.file)
    elif not compare(options.file) <= TOLERANCE:
        raise SystemExit(f"The largest difference is above {TOLERANCE}.")


if __name__ == "__main__":
    main()
