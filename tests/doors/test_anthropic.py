"""/v1/messages, asked by the `anthropic` package and by hand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from octavo.api.doors.anthropic import MessagesAnswer, MessagesError, MessagesEvent
from tests.api.conftest import Api
from tests.api.harness import EOS, MODEL, SAID, ScriptEngine, ids_of, make_tokenizer, parts_of, running, until
from tests.cases.real import NAME, Real

MESSAGES = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": HELLO, "temperature": 0}
GREEDY = {"temperature": 0}
"""The package has no argument for it any more."""
SAID_TOKENS = len(ids_of(SAID)) + 1
"""With the end of sequence."""


@pytest.fixture
def client(api: Api) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.url, api_key="none", max_retries=0) as made:
        yield made


def prompt_of(api: Api) -> str:
    """What the engine was last asked."""
    return make_tokenizer().decode(list(api.engine.seen[-1].prompt), skip_special_tokens=False)


def events_of(api: Api, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has its name in front."""
    response = api.http.post(MESSAGES, json={**ASKED, "stream": True, **body})
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_answer(api: Api, client: anthropic.Anthropic) -> None:
    api.engine.cached = 4
    answer = client.messages.create(
        model=MODEL, max_tokens=100, system="Be brief.", messages=HELLO, extra_body={**GREEDY, "min_tokens": 5}
    )
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    [block] = answer.content
    assert block.type == "text" and block.text == SAID
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    asked = api.engine.seen[-1]
    assert answer.usage.cache_read_input_tokens == 4 and answer.usage.output_tokens == SAID_TOKENS
    assert answer.usage.input_tokens + 4 == len(asked.prompt)
    assert (asked.sampling.min_tokens, asked.max_tokens) == (5, 100)
    assert prompt_of(api) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_why_an_answer_ends(api: Api, client: anthropic.Anthropic) -> None:
    def ends(extra: dict[str, Any] | None = None, **body: Any) -> tuple[str, str | None, str | None]:
        asked = {"model": MODEL, "max_tokens": 100, "messages": HELLO, **body}
        answer = client.messages.create(**asked, extra_body={**GREEDY, **(extra or {})})
        end = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        assert events_of(api, **body, **(extra or {}))[-2]["delta"] == end
        [block] = answer.content
        assert block.type == "text"
        return block.text, answer.stop_reason, answer.stop_sequence

    assert ends(max_tokens=2) == ("Alpha beta", "max_tokens", None)
    assert ends(stop_sequences=["never", " gamma"]) == ("Alpha beta, DEF", "stop_sequence", " gamma")
    assert ends({"stop_token_ids": [257]}) == ("Alpha", "end_turn", None)
    text, why, _ = ends({"ignore_eos": True}, max_tokens=20000)
    assert why == "model_context_window_exceeded" and len(text) > len(SAID)


