"""How byte-level vocabularies of GGUF files cut text into words, by the name the file gives.

GGUF stores the merges of a byte-pair vocabulary but not its regular expressions: `tokenizer.ggml.pre` only names
them. The expressions are those of the models' own tokenizer files; the names are llama.cpp's.
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
_IDEOGRAPHS = r"[一-龥ࠀ-一가-퟿]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


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
    add_bos: bool = False
    """Plain text starts with BOS unless the file says otherwise."""


_DIGITS_THEN_GPT2 = WordRule((r"\p{N}",), gpt2=True)
_GPT2 = WordRule(gpt2=True)

WORD_RULES: dict[str, WordRule] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "exaone4", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code", "gigachat"), _GPT2),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
        WordRule((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), WordRule((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WordRule((_QWEN2,), nfc=True)),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan"), WordRule((_QWEN2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+",), gpt2=True),
    "tekken": WordRule((_TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), WordRule((_GPT4O,))),
    "deepseek-llm": WordRule(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _IDEOGRAPHS, r"\p{N}")
    ),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    "deepseek-v3": WordRule((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), WordRule((_BLOOM,))),
    "viking": WordRule((_BLOOM, r"\p{N}")),
}
"""By the name in `tokenizer.ggml.pre`."""


def pre_tokenizer(rule: WordRule, name: str) -> pre_tokenizers.PreTokenizer:
    """The rule for the `tokenizers` library."""
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rule.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2))
    if name == "falcon":  # cuts runs of digits in threes after the words were made
        steps.append(pre_tokenizers.Digits(individual_digits=False))
        steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)


def normalizer(rule: WordRule) -> normalizers.Normalizer | None:
    """What is done to text before it is cut."""
    return normalizers.NFC() if rule.nfc else None
