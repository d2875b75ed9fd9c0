"""`octavo run-batch`: OpenAI's batch files in and out, bad lines, resuming after a kill, HTTP, signals."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import re
import signal
import socketserver
import struct
import subprocess
import sys
import termios
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai.types.chat import ChatCompletion

from octavo.api import app
from octavo.api.batch import run, transfer
from octavo.api.batch.answers import BatchError, Failure, answers_at, batch_name
from octavo.api.batch.lines import whole
from octavo.api.batch.run import STREAMED, Batch, run_batch
from octavo.api.cli import main
from octavo.client import Process
from octavo.config import EngineConfig
from tests import realmodels
from tests.api.harness import MODEL, SAID, ScriptEngine, ids_of, parts_of, tiny_text, until
from tests.cases.real import serving

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


def line(custom_id: object, url: str = "/v1/completions", body: object = None, **fields: object) -> dict[str, Any]:
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 2} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


def write(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    answers = {answer["custom_id"]: answer for answer in read(path)}
    assert len(answers) == len(read(path))
    return answers


def answered(
    folder: Path, lines: Sequence[object], engine: ScriptEngine | None = None, **options: Any
) -> list[dict[str, Any]]:
    """The output of a batch of `lines`, in the order of its lines' numbers."""
    source, target = write(folder / "in.jsonl", lines), folder / "out.jsonl"
    config = EngineConfig(model=MODEL, **options)
    assert run_batch(config, parts_of(engine or ScriptEngine()), Batch(str(source), str(target))) == 0
    assert not (folder / "out.jsonl.partial").exists()
    return sorted(read(target), key=lambda answer: str(answer["id"]))


# -- what lines may ask, and what they get


def test_every_route_answers_as_the_server_does(tmp_path: Path) -> None:
    lines = [
        line("text"),
        line("chat", "/v1/chat/completions", {**CHAT, "model": MODEL, "max_tokens": 5}),
        line("ids", "/tokenize", {"prompt": "abc"}),
        line("back", "/detokenize", {"tokens": [97, 98]}),
    ]
    text, chat, ids, back = answered(tmp_path, lines)
    for answer, asked in zip((text, chat, ids, back), lines, strict=True):
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert list(answer["response"]) == ["status_code", "request_id", "body"]
        assert answer["custom_id"] == asked["custom_id"] and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["request_id"]
    assert text["response"]["body"]["choices"][0]["text"] == "Alpha beta"
    completion = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    assert completion.choices[0].message.content == "Alpha beta, DEF gamma "
    assert completion.id == f"chatcmpl-{chat['response']['request_id']}"
    assert ids["response"]["body"]["tokens"] == [97, 98, 99]
    assert back["response"]["body"] == {"prompt": "ab"}
    assert len({answer["id"] for answer in (text, chat, ids, back)}) == 4


def test_lines_may_ask_whatever_takes_a_body() -> None:
    assert set(STREAMED) == {o.path for o in app.ROUTES if o.method == "POST" and o.body is not None}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= set(STREAMED)
    assert STREAMED["/v1/completions"] and not STREAMED["/tokenize"]


def test_routes_of_other_apis_answer_with_one_object(tmp_path: Path) -> None:
    """Ollama's streams unless told otherwise; TGI has one that always does."""
    chat = {"model": MODEL, "messages": CHAT["messages"], "options": {"temperature": 0}}
    lines = [line("ollama", "/api/chat", chat), line("tgi", "/generate_stream", {"inputs": "a"}), line("octavo")]
    engine = ScriptEngine(pause=0.002)
    ollama, tgi, octavo = answered(tmp_path, lines, engine)
    assert ollama["response"]["status_code"] == 200 and ollama["response"]["body"]["message"]["content"] == SAID
    assert tgi["response"] is None and tgi["error"]["code"] == "stream_not_supported"
    assert octavo["response"]["status_code"] == 200 and not engine.live


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b"{}", b'{"stream":false}'),
        (b' { "a" : 1 } ', b'{"stream":false,"a" : 1 }'),
        (b'{"stream": false}', b'{"stream": false}'),
        (b'{"stream": null}', b'{"stream": null}'),
        (b"[1]", b"[1]"),
    ],
)
def test_streams_are_switched_off_where_nothing_is_said(body: bytes, sent: bytes) -> None:
    assert whole(body) == sent


