"""`octavo chat`, `octavo complete` and `octavo run`, apart from the terminal."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from octavo.api.cli import main
from octavo.api.local import local_server
from octavo.api.serve import CannotServe, Parts
from octavo.api.terminal import Answer, Continuation, Conversation, Endpoint, TalkError, continue_text, say
from octavo.config import EngineConfig
from tests.api.conftest import Api
from tests.api.harness import MODEL, SAID, ScriptEngine, make_tokenizer, parts_of, until

OPTIONS = {"temperature": 0, "max_tokens": 200}


class Terminal(io.StringIO):
    """What somebody types, or sees."""

    def isatty(self) -> bool:
        return True


class Canned(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """Answers each request over HTTP with `body`, on TCP or a unix socket."""

    daemon_threads = True
    body = b""
    status = 200
    seen: ClassVar[list[tuple[str, Any]]] = []


class CannedTcp(Canned, socketserver.TCPServer):
    pass


class CannedUnix(Canned, socketserver.UnixStreamServer):
    pass


class Exchange(http.server.BaseHTTPRequestHandler):
    server: Canned

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        self.server.seen.append((self.path, body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def canned(
    body: bytes, status: int = 200, path: Path | None = None
) -> Iterator[tuple[Endpoint, list[tuple[str, Any]]]]:
    """A server that always says `body`, and the requests it got."""
    server = CannedTcp(("127.0.0.1", 0), Exchange) if path is None else CannedUnix(str(path), Exchange)
    server.body, server.status, server.seen = body, status, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1" if path is None else f"unix://{path}"
        yield Endpoint(url, model="m"), server.seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def test_say_prints_what_it_returns(api: Api) -> None:
    out = io.StringIO()
    answer = say(Endpoint(api.url), [{"role": "user", "content": "hi"}], OPTIONS, out)
    assert answer.text == SAID and out.getvalue() == SAID + "\n" and not answer.stopped
    assert continue_text(Endpoint(f"{api.url}/v1"), "hi", OPTIONS, io.StringIO()).text == SAID


def test_a_conversation_remembers_until_reset(api: Api) -> None:
    out, notes = io.StringIO(), io.StringIO()
    lines = io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    Conversation(Endpoint(api.url, model=MODEL), OPTIONS, "be nice", lines, out, notes).run()
    prompts = [make_tokenizer().decode(request.prompt) for request in api.engine.seen]
    start = "system\nbe nice\nuser\n"
    assert prompts == [
        f"{start}one\nassistant\n",
        f"{start}one\nassistant\n{SAID}\nuser\ntwo\nassistant\n",
        f"{start}three\nassistant\n",
    ]
    assert out.getvalue() == f"{SAID}\n" * 3 and notes.getvalue() == ""


def test_a_message_of_several_lines(api: Api) -> None:
    lines = io.StringIO('"""one\n  two\n\nthree"""\n"""\nfour\n"""\n"""five"""\n"""never ended\n')
    Continuation(Endpoint(api.url), OPTIONS, None, lines, io.StringIO(), io.StringIO()).run()
    prompts = [make_tokenizer().decode(request.prompt) for request in api.engine.seen]
    assert prompts == ["one\n  two\n\nthree", "four", "five"]


def test_at_a_terminal_a_conversation_outlives_an_error(api: Api) -> None:
    out, notes = Terminal(), Terminal()
    Conversation(Endpoint(api.url), OPTIONS, None, Terminal("x" * 2000 + "\nshort\n/?\n"), out, notes).run()
    assert out.getvalue() == SAID + "\n"
    assert notes.getvalue().count("> ") == 4 and notes.getvalue().count("Ctrl-C stops an answer") == 2
    [error] = [line for line in notes.getvalue().splitlines() if "error: " in line]
    assert "context length" in error
    assert make_tokenizer().decode(api.engine.seen[-1].prompt) == "user\nshort\nassistant\n"


def test_elsewhere_an_error_ends_it(api: Api) -> None:
    lines = io.StringIO("x" * 2000 + "\nshort\n")
    with pytest.raises(TalkError, match="context length"):
        Conversation(Endpoint(api.url), OPTIONS, None, lines, io.StringIO(), io.StringIO()).run()
    assert not api.engine.seen


