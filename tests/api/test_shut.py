"""Start and end of a server process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from octavo.api.serve import CannotServe, bind, bind_path, serve
from octavo.api.server import Server
from octavo.config import EngineConfig
from octavo.info import ModelInfo
from octavo.sampling_params import ParameterError
from octavo.text.request import RequestFactory
from tests.api.harness import GREEDY, ScriptEngine, TinyText, make_tokenizer, parts_of, running, until

SERVER = """
import sys
from octavo.api.serve import Parts, serve
from octavo.client import Process
from octavo.config import EngineConfig
from tests.api.harness import ScriptEngine, parts_of, tiny_text
config = EngineConfig(model="tiny", host="127.0.0.1", port=int(sys.argv[1]), shutdown_timeout=float(sys.argv[2]),
                      uvicorn_log_level="error")
parts = parts_of(ScriptEngine(pause=0.01))
if sys.argv[3] == "apart":
    parts = Parts(lambda config: Process(config, "tests.api.harness:build_slow"), tiny_text)
sys.exit(serve(config, parts))
"""


@contextlib.contextmanager
def server(
    timeout: float, engine: str = "here", closed: str = "", program: str = SERVER
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that takes 10 ms per token, and its URL; its engine is "here" or in a process "apart". `closed`:
    redirections of the shell."""
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-c", program, str(port), str(timeout), engine]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command] if closed else command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready, 20)
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Asker(threading.Thread):
    """A request on a thread: what came of it."""

    def __init__(self, url: str, stream: bool, tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {**GREEDY, "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        self.status = 0
        self.text = ""
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=30) as response,
        ):
            self.status = response.status_code
            self.started.set()
            self.text = response.read().decode()


def begin(url: str, tokens: int) -> list[Asker]:
    """Two streams and one request that waits for its whole answer, all running."""
    askers = [Asker(url, True, tokens), Asker(url, True, tokens), Asker(url, False, tokens)]
    assert all(asker.started.wait(10) for asker in askers[:2])
    until(lambda: 'num_requests_running{engine="0",model_name="tiny"} 3.0' in httpx.get(f"{url}/metrics").text)
    return askers


