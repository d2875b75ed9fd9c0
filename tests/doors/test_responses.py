"""/v1/responses, asked by the `openai` package and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from octavo.api.doors.responses import ResponsesAnswer, ResponsesEvent
from octavo.api.stored import Stored, StoredAnswers
from tests.api.conftest import Api
from tests.api.harness import EOS, MODEL, SAID, ids_of, make_tokenizer, parts_of, running, until
from tests.cases.real import NAME, Real

RESPONSES = "/v1/responses"
SAID_TOKENS = len(ids_of(SAID)) + 1
"""With the end of sequence."""
WITH_LOGPROBS: Any = ["message.output_text.logprobs"]
ASKED: dict[str, Any] = {"model": MODEL, "input": "Hello", "temperature": 0}


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_of(api: Api) -> str:
    """What the engine was last asked."""
    return make_tokenizer().decode(list(api.engine.seen[-1].prompt), skip_special_tokens=False)


def events_of(api: Api, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has its name in front."""
    response = api.http.post(RESPONSES, json={**ASKED, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_answer(api: Api, client: openai.OpenAI) -> None:
    api.engine.cached = 2
    answer = client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", temperature=0, metadata={"a": "b"}, max_output_tokens=99
    )
    assert answer.output_text == SAID
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    [message] = answer.output
    assert message.type == "message" and message.role == "assistant" and message.status == "completed"
    assert prompt_of(api) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(api.engine.seen[-1].prompt), SAID_TOKENS)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 0)
    assert (answer.model, answer.metadata, answer.temperature, answer.top_p) == (MODEL, {"a": "b"}, 0, 1)
    assert (answer.instructions, answer.max_output_tokens, answer.truncation) == ("Be brief.", 99, "disabled")
    assert answer.id.startswith("resp_") and message.id.startswith("msg_") and answer.object == "response"
    assert answer.completed_at is not None and answer.completed_at >= answer.created_at > 0


def test_too_few_tokens(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=2)
    assert (answer.status, answer.output_text) == ("incomplete", "Alpha beta")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.completed_at is None and answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_fields_that_are_not_openais(api: Api) -> None:
    body = {
        **ASKED,
        "stop": [" gamma"],
        "top_k": 7,
        "min_p": 0.5,
        "seed": 3,
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"1": 2},
        "ignore_eos": True,
        "cache_salt": "s",
        "max_output_tokens": 60,
        "chat_template_kwargs": {"x": 1},
        "tempratur": 1,
        "verbosity": "low",
    }
    response = api.http.post(RESPONSES, json=body)
    assert response.status_code == 200 and " gamma" not in response.json()["output"][0]["content"][0]["text"]
    asked = api.engine.seen[-1]
    found = asked.sampling
    assert (found.top_k, found.min_p, found.repetition_penalty, found.logit_bias) == (7, 0.5, 1.5, {1: 2})
    assert (asked.seed, asked.eos_ids, asked.salt, asked.max_tokens) == (3, (), "s", 60)
    assert response.headers["x-octavo-warnings"] == "ignored: tempratur, verbosity"


def test_events(api: Api, client: openai.OpenAI) -> None:
    events = events_of(api, include=WITH_LOGPROBS, top_logprobs=2, max_output_tokens=4)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(["output_text.delta"] * 4),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    for event in events:
        ResponsesEvent.model_validate_json(json.dumps(event))
    created, begun, item, part, *deltas, text, whole_part, whole_item, last = events
    answer = last["response"]
    assert created["response"]["status"] == begun["response"]["status"] == "in_progress"
    assert created["response"]["output"] == [] and created["response"]["usage"] is None
    [message] = answer["output"]
    [content] = message["content"]
    assert content["text"] == text["text"] == "".join(delta["delta"] for delta in deltas) == "Alpha beta, DEF gamma"
    assert content["logprobs"] == text["logprobs"] == [entry for delta in deltas for entry in delta["logprobs"]]
    assert [entry["token"] for entry in content["logprobs"]] == ["Alpha", " beta", ", DEF", " gamma"]
    assert [entry["token"] for entry in content["logprobs"][0]["top_logprobs"]] == ["Alpha", " beta"]
    assert whole_part["part"] == content and whole_item["item"] == message and answer["usage"]["output_tokens"] == 4
    assert {event["item_id"] for event in (part, *deltas, text, whole_part)} == {message["id"], item["item"]["id"]}
    assert {event["response"]["id"] for event in (created, begun, last)} == {answer["id"]}
    kept = client.responses.retrieve(answer["id"])
    assert kept.output_text == content["text"] and kept.to_dict()["status"] == "incomplete"
    assert api.http.get(f"{RESPONSES}/{answer['id']}").json() == answer