def test_events(api: Api) -> None:
    api.engine.cached = 4
    events = events_of(api, max_tokens=3)
    for event in events:
        MessagesEvent.model_validate_json(json.dumps(event))
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "ping"),
        *(["content_block_delta"] * 3),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    begun, usage = events[0]["message"], events[-2]["usage"]
    assert begun["content"] == [] and begun["stop_reason"] is None and begun["usage"]["cache_read_input_tokens"] == 4
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in events[3:6]) == "Alpha beta, DEF"
    assert usage["output_tokens"] == 3 and usage["input_tokens"] + 4 == len(api.engine.seen[-1].prompt)
    whole = api.http.post(MESSAGES, json={**ASKED, "max_tokens": 3}).json()
    MessagesAnswer.model_validate_json(json.dumps(whole))
    assert whole["usage"] == usage and whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_stream_helpers(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HELLO, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == stream.get_final_text() == SAID
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", SAID_TOKENS)
    raw = client.messages.create(model=MODEL, max_tokens=2, messages=HELLO, extra_body=GREEDY, stream=True)
    assert [event.type for event in raw][-2:] == ["message_delta", "message_stop"]
    beta = client.beta.messages.create(
        model=MODEL,
        max_tokens=2,
        messages=HELLO,
        extra_body=GREEDY,
        betas=["interleaved-thinking-2025-05-14"],
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    )
    assert beta.content[0].to_dict()["text"] == "Alpha beta"


def test_asynchronous_client(api: Api) -> None:
    async def use() -> tuple[str, Any, int]:
        async with anthropic.AsyncAnthropic(base_url=api.url, api_key="none", max_retries=0) as made:
            async with made.messages.stream(model=MODEL, max_tokens=100, messages=HELLO, extra_body=GREEDY) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            whole = await made.messages.create(model=MODEL, max_tokens=100, messages=HELLO, extra_body=GREEDY)
            counted = await made.messages.count_tokens(model=MODEL, messages=HELLO)
            return text, whole, counted.input_tokens

    text, whole, counted = asyncio.run(use())
    assert text == whole.content[0].text == SAID
    assert counted == whole.usage.input_tokens == len(api.engine.seen[-1].prompt)


def test_turns(api: Api, client: anthropic.Anthropic) -> None:
    """Turns of one side are one message, and an answer goes on in the last one if it is the assistant's."""
    client.messages.create(
        model=MODEL,
        max_tokens=5,
        extra_body=GREEDY,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "Two"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Three"},
                ],
            },
            {"role": "user", "content": "Four"},
            {"role": "assistant", "content": "Fi"},
        ],
    )
    assert prompt_of(api) == (
        "<|im_start|>user\nOne\nTwo<|im_end|>\n<|im_start|>assistant\nThree<|im_end|>\n"
        "<|im_start|>user\nFour<|im_end|>\n<|im_start|>assistant\nFi"
    )


@pytest.mark.parametrize(
    "system, shown",
    [
        ("Rules.", "Rules."),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (
            [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"},
                {"type": "text", "text": "Rules."},
            ],
            "Rules.",
        ),
        ("x-anthropic-billing-header: cch=abc;\nRules.", "Rules."),
        ("x-anthropic-billing-header: cch=abc;", None),
        ([], None),
    ],
)
def test_system(api: Api, system: Any, shown: str | None) -> None:
    assert api.http.post(MESSAGES, json={**ASKED, "system": system}).status_code == 200
    first = f"<|im_start|>system\n{shown}<|im_end|>\n" if shown else ""
    assert prompt_of(api) == first + "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_functions_reach_the_template_as_in_a_chat(api: Api) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    template = "{{ tools | tojson }}{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    with running(parts_of(api.engine), chat_template=template) as url:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            client.messages.create(
                model=MODEL,
                max_tokens=5,
                extra_body=GREEDY,
                tools=[{"name": "f", "description": "d", "input_schema": schema}],
                tool_choice={"type": "auto"},
                messages=[
                    {"role": "user", "content": "Hello"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "Let me see."},
                            {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
                            {"type": "tool_use", "id": "c2", "name": "f", "input": {"x": 2}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": "7"},
                            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "8"}]},
                            {"type": "text", "text": "Well?"},
                        ],
                    },
                ],
            )
        mine = api.engine.seen[-1].prompt
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {i}}}'}} for i in (1, 2)
        ]
        httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "temperature": 0,
                "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}],
                "messages": [
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c1", "content": "7"},
                    {"role": "tool", "tool_call_id": "c2", "content": "8"},
                    {"role": "user", "content": "Well?"},
                ],
            },
        ).raise_for_status()
    assert mine == api.engine.seen[-1].prompt and len(mine) > 100


def test_count_tokens(api: Api, client: anthropic.Anthropic) -> None:
    asked: Any = {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "Rules."}],
        "messages": HELLO,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
    counted = client.messages.count_tokens(model=MODEL, **asked).input_tokens
    answer = client.messages.create(model=MODEL, max_tokens=1, **asked)
    assert counted == answer.usage.input_tokens == len(api.engine.seen[-1].prompt)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="nope", messages=HELLO)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model=MODEL, messages=[])
    response = api.http.post(f"{MESSAGES}/count_tokens", json={"messages": HELLO, "tolls": 1})
    assert response.headers["x-octavo-warnings"] == "ignored: tolls"


