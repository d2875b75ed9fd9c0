"""Ollama's API, asked by its own client and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

import octavo
from octavo.api.doors import ollama as door
from tests.api.conftest import Api
from tests.api.harness import EOS, MODEL, SAID, ScriptEngine, ids_of, make_tokenizer, parts_of, running, until
from tests.cases.real import NAME, Real

WORDS = ["Alpha", " beta", ", DEF", " gamma"]
USER = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}
CUT = {"temperature": 0, "num_predict": 4}


@pytest.fixture
def client(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[ollama.Client]:
    monkeypatch.delenv("OLLAMA_API_KEY", raising=False)
    yield ollama.Client(host=api.url)


def prompt_of(api: Api) -> str:
    """What the engine was last asked."""
    return make_tokenizer().decode(list(api.engine.seen[-1].prompt), skip_special_tokens=False)


def lines(api: Api, path: str, **body: Any) -> list[dict[str, Any]]:
    response = api.http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("}\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_generate(api: Api, client: ollama.Client) -> None:
    answer = client.generate(MODEL, "Hello", system="Be brief", options=CUT)
    assert (answer.response, answer.done, answer.done_reason) == ("".join(WORDS), True, "length")
    prompt = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(api) == prompt
    asked = api.engine.seen[-1].prompt
    assert (answer.prompt_eval_count, answer.eval_count) == (len(asked), 4)
    assert answer.context == [*asked, *ids_of("".join(WORDS))]
    times = (answer.prompt_eval_duration, answer.eval_duration, answer.total_duration)
    assert all(time is not None and time >= 1 for time in times)
    whole = client.generate(MODEL, "Hello", options=GREEDY)
    assert (whole.response, whole.done_reason) == (SAID, "stop")
    stopped = client.generate(MODEL, "Hello", options={**GREEDY, "stop": [" gam"]})
    assert (stopped.response, stopped.done_reason) == ("Alpha beta, DEF", "stop")


def test_durations_are_nanoseconds(api: Api, client: ollama.Client) -> None:
    api.engine.pause = 0.01
    answer = client.generate(MODEL, "Hello", options={**GREEDY, "num_predict": 11})
    assert answer.total_duration and answer.eval_duration and answer.prompt_eval_duration
    assert answer.eval_duration >= 10 * 10_000_000  # ten steps after the first token
    assert answer.prompt_eval_duration >= 10_000_000
    assert answer.total_duration >= answer.eval_duration + answer.prompt_eval_duration


def test_generate_streams(api: Api, client: ollama.Client) -> None:
    parts = list(client.generate(MODEL, "Hello", options=CUT, stream=True))
    assert [part.response for part in parts] == [*WORDS, ""]
    assert [part.done for part in parts] == [False] * 4 + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 4)
    assert parts[-1].context == [*api.engine.seen[-1].prompt, *ids_of("".join(WORDS))]


def test_a_stream_is_what_happens_unless_told_otherwise(api: Api) -> None:
    for path, body in (("/api/generate", {"prompt": "Hello"}), ("/api/chat", {"messages": USER})):
        parts = lines(api, path, options=CUT, **body)
        assert len(parts) == 5 and parts[-1]["done"]
        whole = api.http.post(path, json={"options": CUT, "stream": False, **body})
        assert whole.headers["content-type"] == "application/json" and whole.json()["done"]


def test_a_context_goes_on(api: Api, client: ollama.Client) -> None:
    first = client.generate(MODEL, "Hello", options=GREEDY)
    second = client.generate(MODEL, "Again", options=CUT, context=first.context)
    assert first.context is not None and first.context[-1] == EOS
    end = "<|im_end|><|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(api).endswith(SAID + end)
    assert second.context is not None and second.context[: len(first.context)] == first.context


def test_raw_prompts(api: Api, client: ollama.Client) -> None:
    answer = client.generate(MODEL, "Hello", raw=True, options=CUT)
    assert prompt_of(api) == "Hello" and answer.context is None
    with pytest.raises(ollama.ResponseError, match="raw does not go together"):
        client.generate(MODEL, "Hello", raw=True, system="x")


def test_chat(api: Api, client: ollama.Client) -> None:
    answer = client.chat(MODEL, USER, options=CUT)
    assert (answer.message.role, answer.message.content) == ("assistant", "".join(WORDS))
    assert (answer.done_reason, answer.eval_count) == ("length", 4)
    parts = list(client.chat(MODEL, USER, options=CUT, stream=True))
    assert [part.message.content for part in parts] == [*WORDS, ""]
    assert parts[-1].done and parts[-1].prompt_eval_count == len(api.engine.seen[-1].prompt)


def test_tools_and_their_answers_reach_the_template(api: Api, client: ollama.Client) -> None:
    def weather(city: str) -> str:
        """How the weather is.

        Args:
            city: where
        """
        return city

    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    client.chat(MODEL, [*USER, call, result], tools=[weather], options=CUT)
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt_of(api)
    assert '"name": "weather"' in prompt_of(api)


def test_logprobs(client: ollama.Client) -> None:
    generated = client.generate(MODEL, "Hello", options=CUT, logprobs=True, top_logprobs=2)
    chatted = client.chat(MODEL, USER, options=CUT, logprobs=True, top_logprobs=2)
    for answer in (generated, chatted):
        assert answer.logprobs is not None
        assert [(entry.token, entry.logprob) for entry in answer.logprobs] == [(word, -0.25) for word in WORDS]
        assert [rival.token for rival in answer.logprobs[0].top_logprobs or ()] == ["Alpha", " beta"]
    streamed = client.chat(MODEL, USER, options=CUT, logprobs=True, stream=True)
    assert [entry.token for part in streamed for entry in part.logprobs or ()] == WORDS


def test_the_async_client(api: Api) -> None:
    async def ask() -> tuple[str | None, list[str | None]]:
        client = ollama.AsyncClient(host=api.url)
        answer = await client.generate(MODEL, "Hello", options=CUT)
        parts = await client.chat(MODEL, USER, options=CUT, stream=True)
        return answer.response, [part.message.content async for part in parts]

    assert asyncio.run(ask()) == ("".join(WORDS), [*WORDS, ""])


def test_what_is_served(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == f"{MODEL}:latest" and listed.digest is not None and len(listed.digest) == 64
    (running,) = client.ps().models
    assert (running.name, running.context_length, running.size_vram) == (f"{MODEL}:latest", 512, 0)
    for name in (MODEL, listed.model):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools"]
        assert shown.modelinfo is not None and shown.modelinfo["general.name"] == MODEL
        assert shown.template is not None and "im_start" in shown.template


def test_names_have_tags_or_none() -> None:
    with running(parts_of(ScriptEngine()), served_model_name=("a/b", "c:7b")) as url:
        client = ollama.Client(host=url)
        assert [model.model for model in client.list().models] == ["a/b:latest", "c:7b"]
        for name in ("a/b", "a/b:latest", "c:7b"):
            assert client.chat(name, USER, options=CUT).model == name
        for name in ("c", "c:latest", "a/b:7b"):
            with pytest.raises(ollama.ResponseError, match="does not exist") as raised:
                client.chat(name, USER)
            assert raised.value.status_code == 404


def test_there_is_a_server(api: Api) -> None:
    assert api.http.get("/").text == "Ollama is running"
    assert api.http.head("/").status_code == 200
    assert api.http.get("/api/version").json() == {"version": octavo.__version__}


def test_nothing_to_generate_is_a_loaded_model(api: Api, client: ollama.Client) -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"
    assert [part.done_reason for part in client.generate(MODEL, stream=True)] == ["load"]
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.generate("none")
    assert not api.engine.seen


def test_answers_are_as_described(api: Api) -> None:
    asked = {"options": CUT, "logprobs": True, "top_logprobs": 1}
    for path, body, form in (
        ("/api/generate", {"prompt": "Hello"}, door.OllamaGenerated),
        ("/api/chat", {"messages": USER}, door.OllamaChatted),
    ):
        for part in lines(api, path, **asked, **body):
            form.model_validate(part)
        form.model_validate(api.http.post(path, json={**asked, **body, "stream": False}).json())
        form.model_validate(api.http.post(path, json={}).json())
    for path, form in (
        ("/api/tags", door.OllamaModels),
        ("/api/ps", door.OllamaRunningModels),
        ("/api/version", door.OllamaVersion),
        ("/api/nothing", door.OllamaError),
    ):
        form.model_validate(api.http.get(path).json())
    door.OllamaShown.model_validate(api.http.post("/api/show", json={}).json())


def test_options_reach_the_engine(api: Api, client: ollama.Client) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.75,
        "seed": 3,
        "num_predict": 5,
    }
    client.generate(MODEL, "Hello", options=options)
    request = api.engine.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, 0.5, 0.75)
    assert (request.seed, request.max_tokens) == (3, 5)
    client.generate(MODEL, "Hello", raw=True, options={"repeat_penalty": 1.25, "repeat_last_n": 0, "top_k": -1})
    request = api.engine.seen[-1]
    assert (request.sampling.repetition_penalty, request.sampling.top_k) == (1.0, 0)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.8, 0.9)
    for endless in (-1, -2, 0, 5000):
        client.generate(MODEL, "Hello", raw=True, options={"num_predict": endless})
        assert api.engine.seen[-1].max_tokens == 507


@pytest.mark.parametrize(
    "body, says",
    [
        ({"format": "json"}, "format"),
        ({"format": {"type": "object"}}, "format"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": "x"}, "suffix"),
        ({"images": ["aGk="]}, "takes text only"),
        ({"think": True}, "think"),
        ({"think": "high"}, "think"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"repeat_penalty": 0}}, "repeat_penalty must be greater than zero"),
        ({"options": {"temperature": 3}}, "temperature"),
        ({"options": {"stop": [""]}}, "stop"),
        ({"options": {"num_predict": "4"}}, "options"),
        ({"context": [99999]}, "out of vocabulary"),
        ({"prompt": "x" * 600, "raw": True}, "maximum context length"),
        ({"prompt": 4}, "prompt"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(api: Api, body: dict[str, Any], says: str, stream: bool) -> None:
    response = api.http.post("/api/generate", json={"prompt": "Hello", **body, "stream": stream})
    error = response.json()
    door.OllamaError.model_validate(error)
    assert response.status_code == 400 and says in error["error"]
    api.alive()


def test_messages_with_images_are_refused(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images") as raised:
        client.chat(MODEL, [{"role": "user", "content": "x", "images": ["aGk="]}])
    assert raised.value.status_code == 400


def test_what_is_not_there_says_so(client: ollama.Client) -> None:
    for ask in (
        lambda: client.pull("x"),
        lambda: client.embed(MODEL, "x"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
        lambda: client.create("x", from_="y"),
    ):
        with pytest.raises(ollama.ResponseError, match="serves the one model it was started with") as raised:
            ask()
        assert raised.value.status_code == 404


def test_an_error_in_a_stream(api: Api, client: ollama.Client) -> None:
    api.engine.fail_after = 2
    said = []
    with pytest.raises(ollama.ResponseError, match="not finite"):
        for part in client.chat(MODEL, USER, options=GREEDY, stream=True):
            said.append(part.message.content)
    assert said == WORDS[:2]
    with pytest.raises(ollama.ResponseError, match="not finite") as raised:
        client.chat(MODEL, USER, options=GREEDY)
    assert raised.value.status_code == 500


def test_keys_are_told_of_as_ollama_does() -> None:
    with running(parts_of(ScriptEngine()), api_key=("k",)) as url:
        with pytest.raises(ollama.ResponseError, match="API key") as raised:
            ollama.Client(host=url).chat(MODEL, USER)
        assert raised.value.status_code == 401
        client = ollama.Client(host=url, headers={"Authorization": "Bearer k"})
        assert client.chat(MODEL, USER, options=CUT).message.content == "".join(WORDS)


def test_bodies_need_no_content_type(api: Api) -> None:
    """As in the examples of Ollama's documentation, where curl calls them forms."""
    body = json.dumps({"model": MODEL, "prompt": "Hello", "stream": False, "options": CUT})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = api.http.post("/api/generate", content=body, headers=headers)
    assert answer.json()["response"] == "".join(WORDS)


