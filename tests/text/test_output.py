from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.text.output import Piece, RequestOutputBuilder
from octavo.types import Delta, FinishReason, Request, TokenLogprobs
from tests.text import small

TOKENIZER = small.byte_level()
EOS = 256 + len(small.WORDS) + 1
WORD = {word: 256 + i for i, word in enumerate(small.WORDS)}


def scores(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -float(i), 1, ((token, -float(i)),)) for i, token in enumerate(tokens)]


def answer(
    tokens: list[int],
    finish: FinishReason | None = "length",
    *,
    sizes: list[int] | None = None,
    stop_reason: int | None = None,
    prompt: tuple[int, ...] = (65,),
    **sampling: Any,
) -> tuple[list[Piece], Piece]:
    """The pieces of one choice, and all of them joined."""
    request = Request(
        id="r",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=1000, logprobs=1, **sampling),
        seed=1,
        max_tokens=1000,
        eos_ids=(EOS,),
    )
    builder = RequestOutputBuilder(request, TOKENIZER)
    pieces: list[Piece] = []
    at, all_scores = 0, scores(tokens)
    for size in [*(sizes or [1] * len(tokens)), len(tokens)]:
        if at >= len(tokens):
            break
        end = min(at + size, len(tokens))
        last = end == len(tokens)
        pieces.append(
            builder.push(
                Delta(
                    request="r",
                    start=at,
                    tokens=tokens[at:end],
                    logprobs=all_scores[at:end],
                    finish=finish if last else None,
                    stop_reason=stop_reason if last else None,
                )
            )
        )
        at = end
    whole = Piece(0, logprobs=[])
    for piece in pieces:
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs or []  # type: ignore[operator]
        whole.stopped |= piece.stopped
        if piece.finish_reason is not None:
            assert whole.finish_reason is None, "one finish reason"
            whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    return pieces, whole


SAID = [WORD["ABC"], WORD["DEF"], WORD[" world"], WORD["\n\n"]]  # "ABCDEF world\n\n"


def test_plain() -> None:
    pieces, whole = answer(SAID)
    assert [piece.text for piece in pieces] == ["ABC", "DEF", " world", "\n\n"]
    assert (whole.finish_reason, whole.stop_reason, whole.stopped) == ("length", None, False)
    assert whole.token_ids == SAID and whole.logprobs == scores(SAID)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4], [2, 2], [3, 1]])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("DE", "ABC", 2),
        ("BCD", "A", 2),
        ("CDEF wor", "AB", 3),
        ("world", "ABCDEF ", 3),
        ("A", "", 1),
    ],
)
def test_stop_strings_inside_and_across_tokens(stop: str, text: str, tokens: int, sizes: list[int]) -> None:
    pieces, whole = answer(SAID, sizes=sizes, stop=[stop])
    assert whole.text == text
    assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
    assert whole.token_ids == SAID[:tokens] and whole.logprobs == scores(SAID)[:tokens]
    included = answer(SAID, sizes=sizes, stop=[stop], include_stop_str_in_output=True)[1]
    assert included.text == text + stop


def test_the_engine_is_told_when_only_the_text_ended() -> None:
    assert answer(SAID, stop=["DEF"])[1].stopped
    assert not answer(SAID, sizes=[4], stop=["DEF"])[1].stopped  # the engine had ended by itself
    later = answer(SAID, stop=["DEF"])[0][2]
    assert (later.text, later.token_ids, later.finish_reason, later.stopped) == ("", [], None, False)


def test_no_part_of_a_stop_string_is_sent_early() -> None:
    pieces, _ = answer(SAID, stop=["CDEF w!"])
    assert [piece.text for piece in pieces] == ["AB", "", "CDEF world", "\n\n"]


def test_logprobs_come_with_their_tokens() -> None:
    pieces, whole = answer(SAID, stop=["DEF!"])
    assert [len(piece.logprobs or ()) for piece in pieces] == [1, 1, 1, 1]
    assert [entry.token for entry in whole.logprobs or ()] == SAID


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_stop_string_on_the_last_token_wins(finish: FinishReason) -> None:
    whole = answer(SAID[:2], finish, stop=["DEF"], include_stop_str_in_output=finish == "stop")[1]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "DEF")


def test_eos_has_no_text() -> None:
    whole = answer([*SAID[:1], EOS], "stop", skip_special_tokens=False)[1]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ABC", "stop", None)
    assert whole.token_ids == [SAID[0], EOS] and len(whole.logprobs or ()) == 2
    shown = answer([*SAID[:1], EOS], "stop", skip_special_tokens=False, include_stop_str_in_output=True)[1]
    assert shown.text == "ABC</s>"
    assert answer([*SAID[:1], EOS], "stop", include_stop_str_in_output=True)[1].text == "ABC"


