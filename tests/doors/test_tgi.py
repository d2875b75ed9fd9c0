"""The API of text-generation-inference, asked by its own client, by huggingface_hub and by hand."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from octavo.api.doors.tgi import TgiAnswer, TgiAnswers, TgiError, TgiEvent, TgiInfo
from octavo.config import cache_dir
from tests.api.conftest import Api
from tests.api.harness import EOS, MODEL, SAID, ScriptEngine, events_of, ids_of, parts_of, running, until
from tests.cases.real import Real

VERSION = "0.7.0"
WORDS = ["Alpha", " beta", ", DEF", " gamma"]


@pytest.fixture(scope="session")
def tgi() -> ModuleType:
    """TGI's client. It asks for a huggingface_hub of long ago, and works with today's: so it cannot be among the
    requirements of the tests, and is fetched alone."""
    folder = cache_dir() / f"text-generation-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{made}/all"]
            subprocess.run([*pip, f"text-generation=={VERSION}"], check=True)
            os.rename(f"{made}/all", folder)
    sys.path.append(str(folder))
    return importlib.import_module("text_generation")


def ask(api: Api, path: str = "/generate", prompt: str = "Hello", **parameters: Any) -> httpx.Response:
    return api.http.post(path, json={"inputs": prompt, "parameters": parameters})


def events(api: Api, path: str = "/generate_stream", **parameters: Any) -> list[dict[str, Any]]:
    response = ask(api, path, **parameters)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = [httpx.Response(200, text=data).json() for data in events_of(response.text.split("\n"))]
    for event in found:
        TgiEvent.model_validate(event)
    return found


def test_the_client_generates(api: Api, tgi: ModuleType) -> None:
    client = tgi.Client(api.url)
    answer = client.generate("Hello", max_new_tokens=4, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text == "".join(WORDS)
    details = answer.details
    assert (details.finish_reason.value, details.generated_tokens, details.seed) == ("length", 4, None)
    assert [(token.id, token.text, token.special) for token in details.tokens] == [
        (id, text, False) for id, text in zip(ids_of("".join(WORDS)), WORDS, strict=True)
    ]
    assert [token.logprob for token in details.tokens] == [-0.25] * 4
    assert [[token.text for token in top] for top in details.top_tokens[:2]] == [["Alpha", " beta"], [" beta", ", DEF"]]
    assert [(token.text, token.logprob) for token in details.prefill] == [
        (letter, -0.25 if at else None) for at, letter in enumerate("Hello")
    ]
    whole = client.generate("Hello", max_new_tokens=100)
    assert whole.generated_text == SAID and whole.details.finish_reason.value == "eos_token"
    assert whole.details.tokens[-1].text == "<|im_end|>" and whole.details.tokens[-1].special
    stopped = client.generate("Hello", max_new_tokens=100, stop_sequences=[" gam"], return_full_text=True)
    assert stopped.generated_text == "HelloAlpha beta, DEF gam"
    assert stopped.details.finish_reason.value == "stop_sequence"
    assert "".join(token.text for token in stopped.details.tokens) == "Alpha beta, DEF gam"


def test_the_client_streams(api: Api, tgi: ModuleType) -> None:
    client = tgi.Client(api.url)
    parts = list(client.generate_stream("Hello", max_new_tokens=100))
    assert "".join(part.token.text for part in parts if not part.token.special) == SAID
    assert [part.generated_text for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].generated_text == SAID and parts[-1].token.id == EOS
    assert parts[-1].details.finish_reason.value == "eos_token"
    assert parts[-1].details.generated_tokens == len(parts) == len(ids_of(SAID)) + 1


def test_the_async_client_generates_and_streams(api: Api, tgi: ModuleType) -> None:
    async def ask() -> tuple[str, list[str]]:
        client = tgi.AsyncClient(api.url)
        answer = await client.generate("Hello", max_new_tokens=3)
        return answer.generated_text, [
            part.token.text async for part in client.generate_stream("Hello", max_new_tokens=3)
        ]

    assert asyncio.run(ask()) == ("".join(WORDS[:3]), WORDS[:3])


def test_the_client_knows_our_errors(api: Api, tgi: ModuleType) -> None:
    client = tgi.Client(api.url)
    with pytest.raises(tgi.errors.ValidationError, match="ask for at most max_new_tokens=507"):
        client.generate("Hello", max_new_tokens=5000)
    api.engine.fail_after = 2
    with pytest.raises(tgi.errors.GenerationError, match="not finite"):
        client.generate("Hello")
    with pytest.raises(tgi.errors.GenerationError, match="not finite"):
        list(client.generate_stream("Hello"))


def test_huggingface_hub_generates(api: Api) -> None:
    client = InferenceClient(api.url)
    assert client.text_generation("Hello", max_new_tokens=4, return_full_text=False) == "".join(WORDS)
    assert client.text_generation("Hello", max_new_tokens=1) == "HelloAlpha"
    assert list(client.text_generation("Hello", max_new_tokens=4, stream=True)) == WORDS
    answer = client.text_generation("Hello", max_new_tokens=2, details=True, return_full_text=False, seed=7, top_k=3)
    assert answer.details is not None
    assert (answer.details.finish_reason, answer.details.seed, len(answer.details.tokens)) == ("length", 7, 2)
    last = list(client.text_generation("Hello", max_new_tokens=2, details=True, stream=True))[-1]
    assert last.details is not None and last.details.generated_tokens == 2
    assert last.generated_text == "HelloAlpha beta"
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("Hello", max_new_tokens=5000)


def test_huggingface_hub_generates_asynchronously(api: Api) -> None:
    async def ask() -> list[str]:
        async with AsyncInferenceClient(api.url) as client:
            return [token async for token in await client.text_generation("Hello", max_new_tokens=3, stream=True)]

    assert asyncio.run(ask()) == WORDS[:3]


@pytest.mark.parametrize("named", ["base_url", "model"])
def test_huggingface_hub_chats_without_a_name(api: Api, named: str) -> None:
    client = InferenceClient(**{named: api.url})
    answer = client.chat_completion([{"role": "user", "content": "x"}], max_tokens=4, temperature=0)
    assert (answer.choices[0].message.content, answer.model) == ("".join(WORDS), MODEL)
    parts = client.chat_completion([{"role": "user", "content": "x"}], max_tokens=4, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "".join(WORDS)


def test_answers_are_as_described(api: Api) -> None:
    full = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "do_sample": True, "best_of": 3}
    TgiAnswer.model_validate(ask(api, **full).json())
    plain = ask(api, max_new_tokens=2)
    assert plain.json() == {"generated_text": "Alpha beta"}
    listed = ask(api, "/", max_new_tokens=2)
    TgiAnswers.model_validate(listed.json())
    assert listed.json() == [{"generated_text": "HelloAlpha beta"}]
    for path in ("/", "/generate"):
        streamed = api.http.post(path, json={"inputs": "Hello", "stream": True, "parameters": {"max_new_tokens": 2}})
        assert [httpx.Response(200, text=data).json()["index"] for data in events_of(streamed.text.split("\n"))] == [
            1,
            2,
        ]
    assert events(api, max_new_tokens=2)[-1]["details"] is None
    assert events(api, max_new_tokens=2, details=True)[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": None,
        "input_length": 5,
    }
    info = api.http.get("/info").json()
    TgiInfo.model_validate(info)
    assert (info["model_id"], info["max_total_tokens"]) == (MODEL, 512)


def test_texts_of_streamed_tokens_add_up(api: Api) -> None:
    """Also where characters have several tokens, and where a stop text may be about to come."""
    parts = events(api, max_new_tokens=100, stop=["two  spaced"])
    assert "".join(part["token"]["text"] for part in parts if not part["token"]["special"]) == SAID
    cut = events(api, max_new_tokens=6)  # two of the four tokens of a character
    assert "".join(part["token"]["text"] for part in cut) == cut[-1]["generated_text"] == "Alpha beta, DEF gamma \ufffd"


def test_best_of(api: Api) -> None:
    answer = ask(api, best_of=2, details=True, do_sample=True, max_new_tokens=2, seed=1).json()
    rivals = answer["details"]["best_of_sequences"]
    assert len(rivals) == 1 and rivals[0]["generated_text"] != answer["generated_text"]
    assert {request.n for request in api.engine.seen} == {2}
    refused = ask(api, best_of=2)
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    assert ask(api, "/generate_stream", best_of=2, do_sample=True).status_code == 422


@pytest.mark.parametrize(
    "parameters, greedy",
    [
        ({}, True),
        ({"do_sample": False, "repetition_penalty": 1.1}, True),
        ({"do_sample": True}, False),
        ({"temperature": 0.5}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.5}, False),
    ],
)
def test_what_makes_it_sample(api: Api, parameters: dict[str, Any], greedy: bool) -> None:
    assert ask(api, **parameters).status_code == 200
    assert api.engine.seen[-1].sampling.greedy == greedy


def test_parameters_reach_the_engine(api: Api) -> None:
    ask(
        api,
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        seed=3,
    )
    request = api.engine.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, request.seed) == (0.5, 7, 0.25, 3)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, request.max_tokens) == (1.25, 0.5, 100)
    ask(api, prompt="abcdef", truncate=3)
    assert api.engine.seen[-1].prompt == tuple(b"def")
    assert api.http.post("/generate", json={"inputs": "a" * 450}).status_code == 200
    assert api.engine.seen[-1].max_tokens == 62  # what is left, as nobody asked for 100
    assert not api.engine.seen[-1].sampling.greedy  # as TGI: without parameters it samples


@pytest.mark.parametrize(
    "parameters, says",
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"watermark": True}, "watermark"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"adapter_id": "a"}, "adapter_id"),
        ({"temperature": 0.0}, "strictly positive"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_n_tokens": 21, "details": True}, "max-logprobs"),
        ({"truncate": 0}, "truncate"),
        ({"seed": -1}, "seed"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"max_new_tokens": "4"}, "parameters"),
    ],
)
def test_refused(api: Api, parameters: dict[str, Any], says: str) -> None:
    response = ask(api, **parameters)
    error = response.json()
    TgiError.model_validate(error)
    assert (response.status_code, error["error_type"]) == (422, "validation")
    assert says in error["error"]
    api.alive()


def test_more_that_is_refused(api: Api) -> None:
    for body in ({}, {"inputs": ""}, {"inputs": 1}, {"inputs": "a", "model": "none"}):
        response = api.http.post("/generate", json=body)
        TgiError.model_validate(response.json())
        assert response.status_code == (404 if "model" in body else 422)
    assert ask(api, "/generate_stream", decoder_input_details=True).status_code == 422


def test_fields_without_an_effect_are_named(api: Api) -> None:
    body = {"inputs": "a", "use_cache": True, "functions": [1], "parameters": {"max_tokens": 3, "watermark": False}}
    response = api.http.post("/generate", json=body)
    assert response.status_code == 200
    assert response.headers["x-octavo-warnings"] == "ignored: functions, use_cache, parameters.max_tokens"


def test_an_overloaded_server_says_429() -> None:
    engine = ScriptEngine(pause=0.05)
    with running(parts_of(engine), max_num_queued_reqs=1) as url, httpx.Client(base_url=url) as http:
        with http.stream("POST", "/generate_stream", json={"inputs": "a"}):
            until(lambda: bool(engine.seen))
            busy = http.post("/generate", json={"inputs": "a"})
            assert (busy.status_code, busy.json()["error_type"]) == (429, "overloaded")
            assert "retry-after" in busy.headers
            with pytest.raises(OverloadedError, match="busy"):
                InferenceClient(url).text_generation("a")
        until(lambda: not engine.live)


def test_a_client_that_leaves_ends_its_request(api: Api) -> None:
    api.engine.pause = 0.02
    body = {"inputs": "a", "parameters": {"max_new_tokens": 400}}
    with api.http.stream("POST", "/generate_stream", json=body) as response:
        next(response.iter_raw())
    until(lambda: not api.engine.live)
    with pytest.raises(httpx.ReadTimeout):
        api.http.post("/generate", json=body, timeout=0.1)
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 2


def test_greedy_answers_of_a_real_model(real: Real, tgi: ModuleType) -> None:
    prompt = "The three primary colours are"
    expected = real.complete(prompt, max_tokens=24)["choices"][0]["text"]
    client = tgi.Client(real.url, timeout=60)
    assert client.generate(prompt, max_new_tokens=24).generated_text == expected
    parts = list(client.generate_stream(prompt, max_new_tokens=24))
    assert "".join(part.token.text for part in parts if not part.token.special) == expected
    assert InferenceClient(real.url).text_generation(prompt, max_new_tokens=24, return_full_text=False) == expected


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """huggingface_hub reads the user's token: none may be sent."""
    monkeypatch.setenv("HF_TOKEN", "")
    yield
