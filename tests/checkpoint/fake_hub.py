"""A Hugging Face hub of a few small files on 127.0.0.1, as far as the hub's library asks it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CONFIG, SHARD = b'{"architectures": ["LlamaForCausalLM"]}', b"weights"

REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/plain": {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ x }}",
        "README.md": b"readme",
        "model-00001-of-00001.safetensors": SHARD,
        "model.safetensors.index.json": b"{}",
        "pytorch_model.bin": b"old",
        "consolidated.safetensors": b"copy",
        "optimizer.bin": b"state",
        "onnx/model.safetensors": b"onnx",
    },
    "org/old": {
        "config.json": CONFIG,
        "pytorch_model.bin": b"old",
        "tokenizer.model": b"spm",
        "training_args.bin": b"x",
    },
    "org/several-gguf": {
        "m-Q8_0.gguf": b"eight",
        "m-Q4_K_M.gguf": b"four",
        "m-Q4_K_S.gguf": b"small",
        "mmproj-m-Q8_0.gguf": b"image",
        "sub/m-BF16.gguf": b"sixteen",
        "config.json": CONFIG,
    },
    "org/odd-gguf": {"a-IQ2_XS.gguf": b"a", "b-IQ3_S.gguf": b"b"},
    "org/parts-gguf": {
        "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf": b"first",
        "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf": b"second",
        "m-Q8_0-00001-of-00002.gguf": b"eight",
    },
    "org/nothing": {"README.md": b"readme"},
    "org/gated": {"config.json": CONFIG, "model.safetensors": SHARD},
}


class FakeHub(ThreadingHTTPServer):
    """`requests` are the (method, path) asked so far, `tokens` the tokens sent, `sent` the bytes of files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.repositories = dict(REPOSITORIES)
        self.sent = 0
        self.knows_ranges = True
        self.status = 200
        """Anything else: the answer to everything."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Answer(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        parts = unquote(url.path).strip("/").split("/")
        self.server.requests.append((self.command, unquote(url.path)))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.status != 200:
            return self._send(self.server.status, b"{}")
        if parts == ["api", "models"]:
            word = parse_qs(url.query)["search"][0]
            return self._json([{"id": name} for name in self.server.repositories if word[:3] in name])
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo not in self.server.repositories:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        files = self.server.repositories[repo]
        if parts[0] == "api":
            return self._api(repo, files, parts[4:])
        if repo == "org/gated" and self.headers.get("Authorization") != "Bearer accepted":
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        content = files["/".join(parts[4:])]
        about = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.server.knows_ranges:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
            about["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            self._send(206, content[start:end], about)
        else:
            self._send(200, content, about)

    def _api(self, repo: str, files: dict[str, bytes], rest: list[str]) -> None:
        if rest[:1] == ["tree"]:
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                    for name, content in files.items()
                ]
            )
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return self._json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.server.sent += len(content)
            self.wfile.write(content)
