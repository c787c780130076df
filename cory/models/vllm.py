"""Samples with an inference engine: a vLLM server that receives the agents' weights through a folder (docs/scaling.md).

One server samples for all agents, which share a base model. It loads LoRA agents as adapters, under a new name after
each update. Without LoRA, it loads the full weights of the agent that answers next. The learner computes the old
log-probabilities with the policy itself; the engine's serve only as a check and for `sampling.engine_correction`.
"""

import os
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from peft import PeftModel
from torch import Tensor

from cory.config import Config, SamplingConfig
from cory.errors import UserError
from cory.identity import is_adapter
from cory.models.lora import LanguageModel, save_policy
from cory.parallel import distributed

PROMPTS_PER_REQUEST = 1000  # vLLM accepts up to 1,024
SECONDS_TO_CONNECT = 5
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for --max-lora-rank
CACHE_RESETS = 50  # attempts to empty the server's cache, 0.1 seconds apart


class Engine:
    """One process's client of the run's vLLM server.

    Args:
        config: the run's settings.

    Attributes:
        folder: folder for passing weights to the server; it is inside the run's folder once the run has begun.

    Raises a UserError if the settings exclude an engine, or no server answers.
    """

    def __init__(self, config: Config) -> None:
        agents = [config.of_agent(index) for index in range(config.cory.num_agents)]
        bases = {
            (
                agent.model.name,
                agent.model.revision,
                agent.model.quantization,
                bool(agent.lora.rank),
            )
            for agent in agents
        }
        if len(bases) > 1:
            raise UserError(
                "sampling.engine: expected agents with the same base model, all or none with LoRA, "
                f"got {sorted(bases, key=str)}"
            )
        name = config.resolve(agents[0].model.name)
        if is_adapter(Path(name)):
            raise UserError(
                f"model.name: expected a whole model with sampling.engine: vllm, got the adapter {name!r}"
            )
        self.url = config.sampling.engine_url.rstrip("/")
        self.is_quantized = agents[0].model.quantization != "none"
        self.started_by = _command(agents)
        self.http = requests.Session()
        self.http.trust_env = False  # no proxy
        if key := os.environ.get("VLLM_API_KEY"):
            self.http.headers["Authorization"] = f"Bearer {key}"
        listed = self._ask("GET", "/v1/models")
        served = [model for model in listed.get("data", []) if not model.get("parent")]
        if not served or "max_model_len" not in served[0]:
            raise UserError(
                f"sampling.engine_url: expected a vLLM server with a model, got one that serves {served}. "
                f"Start one with: {self.started_by}"
            )
        self.base = served[0]["id"]  # the server's name for the base
        self.context_length = served[0]["max_model_len"]
        self.names: dict[str, str] = {}  # the server's name for each agent's weights
        self.current: set[str] = set()  # agents whose latest weights the server has
        self.run = uuid.uuid4().hex[:8]
        self.versions = 0
        self.temporary = tempfile.TemporaryDirectory(prefix="cory-engine-")
        self.folder = Path(self.temporary.name)

    def mark_outdated(self, agent: str) -> None:
        """Marks an agent's weights as changed, so that they are sent before the agent answers again."""
        self.current.discard(agent)

    def sample(
        self,
        agent: str,
        policy: LanguageModel,
        queries: Sequence[Tensor],
        sampling: SamplingConfig,
        ends: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Samples one response per query with the policy's current weights, like `cory.models.sample.sample`.

        Queries and responses are 1-d tensors of token ids. The second list has the response tokens' log-probabilities
        as the engine computes them. The server draws the random numbers.

        Args:
            ends: tokens that end a response, besides the texts in `sampling.stop`.

        Raises a UserError if the server does not answer, or refuses the request.
        """
        if agent not in self.current:
            distributed.barrier()  # waits until the server has answered all ranks' requests
            self.names[agent] = distributed.broadcast_object(self._hand_over(agent, policy))
            self.current = {*self.current, agent} if isinstance(policy, PeftModel) else {agent}
        # These values override a model's generation_config.json.
        request = {
            "model": self.names[agent],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": ends,
            "stop": sampling.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 0,
        }
        rows = self._complete(queries, request)
        responses = [torch.tensor(row["token_ids"], dtype=torch.long) for row in rows]
        return responses, [torch.tensor(row["logprobs"]["token_logprobs"]) for row in rows]

    def _complete(self, queries: Sequence[Tensor], request: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the server's answer to each query. `request` is the request's body without prompts."""
        rows = []
        for start in range(0, len(queries), PROMPTS_PER_REQUEST):
            prompts = [query.tolist() for query in queries[start : start + PROMPTS_PER_REQUEST]]
            answer = self._ask("POST", "/v1/completions", request | {"prompt": prompts})
            if "choices" not in answer:
                raise UserError(
                    f"sampling.engine_url: expected responses from {self.url}, got none. Is it a "
                    "vLLM server?"
                )
            rows += sorted(answer["choices"], key=lambda choice: choice["index"])
        return rows

    def _hand_over(self, agent: str, policy: LanguageModel) -> str:
        """Passes an agent's weights to the server and returns the server's name for them."""
        self.versions += 1
        name = f"{agent}-{self.versions}-{self.run}"
        folder = self.folder / name
        if not isinstance(policy, PeftModel):
            save_policy(policy, folder, agent)
            if distributed.is_main():
                self._load_weights(folder)
            return self.base

        # Another run may have changed the server's base weights, so they are sent, too.
        sends_base = not self.names and not self.is_quantized
        base = folder.with_name(f"{name}-base")
        if sends_base:
            save_policy(policy, base, adapter=None)
        save_policy(policy, folder, agent)
        # Requests are sent only after all collective operations. If the server refused one earlier, this process would
        # raise an error while the others wait for it in the next operation.
        if distributed.is_main():
            if sends_base:
                self._load_weights(base)
            self._load_adapter(folder, replaced=self.names.get(agent))
        return name

    def _load_adapter(self, folder: Path, replaced: str | None) -> None:
        """Makes the server load an adapter, under its folder's name, in place of the agent's earlier one."""
        if replaced is not None:
            self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": replaced})
            # The server may reload an adapter from its folder until the adapter is unloaded.
            shutil.rmtree(folder.with_name(replaced), ignore_errors=True)
        body = {"lora_name": folder.name, "lora_path": str(folder.resolve())}
        self._ask("POST", "/v1/load_lora_adapter", body)

    def _load_weights(self, folder: Path) -> None:
        """Makes the server load a full model's weights."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        self._ask("POST", "/collective_rpc", body)
        shutil.rmtree(folder)
        # The server does not empty its cache while it is still finishing an answer.
        for _ in range(CACHE_RESETS):
            if self._ask("POST", "/reset_prefix_cache").get("success"):
                return
            time.sleep(0.1)
        raise UserError(
            f"sampling.engine_url: expected {self.url} to empty its cache of keys and values, got only refusals. "
            "Does it serve another run, too?"
        )

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Returns the server's answer, or {} if it is not a JSON object. Raises a UserError if the request fails."""
        url = self.url + path
        try:
            answer = self.http.request(
                method,
                url,
                json=body,
                timeout=(SECONDS_TO_CONNECT, distributed.TIME_LIMIT.total_seconds()),
            )
        except requests.RequestException as error:
            raise UserError(
                f"sampling.engine_url: expected a server at {url}, got no answer ({type(error).__name__}). "
                f"To start one, in vLLM's environment:\n  {self.started_by}"
            ) from None
        if answer.status_code == 404 and path != "/v1/completions":
            raise UserError(
                f"sampling.engine_url: expected a server that has {url}, got status 404. To start one:\n"
                f"  {self.started_by}"
            )
        if not answer.ok:
            raise UserError(
                f"sampling.engine_url: expected an answer from {url}, got status {answer.status_code}: "
                f"{answer.text[:500]}"
            )
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        content = answer.json() if is_json else {}
        return content if isinstance(content, dict) else {}


def _command(agents: Sequence[Config]) -> str:
    """Returns the command that starts a server for a run's agents."""
    config = agents[0]
    model = config.model
    url = urlsplit(config.sampling.engine_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    dtype = "bfloat16" if config.precision == "bf16" else model.dtype
    options = ""
    if model.revision:
        options += f" --revision {shlex.quote(model.revision)}"
    if model.quantization == "4bit":
        options += " --quantization bitsandbytes"
    largest_rank = max(agent.lora.rank for agent in agents)
    if largest_rank:
        max_rank = next((rank for rank in MAX_RANKS if rank >= largest_rank), largest_rank)
        options += f" --enable-lora --max-lora-rank {max_rank} --max-loras {len(agents)}"
    return (
        "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server "
        f"--model {shlex.quote(config.resolve(model.name))} --host {shlex.quote(url.hostname or '')} --port {port} "
        f"--dtype {dtype} --generation-config vllm{options}"
    )
