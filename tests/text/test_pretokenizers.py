"""Every name of a pre-tokenizer and every kind of tokenizer that llama.cpp knows is built, or refused by name.

What is built equals transformers' tokenizer of the family where there is one without a download, or else llama.cpp's
own expressions run by another regular expression engine (names and expressions: src/llama-vocab.cpp at 00ad355).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import regex
import transformers

from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.pretokenizers import REFUSED, WORD_RULES, normalizer, pre_tokenizer
from octavo.text.tokenizer import TokenizerError
from tests.text.corpus import CORPUS

LLAMA_CPP = frozenset(
    {
        *(
            "default",
            "minicpm5",
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
            "spark2_5",
            "youtu",
            "falcon",
            "mpt",
            "starcoder",
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jais-2",
            "gemma4",
            "granite-embed-multi-311m",
            "sarvam-moe",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "whitespace",
            "refact",
            "command-r",
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "qwen35",
            "stablelm2",
            "olmo",
            "dbrx",
            "smaug-bpe",
            "poro-chat",
            "glm4",
            "glm5",
            "chatglm-bpe",
            "viking",
            "jais",
            "tekken",
            "smollm",
            "codeshell",
            "bloom",
            "gpt3-finnish",
            "exaone",
            "exaone4",
            "exaone-moe",
            "chameleon",
            "minerva-7b",
            "megrez",
            "gpt-4o",
            "llama4",
            "kanana2",
            "talkie",
            "granite-embed-multi-97m",
            "tiny_aya",
            "cohere2moe",
            "superbpe",
            "trillion",
            "granite-docling",
            "bailingmoe",
            "bailingmoe2",
            "llada-moe",
            "seed-coder",
            "hunyuan",
            "hunyuan-dense",
            "hy_v4",
            "joyai-llm",
            "kimi-k2",
            "ufakzeka",
            "grok-2",
            "afmoe",
            "laguna",
            "minimax-m2",
            "solar-open",
            "mellum2",
        ),
    }
)
TEXTS = [
    *CORPUS,
    "I'LL see HelloWorld's 12345 cafés  x\n\n\ty = 'ş'! 漢字ab한국 <a/>\n",
    "Ankara'da 1234567 ab12 ١٢٣٤ ½ <sentinel:12>IMGIMGABZ\r\n\r\n  indented\n\n\n// a\t\tb    c",
    "ภาษาไทย हिन्दी का 12 नियम. “quoted” — fine…",
]


def words(name: str, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in pre_tokenizer(WORD_RULES[name]).pre_tokenize_str(text)]


def test_every_name_of_llama_cpp_is_built_or_refused() -> None:
    assert LLAMA_CPP - WORD_RULES.keys() == REFUSED
    assert WORD_RULES.keys() - LLAMA_CPP == {"gpt2"}


# -- against llama.cpp's expressions

C = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{C}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{C}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = r"[一-龥぀-ゟ゠-ヿ]+"
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "trillion": (GPT2,),
    "llama-bpe": (LLAMA3,),
    "lfm2": (LLAMA3,),
    "glm4": (LLAMA3,),
    "minicpm5": (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
    "jais-2": (
        LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
        + r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}",
    ),
    "qwen2": (QWEN2,),
    "hunyuan": (QWEN2,),
    "solar-open": (QWEN2,),
    "grok-2": (QWEN2,),
    "kormo": (QWEN2,),
    "qwen35": (C + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "ufakzeka": (QWEN2.removeprefix(C + "|"),),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "seed-coder": (C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "exaone-moe": (
        C + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
        r"|\s+(?!\S)|\s+",
    ),
    "bailingmoe": (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "smollm": (r"\p{N}", GPT2),
    "mellum2": (r"\p{N}", GPT2),
    "chameleon": (
        *(r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}"),
        *(r"[\p{P}!-/:-@\[-`{-~]", GPT2),
    ),
    "gpt-4o": (CASED,),
    "minimax-m2": (CASED,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", CASED),
    "youtu": (
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        CASED.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "deepseek-v3": (r"\p{N}{1,3}", CJK, DEEPSEEK3),
    "hunyuan-dense": (r"\p{N}{1,3}", CJK, DEEPSEEK3),
    "spark2_5": (
        *(r"\p{N}{1,3}", CJK),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
        r"|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
}
"""One name of each rule, and more where a name was once sorted elsewhere."""


def cut(expressions: tuple[str, ...], text: str) -> list[str]:
    """Each expression cuts what the one before left; what none matches stays a word."""
    pieces = [text]
    for expression in expressions:
        found: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(expression, piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_words_are_those_of_llama_cpp(name: str) -> None:
    assert any(len(words(name, text)) > 1 for text in TEXTS)
    for text in TEXTS:
        assert words(name, text) == cut(EXPRESSIONS[name], text), text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("kimi-k2", "HelloWorld's 漢字ab 1234", ["Hello", "World's", " ", "漢字", "ab", " ", "123", "4"]),
        ("afmoe", "a 12345 漢字b1", ["a", " ", "12", "345", " ", "漢字", "b", "1"]),
        ("superbpe", "so 1234567 is it", ["so ", "1", "234", "567", " is it"]),
        ("ufakzeka", "Ankara'da", ["Ankara", "'da"]),
        ("qwen2", "Ankara'da", ["Ankara", "'d", "a"]),
        ("exaone-moe", "see the cat, 12", ["see the cat", ",", " ", "1", "2"]),
        ("chameleon", "IMGIMGABZ,", ["IMGIMGABZ", ","]),
    ],
)
def test_words_by_hand(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


# -- against transformers


def _byte_vocabulary() -> dict[str, int]:
    from tests.text.test_tokenizer import BYTE_CHARACTERS

    return {character: i for i, character in enumerate(sorted(BYTE_CHARACTERS))}


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("qwen2", transformers.Qwen2Tokenizer),
        ("qwen35", transformers.Qwen3_5Tokenizer),
        ("command-r", transformers.CohereTokenizer),
        ("gpt-2", transformers.GPT2Tokenizer),
    ],
)
def test_words_are_those_of_transformers(name: str, tokenizer: Any) -> None:
    theirs = tokenizer(vocab=_byte_vocabulary(), merges=[])._tokenizer
    ours, rule = pre_tokenizer(WORD_RULES[name]), WORD_RULES[name]
    for text in TEXTS:
        want = theirs.pre_tokenizer.pre_tokenize_str(text)
        assert [word for word, _ in ours.pre_tokenize_str(text)] == [word for word, _ in want]
        own = normalizer(rule)
        if theirs.normalizer is not None:
            assert (text if own is None else own.normalize_str(text)) == theirs.normalizer.normalize_str(text)


# -- other kinds of tokenizers

PIECES = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁ca", "t", "s", "a", "e", "h", "c", "▁cats", "12", "1", "2", "<x>"]
SCORES = [0.0, 0.0, 0.0, -2.0, -3.0, -4.5, -5.0, -5.1, -5.2, -5.3, -5.4, -5.5, -9.0, -6.0, -6.5, -6.6, 0.0]
T5 = {
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": np.array(SCORES, np.float32),
    "tokenizer.ggml.token_type": np.array([3, 3, 2, *[1] * 13, 4], np.int32),
    "tokenizer.ggml.remove_extra_whitespaces": True,
}


def test_unigram_vocabularies_equal_transformers() -> None:
    ours = from_gguf(T5)
    theirs = transformers.T5Tokenizer(vocab=list(zip(PIECES, SCORES, strict=True)), extra_ids=0)
    theirs.add_tokens(["<x>"])
    for text in ("the cats", "the cat", "cats 12 hats", "  the", "that z <x> cats"):
        assert ours.encode(text) == theirs.encode(text), text
    assert (ours.eos_ids, ours.bos_id) == ((1,), None)
    assert ours.decode(ours.encode("the cats")) == "the cats"
    bare = from_gguf({**T5, "tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("cat") == [11, 8, 6]


def test_unigram_spaces_are_merged_where_the_file_says_so() -> None:
    merged, kept = from_gguf(T5), from_gguf({**T5, "tokenizer.ggml.remove_extra_whitespaces": False})
    assert merged.encode("  the   cats ") == merged.encode("the cats") == kept.encode("the cats")
    assert kept.encode("the   cats") != merged.encode("the   cats")


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "##12", "é", "e", ",", "1", "##2"]
BERT = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": [
        word if word[0] == "[" else word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS
    ],
    "tokenizer.ggml.token_type": np.array([3, 2, 3, 3, *[1] * 9], np.int32),
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.seperator_token_id": 3,
    "tokenizer.ggml.unknown_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
}


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_equal_transformers(lowercase: bool) -> None:
    ours = from_gguf({**BERT, "tokenizer.ggml.normalizer.lowercase": lowercase})
    theirs = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, do_lower_case=lowercase)
    for text in ("the cats", "The Cats, 12", "é e", "unknown cat12", "the,cat"):
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("kind", ["rwkv", "plamo2", "gemma4", "hybriddna"])
def test_kinds_that_are_not_built_are_refused_by_name(kind: str) -> None:
    with pytest.raises(TokenizerError, match=f"of the kind '{kind}', which is not built"):
        from_gguf({**T5, "tokenizer.ggml.model": kind})
    with pytest.raises(TokenizerError, match="of the kind 'new', which is not known"):
        from_gguf({**T5, "tokenizer.ggml.model": "new"})
