"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.text import sentencepiece
from octavo.text.tokenizer import BYTE_CHARACTERS, Tokenizer

WORDS = ("Hello", " world", " wor", "ld", "DEF", "ABC", " a", "  ", "\n\n", "é")


def byte_level() -> Tokenizer:
    """Ids 0-255 are the bytes, then `WORDS`, then <s>, </s> and <turn>. Encoding knows bytes only."""
    characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    for word in WORDS:
        vocabulary["".join(characters[byte] for byte in word.encode())] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<turn>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def pieces(add_space_prefix: bool = True, add_bos: bool = True) -> Tokenizer:
    """SentencePiece BPE with byte fallback: <unk>, <s>, </s>, the bytes (ids 3-258), then letters and `WORDS`."""
    texts = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)]]
    types = [2, 3, 3, *[6] * 256]
    for text in ["▁", *"abcdeflorwHD", "▁w", "▁wo", *[word.replace(" ", "▁") for word in WORDS]]:
        if text not in texts:
            texts.append(text)
            types.append(1)
    scores = [-float(i) for i in range(len(texts))]
    backend = sentencepiece.build_bpe(texts, scores, types, 0, add_space_prefix)
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=add_bos)


def word_pieces() -> Tokenizer:
    """A vocabulary only the backend can decode."""
    listed = ["[UNK]", "he", "##llo", "you", "##r", "a", "[SEP]"]
    backend = tokenizers.Tokenizer(models.WordPiece({text: i for i, text in enumerate(listed)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)