def test_start_01_a_taken_port_is_found_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotServe, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)
        done = subprocess.run(
            [sys.executable, "-c", SERVER, str(port), "0", "here"], text=True, capture_output=True, timeout=30
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and str(port) in done.stderr


def test_start_the_engine_is_set_going_before_the_rest_is_imported() -> None:
    code = """
import sys
import octavo.api.cli
from octavo.api.serve import Parts, serve
from octavo.config import EngineConfig
def engine(config):
    print(sorted({"numpy", "octavo.build", "pydantic", "starlette", "tokenizers", "uvicorn"} & sys.modules.keys()))
    raise SystemExit(0)
serve(EngineConfig(model="tiny", host="127.0.0.1", port=0), Parts(engine, None))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_start_tls_files_that_are_not_there() -> None:
    parts = parts_of(ScriptEngine())

    async def run() -> None:
        config = EngineConfig(model="tiny", ssl_keyfile="/no/key", ssl_certfile="/no/cert")
        with bind("127.0.0.1", 0) as listening:
            await Server(config, listening, parts.engine(config), parts.text, lambda info: None).run()

    with pytest.raises(CannotServe, match="HTTP server cannot"):
        asyncio.run(run())


def test_start_missing_tls_files_are_named_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model="tiny", ssl_keyfile="/no/key", ssl_certfile="/no/cert")
    assert serve(config, parts_of(ScriptEngine())) == 1
    assert capsys.readouterr() == ("", "octavo: error: cannot read the TLS file /no/cert: No such file or directory.\n")


def test_start_wrong_sampling_defaults_end_the_server() -> None:
    class Wrong(TinyText):
        def factory(self, info: ModelInfo, config: EngineConfig) -> RequestFactory:
            raise ParameterError("The defaults are wrong.")

    parts = parts_of(ScriptEngine())._replace(text=lambda config: Wrong(make_tokenizer(), None))

    async def run() -> None:
        config = EngineConfig(model="tiny")
        with bind("127.0.0.1", 0) as listening:
            await Server(config, listening, parts.engine(config), parts.text, lambda info: None).run()

    with pytest.raises(CannotServe, match="^The defaults are wrong.$"):
        asyncio.run(run())


def test_answers_tell_the_time_also_after_a_pause() -> None:
    with running(parts_of(ScriptEngine())) as url, httpx.Client() as client:
        for _ in range(2):
            before = int(time.time())
            told = parsedate_to_datetime(client.get(f"{url}/health").headers["date"]).timestamp()
            assert before <= told <= time.time()
            time.sleep(1.1)


TELLING = """
import sys
from octavo.api.serve import Parts, serve
from octavo.client import Process
from octavo.config import EngineConfig
from tests.api.harness import Telling, parts_of, tiny_text
config = EngineConfig(model="tiny", host="127.0.0.1", port=int(sys.argv[1]), uvicorn_log_level="error")
parts = parts_of(Telling())
if sys.argv[3] == "apart":
    parts = Parts(lambda config: Process(config, "tests.api.harness:build_telling"), tiny_text)
sys.exit(serve(config, parts))
"""


@pytest.mark.parametrize("engine", ["here", "apart"])
def test_what_was_loaded_is_not_looked_through_for_garbage(engine: str) -> None:
    with server(0, engine, program=TELLING) as (process, url):
        assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a", "max_tokens": 2}).status_code == 200
        process.terminate()
        _, told = process.communicate(timeout=30)
    assert "frozen: True" in told


def test_start_an_address_that_is_not_here() -> None:
    with pytest.raises(CannotServe, match="--"):
        bind("203.0.113.1", 0)


def test_shut_01_running_requests_finish_within_the_timeout() -> None:
    with server(30) as (process, url):
        askers = begin(url, 100)
        process.send_signal(signal.SIGTERM)
        for asker in askers:
            asker.join(20)
        assert [asker.status for asker in askers] == [200] * 3
        assert all(asker.text.endswith("data: [DONE]\n\n") for asker in askers[:2])
        assert process.wait(10) == 0
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))


def test_shut_01_without_a_timeout_each_client_is_told() -> None:
    with server(0) as (process, url):
        askers = begin(url, 480)
        process.send_signal(signal.SIGTERM)
        for asker in askers:
            asker.join(10)
        assert askers[2].status == 503 and "shutting down" in askers[2].text
        assert all("shutting down" in asker.text and "[DONE]" not in asker.text for asker in askers[:2])
        assert process.wait(10) == 0


def test_shut_01_a_second_signal_does_not_wait() -> None:
    with server(600) as (process, url):
        begin(url, 480)
        process.send_signal(signal.SIGINT)
        until(lambda: httpx_refuses(url))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_server_without_standard_files_starts_its_engine(closed: str) -> None:
    with server(0, "apart", closed) as (process, url):
        body = {**GREEDY, "prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        engine_of(process).kill()
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
        process.terminate()
        assert process.wait(10) == 0


def engine_of(process: subprocess.Popen[str]) -> psutil.Process:
    [engine] = psutil.Process(process.pid).children()
    return engine


def test_shut_03_a_signal_while_the_engine_restarts_drains_too() -> None:
    with server(30, "apart") as (process, url):
        askers = begin(url, 200)
        engine_of(process).kill()
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGTERM)
        for asker in askers:
            asker.join(20)
        assert [asker.status for asker in askers] == [200] * 3
        assert all(asker.text.endswith("data: [DONE]\n\n") for asker in askers[:2])
        assert process.wait(10) == 0


def test_start_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "octavo.sock")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(path)
    with running(parts_of(ScriptEngine()), listening=bind_path(path)) as url:
        assert url == f"unix://{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://octavo") as http:
            answer = http.post("/v1/completions", json={**GREEDY, "prompt": "a", "max_tokens": 1})
            assert answer.json()["choices"][0]["text"] == "Alpha"
        with pytest.raises(CannotServe, match="in use.*--uds"), bind_path(path):
            pass
    assert not Path(path).exists()
    with pytest.raises(CannotServe, match="--uds"), bind_path(str(tmp_path / "no" / "folder")):
        pass
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CannotServe, match="--uds"), bind_path(str(tmp_path / "file")):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_start_tls_and_client_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    files = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "key", "cert")}
    options = {"ssl_keyfile": files["key"], "ssl_certfile": files["cert"]}
    trust = ssl.create_default_context(cafile=files["ca"])
    with running(parts_of(ScriptEngine()), **options) as url:
        assert url.startswith("https://") and httpx.get(f"{url}/health", verify=trust).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    with running(parts_of(ScriptEngine()), **options, ssl_ca_certs=files["ca"], ssl_cert_reqs=2) as url:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=trust)
        authority.issue_cert("client").configure_cert(trust)
        assert httpx.get(f"{url}/health", verify=trust).status_code == 200


def test_shut_03_no_engine_outlives_its_server() -> None:
    with server(0, "apart") as (process, url):
        engine = engine_of(process)
        begin(url, 480)
        process.kill()
        engine.wait(10)
    with server(0, "apart") as (process, _):
        engine = engine_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not engine.is_running()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serve", "/no/such/model", "--host", "127.0.0.1", "--port", "0"], "/no/such/model"),
        (["serve", "--host", "127.0.0.1", "--port", "0", "--max-modle-len", "5"], "--max-model-len"),
        (["serve", "a", "--model", "b"], "two models"),
        (["run", "/no/such/model", "hello"], "/no/such/model"),
        (["chat", "--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_start_04_mistakes_end_with_one_clear_line(arguments: list[str], words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", *arguments], text=True, capture_output=True, timeout=60)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().split("\n")[-1]
    assert "error: " in last and words in last


def httpx_refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False
