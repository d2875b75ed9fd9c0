from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.text.stream import Detokenizer, StopStrings
from octavo.text.tokenizer import Tokenizer
from tests.text import small
from tests.text.corpus import CORPUS

TOKENIZERS = {
    "bytes": small.byte_level(),
    "pieces": small.pieces(),
    "bare pieces": small.pieces(add_space_prefix=False),
    "words": small.word_pieces(),
}
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    texts, at = [], 0
    for size in cuts:
        texts.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*texts, detokenizer.push(ids[at:]), detokenizer.finish()]


def chunks() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 5), max_size=20)


@pytest.mark.parametrize("name", TOKENIZERS)
@relaxed
@given(data=st.data(), cuts=chunks(), skip=st.booleans())
def test_any_ids_in_any_chunks(name: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    assert "".join(streamed(tokenizer, [], ids, cuts, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["smollm", "gemma"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cuts=chunks(), skip=st.booleans())
def test_any_ids_of_real_models(
    name: str, request: pytest.FixtureRequest, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    low = st.integers(0, 700)  # where control tokens and bytes are
    ids = data.draw(st.lists(st.one_of(low, st.integers(0, tokenizer.vocab_size - 1)), max_size=30))
    assert "".join(streamed(tokenizer, [], ids, cuts, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@relaxed
@given(data=st.data(), cuts=chunks(), skip=st.booleans())
def test_goes_on_from_the_prompt(name: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    id = st.integers(0, tokenizer.vocab_size - 1)
    prompt, ids = data.draw(st.lists(id, max_size=12)), data.draw(st.lists(id, max_size=12))
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
    text = "".join(streamed(tokenizer, prompt, ids, cuts, skip))
    if whole.startswith(before):
        assert before + text == whole
    else:  # the prompt ends inside a character that the output completes
        assert before.endswith("\ufffd") and whole.endswith(text) and before[:-1] + text == whole


def test_a_prompt_that_ends_in_bytes_of_no_character() -> None:
    """The first two bytes of half a surrogate pair are two U+FFFD, not one."""
    for prompt, text in (([0xED, 0xA0], ""), ([0xED, 0xA0, 0x61], "a"), ([0xE2, 0x82], ""), ([0xE2, 0x82, 0xAC], "€")):
        ids = [byte + 3 for byte in prompt]
        assert "".join(streamed(small.pieces(), ids[:2], ids[2:], [], True)) == text


def test_leading_spaces_of_pieces() -> None:
    tokenizer = TOKENIZERS["pieces"]
    hello, world = tokenizer.id_of("Hello"), tokenizer.id_of("▁world")
    assert hello is not None and world is not None
    assert "".join(streamed(tokenizer, [1], [world, world], [1, 1], True)) == "world world"
    assert "".join(streamed(tokenizer, [1, hello], [world, world], [1, 1], True)) == " world world"
    assert "".join(streamed(tokenizer, [], [1, world], [1, 1], False)) == "<s> world"


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_characters_come_whole(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in (*CORPUS, "a    b", " lead"):
        if "▁" in text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        texts = streamed(tokenizer, tokenizer.encode("The sky is"), ids, [1] * len(ids), False)
        assert "".join(texts) == text
        assert not any("\ufffd" in part for part in texts)


def test_incomplete_bytes_come_at_the_very_end() -> None:
    detokenizer = Detokenizer(TOKENIZERS["bytes"])
    smile = "🙂".encode()
    assert [detokenizer.push([byte]) for byte in smile] == ["", "", "", "🙂"]
    assert detokenizer.push([ord("a"), *smile[:2]]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_prompt_inside_a_character() -> None:
    smile = list("🙂".encode())
    assert Detokenizer(TOKENIZERS["bytes"], smile[:2]).push(smile[2:]) == "🙂"
    broken = Detokenizer(TOKENIZERS["bytes"], smile[:2])
    assert broken.push([ord("a")]) + broken.finish() == "a"


def find(text: str, strings: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first; of those, the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab\n", max_size=40),
    strings=st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 4), max_size=40),
    include=st.booleans(),
)
def test_stop_strings_streamed_equal_whole(text: str, strings: list[str], cuts: list[int], include: bool) -> None:
    stops = StopStrings(strings, include)
    out, found, at = "", None, 0
    for size in [*cuts, len(text)]:
        safe, stop = stops.push(text[at : at + size])
        at += size
        out, found = out + safe, found or stop
        if found is None:
            held = len(text[:at]) - len(out)
            assert held <= max(map(len, strings), default=1) - 1
            tail = text[:at][len(out) :]
            assert not tail or any(string.startswith(tail) for string in strings)
    out += stops.flush()
    assert (out, found) == find(text, strings, include)


def test_text_before_a_match_is_not_held() -> None:
    stops = StopStrings(["\n\n\n\n"])
    assert stops.push("abc\n") == ("abc", None)
    assert stops.push("\nd") == ("\n\nd", None)
    assert stops.push("\n\n\n") == ("", None)
    assert stops.push("\nrest") == ("", "\n\n\n\n")
    assert stops.push("more") == ("", None) and stops.flush() == ""


def test_ignored_matches_are_text() -> None:
    stops = StopStrings(["ab"])
    assert stops.push("xab", match=False) == ("xab", None)
    assert stops.push("a", match=False) == ("", None)
    assert stops.push("b") == ("", "ab")


def test_long_stop_strings_are_cheap() -> None:
    stops = StopStrings(["a" * 20_000 + "b", "a" * 30_000])
    held = "".join(stops.push("a" * 10)[0] for _ in range(1500))
    assert held == "" and stops.push("c") == ("a" * 15_000 + "c", None)


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    stops = [StopStrings(["ab" * 500_000 + str(i) for i in range(64)])]
    stops += [stops[0].fresh() for _ in range(1000)]
    for one in stops:
        assert one.push("x" + "ab" * 50 + "b") == ("x" + "ab" * 50 + "b", None)
    assert sum(map(len, stops[0]._borders)) <= 64 * 102
    assert all(one._borders is stops[0]._borders for one in stops)


def test_a_fresh_one_knows_nothing_of_the_other_text() -> None:
    stops = StopStrings(["abc"])
    assert stops.push("ab") == ("", None)
    other = stops.fresh()
    assert other.push("c") == ("c", None) and other.push("abc") == ("", "abc")
    assert stops.push("c") == ("", "abc") and stops.fresh().push("x") == ("x", None)


def test_empty_stop_string() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
    assert StopStrings([]).push("abc") == ("abc", None)
