"""A stand-in for vLLM's server: transformers answers the requests of `cory.models.vllm` in this process."""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


class Server:
    """The server's weights and settings. `requests` lists each request's (path, body) in order.

    Attributes that a test may set:
        stale: The server confirms new weights but keeps the old ones.
        dies_at: After this many completion requests, the server ends connections, as a killed server does.
        kept_cache: The number of times that the server refuses to empty its cache.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.adapters: dict[str, Any] = {}
        self.requests: list[tuple[str, Any]] = []
        self.url, self.longest, self.stale, self.dies_at, self.key = "", 96, False, -1, ""
        self.draws = torch.Generator().manual_seed(0)
        self.completions, self.kept_cache, self.lock = 0, 0, threading.Lock()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer to a request."""
        self.requests.append((path, body))
        if path == "/v1/models":
            names = [{"id": "base", "max_model_len": self.longest, "parent": None}]
            return 200, {
                "data": [*names, *({"id": name, "parent": "base"} for name in self.adapters)]
            }
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            if not self.stale:
                self.model = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            self.kept_cache -= 1
            return 200, {"success": self.kept_cache < 0}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": "already loaded"}}
            agent = body["lora_name"].split("-")[0]
            before = [adapter for name, adapter in self.adapters.items() if name.startswith(agent)]
            loaded = PeftModel.from_pretrained(copy.deepcopy(self.model), body["lora_path"])
            self.adapters[body["lora_name"]] = before[-1] if before and self.stale else loaded
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            if not self.stale:
                del self.adapters[body["lora_name"]]
            return 200, "Success"
        assert path == "/v1/completions"
        model = self.adapters.get(body["model"], self.model if body["model"] == "base" else None)
        if model is None:
            return 404, {"error": {"message": f"The model {body['model']!r} does not exist"}}
        choices = [
            self.complete(model, prompt, body) | {"index": i}
            for i, prompt in enumerate(body["prompt"])
        ]
        return 200, {"choices": choices[::-1]}  # vLLM does not promise an order

    @torch.no_grad()
    def complete(self, model: Any, prompt: list[int], body: Any) -> dict[str, Any]:
        """Samples a response token by token, without a cache."""
        new, logprobs = [], []
        while len(new) < body["max_tokens"]:
            logits = model(torch.tensor([prompt + new])).logits[0, -1]
            new.append(torch.multinomial(logits.softmax(-1), 1, generator=self.draws).item())
            logprobs.append(logits.log_softmax(-1)[new[-1]].item())
            if new[-1] in body["stop_token_ids"] or any(
                s in self.tokenizer.decode(new) for s in body["stop"]
            ):
                break
        return {"token_ids": new, "logprobs": {"token_logprobs": logprobs}}


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serves the model in `folder` at the yielded server's `url`."""
    server = Server(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
            with server.lock:  # one request at a time
                server.completions += self.path == "/v1/completions"
                if 0 <= server.dies_at < server.completions:
                    self.close_connection = True
                    return
                allowed = (
                    not server.key or self.headers.get("Authorization") == f"Bearer {server.key}"
                )
                status, content = (
                    server.answer(self.path, body) if allowed else (401, {"error": "Unauthorized"})
                )
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
