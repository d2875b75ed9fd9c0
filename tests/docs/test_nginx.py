"""nginx, as docs/nginx.md sets it up, in front of servers: the configuration that is shipped, with other places."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from octavo.api.serve import bind, bind_path
from octavo.types import Delta, Request
from tests import realmodels
from tests.api.harness import GREEDY, ScriptEngine, ids_of, parts_of, running
from tests.docs.blocks import ROOT, blocks_of

CONF = ROOT / "deploy" / "nginx.conf"
PREFIXED = next(
    block.text for block in blocks_of((ROOT / "docs" / "nginx.md").read_text()) if "location /llm/" in block.text
)
AROUND = """\
daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {extra}
    include {folder}/octavo.conf;
}}
"""

if not shutil.which("nginx") and not os.environ.get("CI"):
    pytest.skip("nginx is not here: apt install nginx-light", allow_module_level=True)


def change(text: str, *replacements: tuple[str, str]) -> str:
    for old, new in replacements:
        assert old in text, f"there is no {old!r} to replace"
        text = text.replace(old, new)
    return text


@dataclass
class Site:
    """nginx's configuration in a folder."""

    folder: Path
    url: str
    """Where it listens once it runs."""

    def nginx(self, *flags: str) -> list[str]:
        return ["nginx", "-e", str(self.folder / "error.log"), "-c", str(self.folder / "nginx.conf"), *flags]


def write(folder: Path, upstream: str, *replacements: tuple[str, str], extra: str = "") -> Site:
    """The shipped configuration, with a free port, certificates made here, and the given upstream."""
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("llm.example.com", "127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "octavo.key")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(folder / "octavo.crt", append=True)
    conf = change(
        CONF.read_text(),
        ("    server 127.0.0.1:8000;", f"    server {upstream};"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/tls/", f"{folder}/"),
        *replacements,
    )
    (folder / "octavo.conf").write_text(conf)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder, user=user, extra=extra))
    return Site(folder, f"https://127.0.0.1:{port}")


def trusting(site: Site) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=site.folder / "ca.pem")


@contextmanager
def proxied(site: Site, **options: object) -> Iterator[httpx.Client]:
    """nginx, running, and a client of it."""
    process = subprocess.Popen(site.nginx(), stdin=subprocess.DEVNULL)
    port = int(site.url.rpartition(":")[2])
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (site.folder / "error.log").read_text()
                time.sleep(0.02)
        with httpx.Client(base_url=site.url, verify=trusting(site), timeout=20, **options) as client:  # type: ignore[arg-type]
            yield client
    finally:
        process.terminate()
        process.wait(20)


SAID = "Alpha beta, gamma and so on."
"""A token a character or word, each of which is text by itself."""
NO_COMMENTS = {"sse_keep_alive_interval": 0}
"""So that a stream without events ends in a time-out."""


@dataclass
class StepByStep(ScriptEngine):
    """An engine that makes a token only when the test says so."""

    script: Callable[[Request, int], list[int]] = lambda request, choice: ids_of(SAID)
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def step(self) -> list[Delta]:
        return super().step() if self.allowed.acquire(timeout=0.1) else []


def events(client: httpx.Client, engine: StepByStep, path: str = "/v1/completions") -> Iterator[str]:
    """The texts of a stream; the engine makes a token only after the one before has come through."""
    body = {**GREEDY, "prompt": "Hello", "stream": True}
    engine.allowed.release()  # an answer begins with its first token
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["text"]
                engine.allowed.release()


IGNORE = "proxy_ignore_headers X-Accel-Buffering;"
"""Without the server's own word on buffering the configuration must do."""


@pytest.mark.parametrize("extra", ["", IGNORE])
def test_each_event_comes_through_before_the_next_is_made(tmp_path: Path, extra: str) -> None:
    engine = StepByStep()
    with (
        running(parts_of(engine), **NO_COMMENTS) as url,
        proxied(write(tmp_path, url.removeprefix("http://"), extra=extra)) as client,
    ):
        assert "".join(events(client, engine)) == SAID


