"""Streamed and whole answers are the same, whatever is asked for; and they are right.

Requests are drawn at random. The engine is scripted, so that the right text is known: `Told` works it out anew, from
the whole list of tokens instead of one after another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.types import Delta, Request
from tests.api.harness import EOS, MODEL, SAID, SPECIAL, ScriptEngine, ids_of, make_tokenizer, parts_of, running, until
from tests.clients.answers import CHAT, TEXT, Answer, ask, ask_stream

HIDDEN = 256 + 8 + SPECIAL.index("<|im_start|>")
"""A special token that the engine says in the middle of its text."""
WHOLE = [i for i, token in enumerate(ids_of(SAID)) if token > 255 or token < 128]
"""Places in the script where no character is cut."""


def script(request: Request, choice: int) -> list[int]:
    """`SAID` with a special token in it, begun at a place that depends on seed and choice."""
    ids = ids_of(SAID)
    start = WHOLE[(request.seed * 7 + choice * 5) % len(WHOLE)] if request.sampling.temperature else 0
    return [*ids[start:], HIDDEN, *ids[:start]]


@dataclass
class InGroups(ScriptEngine):
    """Up to three steps at once, so that several tokens of a choice come together."""

    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def step(self) -> list[Delta]:
        found: dict[tuple[str, int], Delta] = {}
        for _ in range(self.dice.randint(1, 3)):
            for delta in super().step():
                key = (delta.request, delta.choice)
                found[key] = _after(found[key], delta) if key in found else delta
        return list(found.values())


def _after(first: Delta, second: Delta) -> Delta:
    """Two deltas of a choice as one."""
    return Delta(
        first.request,
        first.choice,
        start=first.start,
        tokens=[*first.tokens, *second.tokens],
        logprobs=None if first.logprobs is None else [*first.logprobs, *(second.logprobs or ())],
        prompt_logprobs=first.prompt_logprobs,
        finish=second.finish,
        stop_reason=second.stop_reason,
        cached=first.cached,
    )


@dataclass
class Told:
    """What a choice must be."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: Any


def told(request: Request, choice: int) -> Told:
    """The choice that the engine's script makes of `request`."""
    sampling = request.sampling
    tokenizer = make_tokenizer()
    hidden = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
    said = script(request, choice)
    tokens: list[int] = []
    finish, reason = "length", None
    while len(tokens) < request.max_tokens:
        end = len(tokens) >= len(said) and EOS in request.eos_ids
        tokens.append(EOS if end else said[len(tokens) % len(said)])
        if end or tokens[-1] in request.stop_ids:
            finish, reason = "stop", None if end else tokens[-1]
            break
    silent = finish == "stop" and not sampling.include_stop_str_in_output
    shown = [b"" if token in hidden else tokenizer.token_bytes(token) for token in tokens]
    if silent:
        shown[-1] = b""
    text = b"".join(shown).decode("utf-8", "replace")
    strings = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    ends = sorted(
        (at + len(string), at, string)
        for string in strings
        for at in range(len(text))
        if text.startswith(string, at) and _token_at(shown, text, at + len(string)) >= sampling.min_tokens
    )
    if ends:
        end_at, start_at, string = ends[0]
        text = text[: end_at if sampling.include_stop_str_in_output else start_at]
        tokens = tokens[: _token_at(shown, text if sampling.include_stop_str_in_output else text + string, None)]
        finish, reason = "stop", string
    return Told(tokens, text, finish, reason)


def _token_at(shown: list[bytes], text: str, end: int | None) -> int:
    """How many tokens it takes to show the first `end` characters of `text`."""
    wanted = len(text[:end].encode("utf-8"))
    size = 0
    for count, piece in enumerate(shown, 1):
        size += len(piece)
        if size >= wanted:
            return count
    return len(shown)


def pieces(least: int, most: int) -> st.SearchStrategy[str]:
    """Parts of what the engine says."""
    return st.builds(lambda at, size: SAID[at : at + size], st.integers(0, len(SAID) - most), st.integers(least, most))


