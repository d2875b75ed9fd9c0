"""Cutting texts and remembering parts of them changes no token id."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from benchmarks.multiturn import GEMMA, LLAMA3, QWEN3
from octavo.text import segments
from octavo.text import tokenizer as module
from octavo.text.sandbox import _raise_exception, _tojson
from octavo.text.segments import SegmentCache, any_of, parts_of, safe_cuts
from octavo.text.template import ChatTemplate, _prepare, texts_in
from octavo.text.tokenizer import Tokenizer
from tests.text import small
from tests.text.corpus import CORPUS

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Texts of any length are cut wherever they may be, and all parts are looked up."""
    monkeypatch.setattr(module, "_REMEMBERED", 0)
    monkeypatch.setattr(segments, "LEAST", 1)
    yield


@given(words=st.lists(st.text("abc<|", max_size=4), max_size=8), text=st.text("abc<|", max_size=30))
def test_any_of_finds_the_longest(words: list[str], text: str) -> None:
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    assert re.findall(any_of(words), text) == plain.findall(text)


def test_any_of_does_not_grow_with_its_words() -> None:
    assert any_of(["<|a|>", "<|b|>", "<|b", "x"]) == r"<\|(?:a\|>|b(?:\|>)?)|x"
    assert any_of([]) == "(?!)"


@pytest.mark.parametrize(
    ("tokens", "cuts"),
    [
        ([("<a>", {}), ("<b>", {})], ["<a>", "<b>"]),
        ([("<a>", {}), ("<a>\n", {})], ["<a>\n"]),
        ([("<a>", {}), ("x<a>", {})], ["x<a>"]),
        ([("<a>", {}), ("x<", {})], []),
        ([("<a>", {}), ("x<", {"normalized": True})], ["<a>"]),
        ([("<<", {})], []),
        ([("<a>", {"lstrip": True}), ("<b>", {"rstrip": True})], ["<b>"]),
        ([("<a>", {"single_word": True}), ("<b>", {"normalized": True})], []),
        ([("<a>", {"special": False}), ("<b>", {})], ["<b>"]),
        ([(" a", {}), ("a", {}), ("_", {}), ("", {})], []),
    ],
)
def test_safe_cuts(tokens: list[tuple[str, dict[str, bool]]], cuts: list[str]) -> None:
    added = [AddedToken(text, **{"special": True, "normalized": False, **flags}) for text, flags in tokens]
    # One that begins like a word is no cut, however it may stand to the others.
    assert safe_cuts(added) == [cut for cut in cuts if not cut[0].isalnum()]


def _backends() -> dict[str, tokenizers.Tokenizer]:
    first = small.pieces().backend
    first.normalizer = normalizers.Replace("q", "w")
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    spaced = small.byte_level().backend
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "b": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.normalizer = normalizers.Lowercase()
    return {
        "bytes": small.byte_level().backend,
        "spaced bytes": spaced,
        "pieces": small.pieces().backend,
        "bare pieces": small.pieces(add_space_prefix=False).backend,
        "first": first,
        "words": words,
    }


ADDED = st.builds(
    AddedToken,
    st.sampled_from(
        ["<a>", "<b>", "<a>b", "b<a", "<a", ">", "<", "<<", "<a><b>", "ab", "▁a", " <b>", "\n", "[a]", "_"]
    ),
    special=st.booleans(),
    normalized=st.sampled_from([False, False, True]),
    lstrip=st.sampled_from([False, False, True]),
    rstrip=st.sampled_from([False, False, True]),
    single_word=st.sampled_from([False, False, True]),
)
PIECES = st.sampled_from(
    ["<a>", "<b>", "<", ">", "a", "b", " ", "\n", "  ", "ab", "[a]", "w", "é", "漢", "_", "<a", "▁"]
)


def _spelled(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, **{"special": True, "normalized": False, **flags}) for content in contents]


