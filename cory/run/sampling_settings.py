"""How responses are sampled: settings. Importing them does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cory.run.checks import Settings, UserError, between, changed, expect, positive


@dataclass
class SamplingConfig(Settings):
    """How responses are sampled. One length is drawn per batch, and every agent's responses stop there at the latest.

    Args:
        min_new_tokens: Shortest length that is drawn.
        max_new_tokens: Longest length that is drawn.
        temperature: Softmax temperature. Other than 1, samples are off-policy for PPO's log-probabilities.
        top_k: Sample among the k likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens of this total probability; 1 for all.
        repetition_penalty: Penalty on tokens that occurred already; 1 for none.
        stop: Texts that end a response, as the end token does; the response's text is cut before them.
        engine: Who samples in training: `native`, the policy itself, or `vllm`, a server that gets the agents' weights
            after each update (docs/scaling.md).
        engine_url: Address of that server, which serves one run at a time.
        engine_folder: Folder that the run and the server see, through which weights are passed on. null: a temporary
            one, for a server on this machine.
    """

    min_new_tokens: int = 4
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    engine: Literal["native", "vllm"] = "native"
    engine_url: str = "http://127.0.0.1:8000"
    engine_folder: str | None = None

    def __post_init__(self) -> None:
        positive("sampling", self, "min_new_tokens", "temperature", "top_p", "repetition_penalty")
        between("sampling", self, 0, 1, "top_p")
        expect(all(self.stop), "sampling.stop", "texts that are not empty", self.stop)
        expect(self.top_k >= 0, "sampling.top_k", "0 (all tokens) or more", self.top_k)
        shortest, longest = self.min_new_tokens, self.max_new_tokens
        expect(longest >= shortest, "sampling.max_new_tokens", f"at least min_new_tokens = {shortest}", longest)
        web = self.engine_url.startswith(("http://", "https://"))
        expect(web, "sampling.engine_url", "an address such as http://127.0.0.1:8000", self.engine_url)

    def after_training(self, changes: Mapping[str, Any]) -> "SamplingConfig":
        """These settings with `changes` for a trained agent, which samples itself, up to `max_new_tokens`."""
        if engine := [key for key in changes if key.startswith("engine")]:
            raise UserError(f"sampling.{engine[0]}: expected no engine, as trained agents sample themselves, got one")
        if "min_new_tokens" in changes:
            raise UserError("sampling.min_new_tokens: expected max_new_tokens alone, as no length is drawn, got both")
        return changed(replace(self, min_new_tokens=1, engine="native"), changes)
