"""Stop strings, streaming and detokenizing."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api, text_of
from tests.api.harness import EOS, SAID, WORDS, ids_of, until

BOTH = ("/v1/completions", "/v1/chat/completions")


def message(api: Api, path: str, **body: object) -> tuple[str, str, object]:
    """(text, finish reason, stop reason) of the only choice."""
    choice = (api.completion(**body) if path.endswith("/v1/completions") else api.chat(**body)).json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], choice["stop_reason"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stop", ["DE", "mma 🙂 na", "漢", "a two", " ", "naïve"])
def test_stop_01_a_stop_string_inside_tokens_is_seen(api: Api, path: str, stop: str) -> None:
    expected = SAID[: SAID.index(stop)] if stop in SAID else SAID
    reason = stop if stop in SAID else None
    assert message(api, path, max_tokens=200, stop=[stop]) == (expected, "stop", reason)


@pytest.mark.parametrize("path", BOTH)
def test_stop_02_no_part_of_a_stop_string_is_streamed(api: Api, path: str) -> None:
    stop = "DEF gamma 🙂 na"
    chunks = api.stream(path, max_tokens=200, stop=[stop])
    assert text_of(chunks) == SAID[: SAID.index(stop)]


@pytest.mark.parametrize("path", BOTH)
def test_stop_02_a_stop_string_ends_the_work_of_the_engine(api: Api, path: str) -> None:
    api.engine.pause = 0.005
    message(api, path, max_tokens=400, stop=["beta"], ignore_eos=True)
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


@pytest.mark.parametrize("stop", ["", ["", "x"]])
def test_stop_04_empty_stop_strings_are_refused(api: Api, stop: object) -> None:
    response = api.completion(stop=stop)
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop"


@pytest.mark.parametrize("stop", [[], None])
def test_stop_04_no_stop_strings_are_as_none(api: Api, stop: object) -> None:
    assert message(api, BOTH[0], max_tokens=200, stop=stop) == (SAID, "stop", None)


def test_stop_04_there_is_a_limit_to_stop_strings(api: Api) -> None:
    assert api.completion(stop=["x"] * 65).json()["error"]["param"] == "stop"


def test_stop_05_stop_string_in_output(api: Api) -> None:
    found = message(api, BOTH[0], max_tokens=200, stop=["gam"], include_stop_str_in_output=True)
    assert found == (SAID[: SAID.index("gam") + 3], "stop", "gam")


def test_stop_05_stop_token_and_its_reason(api: Api) -> None:
    [token] = ids_of(" gamma")
    hidden = message(api, BOTH[1], max_tokens=200, stop_token_ids=[token])
    assert hidden == ("Alpha beta, DEF", "stop", token)
    shown = message(api, BOTH[1], max_tokens=200, stop_token_ids=[token], include_stop_str_in_output=True)
    assert shown == ("Alpha beta, DEF gamma", "stop", token)


@pytest.mark.parametrize("path", BOTH)
def test_stop_05_eos_has_no_stop_reason_and_no_text(api: Api, path: str) -> None:
    assert message(api, path, max_tokens=200) == (SAID, "stop", None)


@pytest.mark.parametrize("path", BOTH)
def test_stop_07_a_stop_that_falls_on_the_last_token_is_a_stop(api: Api, path: str) -> None:
    upto = len(ids_of("Alpha beta, DEF gamma"))
    assert message(api, path, max_tokens=upto, stop=["gamma"]) == ("Alpha beta, DEF ", "stop", "gamma")
    assert message(api, path, max_tokens=len(ids_of(SAID)) + 1) == (SAID, "stop", None)
    assert message(api, path, max_tokens=len(ids_of(SAID))) == (SAID, "length", None)


@pytest.mark.parametrize("path", BOTH)
def test_stop_08_characters_of_several_tokens_stream_whole(api: Api, path: str) -> None:
    chunks = api.stream(path, max_tokens=200)
    assert text_of(chunks) == SAID
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert "�" not in str(choice.get("text", "")) + str(choice.get("delta", ""))


def test_stop_08_a_cut_character_is_shown_as_such(api: Api) -> None:
    upto = len(ids_of("Alpha beta, DEF gamma ")) + 2
    text, finish, _ = message(api, BOTH[0], max_tokens=upto)
    assert text.startswith("Alpha beta, DEF gamma ") and finish == "length"
    assert text_of(api.stream(BOTH[0], max_tokens=upto)) == text


@pytest.mark.parametrize("path", BOTH)
def test_stop_10_runs_of_spaces_are_kept(api: Api, path: str) -> None:
    api.engine.script = lambda request, choice: ids_of(" a    b ")
    assert message(api, path, max_tokens=50)[0] == " a    b "
    assert text_of(api.stream(path, max_tokens=50)) == " a    b "


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("body", [{"max_tokens": 200}, {"max_tokens": 3}, {"max_tokens": 9, "n": 2, "temperature": 1}])
def test_stop_12_each_choice_has_one_finish_reason(api: Api, path: str, body: dict[str, object]) -> None:
    reasons: dict[int, list[str]] = {}
    for chunk in api.stream(path, **body):
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    expected = "stop" if body == {"max_tokens": 200} else "length"
    assert reasons == {index: [expected] for index in range(int(str(body.get("n", 1))))}


@pytest.mark.parametrize("n", [1, 2])
def test_stop_14_echo_in_a_stream(api: Api, n: int) -> None:
    body = {"prompt": "San Francisco is a", "max_tokens": 7, "n": n, "temperature": 0 if n == 1 else 1, "seed": 4}
    plain = api.completion(**body).json()["choices"]
    chunks = api.stream(BOTH[0], echo=True, **body)
    for index in range(n):
        assert text_of(chunks, index) == "San Francisco is a" + plain[index]["text"]
        first = next(c for chunk in chunks for c in chunk["choices"] if c["index"] == index)
        assert first["text"].startswith("San Francisco is a")
    whole = api.completion(echo=True, **body).json()["choices"]
    assert [c["text"] for c in whole] == ["San Francisco is a" + c["text"] for c in plain]


def test_stop_15_no_more_is_held_back_than_a_stop_string_needs(api: Api) -> None:
    stop = "\n\n\n\n"
    chunks = api.stream(BOTH[0], max_tokens=200, stop=[stop], logprobs=0)
    assert text_of(chunks) == SAID
    tokens, shown = 0, ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens += len(choice["logprobs"]["tokens"])
            shown += choice["text"]
            said = bytes(b for token in ids_of(SAID)[:tokens] for b in _bytes(token)).decode("utf-8", "ignore")
            assert len(said) - len(shown) <= len(stop) - 1


def _bytes(token: int) -> bytes:
    return bytes([token]) if token < 256 else b"" if token == EOS else WORDS[token - 256].encode()
