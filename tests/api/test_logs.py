"""What the log says, and that a user cannot write it."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from octavo import logs
from octavo.api.logs import StatsLog
from octavo.api.metrics import Metrics
from octavo.config import ConfigError, EngineConfig
from octavo.logs import JsonLines, TextLines, one_line
from tests.api.harness import GREEDY, MODEL, SAID, ScriptEngine, parts_of, running, until

ACCESS = "uvicorn.access"


@contextmanager
def listening(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """The lines that the whole process logs meanwhile."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def entries(stream: io.StringIO, logger: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [entry for entry in found if logger in (None, entry["logger"])]


def made(message: str, *args: object, **changes: Any) -> logging.LogRecord:
    """A log record."""
    record = logging.LogRecord("octavo.test", logging.WARNING, __file__, 1, message, args, changes.pop("error", None))
    record.created = 1_700_000_000.25
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def failure() -> Any:
    try:
        raise ValueError("bad\nINFO 12:00:00 forged")
    except ValueError:
        return sys.exc_info()


def test_a_line_of_json_has_what_a_collector_needs() -> None:
    record = made("%s took %d ms", "step", 5, request_id="abc", fields={"tokens": 3, "level": "forged"})
    entry = json.loads(JsonLines("engine", ()).format(record))
    assert entry == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "WARNING",
        "logger": "octavo.test",
        "message": "step took 5 ms",
        "pid": record.process,
        "process": "engine",
        "request_id": "abc",
        "tokens": 3,
    }


def test_a_line_of_text() -> None:
    record = made("done", request_id="abc", fields={"tokens": 3, "prompt": 'a "b"', "finish": "stop", "none": None})
    line = TextLines("engine", ()).format(record)
    assert re.fullmatch(
        r'WARNING \d\d:\d\d:\d\d \[engine\] \[abc\] done tokens=3 prompt="a \\"b\\"" finish=stop none=null', line
    )


@pytest.mark.parametrize("made_by_user", ["a\nINFO 12:00:00 forged", "\r\x1b[2J", "\x85\u2028\u2029", "\ud800"])
def test_users_cannot_write_lines(made_by_user: str) -> None:
    record = made("said %s", made_by_user, request_id=made_by_user, fields={"prompt": made_by_user}, error=failure())
    text = TextLines("", ()).format(record)
    first, *others = text.split("\n")
    assert first.startswith("WARNING") and others and all(line.startswith("    ") for line in others)
    assert "".join(text.split("\n")).isprintable()
    whole = JsonLines("", ()).format(record)
    assert whole.isascii() and "\n" not in whole
    assert json.loads(whole)["prompt"] == made_by_user and "forged" in json.loads(whole)["exception"]


def test_plain_text_stays_as_it_is() -> None:
    assert one_line("naïve 漢字 🙂\u3000x") == "naïve 漢字 🙂\u3000x"
    assert one_line("a\nb\tc") == "a\\nb\\tc"


def test_keys_are_never_logged() -> None:
    key = 'sk-"quoted\\key'
    for formatter in (TextLines("", (key, "")), JsonLines("", (key, ""))):
        line = formatter.format(made("GET /v1/models?key=%s", key, fields={"prompt": f"my key is {key}"}))
        assert key not in line and "quoted" not in line and line.count("***") == 2, line


def test_the_log_goes_where_the_options_say() -> None:
    code = (
        "import logging; from octavo import logs; from octavo.config import EngineConfig\n"
        "logs.configure(EngineConfig(log_format='json', log_level='warning', api_key=('sk-secret',)), 'engine')\n"
        "logs.REQUEST_ID.set('r1'); log = logging.getLogger('octavo.x'); log.info('no'); log.warning('yes sk-secret')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (entry,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (entry["message"], entry["request_id"], entry["process"], done.stdout) == ("yes ***", "r1", "engine", "")


def test_every_line_of_a_request_has_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(ACCESS), "propagate", True)  # a server without these lines turns them off
    with listening(JsonLines("", ())) as stream:
        options: dict[str, Any] = {"uvicorn_log_level": "info", "enable_log_requests": True}
        with running(parts_of(ScriptEngine()), **options) as url:
            with httpx.Client(base_url=url, headers={"X-Request-Id": "mine-1"}) as http:
                body = {**GREEDY, "prompt": "Hello", "max_tokens": 3, "stream": True}
                assert http.post("/v1/completions", json=body).status_code == 200
            assert httpx.get(f"{url}/nowhere", headers={"X-Request-Id": "mine-2"}).status_code == 404
            until(lambda: len(entries(stream, "octavo.requests")) == 2)
        mine = [entry for entry in entries(stream) if entry["logger"] in (ACCESS, "octavo.requests")]
    assert [entry["request_id"] for entry in mine] == ["mine-1"] * 3 + ["mine-2"]
    access = entries(stream, ACCESS)
    assert '"POST /v1/completions HTTP/1.1" 200' in access[0]["message"]
    assert '"GET /nowhere HTTP/1.1" 404' in access[1]["message"]