BAD = [
    ("not json", None, "invalid_json_line", "Line 2 is not a JSON object"),
    ("[1]", None, "invalid_json_line", "Line 2 is not a JSON object"),
    ('{"custom_id": "x", "method": "POST"', None, "invalid_json_line", "Line 2"),
    (line(None), None, "invalid_custom_id", "custom_id must be a text"),
    (line(5), None, "invalid_custom_id", "custom_id must be a text"),
    (line("first"), "first", "duplicate_custom_id", "earlier line"),
    (line("x", "/v1/completion"), "x", "invalid_url", "did you mean /v1/completions?"),
    (line("x", "/health"), "x", "invalid_url", "cannot be asked in a batch"),
    (line("x", ["/tokenize"]), "x", "invalid_url", "cannot be asked in a batch"),  # type: ignore[arg-type]
    (line("x", method="GET"), "x", "invalid_method", 'method must be POST, got "GET".'),
    ({"custom_id": "x", "url": "/tokenize", "body": {}}, "x", "invalid_method", "got nothing"),
    ({"custom_id": "x", "url": "/tokenize", "method": "POST"}, "x", "missing_required_parameter", "body is missing"),
    (line("x", body={"prompt": "a", "stream": True}), "x", "stream_not_supported", "stream must be false"),
    (json.dumps(line("x", body="a" * (run.LINE_BYTES + 5000))), None, "line_too_long", "--max-request-bytes"),
]


@pytest.mark.parametrize(("bad", "custom_id", "code", "message"), BAD, ids=[str(row[2:]) for row in BAD])
def test_bad_lines_become_errors_and_stop_nothing(
    tmp_path: Path, bad: object, custom_id: str | None, code: str, message: str
) -> None:
    first, second, third = answered(tmp_path, [line("first"), bad, line("third")], max_request_bytes=4096)
    assert second["custom_id"] == custom_id and second["response"] is None
    assert second["error"]["code"] == code and message in second["error"]["message"]
    assert list(second["error"]) == ["code", "message"]
    assert [answer["response"]["status_code"] for answer in (first, third)] == [200, 200]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "model": "gpt-4o"}, 404, "Served here: `tiny`"),
        ([1], 400, "must be a JSON object"),
        ({}, 400, "prompt"),
        ({"prompt": "x" * 300}, 400, "can never fit"),
        ({"prompt": "x" * 5000}, 413, "--max-request-bytes"),
        ({"prompt": "a", "stream": "maybe"}, 400, "stream"),
    ],
)
def test_what_a_route_refuses_is_its_answer(tmp_path: Path, body: object, status: int, message: str) -> None:
    answers = answered(tmp_path, [line("first"), line("bad", body=body)], max_request_bytes=4096)
    assert answers[0]["response"]["status_code"] == 200
    assert answers[1]["error"] is None and answers[1]["response"]["status_code"] == status
    error = answers[1]["response"]["body"]["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_a_line_that_the_engine_fails_at_costs_the_others_nothing(tmp_path: Path) -> None:
    engine = ScriptEngine(fail_after=3)
    short = {"prompt": "a", "max_tokens": 2}
    one, two, three = answered(
        tmp_path,
        [line("a", body=short), line("b", body={"prompt": "a", "max_tokens": 9}), line("c", body=short)],
        engine,
    )
    assert [a["response"]["status_code"] for a in (one, two, three)] == [200, 500, 200]
    assert "not finite" in two["response"]["body"]["error"]["message"] and not engine.live


def test_blank_lines_windows_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(line("a")).encode() + b"\r\n\r\n  \n" + json.dumps(line("ü")).encode()
    )
    target = tmp_path / "out.jsonl"
    assert run_batch(EngineConfig(model=MODEL), parts_of(ScriptEngine()), Batch(str(source), str(target))) == 0
    assert set(by_id(target)) == {"a", "ü"}


