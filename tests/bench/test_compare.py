"""`octavo bench compare` with servers that say a script: who is asked what and when, and what happens to servers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.bench.client import Ask
from octavo.bench.compare import Turn, fingerprint, marked, schedule
from octavo.bench.compare_options import CompareOptions, Level
from octavo.bench.options import BenchError
from octavo.types import Delta
from tests.api.harness import ScriptEngine, parts_of, running, until
from tests.bench.comparing import ROOT, compared, row, scripted, server
from tests.realmodels import smollm2_gguf

GONE = "http://127.0.0.1:9"
"""Nobody listens there."""


# -- who is asked when


def test_rounds_are_interleaved_and_begin_with_another_server_each_time() -> None:
    one, ten = Level(1, 5), Level(10, 20)
    turns = schedule(3, [one, ten], 2, one_at_a_time=False)
    assert turns[:6] == [Turn(1, level, server) for level in (one, ten) for server in (0, 1, 2)]
    assert turns[6:] == [Turn(2, level, server) for level in (one, ten) for server in (1, 2, 0)]


def test_one_at_a_time_has_all_loads_of_a_server_in_one_go() -> None:
    turns = schedule(2, [Level(1, 5), Level(10, 5)], 2, one_at_a_time=True)
    assert [(turn.round, turn.server, turn.level.concurrency) for turn in turns] == [
        *[(1, 0, 1), (1, 0, 10), (1, 1, 1), (1, 1, 10)],
        *[(2, 1, 1), (2, 1, 10), (2, 0, 1), (2, 0, 10)],
    ]


def test_a_mark_stands_before_texts_and_first_messages_only() -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Again"}]
    asks = [Ask("Hello", 1), Ask(talk, 1), Ask([1, 2], 1), Ask("later", 1, after=0)]
    found = [ask.prompt for ask in marked(asks, "1.8.")]
    assert found == ["1.8. Hello", [{"role": "user", "content": "1.8. Hello"}, talk[1]], [1, 2], "later"]
    assert talk[0]["content"] == "Hello"


def test_the_fingerprint_is_of_prompts_lengths_and_sampling() -> None:
    asks = [Ask("Hello", 5, extra={"temperature": 0})]
    same = fingerprint([Ask("Hello", 5, extra={"temperature": 0})])
    others = [Ask("Hallo", 5, extra={"temperature": 0}), Ask("Hello", 6), Ask("Hello", 5, extra={"temperature": 1})]
    assert fingerprint(asks) == same and len({same, *(fingerprint([other]) for other in others)}) == 4


# -- what is measured


def test_two_servers_get_the_same_prompts_and_the_faster_one_is_found(tmp_path: Path, capsys: Any) -> None:
    quick, slow = ScriptEngine(pause=0.002), ScriptEngine(pause=0.02)
    with running(parts_of(quick)) as first, running(parts_of(slow)) as second:
        status, results = compared(
            tmp_path, server=(f"quick={first}", f"slow={second}"), concurrency="1,4", num_prompts_each="2,6"
        )
    assert status == 0 and results["interrupted"] is False
    for concurrency, prompts in ((1, 2), (4, 6)):
        one, two = row(results, "quick", concurrency), row(results, "slow", concurrency)
        assert one["rounds"] == two["rounds"] == 2
        assert one["requests"] == two["requests"] == 2 * prompts and one["errors"] == two["errors"] == 0
        assert one["output_tokens"] == two["output_tokens"] == 2 * prompts * 12
        assert one["output_tok_s"]["median"] > 2 * two["output_tok_s"]["median"]
        assert two["latency_ms"]["itl"]["p50"] > 19 > one["latency_ms"]["itl"]["p50"]
        assert two["latency_ms"]["e2el"]["p50"] > 12 * 20
    asked = [[bytes(request.prompt).decode() for request in engine.seen] for engine in (quick, slow)]
    assert sorted(asked[0]) == sorted(asked[1])
    measured = [text for text in asked[0] if not text.startswith("Warm-up.")]
    assert len(measured) == 2 * (2 + 6) == len(set(measured)), "a prompt came twice: a prefix cache knew it"
    assert results["agreement"] == [
        {
            "servers": ["quick", "slow"],
            "compared": 16,
            "identical": 1.0,
            "same_beginning": 1.0,
            "common_prefix_median": pytest.approx(results["agreement"][0]["common_prefix_median"]),
            "common_share_median": 1.0,
        }
    ]
    ends = 0.0
    for turn in results["turns"]:
        assert turn["begun_s"] >= ends, "two servers were loaded at a time"
        ends = turn["begun_s"] + turn["wall_s"]
        assert turn["before"]["probe_ms"] > 0 and turn["cores"]["client"] > 0
    said = capsys.readouterr().out
    assert "4 requests at a time: quick writes" in said and "quick and slow answer alike" in said
    assert said.splitlines()[0].split()[:4] == ["at", "once", "server", "out"]


def test_repeated_prompts_are_the_same_in_every_round(tmp_path: Path) -> None:
    engine = ScriptEngine()
    with running(parts_of(engine)) as url:
        compared(tmp_path, server=(f"a={url}",), repeat_prompts=True, num_warmups=0)
    texts = [bytes(request.prompt).decode() for request in engine.seen][1:]  # the first one warms up
    assert len(texts) == 8 and sorted(texts[:4]) == sorted(texts[4:])


def test_a_file_of_prompts_and_the_results_as_json(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}"}) + "\n" for i in range(3)))
    engine = ScriptEngine()
    with running(parts_of(engine)) as url:
        status, results = compared(
            tmp_path / "out", server=(f"a={url}",), prompts=str(file), num_prompts=3, rounds=1, json=True
        )
    told = json.loads(capsys.readouterr().out)
    assert status == 0 and told["summary"] == results["summary"] and "requests" not in told["turns"][0]
    texts = [request["text"] for request in results["turns"][0]["requests"]]
    assert len(texts) == 3 and all(text.startswith("Alpha beta") for text in texts)
    asked = [bytes(request.prompt).decode() for request in engine.seen]
    assert asked[-3:] == ["1.2. Question 0", "1.2. Question 1", "1.2. Question 2"]


def test_a_server_is_asked_in_the_way_of_tgi(tmp_path: Path) -> None:
    engine = ScriptEngine()
    with running(parts_of(engine)) as url:
        status, results = compared(tmp_path, server=(f"a={url}", f"b={url}"), kind=("b=tgi",), ignore_eos=True)
    assert status == 0, results["warnings"]
    assert server(results, "b")["kind"] == "tgi" and server(results, "b")["model"] == "tiny"
    assert row(results, "b")["output_tokens"] == row(results, "a")["output_tokens"] == 8 * 12
    assert results["agreement"][0]["identical"] == 1.0


# -- servers that are started


def test_started_servers_are_measured_with_their_children_and_stopped(tmp_path: Path) -> None:
    status, results = compared(
        tmp_path,
        start=(f"open={scripted()}", f"locked={scripted('--api-key', 'sesame-street')}"),
        api_key=("locked=sesame-street",),
    )
    assert status == 0, results["warnings"]
    for name in ("open", "locked"):
        found = server(results, name)
        assert found["starts"][0]["first_answer_s"] > found["starts"][0]["ready_s"] > 0
        assert found["versions"]["/version version"]
        assert row(results, name)["memory_peak"] > 100e6, "the child alone has 50 MB"
        turn = next(turn for turn in results["turns"] if turn["server"] == name)
        assert turn["memory"]["processes"] == 2 and turn["cores"]["server"] >= 0
        assert turn["samples"][-1][2] > 0, "seconds of CPU since the start; those of a short turn may be none"
        assert set(turn["cores"]["idle_servers"]) == {"open", "locked"} - {name}
        log = (tmp_path / f"{name}.log").read_text()
        assert not psutil.pid_exists(found["pid"]) and not _runs(int(log.split()[1]))
    text = (tmp_path / "results.json").read_text() + (tmp_path / "report.html").read_text()
    assert "sesame" not in text and "--api-key ***" in text


def test_one_at_a_time_runs_a_server_in_its_turns_only(tmp_path: Path) -> None:
    status, results = compared(
        tmp_path, start=(f"a={scripted()}", f"b={scripted()}"), one_at_a_time=True, concurrency="1,2", rounds=2
    )
    assert status == 0, results["warnings"]
    assert [turn["server"] for turn in results["turns"]] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert all(turn["cores"]["idle_servers"] == {} for turn in results["turns"])
    assert len(server(results, "a")["starts"]) == 2 and len(server(results, "b")["starts"]) == 1


def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.servers._PATIENCE", 0.3)
    status, results = compared(tmp_path, start=(f"a={scripted('--stubborn')}",), rounds=1)
    assert status == 0
    assert not psutil.pid_exists(server(results, "a")["pid"])
    assert not _runs(int((tmp_path / "a.log").read_text().split()[1]))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _runs(pid: int) -> bool:
    """Whether a process is there; one that nobody has waited for yet has ended all the same."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- what goes wrong