def test_stop_token_has_no_text() -> None:
    whole = answer(SAID[:2], "stop", stop_reason=SAID[1])[1]
    assert (whole.text, whole.stop_reason) == ("ABC", SAID[1])
    assert answer(SAID[:2], "stop", stop_reason=SAID[1], include_stop_str_in_output=True)[1].text == "ABCDEF"


def test_eos_inside_the_text_is_a_token_like_others() -> None:
    whole = answer([SAID[0], EOS, SAID[1]], skip_special_tokens=False, ignore_eos=True)[1]
    assert whole.text == "ABC</s>DEF"
    assert answer([SAID[0], EOS, SAID[1]], ignore_eos=True)[1].text == "ABCDEF"


def test_held_text_comes_at_the_end() -> None:
    assert answer(SAID[:2], stop=["DEF!"])[1].text == "ABCDEF"
    assert answer([*SAID[:2], EOS], "stop", stop=["DEF!"])[1].text == "ABCDEF"
    assert answer([65, 0xF0, 0x9F], "abort")[1].text == "A\ufffd"


def test_min_tokens_counts_before_stop_strings() -> None:
    said = [WORD["DEF"], WORD["DEF"], WORD["DEF"]]
    assert answer(said, stop=["DEF"], min_tokens=2)[1].text == "DEF"
    assert answer(said, stop=["DEF"], min_tokens=2)[1].token_ids == said[:2]
    assert answer(said, stop=["EFDE"], min_tokens=2)[1].text == "D"


def test_without_detokenizing() -> None:
    whole = answer(SAID, detokenize=False)[1]
    assert whole.text == "" and whole.token_ids == SAID and whole.finish_reason == "length"


def test_characters_come_whole_and_their_bytes_are_exact() -> None:
    text = "🙂👩‍👩‍👧 naïve 漢字"
    pieces, whole = answer(list(text.encode()))
    assert whole.text == text and not any("\ufffd" in piece.text for piece in pieces)
    assert b"".join(TOKENIZER.token_bytes(entry.token) for entry in whole.logprobs or ()).decode() == text


def test_choices_are_apart_and_duplicates_are_dropped() -> None:
    request = Request(id="r", prompt=(1,), sampling=SamplingParams(n=2, stop=["DEF"]), seed=1, max_tokens=9, n=2)
    builder = RequestOutputBuilder(request, TOKENIZER)
    assert builder.push(Delta("r", 0, tokens=SAID[:1], cached=3)).cached == 3
    assert builder.push(Delta("r", 1, tokens=SAID[1:2])).stopped
    assert builder.push(Delta("r", 0, start=0, tokens=SAID[:1])).text == ""
    again = builder.push(Delta("r", 0, start=0, tokens=[SAID[0], SAID[2]], logprobs=scores([SAID[0], SAID[2]])))
    assert (again.text, again.token_ids) == (" world", [SAID[2]])
    assert [entry.token for entry in again.logprobs or ()] == [SAID[2]]
    failed = builder.push(Delta("r", 0, start=2, finish="error", error="NaN"))
    assert (failed.finish_reason, failed.error) == ("error", "NaN")


def test_prompt_logprobs_pass() -> None:
    request = Request(id="r", prompt=(1, 2), sampling=SamplingParams(prompt_logprobs=1), seed=1, max_tokens=0)
    entry = TokenLogprobs(2, -1.0, 1, ())
    piece = RequestOutputBuilder(request, TOKENIZER).push(Delta("r", prompt_logprobs=[None, entry], finish="length"))
    assert piece.prompt_logprobs == [None, entry] and piece.finish_reason == "length" and piece.token_ids == []


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.one_of(st.sampled_from(list(WORD.values())), st.integers(32, 255)), min_size=1, max_size=25),
    sizes=st.lists(st.integers(1, 5), max_size=25),
    stop=st.lists(st.sampled_from(["DE", "ld", " wor", "\n", "A", "CD", "dH"]), max_size=3),
    include=st.booleans(),
    least=st.integers(0, 4),
)
def test_any_grouping_gives_the_same(
    tokens: list[int], sizes: list[int], stop: list[str], include: bool, least: int
) -> None:
    options: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": least}
    one, other = answer(tokens, **options)[1], answer(tokens, sizes=sizes, **options)[1]
    one.stopped = other.stopped = False
    assert one == other
    if one.finish_reason == "length":
        assert one.text == TOKENIZER.decode(tokens)
    else:
        cut = TOKENIZER.decode(one.token_ids)
        assert cut.startswith(one.text) and one.stop_reason in cut