def test_an_empty_input_is_an_empty_output_and_loads_nothing(tmp_path: Path) -> None:
    def never(config: EngineConfig) -> Any:
        raise AssertionError("the model was loaded")

    source, target = write(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl"
    parts = parts_of(ScriptEngine())._replace(engine=never)
    assert run_batch(EngineConfig(model=MODEL), parts, Batch(str(source), str(target))) == 0
    assert target.read_bytes() == b""


class Crowd(ScriptEngine):
    """Remembers how many requests it had at most."""

    most = 0

    def step(self) -> Any:
        self.most = max(self.most, len(self.live))
        return super().step()


def test_a_bounded_number_is_in_flight_and_keeps_the_engine_busy(tmp_path: Path) -> None:
    engine = Crowd(pause=0.001)
    answers = answered(tmp_path, [line(str(i)) for i in range(200)], engine, max_num_seqs=4)
    assert len(answers) == 200 and engine.most == 4 * run.IN_FLIGHT


def test_a_bad_line_does_not_wait_for_others_and_answers_come_as_they_are_made(tmp_path: Path) -> None:
    engine = ScriptEngine(script=lambda request, choice: ids_of(SAID), pause=0.002)
    source = write(
        tmp_path / "in.jsonl", [line("long", body={**CHAT_TEXT, "max_tokens": 100}), line("short"), "broken"]
    )
    target = tmp_path / "out.jsonl"
    assert run_batch(EngineConfig(model=MODEL), parts_of(engine), Batch(str(source), str(target))) == 0
    assert [answer["custom_id"] for answer in read(target)] == [None, "short", "long"]


CHAT_TEXT = {"prompt": "Hello", "temperature": 0, "ignore_eos": True}


# -- going on after an end


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(str(i)) for i in range(20)] + ["broken", line("3")]
    whole = answered(tmp_path, lines)
    text = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(b"".join(text[:9]) + text[9][:40])
    engine = ScriptEngine()
    again = answered(tmp_path, lines, engine)
    kept = [json.loads(item) for item in text[:9]]
    assert len(engine.seen) == sum(a["response"] is not None for a in whole) - sum(
        a["response"] is not None for a in kept
    )
    assert read(tmp_path / "out.jsonl")[:9] == kept
    assert [a["id"] for a in again] == [a["id"] for a in whole]
    assert "22 lines: 20 answered, 2 failed, 9 of them before;" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [0, 1, 3, 10, 60])
def test_a_last_line_that_is_cut_off_is_repaired(tmp_path: Path, cut: int) -> None:
    answered(tmp_path, [line("a"), line("b")])
    first, second = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl.partial").write_bytes(first + (second[:cut] if cut != 3 else bytes(50)))
    engine = ScriptEngine()
    answers = answered(tmp_path, [line("a"), line("b")], engine)
    assert {a["custom_id"] for a in answers} == {"a", "b"} and len(engine.seen) == 1


@pytest.mark.parametrize(
    ("lines", "model", "partial"),
    [
        (["a", "c"], MODEL, None),
        (["a", "b", "c"], MODEL, None),
        (["a", "b"], "other", None),
        (["a", "b"], MODEL, b"my notes\n"),
        (["a", "b"], MODEL, b"my notes"),
        (["a", "b"], MODEL, b'{"id": "batch_req_1", "custom_id": "a", "response": null, "error": null}\n'),
    ],
)
def test_answers_of_another_batch_are_left_alone(
    tmp_path: Path, lines: list[str], model: str, partial: bytes | None
) -> None:
    answered(tmp_path, [line("a"), line("b")])
    kept = partial or (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)[0]
    path = tmp_path / "out.jsonl.partial"
    path.write_bytes(kept)
    source = write(tmp_path / "in.jsonl", [line(name) for name in lines])
    with pytest.raises(BatchError, match="another input, or of another model"):
        run_batch(EngineConfig(model=model), parts_of(ScriptEngine()), Batch(str(source), str(tmp_path / "out.jsonl")))
    assert path.read_bytes() == kept


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    name = batch_name("x")
    path = tmp_path / "out.jsonl.partial"
    with answers_at(path, name) as answers:
        answers.add(1, "a", Failure("c", "m"))
        with pytest.raises(BatchError, match="another octavo run-batch writes"), answers_at(path, name):
            pass
    with answers_at(path, name) as answers:
        assert 1 in answers.done and 2 not in answers.done and (answers.done.count, answers.done.failed) == (1, 1)


