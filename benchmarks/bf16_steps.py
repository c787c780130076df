"""How steps of a learning rate show in a model's probabilities: in float32, and with `--precision bf16`.

    python benchmarks/bf16_steps.py models/smollm2 --step 3e-5
    python benchmarks/bf16_steps.py models/smollm2 --step 1.41e-5 --released

Autocast rounds the float32 weights to bfloat16 in each pass. A step that is smaller than the distance of two such
numbers shows only once enough of them have added up. `--released` first rounds the weights to bfloat16, as most models
are published. Each step moves every weight by `--step` along the sign of one gradient, as Adam does at first.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 12
TEXTS = (
    "This film was one of the best I have seen in many years and",
    "The plot of the story makes no sense and the actors are very bad",
    "I have seen many bad films but this one is really the worst of",
    "What a great movie, it has a good story and a fine cast of",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--step", type=float, default=1.41e-5)
    parser.add_argument("--released", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.released:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
    ids = torch.tensor([row[: min(map(len, encoded))] for row in encoded])

    def logprobs(bf16: bool) -> torch.Tensor:
        """Of the texts' tokens, (texts, tokens - 1)."""
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(ids).logits
        return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    with torch.no_grad():
        before = {bf16: logprobs(bf16) for bf16 in (False, True)}
    advantages = torch.randn_like(before[False])
    (-(advantages * logprobs(False)).mean()).backward()
    signs = {parameter: parameter.grad.sign() for parameter in model.parameters()}

    weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1])
    moved = ((weights + args.step).bfloat16() != weights.bfloat16()).float().mean()
    print(f"a step of {args.step:g} changes {moved:.1%} of the weights as bfloat16 numbers")
    print("steps  mean |log ratio|, float32  bf16   correlation")
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for parameter, sign in signs.items():
                parameter -= args.step * sign
            full, rounded = (logprobs(bf16) - before[bf16] for bf16 in (False, True))
        correlation = torch.corrcoef(torch.stack([full.flatten(), rounded.flatten()]))[0, 1]
        print(
            f"{step:5}  {full.abs().mean():25.3f}  {rounded.abs().mean():.3f}  {correlation:11.2f}"
        )


if __name__ == "__main__":
    main()
