"""The API of llama.cpp's server, which has no client package: the forms that its documentation tells."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.api.doors import llamacpp as door
from tests.api.conftest import Api
from tests.api.harness import EOS, MODEL, SAID, events_of, ids_of, until
from tests.cases.real import NAME, Real

WORDS = ["Alpha", " beta", ", DEF", " gamma"]


def ask(api: Api, path: str = "/completion", **body: Any) -> Any:
    response = api.http.post(path, json={"prompt": "Hello", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    door.LlamacppCompletions.model_validate(answer)
    return answer


def events(api: Api, **body: Any) -> list[dict[str, Any]]:
    response = api.http.post("/completion", json={"prompt": "Hello", "temperature": 0, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = [json.loads(data) for data in events_of(response.text.split("\n"))]
    for event in found:
        door.LlamacppEvent.model_validate(event)
    return found


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_an_answer(api: Api, path: str) -> None:
    api.engine.cached = 2
    answer = ask(api, path, n_predict=4, return_tokens=True)
    assert (answer["content"], answer["tokens"]) == ("".join(WORDS), ids_of("".join(WORDS)))
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["model"], answer["prompt"], answer["truncated"]) == (MODEL, "Hello", False)
    assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["tokens_cached"]) == (5, 4, 2)
    timings = answer["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, 3, 4)
    assert timings["predicted_per_second"] == pytest.approx(4000 / timings["predicted_ms"])
    assert timings["prompt_per_token_ms"] == pytest.approx(timings["prompt_ms"] / 3)
    assert answer["generation_settings"]["n_predict"] == 4 and answer["generation_settings"]["temperature"] == 0


def test_how_an_answer_ends(api: Api) -> None:
    whole = ask(api)
    assert (whole["content"], whole["stop_type"], whole["has_new_line"]) == (SAID, "eos", True)
    assert whole["tokens"] == []  # nobody asked for them
    word = ask(api, stop=["nothing", " gam"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("Alpha beta, DEF", "word", " gam")
    full = ask(api, ignore_eos=True)
    assert (full["stop_type"], full["truncated"], full["tokens_predicted"]) == ("limit", True, 507)
    assert ask(api, ignore_eos=True, n_predict=100_000)["tokens_predicted"] == 507


def test_a_stream(api: Api) -> None:
    parts = events(api, n_predict=4)
    assert [(part["content"], part["tokens"], part["stop"]) for part in parts] == [
        *((word, ids_of(word), False) for word in WORDS),
        ("", [], True),
    ]
    assert [part["tokens_predicted"] for part in parts] == [1, 2, 3, 4, 4]
    assert (parts[-1]["stop_type"], parts[-1]["timings"]["predicted_n"]) == ("limit", 4)
    whole = events(api)
    assert "".join(part["content"] for part in whole) == SAID and whole[-2]["tokens"] == [EOS]


def test_prompts_of_every_kind(api: Api) -> None:
    for prompt, ids in (
        ("ab", [b"ab"]),
        ([97, 98], [b"ab"]),
        ([97, "bc", 100], [b"abcd"]),
        (["a", 98], [b"ab"]),
        ({"prompt_string": "ab"}, [b"ab"]),
        (["ab"], [b"ab"]),
        (["ab", "cd"], [b"ab", b"cd"]),
        (["ab", [99, "d"], {"prompt_string": "e"}, [102]], [b"ab", b"cd", b"e", b"f"]),
    ):
        api.engine.seen.clear()
        answer = ask(api, prompt=prompt, n_predict=1)
        assert [request.prompt for request in api.engine.seen] == [tuple(text) for text in ids]
        answers = answer if isinstance(answer, list) else [answer]
        assert [one["index"] for one in answers] == list(range(len(ids)))
        assert isinstance(answer, list) == (len(ids) > 1)
        assert [one["prompt"] for one in answers] == [text.decode() for text in ids]
    streamed = events(api, prompt=["ab", "cd"], n_predict=2)
    for index in (0, 1):
        mine = [part for part in streamed if part["index"] == index]
        assert "".join(part["content"] for part in mine) == "Alpha beta" and mine[-1]["stop"]


def test_several_answers_to_a_prompt(api: Api) -> None:
    answers = ask(api, prompt=["a", "b"], n_cmpl=2, temperature=1, seed=1, n_predict=2)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in answers] == ["a", "a", "b", "b"]
    assert answers[0]["content"] != answers[1]["content"]


def test_a_prompt_can_be_read_only(api: Api) -> None:
    answer = ask(api, n_predict=0)
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert (answer["tokens_evaluated"], answer["timings"]["predicted_n"]) == (5, 0)
    (last,) = events(api, n_predict=0)
    assert last["stop"] and api.engine.seen[-1].max_tokens == 0


def test_probabilities(api: Api) -> None:
    answer = ask(api, n_predict=4, n_probs=2)
    scores = answer["completion_probabilities"]
    assert [(score["id"], score["token"], score["logprob"]) for score in scores] == [
        (id, word, -0.25) for id, word in zip(ids_of("".join(WORDS)), WORDS, strict=True)
    ]
    assert scores[0]["bytes"] == list(b"Alpha")
    assert [(rival["token"], rival["logprob"]) for rival in scores[0]["top_logprobs"]] == [
        ("Alpha", -0.25),
        (" beta", -2.0),
    ]
    streamed = events(api, n_predict=4, n_probs=2)
    assert [score for part in streamed for score in part.get("completion_probabilities", [])] == scores
    assert "completion_probabilities" not in ask(api, n_predict=1)


def test_parameters_reach_the_engine(api: Api) -> None:
    ask(
        api,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        repeat_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=0.75,
        seed=3,
        logit_bias=[[65, 1.5], [66, False], ["ab", -2]],
    )
    request = api.engine.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, 0.5, 0.75)
    assert request.seed == 3 and sampling.logit_bias == {65: 1.5, 66: -100.0, 97: -2.0, 98: -2.0}
    ask(api, temperature=None, seed=0xFFFFFFFF, logit_bias={"65": 1, "a": 2}, repeat_penalty=2, repeat_last_n=0)
    request = api.engine.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert request.seed != 0xFFFFFFFF and sampling.logit_bias == {65: 1, 97: 2} and sampling.repetition_penalty == 1
    ask(api, temperature=-1, top_k=-5)
    assert api.engine.seen[-1].sampling.greedy


@pytest.mark.parametrize(
    "body, says",
    [
        ({"prompt": None}, "prompt must be"),
        ({"prompt": 4}, "prompt must be"),
        ({"prompt": []}, "empty"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": [[1, {}]]}, "prompt must be"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [99999]}, "out of vocabulary"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "takes text only"),
        ({"grammar": "root ::= [a-z]"}, "grammar"),
        ({"json_schema": {}}, "json_schema"),
        ({"mirostat": 2}, "mirostat"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dry_multiplier": 1.0}, "dry_multiplier"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"repeat_penalty": 0}, "repeat_penalty must be greater than zero"),
        ({"n_cmpl": 2}, "n_cmpl must be 1 when using greedy"),
        ({"logit_bias": 3}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"n_predict": "4"}, "n_predict"),
        ({"stop": [""]}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(api: Api, body: dict[str, Any], says: str, stream: bool) -> None:
    response = api.http.post("/completion", json={"prompt": "Hello", "temperature": 0, **body, "stream": stream})
    error = response.json()
    door.LlamacppError.model_validate(error)
    assert response.status_code == error["error"]["code"] == 400
    assert error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]
    api.alive()


@pytest.mark.parametrize("prompt", ["x" * 600, ["x" * 600], [97] * 600, ["x" * 100_000, 97]])
def test_prompts_that_are_too_long_are_of_their_own_type(api: Api, prompt: Any) -> None:
    response = api.http.post("/completion", json={"prompt": prompt})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert "maximum context length is 512 tokens" in error["message"]


def test_other_errors(api: Api) -> None:
    none = api.http.post("/completion", json={"prompt": "a", "model": "none"})
    assert (none.status_code, none.json()["error"]["type"]) == (404, "not_found_error")
    api.engine.fail_after = 2
    failed = api.http.post("/completion", json={"prompt": "a", "temperature": 0})
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    streamed = api.http.post("/completion", json={"prompt": "a", "temperature": 0, "stream": True})
    *parts, last = [json.loads(data) for data in events_of(streamed.text.split("\n"))]
    assert [part["content"] for part in parts] == WORDS[:2]
    assert last["error"]["code"] == 500 and "not finite" in last["error"]["message"]


def test_fields_without_an_effect_are_named(api: Api) -> None:
    calm = {"cache_prompt": True, "mirostat": 0, "id_slot": -1, "typical_p": 1.0, "grammar": "", "n_keep": 0}
    body = {"prompt": "a", **calm, "samplers": ["top_k"], "repeat_last_n": 64, "t_max_predict_ms": 5, "n_predit": 2}
    response = api.http.post("/completion", json=body)
    assert response.status_code == 200
    assert response.headers["x-octavo-warnings"] == "ignored: n_predit, repeat_last_n, samplers, t_max_predict_ms"


def test_props(api: Api) -> None:
    props = api.http.get("/props").json()
    door.LlamacppProps.model_validate(props)
    assert (props["model_alias"], props["eos_token"]) == (MODEL, "<|im_end|>")
    assert "im_start" in props["chat_template"] and props["build_info"].startswith("octavo-")
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512 and settings["params"]["temperature"] == 0.8
    asked = ask(api, temperature=None, n_predict=1)["generation_settings"]
    assert {**asked, "n_predict": -1, "seed": 0xFFFFFFFF} == settings["params"]


def test_a_template_is_applied(api: Api) -> None:
    messages = [{"role": "user", "content": "<|im_end|>Hi"}]
    answer = api.http.post("/apply-template", json={"messages": messages})
    assert answer.json() == {"prompt": "<|im_start|>user\n<|im_end|>Hi<|im_end|>\n<|im_start|>assistant\n"}
    closed = api.http.post("/apply-template", json={"messages": messages, "add_generation_prompt": False, "x": 1})
    assert closed.json()["prompt"].endswith("Hi<|im_end|>\n") and closed.headers["x-octavo-warnings"] == "ignored: x"
    refused = api.http.post("/apply-template", json={"messages": [{"role": "system", "content": "forbidden"}]})
    assert refused.status_code == 400 and "System role not supported" in refused.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request(api: Api) -> None:
    api.engine.pause = 0.02
    with api.http.stream("POST", "/completion", json={"prompt": "a", "stream": True}) as response:
        next(response.iter_raw())
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


def test_greedy_answers_of_a_real_model(real: Real) -> None:
    prompt = "The three primary colours are"
    expected = real.complete(prompt, max_tokens=24)["choices"][0]["text"]
    ids = real.tokens(prompt)
    for form in (prompt, ids, [*ids[:2], prompt.removeprefix("The three")]):
        answer = real.http.post("/completion", json={"prompt": form, "n_predict": 24, "temperature": 0}).json()
        assert (answer["content"], answer["model"]) == (expected, NAME)
    streamed = real.http.post("/completion", json={"prompt": prompt, "n_predict": 24, "temperature": 0, "stream": True})
    parts = [json.loads(data) for data in events_of(streamed.text.split("\n"))]
    assert "".join(part["content"] for part in parts) == expected

    chat = [{"role": "user", "content": "Name three colours."}]
    templated = real.http.post("/apply-template", json={"messages": chat}).json()["prompt"]
    answer = httpx.post(
        f"{real.url}/completion", json={"prompt": templated, "n_predict": 24, "temperature": 0}, timeout=60
    ).json()
    assert answer["content"] == real.chat(chat, max_tokens=24)["choices"][0]["message"]["content"]