SCRIPTED = """
import sys
from octavo.api import cli
from octavo.api.serve import Parts
from octavo.client import Process
from tests.api.harness import tiny_text
cli._parts = lambda: Parts(lambda config: Process(config, "tests.api.harness:build_slow"), tiny_text)
sys.exit(cli.main(["run-batch", "--model", "tiny", *sys.argv[1:]]))
"""


def start(*arguments: str, scripted: bool = True) -> subprocess.Popen[str]:
    """`octavo run-batch` as users start it, with an engine in a process of its own: 10 ms per token, or a real one."""
    head = ["-c", SCRIPTED] if scripted else ["-m", "octavo", "run-batch"]
    return subprocess.Popen([sys.executable, *head, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_a_terminal_shows_how_far_it_is(tmp_path: Path) -> None:
    lines = [line(str(i), body={**CHAT_TEXT, "max_tokens": 20}) for i in range(12)] + [line("bad", method="GET")]
    source = write(tmp_path / "in.jsonl", lines)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-c", SCRIPTED, "-i", str(source), "-o", str(tmp_path / "o"), "--max-num-seqs", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while data := os.read(ours, 4096):
            shown += data
    os.close(ours)
    assert process.wait(60) == 0
    *bars, summary = [text for text in shown.decode().replace("\r", "\n").split("\n") if text.strip()]
    assert "13 lines: 12 answered, 1 failed;" in summary
    assert re.search(r"100%.*13/13 .*, 1 failed, \d+ tokens/s\]", bars[-1]), bars


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_is_gone_on_with(tmp_path: Path, number: signal.Signals) -> None:
    lines = [line(str(i), body={**CHAT_TEXT, "max_tokens": 4 + i % 7}) for i in range(60)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    command = ("-i", str(source), "-o", str(target), "--max-num-seqs", "4")
    process = start(*command)
    until(lambda: lines_in(partial) >= 12, 30)
    process.send_signal(number)
    status, said = ended(process)
    kept = lines_in(partial)
    assert 12 <= kept < 60 and not target.exists() and "Traceback" not in said
    if number == signal.SIGKILL:
        assert status == -number
    else:
        assert status == 128 + number
        assert said == (
            f"octavo run-batch: stopped: {kept} of 60 lines are answered in {partial}; run the same command again to "
            "go on.\n"
        )
    status, said = ended(start(*command))
    assert status == 0, said
    assert f"60 lines: 60 answered, 0 failed, {kept} of them before;" in said
    assert said.count("\n") == 1, "quiet where stderr is no terminal"
    answers = by_id(target)
    assert set(answers) == {str(i) for i in range(60)} and not partial.exists()
    for i in range(60):
        assert answers[str(i)]["response"]["body"]["usage"]["completion_tokens"] == 4 + i % 7


def test_an_engine_that_is_killed_costs_no_line(tmp_path: Path) -> None:
    lines = [line(str(i), body={**CHAT_TEXT, "max_tokens": 20}) for i in range(24)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start("-i", str(source), "-o", str(target), "--max-num-seqs", "4")
    until(lambda: lines_in(tmp_path / "out.jsonl.partial") >= 8, 30)
    [engine] = psutil.Process(process.pid).children()
    engine.kill()
    status, said = ended(process)
    assert status == 0 and "24 lines: 24 answered, 0 failed;" in said
    texts = {a["response"]["body"]["choices"][0]["text"] for a in by_id(target).values()}
    assert len(texts) == 1


def build_mortal(config: EngineConfig, on_progress: Any) -> Any:
    """For `octavo.process`: an engine that dies at each first step while there is the file that `config` names."""
    from tests.api.harness import Served, make_info, make_tokenizer

    class Mortal(ScriptEngine):
        def step(self) -> Any:
            if os.path.exists(str(config.download_dir)):
                os._exit(3)
            return super().step()

    return Served(Mortal(), make_info(make_tokenizer()))


def test_an_engine_that_keeps_dying_ends_the_run_and_spoils_no_line(tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in (("SECOND_DELAY", 0.01), ("FAILING", 2), ("HOPELESS", 3)):
        monkeypatch.setattr(f"octavo.recovery.{name}", value)
    poison = tmp_path / "poison"
    source, target = write(tmp_path / "in.jsonl", [line(str(i)) for i in range(40)]), tmp_path / "out.jsonl"
    config = EngineConfig(model=MODEL, download_dir=str(poison), max_num_seqs=8)
    parts = parts_of(ScriptEngine())._replace(
        engine=lambda config: Process(config, "tests.api.test_run_batch:build_mortal"), text=tiny_text
    )
    poison.touch()
    with pytest.raises(BatchError, match="the engine keeps stopping") as caught:
        run_batch(config, parts, Batch(str(source), str(target)))
    done = read(tmp_path / "out.jsonl.partial")
    assert len(done) < 40, caught.value
    poison.unlink()
    assert run_batch(config, parts, Batch(str(source), str(target))) == 0
    assert len(by_id(target)) == 40


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "o"), "--model", str(tmp_path / "no")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("octavo: error: There is no file or folder") and said.count("\n") == 1


# -- files and URLs


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("nothing.jsonl", "out.jsonl", "cannot read the input .*nothing.jsonl: No such file or directory"),
        (".", "out.jsonl", "cannot read the input .*: Is a directory"),
        ("in.jsonl", "in.jsonl", "input and output are both"),
        ("in.jsonl", ".", "is not a file"),
        ("in.jsonl", "no/out.jsonl", "the folder of the output, .*no, does not exist"),
        ("in.jsonl", "taken.jsonl", "cannot write .*taken.jsonl.partial: Is a directory"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, source: str, target: str, message: str) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / "taken.jsonl.partial").mkdir()
    with pytest.raises(BatchError, match=message):
        run_batch(
            EngineConfig(model=MODEL),
            parts_of(ScriptEngine()),
            Batch(str(tmp_path / source), str(tmp_path / target)),
        )


def test_an_input_from_a_pipe(tmp_path: Path) -> None:
    source, target = tmp_path / "fifo", tmp_path / "out.jsonl"
    os.mkfifo(source)
    threading.Thread(target=lambda: write(source, [line("a"), line("a")]), daemon=True).start()
    assert run_batch(EngineConfig(model=MODEL), parts_of(ScriptEngine()), Batch(str(source), str(target))) == 0
    assert sorted(a["error"] is None for a in read(target)) == [False, True]


class Store(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Files over HTTP; the first `failures` requests of each method fail."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.files: dict[str, bytes] = {}
        self.failures: Counter[str] = Counter()
        self.logins: dict[str, str | None] = {}
        self.status = 503
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Exchange(http.server.BaseHTTPRequestHandler):
    server: Store

    def _fails(self) -> bool:
        self.server.logins[self.command] = self.headers["Authorization"]
        if self.server.failures[self.command] <= 0:
            return False
        self.server.failures[self.command] -= 1
        self.send_error(self.server.status)
        return True

    def do_GET(self) -> None:
        if self._fails():
            return
        data = self.server.files.get(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._fails():
            return
        self.server.files[self.path] = body
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(transfer, "PAUSES", (0.01, 0.01))
    server = Store()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_input_and_output_behind_urls(tmp_path: Path, store: Store) -> None:
    store.files["/in?sig=1"] = write(tmp_path / "in.jsonl", [line("a"), line("b")]).read_bytes()
    store.failures.update(GET=2, PUT=2)
    login = store.url.replace("//", "//me:a%40b@")
    batch = Batch(f"{login}/in?sig=1", f"{store.url}/out?sig=2", tmp_path / "kept")
    assert run_batch(EngineConfig(model=MODEL), parts_of(ScriptEngine()), batch) == 0
    (tmp_path / "out.jsonl").write_bytes(store.files["/out?sig=2"])
    assert set(by_id(tmp_path / "out.jsonl")) == {"a", "b"}
    assert list((tmp_path / "kept").iterdir()) == []
    assert store.logins == {"GET": "Basic " + b64encode(b"me:a@b").decode(), "PUT": None}


def test_answers_that_cannot_be_sent_are_kept_and_sent_later(tmp_path: Path, store: Store) -> None:
    source = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    store.failures.update(PUT=1)
    store.status = 403
    engine = ScriptEngine()
    config = EngineConfig(model=MODEL)
    with pytest.raises(BatchError, match=r"cannot send the answers to http://.*/out: HTTP 403 .* kept in .*\.partial"):
        run_batch(config, parts_of(engine), Batch(str(source), f"{store.url}/out?sig=1", tmp_path / "kept"))
    assert len(engine.seen) == 2
    # A URL that was signed anew is the same output.
    assert run_batch(config, parts_of(engine), Batch(str(source), f"{store.url}/out?sig=2", tmp_path / "kept")) == 0
    assert store.files["/out?sig=2"].count(b"\n") == 2 and len(engine.seen) == 2


@pytest.mark.parametrize(
    ("url", "failures", "message"),
    [
        ("{}/nothing?secret", 0, "cannot fetch http://127.0.0.1:[0-9]+/nothing: HTTP 404 Not Found"),
        ("{}/in", 9, "HTTP 503"),
        ("http://user:secret@127.0.0.1:1/in", 0, "cannot fetch http://127.0.0.1:1/in: .*refused"),
    ],
)
def test_inputs_that_cannot_be_fetched(tmp_path: Path, store: Store, url: str, failures: int, message: str) -> None:
    store.files["/in"] = b""
    store.failures.update(GET=failures)
    with pytest.raises(BatchError, match=message) as caught:
        run_batch(
            EngineConfig(model=MODEL),
            parts_of(ScriptEngine()),
            Batch(url.format(store.url), str(tmp_path / "out.jsonl")),
        )
    assert "secret" not in str(caught.value)


# -- a real model


def test_a_real_model_killed_in_the_middle_says_what_its_server_says(tmp_path: Path) -> None:
    prompts = [f"Question {i}: what is {i} plus {i}? Answer:" for i in range(40)]
    lines: list[object] = [
        line(f"text-{i}", body={"prompt": prompt, "temperature": 0, "max_tokens": 12})
        for i, prompt in enumerate(prompts)
    ]
    lines.append(line("chat", "/v1/chat/completions", {**CHAT, "max_tokens": 12}))
    lines.append("{")
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    model = realmodels.smollm2_gguf()
    flags = ("--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64MiB")
    command = ("-i", str(source), "-o", str(target), "--model", str(model), *flags)
    process = start(*command, scripted=False)
    until(lambda: lines_in(partial) >= 8, 60)
    process.send_signal(signal.SIGKILL)
    ended(process)
    kept = lines_in(partial)
    assert 8 <= kept < 42
    status, said = ended(start(*command, scripted=False))
    assert status == 0 and f"42 lines: 41 answered, 1 failed, {kept} of them before;" in said
    answers = by_id(target)
    assert len(answers) == 42
    with serving(model, tmp_path, *flags) as server:
        for i, prompt in enumerate(prompts):
            [choice] = answers[f"text-{i}"]["response"]["body"]["choices"]
            assert choice["text"] == server.complete(prompt, max_tokens=12)["choices"][0]["text"], prompt
        [choice] = answers["chat"]["response"]["body"]["choices"]
        assert choice["message"]["content"] == server.chat("Hello", max_tokens=12)["choices"][0]["message"]["content"]


def test_inputs_of_any_size_take_little_memory(tmp_path: Path) -> None:
    """10 000 lines of 100 kB each would be 1 GB; a quarter of that is enough to tell."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for i in range(2500):
            file.write(json.dumps(line(str(i), "/tokenize", {"prompt": "a", "padding": "x" * 100_000})) + "\n")
    process = start("-i", str(source), "-o", str(target))
    peak = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            peak = max(peak, int(status.read_text().split("VmHWM:")[1].split()[0]))
        time.sleep(0.02)
    code, said = ended(process)
    assert code == 0 and lines_in(target) == 2500, said
    assert 20_000 < peak < 200_000, f"{peak} kB"