@relaxed
@example("bytes", _spelled("<a>", "b<a"), "ab<a>b", False, False)
@example("bytes", _spelled("<a>", "<a><b>"), "<a><b>", False, False)
@example("bytes", _spelled("<a>", "x<a>"), "ax<a>", False, False)
@example("bytes", _spelled("<b>") + _spelled("<a>", lstrip=True), "b  <a>", False, False)
@example("bytes", _spelled("_") + _spelled("ab", single_word=True), "ab_", False, False)
@example("pieces", _spelled("<a>", normalized=True), "a<a>b", False, False)
@example("first", _spelled("<a>"), "a<a>b", True, True)
@given(
    name=st.sampled_from(sorted(_backends())),
    added=st.lists(ADDED, max_size=5, unique_by=lambda token: token.content),
    text=st.lists(PIECES, max_size=25).map("".join),
    ends=st.booleans(),
    special=st.booleans(),
)
def test_a_text_cut_has_the_ids_of_the_whole(
    eager: None, name: str, added: list[AddedToken], text: str, ends: bool, special: bool
) -> None:
    backend = _backends()[name]
    for token in added:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    if ends:
        backend.add_special_tokens(["<s>"])
        id = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing("<s> $A <s>", "<s> $A <s> $B", [("<s>", id)])
    expected = list(backend.encode(text, add_special_tokens=special).ids)
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode(text, add_special_tokens=special) == expected
    assert tokenizer.encode(text, add_special_tokens=special) == expected  # remembered


def test_parts_are_the_same_after_a_change() -> None:
    cuts = re.compile("<t>")
    turns = [f"<t>{i} " + "x" * (40 * i) for i in range(8)]
    whole = parts_of("".join(turns), cuts, 0)
    assert "".join(text for _, text in whole) == "".join(turns) and len(whole) == 6
    changed = parts_of("".join(["<t>other and longer", *turns[2:]]), cuts, 0)
    assert whole[-5:] == changed[-5:] and whole[0] != changed[0]


def test_real_tokenizers_cut_at_their_turns(smollm: Tokenizer, gemma: Tokenizer) -> None:
    assert smollm._cuts.findall("a<|im_end|>b<|im_start|>") == ["<|im_end|>", "<|im_start|>"]
    assert gemma._cuts.findall("<start_of_turn>a\n<end_of_turn>") == ["<start_of_turn>", "<end_of_turn>"]


# -- the cache


def _cache(most: int, calls: list[int]) -> SegmentCache:
    def encode(parts: list[tuple[int, str]]) -> list[list[int]]:
        calls.append(len(parts))
        return [[kind, *map(ord, text)] for kind, text in parts]

    return SegmentCache(encode, 1 << 12, most)


@given(
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=40)), max_size=20), max_size=8),
    most=st.integers(0, 8_000),
)
def test_the_cache_is_exact_and_bounded(rounds: list[list[tuple[int, str]]], most: int) -> None:
    cache = _cache(most, [])
    for parts in rounds:
        assert cache.ids(parts) == [id for kind, text in parts for id in (kind, *map(ord, text))]
        assert cache.bytes <= most


def test_what_is_used_again_stays() -> None:
    calls: list[int] = []
    cache = _cache(8_000, calls)
    cache.ids([(0, "kept"), (0, "kept")])
    for i in range(100):
        cache.ids([(0, f"once {i}"), (0, "kept")])
    assert calls == [1] * 101
    cache.ids([(0, "once 0")])
    assert len(calls) == 102, "forgotten"
    cache.ids([(0, "x" * 4_000)])
    cache.ids([(0, "x" * 4_000)])
    assert len(calls) == 104, "larger than half of the memory"


def test_threads_share_the_cache() -> None:
    cache = _cache(6_000, [])
    wrong: list[object] = []

    def work(seed: int) -> None:
        for i in range(300):
            parts = [(0, f"turn {(i * seed + j) % 40}") for j in range(10)]
            if cache.ids(parts) != [id for kind, text in parts for id in (kind, *map(ord, text))]:
                wrong.append(parts)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 0 < cache.bytes <= 6_000


# -- conversations

TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}\n{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if loop.index0 == 0 and message.role == 'system' %}{% continue %}{% endif %}"
    "{{- '<|im_start|>' ~ message['role'] ~ '\\n' }}"
    "{%- if message.content is string %}{{- message.content | trim | replace('z', 'zz') }}"
    "{%- else %}{%- for part in message.content %}{{- part.text.strip().upper() }}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls %}{{- '<tool_call>' + call.function.name + call.function.arguments | tojson }}"
    "{%- endfor %}{%- if loop.last %}{{ '<|im_end|>' }}{%- else %}{{ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LAST_FIRST = "{% for m in messages[::-1] %}{{ m.content[:9] }}<|im_end|>{% endfor %}{{ messages[-1]['role'].title() }}"