def test_requests_are_logged_at_start_and_end() -> None:
    engine = ScriptEngine(cached=2)
    with listening(JsonLines("", ())) as stream, running(parts_of(engine), enable_log_requests=True) as url:
        body = {**GREEDY, "prompt": "Hi\nthere", "max_tokens": 3, "stop": ["zzz"], "request_id": "abc"}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        until(lambda: len(entries(stream, "octavo.requests")) == 2)
    start, end = entries(stream, "octavo.requests")
    assert start["message"] == "request started" and end["message"] == "request ended"
    assert start["request_id"] == end["request_id"] == "abc"
    assert start["route"] == "/v1/completions" and start["model"] == MODEL and start["prompt"] == "Hi\nthere"
    assert start["prompt_tokens"] == end["prompt_tokens"] == 8
    assert start["parameters"] == {"temperature": 0.0, "max_tokens": 3, "stop": ["zzz"]}
    assert (end["finish"], end["output_tokens"], end["cached_tokens"]) == ("length", 3, 2)
    assert 0 < end["ttft_ms"] <= end["total_ms"]
    assert end["client"] == start["client"] and end["client"].startswith("127.0.0.1:")
    assert "output" not in end


def test_outputs_are_logged_cut() -> None:
    options: dict[str, Any] = {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 4}
    with listening(JsonLines("", ())) as stream, running(parts_of(ScriptEngine()), **options) as url:
        messages = [{"role": "user", "content": "Hello"}]
        body = {**GREEDY, "messages": messages, "n": 2, "temperature": 1, "seed": 0}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        until(lambda: len(entries(stream, "octavo.requests")) == 2)
    start, end = entries(stream, "octavo.requests")
    assert len(start["prompt"]) == 4 and end["output"][0] == SAID[:4] and len(end["output"][1]) == 4
    assert end["finish"] == "stop*2"


def test_a_request_that_fails_is_logged_as_such() -> None:
    with (
        listening(JsonLines("", ())) as stream,
        running(parts_of(ScriptEngine(fail_after=2)), enable_log_requests=True) as url,
    ):
        assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"}).status_code == 500
        until(lambda: len(entries(stream, "octavo.requests")) == 2)
    assert entries(stream, "octavo.requests")[1]["finish"] == "error"


def test_nothing_is_logged_unasked() -> None:
    with listening(JsonLines("", ())) as stream, running(parts_of(ScriptEngine())) as url:
        assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"}).status_code == 200
    assert entries(stream, "octavo.requests") == []
    with pytest.raises(ConfigError, match="needs enable_log_requests"):
        EngineConfig(enable_log_outputs=True)


def test_throughput_is_logged_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.api.logs.STATS_SECONDS", 0.1)
    engine = ScriptEngine(pause=0.005)
    engine.numbers.prefix_queries = 0
    with listening(JsonLines("", ())) as stream, running(parts_of(engine)) as url:
        assert entries(stream, "octavo.stats") == []
        body = {**GREEDY, "prompt": "Hello", "max_tokens": 300, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
        until(lambda: any("Running: 0 reqs" in entry["message"] for entry in entries(stream, "octavo.stats")))
        time.sleep(0.3)
        lines = [entry["message"] for entry in entries(stream, "octavo.stats")]
        time.sleep(0.3)
        assert [entry["message"] for entry in entries(stream, "octavo.stats")] == lines, "idle"
    assert any("Running: 1 reqs, Waiting: 0 reqs, KV cache usage: 1.0%" in line for line in lines)
    prompt, output = zip(
        *(map(float, re.findall(r"throughput: ([\d.]+) tokens/s", line)) for line in lines), strict=True
    )
    assert prompt[0] > 0 and not any(prompt[1:]) and sum(output[:-1]) > 0
    assert "request_id" not in entries(stream, "octavo.stats")[0]


def test_no_throughput_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.api.logs.STATS_SECONDS", 0.02)
    with (
        listening(JsonLines("", ())) as stream,
        running(parts_of(ScriptEngine(pause=0.005)), disable_log_stats=True) as url,
    ):
        assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a", "max_tokens": 30}).status_code == 200
    assert entries(stream, "octavo.stats") == []


def test_a_prefix_hit_rate_is_that_of_the_last_seconds(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(EngineConfig(model="m"))
    log = StatsLog(metrics)
    before = log._read()
    metrics.engine.take(ScriptEngine().stats(), 0, True)
    stats = metrics.engine.now()
    stats.prefix_queries, stats.prefix_hits = 200, 50
    with caplog.at_level(logging.INFO, "octavo.stats"):
        log._write(before, before._replace(seconds=before.seconds + 2, generated_tokens=30, engine=stats))
    assert "generation throughput: 15.0 tokens/s" in caplog.text and "hit rate: 25.0%" in caplog.text


def test_logging_set_up_by_others_is_left_alone() -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    logs.configure(EngineConfig())
    assert before and root.handlers == before