PROMPTS = st.sampled_from(["Hello", "a", "größe 🙂", "x" * 40])
STOPS = st.one_of(
    st.none(),
    pieces(1, 6),
    st.lists(st.one_of(pieces(1, 8), st.sampled_from(["never", "🙂🙂", "\n\n\n"])), max_size=3),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body for it."""
    path = draw(st.sampled_from([CHAT, TEXT]))
    n = draw(st.integers(1, 3))
    body: dict[str, Any] = {
        "model": MODEL,
        "n": n,
        "temperature": 1 if n > 1 else draw(st.sampled_from([0, 1])),
        "seed": draw(st.integers(0, 50)),
        "max_tokens": draw(st.integers(1, 70)),
        "stop": draw(STOPS),
        "stop_token_ids": draw(st.sampled_from([None, None, [256 + 3], [ord("n"), 256 + 4], [HIDDEN]])),
    }
    body["min_tokens"] = draw(st.sampled_from([None, None, min(8, body["max_tokens"])]))
    for name in (
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
    ):
        body[name] = draw(st.sampled_from([None, False, True]))
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": draw(PROMPTS)}]
        if draw(st.booleans()):
            body["messages"].append({"role": "assistant", "content": "So: "})
            body["echo"], body["add_generation_prompt"], body["continue_final_message"] = True, False, True
        body["logprobs"] = draw(st.booleans())
        body["top_logprobs"] = draw(st.sampled_from([None, 0, 2, 5])) if body["logprobs"] else None
    else:
        body["prompt"] = draw(
            st.one_of(
                PROMPTS, st.lists(PROMPTS, min_size=1, max_size=3), st.just([72, 105]), st.just([[72], [105, 33]])
            )
        )
        body["logprobs"] = draw(st.sampled_from([None, 0, 1, 5]))
        body["echo"] = draw(st.booleans())
        if body["echo"] and body["min_tokens"] is None and draw(st.integers(0, 7)) == 0:
            body["max_tokens"] = 0
    return path, body


@pytest.fixture(scope="module", params=[ScriptEngine, InGroups], ids=["one by one", "in groups"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, ScriptEngine]]:
    engine = request.param(script=script, cached=1)
    with running(parts_of(engine)) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http, engine


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(asked=bodies(), usage=st.sampled_from(["none", "last", "always"]))
def test_a_stream_is_the_whole_answer_in_parts(
    server: tuple[httpx.Client, ScriptEngine], asked: tuple[str, dict[str, Any]], usage: str
) -> None:
    http, engine = server
    path, body = asked
    engine.seen.clear()
    whole = ask(http, path, body)
    requests = list(engine.seen)
    streamed = ask_stream(http, path, body, usage)
    assert whole.usage is not None
    assert streamed.usage == (None if usage == "none" else whole.usage)
    assert replace(streamed, usage=None) == replace(whole, usage=None)
    check(path, body, whole, requests)
    until(lambda: not engine.live)


def check(path: str, body: dict[str, Any], whole: Answer, requests: list[Request]) -> None:
    """The answer is the one that the script of the engine makes."""
    n = body["n"]
    assert sorted(whole.choices) == list(range(n * len(requests)))
    assert whole.usage is not None
    total = 0
    for index, choice in whole.choices.items():
        request = requests[index // n]
        right = told(request, index % n)
        total += len(right.tokens)
        echo = _echo(path, body, index // n)
        assert choice.text == echo + right.text
        assert (choice.finish_reason, choice.stop_reason) == (right.finish_reason, right.stop_reason)
        assert choice.token_ids == (right.tokens if body["return_token_ids"] else None)
        _check_logprobs(path, body, choice.logprobs, request, right)
    assert whole.usage["completion_tokens"] == total
    assert whole.usage["prompt_tokens"] == sum(len(request.prompt) for request in requests)
    assert whole.usage["total_tokens"] == total + whole.usage["prompt_tokens"]


def _echo(path: str, body: dict[str, Any], prompt: int) -> str:
    if not body.get("echo"):
        return ""
    if path == CHAT:
        return "So: "
    given = body["prompt"]
    one = given if isinstance(given, str) or isinstance(given[0], int) else given[prompt]
    return one if isinstance(one, str) else bytes(one).decode()


def _check_logprobs(path: str, body: dict[str, Any], found: Any, request: Request, right: Told) -> None:
    wanted = body["logprobs"] if path == CHAT else body["logprobs"] is not None
    if not wanted:
        assert found is None
        return
    tokenizer = make_tokenizer()
    hidden = tokenizer.special_ids if body["skip_special_tokens"] is not False else frozenset()
    if path == CHAT:
        assert len(found["content"]) == len(right.tokens)
        assert [len(entry["top_logprobs"]) for entry in found["content"]] == [body["top_logprobs"] or 0] * len(
            right.tokens
        )
        shown = [b"" if token in hidden else tokenizer.token_bytes(token) for token in right.tokens]
        assert [bytes(entry["bytes"]) for entry in found["content"]] == shown
        assert {entry["logprob"] for entry in found["content"]} <= {-0.25}
        return
    tokens = [*request.prompt, *right.tokens] if body["echo"] else right.tokens
    scores = [None, *[-0.25] * (len(tokens) - 1)] if body["echo"] else [-0.25] * len(tokens)
    assert found["token_logprobs"] == scores
    sizes = [
        sum(byte & 0xC0 != 0x80 for byte in (b"" if token in hidden else tokenizer.token_bytes(token)))
        for token in tokens
    ]
    assert found["text_offset"] == [sum(sizes[:i]) for i in range(len(tokens))]
    if body["return_tokens_as_token_ids"]:
        assert found["tokens"] == [f"token_id:{token}" for token in tokens]


@pytest.mark.parametrize("seed", range(3))
def test_forty_at_once(server: tuple[httpx.Client, ScriptEngine], seed: int) -> None:
    """Every one of many streams that run together is its own answer."""
    http, engine = server
    dice = random.Random(seed)
    asked = []
    for _ in range(40):
        body = {"model": MODEL, "temperature": 1, "seed": dice.randrange(99), "n": dice.randint(1, 3)}
        body |= {"max_tokens": dice.randint(1, 60), "stop": dice.choice([None, "gamma", "spaces", ["🙂", "漢字"]])}
        path = dice.choice([CHAT, TEXT])
        body |= (
            {"messages": [{"role": "user", "content": "Hello"}], "logprobs": dice.random() < 0.5}
            if path == CHAT
            else {"prompt": ["a", "b"], "logprobs": dice.choice([None, 2]), "echo": dice.random() < 0.5}
        )
        asked.append((path, body))
    with ThreadPoolExecutor(40) as pool:
        streamed = list(pool.map(lambda each: ask_stream(http, *each), asked))
    for (path, body), found in zip(asked, streamed, strict=True):
        assert found == ask(http, path, body)
    until(lambda: not engine.live)


def test_comments_that_keep_a_connection_alive_are_no_part_of_the_answer() -> None:
    engine = ScriptEngine(pause=0.25)
    body = {"model": MODEL, "temperature": 0, "max_tokens": 3}
    with running(parts_of(engine), sse_keep_alive_interval=0.05) as url, httpx.Client(base_url=url, timeout=30) as http:
        raw = http.post(TEXT, json={**body, "prompt": "Hello", "stream": True}).content
        assert raw.count(b"\n\n:") >= 3
        streamed = ask_stream(http, TEXT, {**body, "prompt": "Hello"})
        assert streamed == ask(http, TEXT, {**body, "prompt": "Hello"})
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chunks = list(client.completions.create(**body, prompt="Hello", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Alpha beta, DEF"