def test_what_has_no_effect_is_told(api: Api) -> None:
    response = api.http.post(
        MESSAGES,
        json={
            **ASKED,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
            "metadata": {"user_id": "u"},
            "cache_salt": "s",
            "seed": 4,
            "temperature": 1,
            "top_k": 3,
            "top_p": 0.5,
            "chat_template_kwargs": {"x": 1},
            "container": "c",
        },
    )
    assert response.status_code == 200 and response.headers["x-octavo-warnings"] == "ignored: container, thinking"
    asked = api.engine.seen[-1]
    assert (asked.salt, asked.seed, asked.sampling.top_k, asked.sampling.top_p) == ("s", 4, 3, 0.5)
    calm = {"thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto"}
    assert "x-octavo-warnings" not in api.http.post(MESSAGES, json={**ASKED, **calm}).headers


def _blocks(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


REFUSED: dict[str, dict[str, Any]] = {
    "max_tokens: Field required": {"max_tokens": None},
    "max_tokens must be at least 1": {"max_tokens": 0},
    "temperature": {"temperature": 7},
    "top_k must": {"top_k": -4},
    "messages must hold": {"messages": []},
    "messages[0].role": {"messages": [{"role": "tool", "content": "a"}]},
    "messages[0].content must": {"messages": [{"role": "user"}]},
    "takes text only": _blocks({"type": "image", "source": {"type": "url", "url": "x"}}),
    "is of type tool_use": _blocks({"type": "tool_use", "id": "a", "name": "b", "input": {}}),
    "name and input": _blocks({"type": "tool_use", "id": "a"}, role="assistant"),
    "tool_use_id must": _blocks({"type": "tool_result"}),
    "must be an object with a type": _blocks("text"),
    "content[0].text must": _blocks({"type": "text"}),
    "system must": {"system": 3},
    "system[0]": {"system": [{"type": "image"}]},
    "stop_sequences cannot contain an empty string": {"stop_sequences": [""]},
    "stop_sequences may hold at most 64": {"stop_sequences": ["a"] * 65},
    "`output_config.format`": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    "`mcp_servers`": {"mcp_servers": [{"url": "x"}]},
    "`tools[0]`": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "input_schema": {"tools": [{"name": "f"}]},
    "tool_choice.type": {"tool_choice": {"type": "some"}},
    "`tool_choice`": {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
    "the function 'g'": {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
    "guided_json": {"guided_json": {"type": "object"}},
    "maximum context length": {"messages": [{"role": "user", "content": "a" * 600}]},
    "not supported": {"system": "forbidden"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(api: Api, said: str) -> None:
    body = {name: value for name, value in {**ASKED, **REFUSED[said]}.items() if value is not None}
    response = api.http.post(MESSAGES, json=body)
    assert response.status_code == 400, response.text
    error = MessagesError.model_validate_json(response.text).error
    assert error.type == "invalid_request_error" and said in error.message
    assert not api.engine.seen
    api.alive()


def test_error_classes(api: Api, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nope", max_tokens=1, messages=HELLO)
    assert unknown.value.type == "not_found_error" and "tiny" in str(unknown.value.api_message)
    api.engine.fail_after = 0
    for stream in (False, True):
        with pytest.raises(anthropic.InternalServerError) as failed:
            client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=stream)
        assert failed.value.type == "api_error" and failed.value.status_code == 500
    api.engine.fail_after = 2
    events = client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=True)
    with pytest.raises(anthropic.APIStatusError) as broken:
        for _ in events:
            pass
    assert broken.value.type == "api_error" and "not finite" in str(broken.value.api_message)
    assert api.http.get(MESSAGES).json()["type"] == "error"
    with running(parts_of(api.engine), max_request_bytes=1000) as url:
        with (
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as small,
            pytest.raises(anthropic.ContentTooLargeError) as large,
        ):
            small.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "a" * 2000}])
        assert large.value.response.json()["error"]["type"] == "request_too_large"


def test_keys_and_limits(api: Api) -> None:
    api.engine.pause = 0.01
    with running(parts_of(api.engine), api_key=("k", "l"), max_num_reqs_per_key=1, max_num_queued_reqs=1) as url:
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            anthropic.Anthropic(base_url=url, api_key="wrong").messages.create(
                model=MODEL, max_tokens=1, messages=HELLO
            )
        assert wrong.value.type == "authentication_error"
        by_header = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
        by_token = anthropic.Anthropic(base_url=url, auth_token="l", max_retries=0)
        forever = {**GREEDY, "ignore_eos": True}
        with by_header.messages.stream(model=MODEL, max_tokens=400, messages=HELLO, extra_body=forever) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError) as many:
                by_header.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
            assert many.value.type == "rate_limit_error" and many.value.response.headers["retry-after"] == "1"
            with pytest.raises(anthropic.ServiceUnavailableError) as busy:
                by_token.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
            assert busy.value.type == "overloaded_error"
        until(lambda: not api.engine.live)
        assert by_token.messages.create(model=MODEL, max_tokens=1, messages=HELLO).usage.output_tokens == 1