def test_fields_without_an_effect_are_named(api: Api) -> None:
    options = {
        **CUT,
        "num_ctx": 4096,
        "num_gpu": 1,
        "repeat_last_n": 64,
        "typical_p": 1.0,
        "mirostat": 0,
        "num_keep": 1,
    }
    body = {"prompt": "Hello", "keep_alive": "5m", "options": options, "promt": 1, "think": False, "format": ""}
    response = api.http.post("/api/generate", json=body)
    assert response.status_code == 200
    assert response.headers["x-octavo-warnings"] == (
        "ignored: keep_alive, promt, options.num_ctx, options.num_gpu, options.num_keep, options.repeat_last_n"
    )


def test_a_client_that_leaves_ends_its_request(api: Api, client: ollama.Client) -> None:
    api.engine.pause = 0.02
    parts = client.chat(MODEL, USER, options=GREEDY, stream=True)
    next(parts)
    parts.close()
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


def test_greedy_answers_of_a_real_model(real: Real) -> None:
    client = ollama.Client(host=real.url)
    options = {"temperature": 0, "num_predict": 24}
    expected = real.chat("Name three colours.", max_tokens=24)["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": "Name three colours."}]
    assert client.chat(NAME, messages, options=options).message.content == expected
    streamed = client.chat(NAME, messages, options=options, stream=True)
    assert "".join(part.message.content or "" for part in streamed) == expected
    assert client.generate(f"{NAME}:latest", "Name three colours.", options=options).response == expected
    raw = real.complete("The sky is", max_tokens=24)["choices"][0]["text"]
    assert client.generate(NAME, "The sky is", raw=True, options=options).response == raw
    (model,) = client.list().models
    assert model.size and model.details is not None and model.details.format == "gguf"
    assert httpx.get(f"{real.url}/").text == "Ollama is running"
