"""The client of the benchmarks: what it sends, what it makes of answers, and what becomes of broken ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.bench.client import Ask, Kind, Outcome, Target, ask, body_of, load, open_session
from tests.api.harness import MODEL, SAID, ScriptEngine, ids_of, parts_of, running
from tests.bench.raw import answering, event

GREEDY = {"temperature": 0, "ignore_eos": True}


def loaded(target: Target, asks: Sequence[Ask], **options: Any) -> list[Outcome]:
    return asyncio.run(load(target, asks, **options))


def one(url: str, kind: Kind = "openai", item: Ask | None = None, **options: Any) -> Outcome:
    [outcome] = loaded(Target(url, kind, MODEL), [item or Ask("Hello", 5)], **options)
    return outcome


@pytest.mark.parametrize("kind", ["openai", "openai-chat"])
def test_counts_texts_and_times_of_a_real_server(kind: Kind) -> None:
    engine = ScriptEngine(pause=0.001)
    with running(parts_of(engine)) as url:
        asks = [Ask("Hello", tokens, extra=GREEDY) for tokens in (1, 9, 25)]
        outcomes = loaded(Target(f"{url}/v1", kind, MODEL), asks)
    for item, outcome in zip(asks, outcomes, strict=True):
        assert outcome.error is None
        assert outcome.output_tokens == item.max_tokens
        assert outcome.prompt_tokens == (5 if kind == "openai" else len(engine.seen[0].prompt))
        assert SAID.startswith(outcome.text.rstrip("\ufffd")) and outcome.text
        assert outcome.times == sorted(outcome.times) and outcome.first == outcome.times[0]
        assert outcome.asked < outcome.times[0] and outcome.times[-1] <= outcome.ended
    # one event per token with text: of the first 9 tokens 5 are words, then come the 4 bytes of an emoji
    assert len(outcomes[1].times) == 6 and outcomes[1].text == "Alpha beta, DEF gamma 🙂"


def test_token_ids_are_sent_as_they_are() -> None:
    engine = ScriptEngine()
    with running(parts_of(engine)) as url:
        outcome = one(url, item=Ask([7, 8, 9], 2))
    assert engine.seen[0].prompt == (7, 8, 9) and outcome.prompt_tokens == 3


def test_a_refused_request_harms_no_other() -> None:
    with running(parts_of(ScriptEngine())) as url:
        refused, well = loaded(Target(url, "openai", MODEL), [Ask("x", 10_000), Ask("x", 3)])
    assert refused.error is not None and refused.error.startswith("HTTP 400: This model's maximum context length is")
    assert refused.first is None and refused.output_tokens == 0 and refused.ended >= refused.asked
    assert well.error is None and well.output_tokens == 3


def test_a_row_that_fails_while_it_streams() -> None:
    with running(parts_of(ScriptEngine(fail_after=3))) as url:
        outcome = one(url, item=Ask("x", 9, extra=GREEDY))
    assert outcome.error is not None and "not finite" in outcome.error
    assert outcome.text == "Alpha beta, DEF"


def test_a_conversation_sends_what_was_said() -> None:
    engine = ScriptEngine()
    with running(parts_of(engine)) as url:
        asks = [Ask("one", 2, extra=GREEDY), Ask(" two", 1, extra=GREEDY, after=0), Ask("other", 1)]
        loaded(Target(url, "openai", MODEL), asks)
    said = {bytes(token for token in request.prompt if token < 256).decode() for request in engine.seen}
    assert said == {"one", "oneAlpha beta two", "other"}


def test_a_conversation_of_messages() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        text = str(len(body["messages"]))
        return 200, [event({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}), b"data: [DONE]\n"]

    def user(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]

    with answering(answer) as raw:
        asks = [Ask(user("a"), 1), Ask(user("b"), 1, after=0), Ask(user("c"), 1, after=1)]
        outcomes = loaded(Target(raw.url, "openai-chat", MODEL), asks)
    assert [outcome.text for outcome in outcomes] == ["1", "3", "5"]
    assert [(m["role"], m["content"]) for m in raw.bodies[2]["messages"]] == [
        *(("user", "a"), ("assistant", "1"), ("user", "b"), ("assistant", "3"), ("user", "c")),
    ]


def test_what_follows_a_failed_answer_is_not_sent() -> None:
    with answering(lambda body: (500, [b"broken\n"])) as raw:
        asks = [Ask("a", 1), Ask("b", 1, after=0), Ask("c", 1, after=1)]
        outcomes = loaded(Target(raw.url, "openai", MODEL), asks)
    assert len(raw.bodies) == 1
    assert [outcome.error for outcome in outcomes] == [
        "HTTP 500: broken",
        *["not sent: the answer before it failed"] * 2,
    ]


def test_no_more_than_the_limit_at_a_time() -> None:
    with running(parts_of(ScriptEngine(pause=0.002))) as url:
        outcomes = loaded(Target(url, "openai", MODEL), [Ask("x", 4, extra=GREEDY)] * 9, concurrency=3)
    moments = sorted([(o.asked, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    running_now = [sum(change for _, change in moments[: i + 1]) for i in range(len(moments))]
    assert max(running_now) == 3 and len(outcomes) == 9 and not any(o.error for o in outcomes)


def test_requests_are_sent_when_they_are_due() -> None:
    done: list[Outcome] = []
    with running(parts_of(ScriptEngine())) as url:
        outcomes = loaded(Target(url, "openai", MODEL), [Ask("x", 1)] * 3, starts=[0.2, 0.0, 0.1], on_done=done.append)
    late, first, middle = (outcome.asked for outcome in outcomes)
    assert late - first >= 0.199 and middle - first >= 0.099
    assert sorted(o.asked for o in done) == sorted(o.asked for o in outcomes)


# -- what is sent


def test_the_body_of_each_kind() -> None:
    extra = {"temperature": 0.5, "top_p": None, "ignore_eos": True}
    common = {"temperature": 0.5, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    item = Ask("Hi", 4, extra=extra)
    assert body_of(Target("u", "openai", "m"), item) == {"model": "m", "prompt": "Hi", "max_tokens": 4, **common}
    assert body_of(Target("u", "openai-chat", "m"), item) == {
        **{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        **common,
    }
    assert body_of(Target("u", "tgi", "m"), item) == {
        "inputs": "Hi",
        "parameters": {
            **{"max_new_tokens": 4, "details": True, "do_sample": True, "temperature": 0.5, "ignore_eos_token": True},
        },
    }
    greedy = body_of(Target("u", "tgi"), Ask("Hi", 4, extra={"temperature": 0}))
    assert greedy["parameters"] == {"max_new_tokens": 4, "details": True, "do_sample": False}
    assert "model" not in body_of(Target("u", "openai"), item)
    assert "stream_options" not in body_of(Target("u"), Ask("Hi", 1, extra={"stream_options": None}))


@pytest.mark.parametrize(
    "kind, prompt", [("openai", [{"role": "user", "content": "x"}]), ("openai-chat", [1, 2]), ("tgi", [1, 2])]
)
def test_a_prompt_that_the_server_cannot_take_fails_alone(kind: Kind, prompt: Any) -> None:
    with answering(lambda body: (200, [])) as raw:
        outcome = one(raw.url, kind, Ask(prompt, 1))
    assert outcome.error is not None and "prompt" in outcome.error and not raw.bodies


def test_keys_headers_and_paths() -> None:
    done = [b"data: [DONE]\n"]
    with answering(lambda body: (200, done)) as raw:
        loaded(Target(raw.url, "openai", MODEL, "secret", {"X-Mine": "1"}), [Ask("x", 1)])
        loaded(Target(raw.url, "tgi", None), [Ask("x", 1)])
        loaded(Target(raw.url + "/v1/", "openai-chat", MODEL), [Ask("x", 1)])
        loaded(Target(raw.url, "openai", MODEL, endpoint="/proxy/completions"), [Ask("x", 1)])
    assert raw.headers[0]["authorization"] == "Bearer secret" and raw.headers[0]["x-mine"] == "1"
    assert "authorization" not in raw.headers[1]
    assert raw.paths == ["/v1/completions", "/generate_stream", "/v1/chat/completions", "/proxy/completions"]


# -- what comes back


def test_tokens_are_counted_by_events_where_the_server_does_not_tell() -> None:
    lines = [
        b": a comment\n",
        event({"choices": [{"text": "a", "finish_reason": None}]}),
        event({"choices": [{"text": "", "finish_reason": None}]}),
        event({"choices": [{"text": "b", "finish_reason": "length"}]}),
    ]
    with answering(lambda body: (200, lines)) as raw:
        outcome = one(raw.url, item=Ask("x", 5, prompt_tokens=7))
    assert (outcome.error, outcome.text, outcome.output_tokens, outcome.prompt_tokens) == (None, "ab", 2, 7)
    assert len(outcome.times) == 2


def test_thoughts_are_text_too() -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}]
    deltas += [{"reasoning": "oh"}, {"content": "x"}]
    lines = [*(event({"choices": [{"delta": delta}]}) for delta in deltas), b"data: [DONE]\n"]
    with answering(lambda body: (200, lines)) as raw:
        outcome = one(raw.url, "openai-chat")
    assert (outcome.text, len(outcome.times), outcome.error) == ("hmohx", 3, None)


def test_the_events_of_tgi() -> None:
    def token(text: str, special: bool = False, **more: Any) -> bytes:
        return event({"token": {"id": 1, "text": text, "special": special}, "generated_text": None, **more})

    details = {"finish_reason": "length", "generated_tokens": 4, "input_length": 6}
    lines = [token("a"), token(""), token(" b"), token("</s>", True, generated_text="a b", details=details)]
    with answering(lambda body: (200, lines)) as raw:
        outcome = one(raw.url, "tgi")
    assert (outcome.error, outcome.text, outcome.output_tokens, outcome.prompt_tokens) == (None, "a b", 4, 6)
    with answering(lambda body: (200, lines[:2])) as raw:
        assert one(raw.url, "tgi").error == "the connection ended before the answer was complete"
    with answering(lambda body: (200, [event({"error": "out of memory", "error_type": "generation"})])) as raw:
        assert one(raw.url, "tgi").error == "out of memory"


@pytest.mark.parametrize(
    "lines, error",
    [
        ([event({"choices": [{"text": "a"}]})], "the connection ended before the answer was complete"),
        ([event({"error": {"message": "too\nhot"}})], "too hot"),
        ([b"data: {broken\n"], "DecodeError: "),
        ([event([1])], "AttributeError: "),
        ([], "the connection ended before the answer was complete"),
    ],
    ids=["cut", "error", "no JSON", "no object", "empty"],
)
def test_broken_answers(lines: list[bytes], error: str) -> None:
    with answering(lambda body: (200, lines)) as raw:
        outcome = one(raw.url)
    assert outcome.error is not None and outcome.error.startswith(error)


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"error": {"message": "no such model"}}', "HTTP 404: no such model"),
        (b'{"error": "no such model"}', "HTTP 404: no such model"),
        (b"<html>\n  nothing</html>", "HTTP 404: <html> nothing</html>"),
        (b"x" * 1000, "HTTP 404: " + "x" * 300),
    ],
)
def test_refusals_are_told_in_one_line(body: bytes, said: str) -> None:
    with answering(lambda _: (404, [body])) as raw:
        assert one(raw.url).error == said


def test_nobody_listens() -> None:
    outcome = one("http://127.0.0.1:1")
    assert outcome.error is not None and outcome.error.startswith("ClientConnectorError: ")


def test_a_request_that_takes_too_long() -> None:
    with running(parts_of(ScriptEngine(pause=0.05))) as url:
        outcome = one(url, item=Ask("x", 400, extra=GREEDY), timeout=0.3)
    assert outcome.error == "timeout: the answer was not complete in time"
    assert outcome.text.startswith("Alpha")


def test_a_long_event() -> None:
    text = "y" * 500_000
    with answering(lambda body: (200, [event({"choices": [{"text": text}]}), b"data: [DONE]\n"])) as raw:
        assert one(raw.url).text == text


def test_one_request_with_a_session_of_its_own() -> None:
    async def main(url: str) -> Outcome:
        target = Target(url, "openai", MODEL)
        async with open_session(target) as session:
            return await ask(session, target, Ask("x", 2, extra=GREEDY))

    with running(parts_of(ScriptEngine())) as url:
        assert asyncio.run(main(url)).output_tokens == 2


def test_the_script_is_what_the_numbers_above_say() -> None:
    assert len(ids_of("Alpha beta, DEF gamma 🙂")) == 4 + 1 + 4