def test_a_busy_server_is_asked_again(api: Api) -> None:
    """The package waits as long as it is told, and has its answer when the model has loaded."""
    loaded = threading.Event()
    with (
        running(parts_of(api.engine, loaded), wait=False) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=3) as client,
    ):
        timer = threading.Timer(1, loaded.set)
        timer.start()
        answer = client.messages.create(model=MODEL, max_tokens=1, messages=HELLO, extra_body=GREEDY)
        timer.join()
    assert answer.content[0].to_dict()["text"] == "Alpha"


def test_a_client_that_goes_away(api: Api, client: anthropic.Anthropic) -> None:
    api.engine.pause = 0.01
    forever = {**GREEDY, "ignore_eos": True}
    with client.messages.stream(model=MODEL, max_tokens=400, messages=HELLO, extra_body=forever) as stream:
        next(iter(stream))
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


def test_pings_while_nothing_comes() -> None:
    engine = ScriptEngine(script=lambda request, choice: [256, EOS], pause=0.3)
    with (
        running(parts_of(engine), sse_keep_alive_interval=0.05, enable_per_request_metrics=True) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        raw = httpx.post(url + MESSAGES, json={**ASKED, "stream": True}).text
        with client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO, extra_body=GREEDY) as stream:
            assert stream.get_final_text() == "Alpha"
        whole = httpx.post(url + MESSAGES, json=ASKED).json()
    assert raw.startswith('event: ping\ndata: {"type":"ping"}\n\n') and raw.count("event: ping") > 4
    assert ":keep-alive" not in raw.replace(" ", "")
    last = json.loads(raw.strip().split("data: ")[-1])
    assert last["type"] == "message_stop" and last["metrics"]["time_to_first_token_ms"] >= 300
    assert whole["metrics"]["time_to_first_token_ms"] >= 300


def test_a_real_conversation_equals_that_of_a_chat(real: Real) -> None:
    client = anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0)
    system = "You are a helpful astronomer."
    messages: list[Any] = []
    for number, text in enumerate(["Name a planet with rings.", "And one without?"]):
        messages.append({"role": "user", "content": text})
        chat = real.chat([{"role": "system", "content": system}, *messages], max_tokens=40)
        body: dict[str, Any] = {
            "model": NAME,
            "max_tokens": 40,
            "messages": messages,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": system}],
            "extra_body": GREEDY,
        }
        if number:
            with client.messages.stream(**body) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**body)
        said = chat["choices"][0]["message"]["content"]
        assert answer.content[0].text == said and said
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
        assert usage.output_tokens == chat["usage"]["completion_tokens"]
        assert answer.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat["choices"][0]["finish_reason"]]
        messages.append({"role": "assistant", "content": said})
    assert usage.cache_read_input_tokens > 0
    prefilled = client.messages.create(
        model=NAME,
        max_tokens=12,
        messages=[*messages[:1], {"role": "assistant", "content": "The planet is"}],
        extra_body=GREEDY,
    )
    chat = real.chat(
        [*messages[:1], {"role": "assistant", "content": "The planet is"}],
        max_tokens=12,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert prefilled.content[0].to_dict()["text"] == chat["choices"][0]["message"]["content"]
