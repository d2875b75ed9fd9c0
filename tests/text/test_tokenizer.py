from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo.text import sentencepiece
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.pretokenizers import WORD_RULES, pre_tokenizer
from octavo.text.tokenizer import BYTE_CHARACTERS, Tokenizer, TokenizerError
from tests import realmodels
from tests.text.corpus import CORPUS, mixed

TEXTS = CORPUS + mixed(40)


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def same_as_transformers(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, text
        for skip in (True, False):
            expected_text = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(expected, skip_special_tokens=skip) == expected_text, text


def test_smollm_equals_transformers(smollm: Tokenizer) -> None:
    theirs = auto_tokenizer(realmodels.smollm2_hf())
    # transformers forgets, when it reads a GGUF file, that this model's words end at each digit.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    same_as_transformers(smollm, theirs)
    assert (smollm.bos_id, smollm.eos_id, smollm.eos_ids, smollm.vocab_size) == (1, 2, (2,), 49152)
    assert smollm.encode("") == []


def test_smollm_folder_equals_transformers() -> None:
    folder = realmodels.smollm2_hf()
    ours = Tokenizer.from_folder(folder)
    same_as_transformers(ours, auto_tokenizer(folder))
    assert ours.chat_template is not None and "im_start" in ours.chat_template


def test_gemma_equals_transformers(gemma: Tokenizer) -> None:
    theirs = auto_tokenizer(realmodels.gemma_hf())
    same_as_transformers(gemma, theirs)
    same_as_transformers(Tokenizer.from_folder(realmodels.gemma_hf()), theirs)
    assert (gemma.bos_id, gemma.eos_id, gemma.vocab_size) == (2, 1, 262144)
    assert gemma.encode("") == [2]
    assert gemma.chat_template is None


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_batch_equals_single(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    assert tokenizer.encode_batch(CORPUS) == [tokenizer.encode(text) for text in CORPUS]


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_control_tokens_as_plain_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not tokenizer.special_ids & set(ids), text
        if "▁" not in text:
            assert tokenizer.decode(ids) == text
    control = tokenizer.token_text(tokenizer.eos_ids[0])
    assert tokenizer.encode(control, add_special_tokens=False) == [tokenizer.eos_ids[0]]
    assert len(tokenizer.encode(control, add_special_tokens=False, parse_special=False)) > 1


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_bytes_of_tokens_make_the_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in CORPUS:
        if "▁" in text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    word = tokenizer.encode(" world", add_special_tokens=False)
    assert [tokenizer.token(id) for id in word] == [" world"]
    part = tokenizer.encode("🙂", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, part)) == "🙂".encode()


def test_ids_beyond_the_vocabulary_have_no_text(smollm: Tokenizer, gemma: Tokenizer) -> None:
    for tokenizer in (smollm, gemma):
        hello = tokenizer.encode("Hello", add_special_tokens=False)
        beyond = tokenizer.vocab_size + 7
        assert tokenizer.decode([beyond, *hello, beyond]) == "Hello"
        assert tokenizer.token(beyond) == "" and tokenizer.token_bytes(beyond) == b""
        assert tokenizer.token(-1) == ""


def test_lone_surrogates_do_not_crash(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("a\ud800b")) == "a\ufffdb"


def tiny_llama(**flags: Any) -> Tokenizer:
    """A SentencePiece vocabulary as GGUF files hold it."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "h", "i", "hi", "▁hi"]
    given = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces}
    given["tokenizer.ggml.scores"] = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0]
    given["tokenizer.ggml.token_type"] = np.array([2, 3, 3, 1, 1, 1, 1, 1])
    return from_gguf(given | {f"tokenizer.ggml.{key}": value for key, value in flags.items()})


def test_gguf_flags_are_honoured(smollm_metadata: dict[str, Any]) -> None:
    key = "tokenizer.ggml."
    on = from_gguf({**smollm_metadata, key + "add_bos_token": True, key + "add_eos_token": True})
    assert on.encode("hi") == [1, *on.encode("hi", add_special_tokens=False), 2]
    assert tiny_llama().encode("hi") == [1, 7]
    assert tiny_llama().decode([1, 7, 7]) == "hi hi"
    assert tiny_llama(add_bos_token=False).encode("hi") == [7]
    assert tiny_llama(add_eos_token=True, eos_token_id=0).encode("hi") == [1, 7, 0]
    bare = tiny_llama(add_space_prefix=False)
    assert bare.encode("hi") == [1, 6] and bare.decode([1, 7]) == " hi"


def test_gguf_end_of_sequence_comes_from_the_file(smollm_metadata: dict[str, Any]) -> None:
    changed = from_gguf({**smollm_metadata, "tokenizer.ggml.eos_token_id": 500, "tokenizer.ggml.eot_token_id": 2})
    assert changed.eos_id == 500 and changed.eos_ids == (500, 2)


def test_gguf_errors_name_the_key(smollm_metadata: dict[str, Any]) -> None:
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        with pytest.raises(TokenizerError, match=key):
            from_gguf({name: value for name, value in smollm_metadata.items() if name != key})
    with pytest.raises(TokenizerError, match="rwkv"):
        from_gguf({**smollm_metadata, "tokenizer.ggml.model": "rwkv"})
    with pytest.raises(TokenizerError, match="eos_token_id = 99999999"):
        from_gguf({**smollm_metadata, "tokenizer.ggml.eos_token_id": 99999999})
    with pytest.raises(TokenizerError, match="token_type"):
        from_gguf({**smollm_metadata, "tokenizer.ggml.token_type": [1, 2]})


def test_unknown_pre_tokenizers_are_refused_by_name(smollm_metadata: dict[str, Any]) -> None:
    for name, why in (("brand-new", "not known"), ("gemma4", "not byte-level and not built")):
        with pytest.raises(TokenizerError, match=f"pre-tokenizer '{name}', which is {why}"):
            from_gguf({**smollm_metadata, "tokenizer.ggml.pre": name})


def words(name: str, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in pre_tokenizer(WORD_RULES[name]).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll go  12345\n\nx", ["I", "'ll", " go", " ", " 12345", "\n", "\n", "x"]),
        ("llama-bpe", "I'LL go 12345\n\nx", ["I", "'LL", " go", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "go 123\n x", ["go", " ", "1", "2", "3", "\n", " x"]),
        ("smollm", "a 12  b", ["a", " ", "1", "2", " ", " b"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("falcon", "a, 12345", ["a", ",", " ", "123", "45"]),
        ("deepseek-llm", "a b12\n", ["a", " b", "1", "2", "\n"]),
        ("deepseek-coder", "a b12!", ["a", " b", "1", "2", "!"]),
        ("deepseek-v3", "ab 1234漢字", ["ab", " ", "123", "4", "漢字"]),
        ("bloom", "ab, cd", ["ab", ",", " cd"]),
    ],
)
def test_word_rules(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def test_every_word_rule_compiles_and_loses_nothing() -> None:
    for name in WORD_RULES:
        for text in CORPUS:
            pieces = "".join(piece for piece, _ in pre_tokenizer(WORD_RULES[name]).pre_tokenize_str(text))
            assert bytes(BYTE_CHARACTERS[character] for character in pieces).decode() == text, name


def slow_merges(pieces: list[str], scores: list[float]) -> list[tuple[str, str]]:
    found = []
    known = set(pieces)
    for piece, score in zip(pieces, scores, strict=True):
        for cut in range(1, len(piece)):
            if piece[:cut] in known and piece[cut:] in known:
                found.append((-score, -cut, cut - len(piece), piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(found, key=lambda entry: entry[:3])]


def test_derived_merges_equal_the_plain_way() -> None:
    draw = np.random.default_rng(3)
    pieces = list({"".join(draw.choice(list("ab▁漢"), draw.integers(1, 7))) for _ in range(600)})
    scores = draw.permutation(len(pieces)).astype(float)
    assert sentencepiece.derive_merges(pieces, list(scores)) == slow_merges(pieces, list(scores))
    tied = [float(score // 5) for score in scores]
    assert sorted(sentencepiece.derive_merges(pieces, tied)) == sorted(slow_merges(pieces, tied))
    assert sentencepiece.derive_merges([], []) == []


def field(number: int, value: bytes | int | float) -> bytes:
    def varint(n: int) -> bytes:
        out = b""
        while n > 0x7F:
            out += bytes([n & 0x7F | 0x80])
            n >>= 7
        return out + bytes([n])

    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % (1 << 64))
    return varint(number << 3 | 2) + varint(len(value)) + value


def model_file(pieces: list[tuple[str, float, int]], kind: int) -> bytes:
    listed = [field(1, field(1, text.encode()) + field(2, score) + field(3, type)) for text, score, type in pieces]
    trainer = field(3, kind) + field(40, 0) + field(41, 1) + field(42, 2) + field(43, -1)
    return b"".join(listed) + field(2, trainer) + field(3, field(3, 1) + field(4, 0))


SPECIALS = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
BYTES = [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]


def test_sentencepiece_bpe_file(tmp_path: Path) -> None:
    merged = ["▁h", "el", "lo", "▁hel", "▁hello", "▁w", "or", "ld", "▁wor", "▁world"]
    pieces = [*SPECIALS, *BYTES, *[(text, -float(i), 1) for i, text in enumerate(merged)]]
    pieces += [(char, -100.0 - i, 1) for i, char in enumerate("▁helowrd")]
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces, kind=2))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    ids = tokenizer.encode("hello world")
    assert [tokenizer.token_text(id) for id in ids] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(tokenizer.encode("é hello")) == "é hello"
    assert tokenizer.token(ids[1]) == " hello"


def test_sentencepiece_unigram_file(tmp_path: Path) -> None:
    pieces = [*SPECIALS, *BYTES, ("▁a", -1.0, 1), ("b", -2.0, 1), ("▁ab", -2.5, 1), ("▁", -4.0, 1), ("a", -4.0, 1)]
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces, kind=1))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("ab a")
    assert [tokenizer.token_text(id) for id in ids] == ["▁ab", "▁a"]
    assert tokenizer.decode(ids) == "ab a"


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="neither tokenizer.json nor tokenizer.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff")
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_folder(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_post_processor_decides_unless_the_config_does(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = write_folder(tmp_path, backend, bos_token="<s>", eos_token={"content": "</s>"})
    tokenizer = Tokenizer.from_folder(folder)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [0, *plain] and tokenizer.eos_id == 1
    write_folder(tmp_path, backend, bos_token="<s>", eos_token="</s>", add_bos_token=False, add_eos_token=True)
    assert Tokenizer.from_folder(folder).encode("hi") == [*plain, 1]


def test_added_tokens_beside_the_vocabulary(tmp_path: Path) -> None:
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    listed = {
        str(size): {"content": "<|turn|>", "special": True},
        str(size + 1): {"content": "<tool>", "special": False},
    }
    folder = write_folder(tmp_path, backend, bos_token="<s>", pad_token="<pad>", added_tokens_decoder=listed)
    tokenizer = Tokenizer.from_folder(folder)
    theirs = auto_tokenizer(folder)
    for text in ("<|turn|>a<tool>b<pad>", "x <s> y"):
        assert tokenizer.encode(text) == theirs.encode(text)
    assert size in tokenizer.special_ids and size + 1 not in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("<|turn|>a<tool>é")) == "a<tool>é"
    assert tokenizer.token_bytes(size + 1) == b"<tool>"


def test_other_decoders_fall_back_to_the_backend(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2, "you": 3}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("Hello you") + [77]) == "hello you"


def test_named_templates(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write_folder(tmp_path, byte_level_backend(), chat_template=listed)
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert Tokenizer.from_folder(folder).chat_template == "c"


def test_other_threads_run_while_a_long_text_is_encoded(smollm: Tokenizer) -> None:
    text = "hello world " * 50_000
    for encode in (smollm.encode, smollm.encode_literally):
        found: list[int] = []
        thread = threading.Thread(target=lambda encode=encode, found=found: found.extend(encode(text)))
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 20
        assert found == smollm.encode("hello world ")[:2] + smollm.encode(" hello world")[:2] * 49_999 + [
            *smollm.encode(" ")
        ]