def test_whole_and_streamed_are_the_same(api: Api) -> None:
    body = {"include": WITH_LOGPROBS, "temperature": 1, "seed": 5, "stop": "two", "metadata": {"k": "v"}}
    whole = api.http.post(RESPONSES, json={**ASKED, **body}).json()
    streamed = events_of(api, **body)[-1]["response"]
    for answer in (whole, streamed):
        ResponsesAnswer.model_validate_json(json.dumps(answer))
        for name in ("id", "created_at", "completed_at"):
            assert answer.pop(name)
        assert answer["output"][0].pop("id")
    assert whole == streamed and whole["status"] == "completed"


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert snapshots[-1] == final.output_text == SAID
    assert events[-1].type == "response.completed"


def test_asynchronous_client(api: Api) -> None:
    async def use() -> tuple[list[str], Any, Any, Any]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as made:
            stream = await made.responses.create(model=MODEL, input="Hello", temperature=0, stream=True)
            raw = [event.type async for event in stream]
            async with made.responses.stream(model=MODEL, input="Hello", temperature=0) as helped:
                final = await helped.get_final_response()
            kept = await made.responses.retrieve(final.id)
            await made.responses.delete(final.id)
            with pytest.raises(openai.NotFoundError) as gone:
                await made.responses.retrieve(final.id)
            return raw, final, kept, gone.value

    raw, final, kept, gone = asyncio.run(use())
    assert raw[0] == "response.created" and raw[-1] == "response.completed"
    assert final.output_text == kept.output_text == SAID and gone.code == "response_not_found"


def test_going_on(api: Api, client: openai.OpenAI) -> None:
    api.engine.script = lambda request, choice: ids_of("End")
    first = client.responses.create(model=MODEL, input="One", instructions="Be brief.", temperature=0)
    second = client.responses.create(model=MODEL, input="Two", temperature=0, previous_response_id=first.id)
    branch = client.responses.create(model=MODEL, input="Other", temperature=0, previous_response_id=first.id)
    with client.responses.stream(
        model=MODEL, input=[{"role": "user", "content": "Three"}], temperature=0, previous_response_id=second.id
    ) as stream:
        third = stream.get_final_response()
    turns = [
        *("<|im_start|>user\nOne<|im_end|>\n", "<|im_start|>assistant\nEnd<|im_end|>\n"),
        *("<|im_start|>user\nTwo<|im_end|>\n", "<|im_start|>assistant\nEnd<|im_end|>\n"),
        *("<|im_start|>user\nThree<|im_end|>\n", "<|im_start|>assistant\n"),
    ]
    assert prompt_of(api) == "".join(turns)  # instructions are of one answer only
    assert third.previous_response_id == second.id
    said = [
        (item.role, item.content[0].text)  # type: ignore[union-attr]
        for item in client.responses.input_items.list(third.id, order="asc", limit=2)
    ]
    assert said == [*(("user", "One"), ("assistant", "End"), ("user", "Two"), ("assistant", "End"), ("user", "Three"))]
    newest = client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].content[0].text == "Three" and newest.has_more  # type: ignore[union-attr]
    assert "Other" in str(client.responses.input_items.list(branch.id).data)

    client.responses.delete(first.id)
    for body in ({"previous_response_id": second.id}, {"previous_response_id": "resp_none"}):
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(model=MODEL, input="x", **body)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.retrieve(second.id).output_text == "End"


