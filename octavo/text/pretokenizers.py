"""How byte-level vocabularies of GGUF files cut text into words, by the name the file gives.

GGUF stores the merges of a byte-pair vocabulary but not its regular expressions: `tokenizer.ggml.pre` only names
them. The expressions are those of the models' own tokenizer files; the names are llama.cpp's (src/llama-vocab.cpp),
where several of them stand in another form.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _CASED_TAIL
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}" + _CASED_TAIL
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (  # its file lists the cased letters range by range, without those of some later blocks
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}]]+"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_IDEOGRAPHS = r"[一-龥ࠀ-一가-퟿]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_MARKED = (  # Qwen 3.5: marks belong to letters
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_HAN_UPPER, _NOT_HAN_LOWER = _UPPER[:-1] + r"&&[^\p{Han}]]", _LOWER[:-1] + r"&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}" + _TAIL
)
_YOUTU = rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}"
_SPARK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2_SPACES = "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2", "1"))
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + _JAIS2_SPACES.removesuffix(r"(?!\S)")
_EXAONE_MOE = (  # words that spaces join may be one
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASIAN = r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)


class WordRule(NamedTuple):
    """One way to cut text into words before merging.

    `splits` are applied one after the other, each cutting what the one before left; then GPT-2's own expression
    when `gpt2` is set.
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    whole_words: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    nfc: bool = False
    """Text is brought to Unicode's composed form first."""
    threes: bool = False
    """Runs of digits are cut in threes after words have become bytes (Falcon)."""
    add_bos: bool = False
    """Plain text starts with BOS unless the file says otherwise."""


_DIGITS_THEN_GPT2 = WordRule((r"\p{N}",), gpt2=True)
_GPT2 = WordRule(gpt2=True)

WORD_RULES: dict[str, WordRule] = {
    "default": WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(
        ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code", "jina-v1-en", "gigachat"), _GPT2
    ),
    **dict.fromkeys(("roberta-bpe", "a.x-4.0", "mellum", "modern-bert"), _GPT2),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        WordRule((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    "minicpm5": WordRule((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole_words=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), WordRule((_LLAMA3,))),
    "glm5": WordRule((_LLAMA3,), whole_words=True),
    "jais-2": WordRule((_JAIS2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), WordRule((_QWEN2,), nfc=True)),
    "qwen35": WordRule((_MARKED,), nfc=True),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), WordRule((_QWEN2,))),
    "ufakzeka": WordRule((_QWEN2.removeprefix(_CONTRACTION + "|"),)),
    "laguna": WordRule((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": WordRule((_SEED,)),
    "exaone-moe": WordRule((_EXAONE_MOE,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), WordRule((_BAILING,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS_THEN_GPT2),
    "command-r": _DIGITS_THEN_GPT2._replace(nfc=True),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+",), gpt2=True, threes=True),
    "chameleon": WordRule(_CHAMELEON, gpt2=True, add_bos=True),
    "tekken": WordRule((_TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), WordRule((_GPT4O,))),
    "granite-embed-multi-97m": WordRule((_GPT4O,), whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), WordRule((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    "youtu": WordRule((_YOUTU, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")), whole_words=True),
    "kimi-k2": WordRule((_KIMI,)),
    "deepseek-llm": WordRule(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _IDEOGRAPHS, r"\p{N}")
    ),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), WordRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
    ),
    "spark2_5": WordRule((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")),
    "afmoe": WordRule((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3)),
    "superbpe": WordRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), WordRule((_BLOOM,))),
    "viking": WordRule((_BLOOM, r"\p{N}")),
}
"""By the name in `tokenizer.ggml.pre`. "default" is what llama.cpp does with files that say so, or nothing."""

REFUSED = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"})
"""Names that llama.cpp knows for vocabularies that are not byte-level; no architecture with one is served."""


def pre_tokenizer(rule: WordRule) -> pre_tokenizers.PreTokenizer:
    """The rule for the `tokenizers` library."""
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rule.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2))
    if rule.threes:
        steps.append(pre_tokenizers.Digits(individual_digits=False))
        steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)


def normalizer(rule: WordRule) -> normalizers.Normalizer | None:
    """What is done to text before it is cut."""
    return normalizers.NFC() if rule.nfc else None