def test_a_proxy_that_buffers_is_found_out(tmp_path: Path) -> None:
    """The test above can fail."""
    engine = StepByStep()
    with running(parts_of(engine), **NO_COMMENTS) as url:
        upstream = url.removeprefix("http://")
        site = write(tmp_path, upstream, ("proxy_buffering off;", "proxy_buffering on;"), extra=IGNORE)
        with proxied(site) as client:
            client.timeout = httpx.Timeout(2)
            with pytest.raises(httpx.ReadTimeout):
                list(events(client, engine))


def test_a_unix_socket_is_an_upstream(tmp_path: Path) -> None:
    engine = StepByStep()
    path = tmp_path / "octavo.sock"
    with (
        running(parts_of(engine), listening=bind_path(str(path)), **NO_COMMENTS),
        proxied(write(tmp_path, f"unix:{path}")) as client,
    ):
        assert "".join(events(client, engine)) == SAID


def test_the_comment_shows_the_unix_socket_of_the_service() -> None:
    assert "# server unix:/run/octavo/octavo.sock;" in CONF.read_text()
    assert "RuntimeDirectory=octavo" in (ROOT / "deploy" / "octavo.service").read_text()


def test_a_path_of_its_own(tmp_path: Path) -> None:
    """The location of docs/nginx.md: Octavo under /llm/, beside something else."""
    start = CONF.read_text().index("    location / {")
    end = CONF.read_text().index("    # Numbers are for")
    engine = StepByStep()
    with running(parts_of(engine), root_path="/llm", **NO_COMMENTS) as url:
        site = write(tmp_path, url.removeprefix("http://"), (CONF.read_text()[start:end], PREFIXED))
        with proxied(site) as client:
            assert "".join(events(client, engine, "/llm/v1/completions")) == SAID
            assert client.get("/llm/v1/models").json()["data"][0]["id"] == GREEDY["model"]
            assert client.get("/v1/models").status_code == 404


def test_long_prompts_pass_and_numbers_are_private(tmp_path: Path) -> None:
    with running(parts_of(ScriptEngine())) as url:
        site = write(tmp_path, url.removeprefix("http://"))
        with proxied(site) as client:
            long = client.post("/v1/completions", json={**GREEDY, "prompt": "x" * (3 << 20)})
            assert long.status_code == 400 and "context" in long.json()["error"]["message"]
            assert client.post("/v1/completions", content=b"x" * (33 << 20)).status_code == 413
            assert client.get("/metrics").status_code == 200
            elsewhere = httpx.HTTPTransport(local_address="127.0.0.2", verify=trusting(site))
            with httpx.Client(base_url=site.url, transport=elsewhere) as other:
                assert other.get("/metrics").status_code == 403
                assert other.get("/health").status_code == 200


def test_a_real_model_behind_nginx(tmp_path: Path) -> None:
    """All of it: SmolLM2 at a Unix socket, nginx with TLS, and OpenAI's client."""
    path = tmp_path / "octavo.sock"
    command = [sys.executable, "-m", "octavo", "serve", str(realmodels.smollm2_gguf()), "--served-model-name", "small"]
    log = tmp_path / "server.log"
    with log.open("w") as out:
        flags = ["--uds", str(path), "--max-model-len", "1024", "--kv-cache-memory-bytes", "64MiB", "--api-key", "k"]
        server = subprocess.Popen([*command, *flags], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        with proxied(write(tmp_path, f"unix:{path}")) as client:
            deadline = time.monotonic() + 60
            while client.get("/health").status_code != 200:  # 502 before there is a socket, 503 while it loads
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            talk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="k", http_client=client)
            asked = {"model": "small", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            whole = talk.completions.create(**asked).choices[0].text
            parts = [chunk.choices[0].text for chunk in talk.completions.create(**asked, stream=True)]
            assert whole.startswith(" Paris") and "".join(parts) == whole and len(parts) == 8
    finally:
        server.terminate()
        assert server.wait(30) == 0


def test_nginx_accepts_the_configuration_and_not_any(tmp_path: Path) -> None:
    site = write(tmp_path, "127.0.0.1:8000")
    done = subprocess.run(site.nginx("-t"), capture_output=True, text=True)
    assert done.returncode == 0, (tmp_path / "error.log").read_text() + done.stderr
    conf = tmp_path / "octavo.conf"
    conf.write_text(change(conf.read_text(), ("proxy_buffering off;", "proxy_bufering off;")))
    assert subprocess.run(site.nginx("-t"), capture_output=True).returncode == 1
