"""Stop strings, streams and detokenizing with real models."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from tests.cases.conftest import LINE_BREAK, SAID, SAID_IDS
from tests.cases.real import NAME, Real

PROMPT = "Once upon a time there was a little girl who"


@pytest.fixture(scope="module")
def baseline(real: Real) -> tuple[str, list[str], list[int]]:
    """(text, tokens, where each token starts in the text) of a greedy answer."""
    choice = real.complete(PROMPT, max_tokens=24, logprobs=0)["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    return choice["text"], tokens, choice["logprobs"]["text_offset"]


def inside(baseline: tuple[str, list[str], list[int]], first: int, last: int) -> str:
    """Text that starts strictly inside the first long token from `first` on and ends so from `last` on."""
    text, tokens, starts = baseline
    a = next(i for i in range(first, len(tokens)) if len(tokens[i]) > 2)
    b = next(i for i in range(max(last, a + 1), len(tokens)) if len(tokens[i]) > 2)
    return text[starts[a] + 1 : starts[b] + 2]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 4), (2, 6), (10, 15)])
def test_stop_01_a_stop_string_that_ends_inside_a_token(
    real: Real, baseline: tuple[str, list[str], list[int]], first: int, last: int
) -> None:
    stop = inside(baseline, first, last)
    choice = real.complete(PROMPT, max_tokens=24, stop=[stop])["choices"][0]
    assert choice["text"] == baseline[0][: baseline[0].index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(("first", "last"), [(2, 5), (4, 9)])
def test_stop_02_no_part_of_a_long_stop_string_is_streamed(
    real: Real, baseline: tuple[str, list[str], list[int]], first: int, last: int
) -> None:
    stop = inside(baseline, first, last)
    expected = baseline[0][: baseline[0].index(stop)]
    shown, finish = "", []
    for chunk in real.client.completions.create(
        model=NAME, prompt=PROMPT, temperature=0, max_tokens=24, stop=[stop], stream=True
    ):
        shown += chunk.choices[0].text
        assert expected.startswith(shown), "a part of the stop string was sent"
        finish += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (shown, finish) == (expected, ["stop"])


def test_stop_05_what_is_shown_of_a_stop(real: Real, baseline: tuple[str, list[str], list[int]]) -> None:
    text, tokens, starts = baseline
    at = next(i for i in range(6, 20) if tokens[i] not in tokens[:i])
    [token] = real.tokens(tokens[at])
    for shown, end in ((False, starts[at]), (True, starts[at] + len(tokens[at]))):
        choice = real.complete(PROMPT, max_tokens=24, stop_token_ids=[token], include_stop_str_in_output=shown)[
            "choices"
        ][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:end], "stop", token)
    stop = inside(baseline, 4, 7)
    choice = real.complete(PROMPT, max_tokens=24, stop=[stop], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == text[: text.index(stop) + len(stop)]


def test_stop_05_end_of_sequence_has_no_reason(scripted: Real) -> None:
    choice = scripted.complete([LINE_BREAK], max_tokens=50)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (SAID, "stop", None)


def test_stop_07_a_stop_on_the_last_token(
    real: Real, scripted: Real, baseline: tuple[str, list[str], list[int]]
) -> None:
    text, tokens, starts = baseline
    at = next(i for i in range(5, 20) if len(tokens[i]) > 2 and tokens[i] not in text[: starts[i]])
    choice = real.complete(PROMPT, max_tokens=at + 1, stop=[tokens[at]])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: starts[at]], "stop")
    whole = len(SAID_IDS) + 1
    ends = [scripted.complete([LINE_BREAK], max_tokens=k)["choices"][0]["finish_reason"] for k in (whole, whole - 1)]
    assert ends == ["stop", "length"]


def test_stop_08_characters_of_several_tokens_stream_whole(scripted: Real) -> None:
    whole = scripted.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Say it"}])
    assert whole.choices[0].message.content == SAID
    with scripted.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Say it"}], "stream": True}
    ) as response:
        raw = response.read()
    assert b"\xef\xbf\xbd" not in raw and "\\ufffd" not in raw.decode("utf-8")
    shown = [
        chunk.choices[0].delta.content or ""
        for chunk in scripted.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Say it"}], stream=True
        )
    ]
    assert "".join(shown) == SAID and not any("\ufffd" in part for part in shown)
    assert shown.count("🙂") == 1, "one character comes in one piece"


def test_stop_10_spaces_are_kept(gemma: LLM) -> None:
    tokenizer = gemma.get_tokenizer()
    [output] = gemma.generate("The sky is", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    assert "The sky is" + output.outputs[0].text == tokenizer.decode(ids)
    for text in ("a    b", " lead"):
        tail = tokenizer.encode(text, add_special_tokens=False)
        forced = [
            gemma.generate(
                {"prompt_token_ids": [*tokenizer.encode("x"), *tail[:i]]},
                SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[tail[i]]),
                use_tqdm=False,
            )[0]
            .outputs[0]
            .text
            for i in range(len(tail))
        ]
        assert "".join(forced) == text


def test_stop_10_runs_of_spaces_in_a_stream(scripted: Real) -> None:
    parts = [
        chunk.choices[0].text
        for chunk in scripted.client.completions.create(model=NAME, prompt=[LINE_BREAK], max_tokens=50, stream=True)
    ]
    assert "".join(parts) == SAID and SAID.endswith("    b")


def test_stop_14_echo_in_a_stream(real: Real) -> None:
    body = {"temperature": 0.7, "seed": 4, "max_tokens": 7, "n": 2}
    plain = [choice["text"] for choice in real.complete(PROMPT, **body)["choices"]]
    shown: dict[int, list[str]] = {0: [], 1: []}
    for chunk in real.client.completions.create(model=NAME, prompt=PROMPT, echo=True, stream=True, **body):
        for choice in chunk.choices:
            shown[choice.index].append(choice.text)
    assert ["".join(shown[index]) for index in range(2)] == [PROMPT + text for text in plain]
    assert all(parts[0].startswith(PROMPT) for parts in shown.values())


def test_stop_15_text_with_a_stop_string_that_never_comes(
    real: Real, baseline: tuple[str, list[str], list[int]]
) -> None:
    stop = "\n\n\n\n"
    tokens, shown = 0, ""
    for chunk in real.client.completions.create(
        model=NAME, prompt=PROMPT, temperature=0, max_tokens=24, stop=[stop], logprobs=0, stream=True
    ):
        if chunk.choices[0].logprobs is not None:
            tokens += len(chunk.choices[0].logprobs.tokens or ())
        shown += chunk.choices[0].text
        assert len("".join(baseline[1][:tokens])) - len(shown) <= len(stop) - 1
    assert shown == baseline[0]