class Impatient(io.StringIO):
    """Somebody who presses Ctrl-C at the third piece of an answer."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 3:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_what_came(api: Api) -> None:
    api.engine.pause = 0.005
    out = Impatient()
    answer = say(Endpoint(api.url), [{"role": "user", "content": "hi"}], {**OPTIONS, "ignore_eos": True}, out)
    assert out.getvalue() == answer.text + "\n" and SAID.startswith(answer.text) and answer.stopped
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


def test_after_ctrl_c_a_conversation_goes_on_at_a_terminal_only(api: Api) -> None:
    session = Conversation(Endpoint(api.url), OPTIONS, None, Terminal("one\ntwo\n"), Impatient(), Terminal())
    session.run()
    assert [message["content"] for message in session.messages] == ["one", "Alpha beta", "two", SAID]
    with pytest.raises(KeyboardInterrupt):
        Conversation(Endpoint(api.url), OPTIONS, None, io.StringIO("one\ntwo\n"), Impatient(), Terminal()).run()


def test_errors_are_one_line(api: Api) -> None:
    with pytest.raises(TalkError, match="does not exist"):
        list(Endpoint(api.url, model="other").stream("/completions", {"prompt": "a"}))
    api.engine.fail_after = 1
    with pytest.raises(TalkError, match="not finite"):
        list(Endpoint(api.url).stream("/completions", {"prompt": "a"}))
    with pytest.raises(TalkError, match="cannot talk to http://127.0.0.1:1: Connection refused"):
        Endpoint("http://127.0.0.1:1").first_model()


@pytest.mark.parametrize("url", ["ftp://h/v1", "http://", "http://h:port", "http://h:99999", "http://[::1"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(TalkError, match="is no URL"):
        Endpoint(url).first_model()


def test_comments_in_a_stream_are_ignored() -> None:
    body = b": keep-alive\n\n" + event("a") + b": keep-alive\n\nevent: x\n\n" + event("b") + b"data: [DONE]\n\n"
    with canned(body) as (endpoint, seen):
        assert continue_text(endpoint, "p", {"seed": 1}, io.StringIO()).text == "ab"
    assert seen == [("/v1/completions", {"model": "m", "prompt": "p", "seed": 1, "stream": True})]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (event("a") + b'data: {"error": {"message": "no\\nmemory"}}\n\ndata: [DONE]\n\n', 200, "^no memory$"),
        (event("a") + b'data: {"error": "out"}\n\n', 200, "^out$"),
        (event("a") + b'data: {"error": {}}\n\n', 200, "an error without a message"),
        (event("a"), 200, "ended the answer before it was complete"),
        (event("a") + b"data: {broken\n\n", 200, "sent what is not JSON"),
        (b"<html>", 502, "HTTP 502 Bad Gateway"),
        (b'{"error": "busy"}', 503, "^busy$"),
        (b'{"error": "Unauthorized"}', 401, "^Unauthorized$"),
        (b'["x"]', 400, "HTTP 400 Bad Request"),
    ],
)
def test_answers_that_are_errors(body: bytes, status: int, text: str) -> None:
    out = io.StringIO()
    with canned(body, status) as (endpoint, _), pytest.raises(TalkError, match=text):
        continue_text(endpoint, "p", {}, out)
    assert out.getvalue() == ("a\n" if status == 200 else "")


@pytest.mark.parametrize(
    ("body", "text"),
    [(b'{"data": []}', "serves no model"), (b"<html>", "is no server of the OpenAI API"), (b"[]", "is no server")],
)
def test_servers_without_models(body: bytes, text: str) -> None:
    with canned(body) as (endpoint, _), pytest.raises(TalkError, match=text):
        endpoint.first_model()


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with canned(event("a") + b"data: [DONE]\n\n", path=path) as (endpoint, seen):
        assert endpoint.url == f"unix://{path}"
        assert continue_text(endpoint, "p", {}, io.StringIO()).text == "a"
        assert main(["complete", "--uds", str(path), "--model-name", "m", "-q", "x"]) == 0
        assert main(["complete", "--url", f"unix://{path}", "--model-name", "m", "-q", "x"]) == 0
    assert [where for where, _ in seen] == ["/v1/completions"] * 3
    with pytest.raises(TalkError, match=r"cannot talk to unix:///.*s\.sock: "):
        endpoint.first_model()


def test_a_terminal_gets_no_control_characters() -> None:
    body = event("a\x1b[31mb\x07\tc\nd\x9b") + b"data: [DONE]\n\n"
    with canned(body) as (endpoint, _):
        screen, file = Terminal(), io.StringIO()
        assert continue_text(endpoint, "p", {}, screen).text == "a\x1b[31mb\x07\tc\nd\x9b"
        assert screen.getvalue() == "a\ufffd[31mb\ufffd\tc\nd\ufffd\n"
        continue_text(endpoint, "p", {}, file)
        assert file.getvalue() == "a\x1b[31mb\x07\tc\nd\x9b\n"


def test_statistics() -> None:
    answer = Answer("text", tokens=5, begun=10.0, first=10.5, ended=12.5)
    assert answer.stats() == "first token after 0.50 s; 5 tokens in 2.50 s; 2.0 tokens/s"
    assert (
        Answer("t", tokens=1, begun=1.0, first=2.0, ended=2.0).stats() == "first token after 1.00 s; 1 token in 1.00 s"
    )
    assert Answer().stats() == "no tokens"


def test_statistics_count_tokens_as_the_server_does(api: Api) -> None:
    notes = io.StringIO()
    session = Continuation(Endpoint(api.url), {**OPTIONS, "ignore_eos": True}, None, notes=notes, stats=True)
    session.out = io.StringIO()
    assert session.turn("hi").tokens == 200
    assert "; 200 tokens in " in notes.getvalue()


def test_a_local_server_lives_as_long_as_its_block() -> None:
    with local_server(EngineConfig(model=MODEL), parts_of(ScriptEngine())) as endpoint:
        assert endpoint.first_model() == MODEL
        assert say(endpoint, [{"role": "user", "content": "hi"}], OPTIONS, io.StringIO()).text == SAID
        with pytest.raises(TalkError, match="API key"):
            Endpoint(endpoint.url).first_model()
    with pytest.raises(TalkError):
        endpoint.first_model()


def test_a_local_server_that_cannot_load() -> None:
    def broken(config: EngineConfig) -> object:
        raise ValueError("no tokenizer in /there")

    parts = Parts(parts_of(ScriptEngine()).engine, broken)  # type: ignore[arg-type]
    with pytest.raises(CannotServe, match="no tokenizer in /there"), local_server(EngineConfig(model=MODEL), parts):
        pass