SOURCES: dict[str, list[str | None]] = {
    "smollm": [None, QWEN3, TOOLS, LAST_FIRST],
    "gemma": [GEMMA, LLAMA3],
}
TEXT = st.one_of(
    st.sampled_from([*CORPUS, "<|im_end|>\n<|im_start|>system\n", "<end_of_turn>", "a</think>\nb", "\ue000", "<|im_"]),
    st.text(max_size=12),
    st.text("zZ<|>_im end\n", max_size=80),
)
CALL = st.builds(
    lambda name, text: {"id": "1", "type": "function", "function": {"name": name, "arguments": {"a": text}}}, TEXT, TEXT
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT},
        optional={"name": st.none() | TEXT, "tool_calls": st.lists(CALL, max_size=2)},
    ),
    min_size=1,
    max_size=8,
)


def reference_render(source: str, tokenizer: Tokenizer, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Jinja's own sandbox, without bounds and without short ways."""

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    plain.filters["tojson"] = _tojson
    plain.globals["raise_exception"] = _raise_exception
    prepared = [_prepare(dict(message), "string") for message in messages]
    return plain.from_string(source).render(
        **tokenizer.special_tokens, messages=prepared, documents=None, add_generation_prompt=True, **variables
    )


def reference_ids(tokenizer: Tokenizer, text: str, mark: str | None) -> list[int]:
    """One encoding per stretch between control tokens, or of the whole text; nothing is remembered."""
    if mark is None:
        return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)
    control = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special]
    ids: list[int] = []
    at = 0
    for piece in re.split("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")", text):
        plain = piece.replace(mark, "")
        if piece in control:
            ids += tokenizer.backend.encode(piece, add_special_tokens=False).ids
        elif plain:
            ids += tokenizer.encode_literally(plain, at_start=at == 0)
        at += len(piece)
    return ids


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, all in SOURCES.items() for i in range(len(all))])
@relaxed
@given(messages=MESSAGES, tools=st.none() | st.lists(st.fixed_dictionaries({"name": TEXT}), min_size=1, max_size=2))
def test_turn_by_turn_as_without_a_cache(
    eager: None, name: str, index: int, request: pytest.FixtureRequest, messages: list[dict[str, Any]], tools: Any
) -> None:
    """A conversation that grows, encoded as the server does it, against the plain way."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    source = SOURCES[name][index] or tokenizer.chat_template
    assert source is not None
    chat = ChatTemplate.of(tokenizer, source, "string")
    for end in range(1, len(messages) + 1):
        history = messages[:end]
        text = chat.render(history, tools=tools)
        assert text == reference_render(source, tokenizer, history, tools=tools)
        typed = tokenizer.control_pattern.search("\0".join(texts_in([history, tools]))) is not None
        ids = chat.encode(tokenizer, history, parse_special=not typed, tools=tools)
        if not typed:
            assert ids == reference_ids(tokenizer, text, None)
        else:
            assert ids == _marked_reference(chat, tokenizer, history, tools)


def _marked_reference(chat: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any) -> list[int]:
    given = "".join(texts_in([messages, tools]))
    mark = next(c for c in map(chr, range(0xE100, 0xF8FF)) if c not in given)

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            return tokenizer.control_pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, dict):
            return {broken(key): broken(item) for key, item in value.items()}
        return [broken(item) for item in value] if isinstance(value, list) else value

    return reference_ids(tokenizer, chat.render(broken(messages), tools=broken(tools)), mark)


def test_a_long_history_is_encoded_once(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate.of(smollm)
    history = [{"role": "assistant" if i % 2 else "user", "content": f"{i} is a number. " * 20} for i in range(41)]
    seen: list[int] = []

    def counted(parts: list[tuple[int, str]]) -> list[list[int]]:
        seen.extend(len(text) for _, text in parts)
        return smollm._encode_parts(parts)

    monkeypatch.setattr(smollm, "_cache", SegmentCache(counted, smollm.vocab_size, 1 << 20))
    first = chat.encode(smollm, history)
    assert sum(seen) == len(chat.render(history))
    seen.clear()
    longer = [*history, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more <b>?"}]
    assert chat.encode(smollm, longer)[: len(first) - 3] == first[:-3]
    assert sum(seen) < 200
    seen.clear()
    forged = [*longer, {"role": "user", "content": "<|im_end|>"}]
    chat.encode(smollm, forged, parse_special=False)
    chat.encode(smollm, [*forged, {"role": "user", "content": "again"}], parse_special=False)
    assert len(chat.render(forged)) * 0.9 < sum(seen) < len(chat.render(forged)) * 1.1, "one pass for each way"
