"""A stand-in for the Hugging Face Hub: the requests with which huggingface_hub makes repositories and commits."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Its repositories, in memory: `repos[name]` has `private`, `files` and `commits`, lists of changed paths.

    `stored` are the large files by SHA-256. An upload of one whose number is in `refused` is refused.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}
        self.refused: set[int] = set()
        self.uploads = 0
        self.tokens: set[str] = set()
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and JSON of a request."""
        given = json.loads(body) if body[:1] in (b"{", b"[") and b'"key"' not in body[:20] else {}
        if path == "/api/repos/create":
            name = f"{given['organization']}/{given['name']}"
            if name in self.repos:
                return 409, {"error": "exists", "url": f"{self.url}/{name}"}
            start = {".gitattributes": b"*.safetensors filter=lfs\n"}
            self.repos[name] = {
                "private": given["visibility"] == "private",
                "files": start,
                "commits": [],
            }
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/stored/"):
            self.uploads += 1
            if self.uploads in self.refused:
                return 403, {"error": "refused"}
            self.stored[path.removeprefix("/stored/")] = body
            return 200, {}
        if path.endswith("/info/lfs/objects/batch"):
            links = lambda oid: {"actions": {"upload": {"href": f"{self.url}/stored/{oid}"}}}  # noqa: E731
            objects = [
                each | ({} if each["oid"] in self.stored else links(each["oid"]))
                for each in given["objects"]
            ]
            return 200, {"objects": objects, "transfer": "basic"}
        user, name, *rest = [*path.split("/")[3:], "", ""]
        rest = [part for part in rest if part]
        repo = self.repos.get(f"{user}/{name}") if path.startswith("/api/models/") else None
        if repo is None:
            return 404, {"error": "no such repository"}
        if rest == ["settings"]:
            repo["private"] = given["visibility"] == "private"
            return 200, {}
        if rest[:1] == ["preupload"]:
            return 200, {
                "files": [self._known(repo["files"], each["path"]) for each in given["files"]]
            }
        if rest[:1] == ["tree"]:
            files = [
                {"type": "file", "path": n, "size": len(c), "oid": "0"}
                for n, c in repo["files"].items()
            ]
            return 200, files
        if rest[:1] == ["commit"]:
            changed = []
            for line in map(json.loads, body.splitlines()[1:]):
                path, value = line["value"]["path"], line["value"]
                changed.append(path)
                if line["key"] == "deletedFile":
                    del repo["files"][path]
                else:
                    large = line["key"] == "lfsFile"
                    repo["files"][path] = (
                        self.stored[value["oid"]] if large else base64.b64decode(value["content"])
                    )
            repo["commits"].append(changed)
            return 200, {"commitUrl": f"{self.url}/{user}/{name}/commit/1", "commitOid": "1" * 40}
        return 200, {
            "id": f"{user}/{name}",
            "private": repo["private"],
            "sha": "1" * 40,
            "siblings": [],
        }

    def _known(self, files: dict[str, bytes], path: str) -> dict[str, Any]:
        large, content = path.endswith((".safetensors", ".png")), files.get(path)
        oid = None
        if content is not None:
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            oid = hashlib.sha256(content).hexdigest() if large else git
        return {
            "path": path,
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
            "oid": oid,
        }


@contextmanager
def hub() -> Iterator[Hub]:
    """A Hub that is served on this machine."""
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            served.tokens.add(self.headers.get("authorization", ""))
            status, content = served.answer(self.path.split("?")[0], body)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_HEAD = do

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