def test_the_output_of_an_answer_can_be_sent_back(api: Api, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="One", temperature=0, store=False)
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "One"}]}, *first.output]
    history += [{"type": "message", "role": "developer", "content": "Hm."}, {"role": "user", "content": "Two"}]
    client.responses.create(model=MODEL, input=history, temperature=0, store=False)
    assert prompt_of(api) == (
        f"<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n{SAID}<|im_end|>\n"
        "<|im_start|>developer\nHm.<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_functions_reach_the_template_as_in_a_chat(api: Api, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    template = "{{ tools | tojson }}{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    with running(parts_of(api.engine), chat_template=template) as url, httpx.Client(base_url=url) as http:
        response = http.post(
            RESPONSES,
            json={
                **ASKED,
                "tools": [{"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}],
                "input": [
                    {"role": "user", "content": "Hello"},
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
                    {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"x":2}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "7"},
                    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
                ],
            },
        )
        assert response.status_code == 200, response.text
        mine = api.engine.seen[-1].prompt
        function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"x":{i}}}'}} for i in (1, 2)
        ]
        http.post(
            "/v1/chat/completions",
            json={
                "temperature": 0,
                "tools": [{"type": "function", "function": function}],
                "messages": [
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": None, "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c1", "content": "7"},
                    {"role": "tool", "tool_call_id": "c2", "content": "8"},
                ],
            },
        ).raise_for_status()
    assert mine == api.engine.seen[-1].prompt and len(mine) > 100


def test_nothing_is_kept_unless_wanted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", temperature=0, store=False)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Hello", previous_response_id=answer.id)


def test_what_is_kept_belongs_to_a_key(api: Api) -> None:
    with running(parts_of(api.engine), api_key=("one", "two")) as url:
        mine, other = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        answer = mine.responses.create(model=MODEL, input="Hello", temperature=0, extra_headers={"X-Request-Id": "a"})
        for ask in (
            lambda: other.responses.retrieve(answer.id),
            lambda: other.responses.delete(answer.id),
            lambda: other.responses.cancel(answer.id),
            lambda: other.responses.input_items.list(answer.id),
            lambda: other.responses.create(model=MODEL, input="More", previous_response_id=answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        other.responses.create(model=MODEL, input="Other", temperature=0, extra_headers={"X-Request-Id": "a"})
        assert mine.responses.input_items.list(answer.id).data[0].content[0].text == "Hello"  # type: ignore[union-attr]
        assert mine.responses.retrieve(answer.id).output_text == SAID
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="three").responses.retrieve(answer.id)


def test_store_is_bounded_and_conversations_are_whole() -> None:
    def turn(previous: str | None, size: int = 0) -> Stored:
        return Stored(None, previous, b"x" * size, b"{}")

    store = StoredAnswers(most=4)
    for name, previous in (("a1", None), ("b1", None), ("a2", "a1"), ("c1", None)):
        store.put(name, turn(previous))
    store.put("a3", turn("a2"))
    assert store.get("b1", None) is None and len(store) == 4  # a1 is older, but a2 goes on from it
    assert len(store.conversation("a3", None)) == 3
    store.get("c1", None)
    store.put("d1", turn(None))
    assert store.get("a3", None) is None and store.get("a2", None) is not None  # the end goes first
    assert store.get("c1", None) is not None and store.get("c1", 0) is None

    store = StoredAnswers(most_bytes=10_000)
    for number in range(20):
        store.put(str(number), turn(None, size=2_000))
    assert [name for name in map(str, range(20)) if store.get(name, None)] == ["17", "18", "19"]
    assert store.remove("18", None) and not store.remove("18", None) and not store.remove("19", 5)
    store.put("small", turn(None, size=1_000))
    assert len(store) == 3
    store.put("huge", turn(None, size=20_000))
    assert len(store) == 0


def test_too_long_a_conversation(api: Api, client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "system", "content": "Rules."}]
    for number in range(10):
        turns += [{"role": "user", "content": f"{number}{'u' * 60}"}, {"role": "assistant", "content": "a" * 20}]
    turns.append({"role": "user", "content": "last"})
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input=turns, temperature=0)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    client.responses.create(model=MODEL, input=turns, temperature=0, truncation="auto", max_output_tokens=100)
    found = prompt_of(api)
    assert found.startswith("<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\n")
    assert found.endswith("<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n")
    first = int(found.split("user\n")[1][0])
    turn = f"<|im_start|>user\n0{'u' * 60}<|im_end|>\n<|im_start|>assistant\n{'a' * 20}<|im_end|>\n"
    size = len(api.engine.seen[-1].prompt) + 100
    assert first > 0 and size <= 512 < size + len(make_tokenizer().encode(turn, add_special_tokens=False))
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x" * 600, truncation="auto")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "text"),
    ({"text": {"format": {"type": "json_object"}}}, "text"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
    ),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"include": ["everything"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100000}, "max_output_tokens"),
    ({"top_logprobs": 1000}, "top_logprobs"),
    ({"temperature": 3}, "temperature"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": []}, "input"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": {"a": 1}, "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"truncation": "some"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata"),
]


