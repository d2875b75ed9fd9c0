"""Every field that vLLM and OpenAI know is honoured, refused, or named in `warnings`; none is silently dropped."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import httpx
import pytest

from octavo.api import call
from octavo.api.schemas import MOST_WARNINGS
from tests.api.conftest import Api
from tests.api.harness import ScriptEngine, parts_of, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = (COMPLETIONS, CHAT)
Fate = Literal["honoured", "refused", "warned", "silent"]


class Row(NamedTuple):
    field: str
    value: Any
    fate: Fate
    paths: tuple[str, ...] = BOTH
    beside: dict[str, Any] = {}
    """Other fields it needs."""


SAMPLED = {"temperature": 1}
ROWS = (
    Row("model", "tiny", "honoured"),
    Row("n", 2, "honoured", beside=SAMPLED),
    Row("best_of", 2, "honoured", (COMPLETIONS,), SAMPLED),
    Row("best_of", 2, "refused", (CHAT,), SAMPLED),
    Row("max_tokens", 3, "honoured"),
    Row("max_completion_tokens", 3, "honoured", (CHAT,)),
    Row("max_completion_tokens", 3, "warned", (COMPLETIONS,)),
    Row("min_tokens", 3, "honoured"),
    Row("temperature", 0.5, "honoured"),
    Row("top_p", 0.5, "honoured"),
    Row("top_k", 5, "honoured"),
    Row("min_p", 0.5, "honoured"),
    Row("presence_penalty", 1, "honoured"),
    Row("frequency_penalty", 1, "honoured"),
    Row("repetition_penalty", 1.5, "honoured"),
    Row("seed", 3, "honoured"),
    Row("stop", ["x"], "honoured"),
    Row("stop_token_ids", [5], "honoured"),
    Row("include_stop_str_in_output", True, "honoured"),
    Row("ignore_eos", True, "honoured", beside={"max_tokens": 3}),
    Row("skip_special_tokens", False, "honoured"),
    Row("spaces_between_special_tokens", False, "honoured"),
    Row("truncate_prompt_tokens", 3, "honoured"),
    Row("truncation_side", "left", "honoured"),
    Row("truncation_side", "right", "refused"),
    Row("allowed_token_ids", [5], "honoured"),
    Row("bad_words", ["x"], "honoured"),
    Row("logit_bias", {"5": 1}, "honoured"),
    Row("prompt_logprobs", 1, "honoured"),
    Row("logprobs", 1, "honoured", (COMPLETIONS,)),
    Row("logprobs", True, "honoured", (CHAT,)),
    Row("top_logprobs", 1, "honoured", (CHAT,), {"logprobs": True}),
    Row("top_logprobs", 1, "warned", (COMPLETIONS,)),
    Row("logprob_token_ids", [5], "honoured", beside={"logprobs": 1}, paths=(COMPLETIONS,)),
    Row("logprob_token_ids", [5], "honoured", beside={"logprobs": True}, paths=(CHAT,)),
    Row("echo", True, "honoured"),
    Row("suffix", "x", "refused", (COMPLETIONS,)),
    Row("stream_options", {}, "honoured", beside={"stream": True}),
    Row("stream_options", {}, "refused"),
    Row("add_special_tokens", False, "honoured"),
    Row("add_special_tokens", True, "honoured", (COMPLETIONS,)),
    Row("add_special_tokens", True, "refused", (CHAT,)),
    Row("return_tokens_as_token_ids", True, "honoured"),
    Row("return_token_ids", True, "honoured"),
    Row("return_token_offsets", True, "refused"),
    Row("return_prompt_text", True, "refused", (CHAT,)),
    Row("request_id", "mine", "honoured"),
    Row("cache_salt", "mine", "honoured"),
    Row("priority", 0, "honoured"),
    Row("priority", 3, "warned"),
    Row("repetition_detection", {"max_pattern_size": 3}, "honoured"),
    Row("timeout", 100, "honoured"),
    Row("thinking_token_budget", -1, "honoured"),
    Row("thinking_token_budget", 5, "refused"),
    Row("response_format", {"type": "text"}, "honoured"),
    Row("response_format", {"type": "json_object"}, "refused"),
    Row("structured_outputs", {"json": {}}, "refused"),
    Row("structural_tag", "x", "refused"),
    Row("guided_json", {}, "refused"),
    Row("guided_regex", "x", "refused"),
    Row("guided_choice", ["x"], "refused"),
    Row("guided_grammar", "x", "refused"),
    Row("guided_json_object", True, "refused"),
    Row("guided_decoding_backend", "x", "warned"),
    Row("guided_whitespace_pattern", "x", "warned"),
    Row("use_beam_search", True, "refused"),
    Row("use_beam_search", False, "silent"),
    Row("length_penalty", 1.0, "silent"),
    Row("length_penalty", 2.0, "warned"),
    Row("early_stopping", True, "warned"),
    Row("beam_width", 3, "warned"),
    Row("logits_processors", ["x"], "refused"),
    Row("prompt_embeds", "x", "refused"),
    Row("mm_payload", {"a": 1}, "refused"),
    Row("media_io_kwargs", {"a": 1}, "warned"),
    Row("mm_processor_kwargs", {"a": 1}, "warned"),
    Row("kv_transfer_params", {"a": 1}, "refused"),
    Row("ec_transfer_params", {"a": 1}, "refused"),
    Row("vllm_xargs", {"a": 1}, "refused"),
    Row("watermarking", True, "refused"),
    Row("stream_interval", 1, "silent"),
    Row("stream_interval", 5, "warned"),
    Row("routed_experts_prompt_start", 0, "warned"),
    Row("session_id", "x", "silent"),
    Row("user", "x", "silent"),
    Row("metadata", {"a": "b"}, "silent"),
    Row("safety_identifier", "x", "silent"),
    Row("prompt_cache_key", "x", "silent"),
    Row("prediction", {"type": "content", "content": "x"}, "silent"),
    Row("service_tier", "auto", "silent"),
    Row("service_tier", "priority", "warned"),
    Row("store", False, "silent"),
    Row("store", True, "warned"),
    Row("verbosity", "low", "warned"),
    Row("modalities", ["text"], "honoured", (CHAT,)),
    Row("modalities", ["text", "audio"], "refused", (CHAT,)),
    Row("audio", {"voice": "x"}, "refused"),
    Row("web_search_options", {"a": 1}, "refused"),
    Row("functions", [{"name": "f"}], "refused"),
    Row("function_call", "auto", "refused"),
    Row("tools", [], "honoured", (CHAT,)),
    Row("tool_choice", "none", "honoured", (CHAT,)),
    Row("tool_choice", "required", "refused", (CHAT,)),
    Row("parallel_tool_calls", True, "silent", (CHAT,)),
    Row("parallel_tool_calls", False, "warned", (CHAT,)),
    Row("documents", [{"title": "a", "text": "b"}], "honoured", (CHAT,)),
    Row("reasoning_effort", "low", "honoured", (CHAT,)),
    Row("include_reasoning", True, "silent", (CHAT,)),
    Row("include_reasoning", False, "warned", (CHAT,)),
    Row("add_generation_prompt", False, "honoured", (CHAT,)),
    Row("continue_final_message", True, "honoured", (CHAT,)),
    Row("chat_template", "x", "refused", (CHAT,)),
    Row("chat_template_kwargs", {"a": 1}, "honoured", (CHAT,)),
    Row("temprature", 0.5, "warned"),
    Row("extra_body", {"top_k": 1}, "warned"),
)
CASES = [pytest.param(row, path, id=f"{path[4:8]}-{row.field}-{row.fate}") for row in ROWS for path in row.paths]


@pytest.mark.parametrize("row, path", CASES)
def test_every_field_is_honoured_refused_or_warned_about(api: Api, row: Row, path: str) -> None:
    ask = api.completion if path == COMPLETIONS else api.chat
    response = ask(**{"max_tokens": 8, **row.beside, row.field: row.value})
    if row.fate == "refused":
        assert response.status_code == 400 and response.json()["error"]["param"] == row.field
        return
    assert response.status_code == 200, response.text
    warned = f"ignored: {row.field}"
    assert response.headers.get("x-octavo-warnings") == (warned if row.fate == "warned" else None)
    if row.fate == "warned":
        [sentence] = response.json()["warnings"]
        assert f"`{row.field}`" in sentence


SAMPLING = [
    row
    for row in ROWS
    if row.fate == "honoured" and row.field in {"min_p", "top_k", "top_p", "presence_penalty", "frequency_penalty"}
]


@pytest.mark.parametrize("path", BOTH)
def test_sampling_fields_reach_the_engine(api: Api, path: str) -> None:
    ask = api.completion if path == COMPLETIONS else api.chat
    asked = {row.field: row.value for row in SAMPLING} | {"temperature": 0.5, "seed": 3, "min_tokens": 2}
    more = {"stop_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words": ["x"], "repetition_penalty": 1.5}
    assert ask(max_tokens=4, logit_bias={"5": 1}, **asked, **more).status_code == 200
    sampling = api.engine.seen[0].sampling
    assert {name: getattr(sampling, name) for name in (*asked, *more)} == asked | more
    assert sampling.logit_bias == {5: 1.0}


def test_typos_are_met_with_the_right_name(api: Api) -> None:
    body = {"max_token": 3, "stream_option": {}, "repeat_penalty": 1.5, "foo": 1, "temperatur": None}
    response = api.completion(max_tokens=1, **body)
    said = " ".join(response.json()["warnings"])
    for right in ("max_tokens", "stream_options", "repetition_penalty"):
        assert f"Did you mean `{right}`?" in said
    assert "`foo` is not known here and was ignored." in said and "temperatur`" not in said


def test_fields_inside_of_fields_are_told_too(api: Api) -> None:
    chunks = api.stream(CHAT, max_tokens=2, stream_options={"includ_usage": True})
    assert chunks[0]["warnings"] == [
        "The field `stream_options.includ_usage` is not known here and was ignored. "
        "Did you mean `stream_options.include_usage`?"
    ]
    response = api.completion(max_tokens=1, repetition_detection={"max_pattern_size": 2, "min_counts": 3})
    assert response.headers["x-octavo-warnings"] == "ignored: repetition_detection.min_counts"


def test_many_unknown_fields_are_counted(api: Api) -> None:
    response = api.completion(max_tokens=1, **{f"field{number:05}": 1 for number in range(20_000)})
    warnings = response.json()["warnings"]
    assert len(warnings) == MOST_WARNINGS + 1 and warnings[-1].startswith(str(20_000 - MOST_WARNINGS))
    assert len(response.headers["x-octavo-warnings"]) < 2000


@pytest.mark.parametrize("name", [" ", "a b", "", "\x7f", "é", "a\nb", "\x00", "🙂"])
@pytest.mark.parametrize("stream", [False, True])
def test_any_field_name_may_come(api: Api, name: str, stream: bool) -> None:
    shown = "".join(c if "!" <= c <= "~" else "?" for c in name) or '""'
    response = api.completion(max_tokens=1, stream=stream, **{name: 1})
    assert response.status_code == 200
    assert response.headers["x-octavo-warnings"] == f"ignored: {shown}"


@pytest.mark.parametrize(
    "field, value, cap, extra",
    [
        ("n", 16385, 16384, SAMPLED),
        ("best_of", 16385, 16384, SAMPLED),
        ("logprobs", 21, 20, {}),
        ("prompt_logprobs", 21, 20, {}),
        ("stop", ["x"] * 65, 64, {}),
        ("stop_token_ids", [5] * 1025, 1024, {}),
        ("logit_bias", {str(i): 1 for i in range(4097)}, 4096, {}),
        ("bad_words", ["x"] * 129, 128, {}),
        ("allowed_token_ids", [5] * 5000, 267, {}),
        ("logprob_token_ids", list(range(129)), 128, {}),
        ("prompt", [5] * 600, 512, {}),
        ("prompt", "x" * 600, 512, {}),
        ("prompt", ["x"] * 1025, 1024, {}),
        ("max_tokens", 513, 512, {}),
        ("truncate_prompt_tokens", 513, 512, {}),
        ("cache_salt", "x" * 129, 128, {}),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_caps_are_named(api: Api, field: str, value: Any, cap: int, extra: dict[str, Any]) -> None:
    response = api.completion(**extra, **{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field and str(cap) in error["message"]
    api.alive()


@pytest.mark.parametrize(
    "field, value",
    [("stop", ["x" * 100, "y" * 200]), ("bad_words", ["z" * 300]), ("allowed_token_ids", [5] * 200)],
    ids=["stop", "bad_words", "allowed_token_ids"],
)
def test_settings_times_prompts_are_capped(
    api: Api, monkeypatch: pytest.MonkeyPatch, field: str, value: list[Any]
) -> None:
    size = sum(map(len, value)) if isinstance(value[0], str) else len(value)
    monkeypatch.setattr(call, "MOST_SETTINGS", 3 * size)
    assert api.completion(prompt=["a"] * 3, max_tokens=1, **{field: value}).status_code == 200
    response = api.completion(prompt=["a"] * 4, max_tokens=1, **{field: value})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"have {size} characters and entries together, times 4 prompts: more than {3 * size}" in message
    monkeypatch.setattr(call, "MOST_SETTINGS", size - 1)
    assert api.chat(max_tokens=1, **{field: value}).status_code == 400
    api.alive()


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan")])
def test_wrong_timeouts_are_refused(api: Api, timeout: Any) -> None:
    raw = json.dumps({"prompt": "a", "timeout": timeout})
    response = api.http.post(COMPLETIONS, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "timeout"


def test_other_keys_of_messages_reach_the_template(api: Api) -> None:
    engine = ScriptEngine()
    with running(parts_of(engine), trust_request_chat_template=True) as url:
        message = {"role": "user", "content": "a", "mood": "calm", "empty": None, "name": "me"}
        body = {
            "messages": [message],
            "max_tokens": 1,
            "chat_template": "{{ messages[0].mood }}-{{ messages[0].name }}-{{ messages[0].empty is defined }}",
        }
        assert httpx.post(f"{url}{CHAT}", json=body).status_code == 200
    assert bytes(engine.seen[0].prompt).decode() == "calm-me-False"
    for name in ("name", "tool_call_id"):
        response = api.chat(messages=[{"role": "user", "content": "a", name: 3}])
        assert response.status_code == 400 and response.json()["error"]["param"] == f"messages[0].{name}"