def test_a_server_that_is_killed_in_the_middle_is_told_of_and_the_other_measured(tmp_path: Path, capsys: Any) -> None:
    status, results = compared(
        tmp_path,
        start=(f"mortal={scripted('--die-at', '9')}", f"well={scripted()}"),
        num_warmups=2,
        rounds=3,
    )
    assert status == 1
    failure = server(results, "mortal")["failure"]
    assert failure["reason"] == "was ended by signal 9"
    assert failure["when"] == "in round 2, with 2 requests at a time"  # 3 to warm up, 4 a round
    assert failure["log"][-1].startswith("out of luck after ")
    assert row(results, "mortal")["rounds"] == 1 and row(results, "well")["rounds"] == 3
    (broken,) = (turn for turn in results["turns"] if not turn["complete"])
    assert broken["server"] == "mortal" and broken["figures"]["failed"] > 0
    page = (tmp_path / "report.html").read_text()
    assert "mortal was ended by signal 9" in page and "out of luck after " in page
    assert "warning: mortal was ended by signal 9 (in round 2" in capsys.readouterr().out


def test_a_server_by_url_that_goes_away(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.scripted", "--port", str(port), "--die-at", "9"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as dies:
        with running(parts_of(ScriptEngine())) as well:
            status, results = compared(
                tmp_path,
                server=(f"dies=http://127.0.0.1:{port}", f"well={well}"),
                num_warmups=2,
                rounds=3,
            )
        os.killpg(dies.pid, signal.SIGKILL)  # its child
    assert status == 1
    assert server(results, "dies")["failure"]["reason"].startswith("does not answer any more (")
    assert server(results, "dies")["failure"]["when"] == "in round 2, with 2 requests at a time"
    assert row(results, "dies")["rounds"] == 1 and row(results, "well")["rounds"] == 3
    assert row(results, "dies")["memory_peak"] > 100e6, "the process at the port was not found"


def test_a_server_that_was_never_there(tmp_path: Path) -> None:
    with running(parts_of(ScriptEngine())) as well:
        status, results = compared(tmp_path, server=(f"gone={GONE}", f"well={well}"), start_timeout=0.2, rounds=1)
    assert status == 1
    assert server(results, "gone")["failure"]["reason"].startswith("is not ready after 0.2 s")
    assert row(results, "gone")["rounds"] == 0 and row(results, "well")["errors"] == 0


class Hanging(ScriptEngine):
    """Answers some requests, and then nothing."""

    def step(self) -> list[Delta]:
        if len(self.seen) > 5:
            time.sleep(0.01)
            return []
        return super().step()


def test_a_server_that_hangs_is_left_out_after_two_turns(tmp_path: Path) -> None:
    with running(parts_of(ScriptEngine())) as well, running(parts_of(Hanging())) as hangs:
        status, results = compared(
            tmp_path,
            server=(f"hangs={hangs}", f"well={well}"),
            num_warmups=0,
            request_timeout=0.5,
            num_prompts=8,
            rounds=4,
        )
    assert status == 1
    failure = server(results, "hangs")["failure"]
    assert re.match(r"failed in 2 turns in a row: [3-8] requests in a row failed \(timeout", failure["reason"])
    assert [turn["round"] for turn in results["turns"] if turn["server"] == "hangs"] == [1, 2]
    assert any("hangs in round 1" in warning and "does not count" in warning for warning in results["warnings"])
    assert row(results, "well")["rounds"] == 4 and row(results, "hangs")["rounds"] == 0


def test_single_failures_are_counted_and_the_turn_too(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = ["good", "x" * 600, "good as well", "fine"]  # 512 tokens are the most
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    with running(parts_of(ScriptEngine())) as url:
        status, results = compared(tmp_path / "out", server=(f"a={url}",), prompts=str(file), num_warmups=0)
    assert status == 0
    assert row(results, "a")["errors"] == 2 and row(results, "a")["requests"] == 8 and row(results, "a")["rounds"] == 2
    assert any("1 of 4 requests failed: HTTP 400" in warning for warning in results["warnings"])


@pytest.mark.parametrize(
    "command, reason, log",
    [
        ("no-such-program-at-all --port {port}", "cannot be started: no-such-program-at-all: No such file", []),
        ("sh -c 'echo no room; exit 3' {port}", "ended with status 3 while it started", ["no room"]),
    ],
)
def test_a_command_that_starts_nothing(tmp_path: Path, command: str, reason: str, log: list[str]) -> None:
    with running(parts_of(ScriptEngine())) as url:
        status, results = compared(tmp_path, start=(f"bad={command}",), server=(f"good={url}",), rounds=1)
    failure = server(results, "bad")["failure"]
    assert status == 1 and failure["reason"].startswith(reason)
    assert failure["when"] == "before its first turn" and failure["log"] == log
    assert row(results, "good")["rounds"] == 1


@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_end_from_outside_stops_the_servers_and_writes_what_there_is(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    out = tmp_path / "out"
    command = [
        *[sys.executable, "-m", "octavo", "bench", "compare", "--start", f"a={scripted('--pause', '0.05')}"],
        *["--concurrency", "1", "--num-prompts", "200", "--max-tokens", "4", "--output-dir", str(out)],
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1 of 3" in line:
            break
    time.sleep(1.0)
    process.send_signal(sent)
    _, said = process.communicate(timeout=30)
    assert process.returncode == status, said
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"] is True
    (turn,) = results["turns"]
    assert turn["problem"] == "interrupted" and 0 < len(turn["requests"]) < 200
    assert "was interrupted" in results["warnings"][0] and "was interrupted" in (out / "report.html").read_text()
    pid = server(results, "a")["pid"]
    until(lambda: not _runs(pid) and not _runs(int((out / "a.log").read_text().split()[1])))


# -- options


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "no servers"),
        ({"server": ("a",)}, "--server takes NAME=URL, got 'a'"),
        ({"server": ("a=http://x", "a=http://y")}, "the same name"),
        ({"start": ("a=serve --port 1",)}, "{port} is missing"),
        ({"start": ("a=serve '{port}",)}, "cannot be read: No closing quotation"),
        ({"server": ("a=http://x",), "kind": ("b=tgi",)}, "no server is called 'b'; a are"),
        ({"server": ("a=http://x",), "kind": ("a=ollama",)}, "--kind takes openai, openai-chat, tgi, got 'ollama'"),
        ({"server": ("a=http://x",), "pid": ("a=x",)}, "--pid takes NAME=PID"),
        ({"server": ("a=http://x",), "concurrency": "1,0"}, "--concurrency takes whole numbers"),
        ({"server": ("a=http://x",), "concurrency": "4,4"}, "names a load twice"),
        ({"server": ("a=http://x",), "num_prompts_each": "1,2"}, "--num-prompts-each needs 3 numbers"),
        ({"server": ("a=http://x",), "rounds": 0}, "--rounds must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BenchError) as caught:
        CompareOptions(**options)
    assert sentence in str(caught.value)


def test_a_value_is_for_one_server_or_for_all() -> None:
    options = CompareOptions(
        server=("a=http://x:1?q=1", "b=http://y"), model=("b=special", "usual"), kind=("openai-chat",), api_key=("k=v",)
    )
    first, second = options.servers()
    assert (first.target.url, first.target.model, first.target.kind) == ("http://x:1?q=1", "usual", "openai-chat")
    assert (second.target.model, second.target.kind, second.target.key) == ("special", "openai-chat", "k=v")


def test_prompts_must_suit_every_server(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    with running(parts_of(ScriptEngine())) as url, pytest.raises(BenchError, match="b: openai takes a text or token"):
        compared(tmp_path, server=(f"a={url}", f"b={url}"), kind=("a=openai-chat",), prompts=str(file))


# -- a real one


def test_a_real_server_from_the_command_line(tmp_path: Path) -> None:
    smollm2_gguf()
    done = subprocess.run(
        [
            *[sys.executable, "-m", "octavo", "bench", "compare", "--json", "--output-dir", str(tmp_path)],
            *["--start", f"real={sys.executable} -m octavo serve smollm2 --host 127.0.0.1 --port {{port}}"],
            *["--concurrency", "1,2", "--num-prompts", "2", "--rounds", "1", "--max-tokens", "5"],
            *["--num-warmups", "1", "--ignore-eos", "--random-input-len", "20"],
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    found = row(results, "real", 2)
    assert found["errors"] == 0 and found["output_tokens"] == 10 and found["memory_peak"] > 150e6
    # two prompts of 20 tokens, counted by the server itself, and the few tokens of the mark before each
    assert 40 < found["prompt_tokens"] <= 60
    assert found["latency_ms"]["e2el"]["p50"] > found["latency_ms"]["ttft"]["p50"] > 0
    assert server(results, "real")["model"] == "smollm2" and results["setup"]["machine"]["cpu"]
    assert (tmp_path / "report.html").stat().st_size > 20_000