@pytest.mark.parametrize("body, param", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(api: Api, body: dict[str, Any], param: str) -> None:
    response = api.http.post(RESPONSES, json={**ASKED, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "BadRequestError"
    assert "max_tokens" not in error["message"] and "messages must" not in error["message"]
    assert not api.engine.seen
    api.alive()


def test_other_errors(api: Api, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="nope", input="x")
    assert unknown.value.code == "model_not_found"
    answer = client.responses.create(model=MODEL, input="x", temperature=0)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(answer.id)
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        assert api.http.get(f"{RESPONSES}/{answer.id}/input_items", params=query).status_code == 400
    assert api.http.get(f"{RESPONSES}/{answer.id}", params={"stream": "true"}).status_code == 400
    assert api.http.get(RESPONSES).headers["allow"] == "POST"


def test_a_stream_that_fails(api: Api, client: openai.OpenAI) -> None:
    api.engine.fail_after = 2
    events = events_of(api)
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and "not finite" in failed["error"]["message"]
    assert failed["output"][0]["content"][0]["text"] == "Alpha beta"
    assert client.responses.retrieve(failed["id"]).status == "failed"
    api.engine.fail_after = 0
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as error:
            client.responses.create(model=MODEL, input="x", temperature=0, stream=stream)
        assert error.value.code == "engine_error"


def test_a_client_that_goes_away(api: Api) -> None:
    api.engine.pause = 0.01
    with api.http.stream("POST", RESPONSES, json={**ASKED, "stream": True, "ignore_eos": True}) as response:
        assert next(response.iter_lines()) == "event: response.created"
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


def test_a_stream_is_kept_open_while_nothing_comes(api: Api) -> None:
    api.engine.script = lambda request, choice: [256, EOS]
    api.engine.pause = 0.3
    with (
        running(parts_of(api.engine), sse_keep_alive_interval=0.05) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        raw = httpx.post(f"{url}{RESPONSES}", json={**ASKED, "stream": True}).text
        with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
            assert stream.get_final_response().output_text == "Alpha"
    assert raw.startswith(": keep-alive") and raw.count(": keep-alive") > 3


def test_times_where_the_server_tells_them(api: Api) -> None:
    with running(parts_of(api.engine), enable_per_request_metrics=True) as url:
        answer = httpx.post(f"{url}{RESPONSES}", json=ASKED).json()
    ResponsesAnswer.model_validate_json(json.dumps(answer))
    assert answer["metrics"]["time_to_first_token_ms"] > 0


def test_a_real_conversation_equals_that_of_a_chat(real: Real) -> None:
    asked = ["Name a planet with rings.", "And one without?", "Which is larger?"]
    messages: list[Any] = []
    previous: str | None = None
    for number, text in enumerate(asked):
        messages.append({"role": "user", "content": text})
        chat = real.client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=40)
        body: dict[str, Any] = {"model": NAME, "input": text, "temperature": 0, "max_output_tokens": 40}
        answer: Response
        if number == 1:
            with real.client.responses.stream(**body, previous_response_id=previous) as stream:
                *_, last = stream
            answer = last.response  # type: ignore[union-attr]
        else:
            answer = real.client.responses.create(**body, previous_response_id=previous)
        said = chat.choices[0].message.content
        assert answer.output_text == said and said
        assert answer.usage is not None and chat.usage is not None
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        assert answer.status == {"stop": "completed", "length": "incomplete"}[chat.choices[0].finish_reason]
        messages.append({"role": "assistant", "content": said})
        previous = answer.id
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens > 0
