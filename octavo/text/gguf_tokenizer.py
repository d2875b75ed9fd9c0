"""The tokenizer inside a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from octavo.text import sentencepiece
from octavo.text.pretokenizers import REFUSED, WORD_RULES, normalizer, pre_tokenizer
from octavo.text.tokenizer import Tokenizer, TokenizerError

_KEY = "tokenizer.ggml."
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_MORE_ENDS = ("eot_token_id", "eom_token_id")
_DEFAULTS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
    "bert": {"bos_token_id": 101, "eos_token_id": 102, "unknown_token_id": 100, "padding_token_id": 0},
}
"""Ids of kinds of tokenizers, where the file says nothing; BERT's ends are [CLS] and [SEP]."""
_NOT_BUILT = frozenset({"rwkv", "plamo2", "gemma4", "hybriddna"})
"""Kinds that llama.cpp knows besides; no architecture with one is served."""


def _list(metadata: Mapping[str, Any], key: str, length: int | None = None) -> list[Any]:
    value = metadata.get(_KEY + key)
    if value is None:
        raise TokenizerError(f"the GGUF file has no {_KEY}{key}; its tokenizer cannot be built")
    items = list(value) if isinstance(value, list | tuple) else list(value.tolist())
    if length is not None and len(items) != length:
        raise TokenizerError(f"the GGUF file has {len(items)} entries in {_KEY}{key} for {length} tokens")
    return items


def _byte_level(
    metadata: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The backend and whether BOS is added where the file does not say."""
    name = metadata.get(_KEY + "pre", "default")
    rule = WORD_RULES.get(name)
    if rule is None:
        raise TokenizerError(
            f"the GGUF file names the pre-tokenizer {name!r}, which is "
            f"{'not byte-level and not built' if name in REFUSED else 'not known'} here: text would be cut into other "
            "words than those the model was trained on. Name a folder with a tokenizer.json with --tokenizer."
        )
    merges = []
    for merge in _list(metadata, "merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        model = models.BPE(
            vocab={text: i for i, text in enumerate(pieces)}, merges=merges, ignore_merges=rule.whole_words
        )
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"the merges of the GGUF file do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    normalize = normalizer(rule)
    if normalize is not None:
        backend.normalizer = normalize
    backend.pre_tokenizer = pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    sentencepiece.mark_added(backend, pieces, types)
    return backend, rule.add_bos


def _unigram(metadata: Mapping[str, Any], pieces: list[str], types: list[int], unk_id: int) -> tokenizers.Tokenizer:
    """A SentencePiece Unigram vocabulary, as T5 has one."""
    charsmap = metadata.get(_KEY + "precompiled_charsmap")
    model = sentencepiece.SentencePieceModel(
        pieces=pieces,
        # The most probable segmentation takes a user-defined piece wherever it can (llama.cpp: a score of 0).
        scores=[
            0.0 if kind == sentencepiece.USER_DEFINED else float(score)
            for score, kind in zip(_list(metadata, "scores", len(pieces)), types, strict=True)
        ],
        types=types,
        unigram=True,
        unk_id=unk_id,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        charsmap=b"" if charsmap is None else charsmap.tobytes(),
        add_space_prefix=bool(metadata.get(_KEY + "add_space_prefix", True)),
        remove_extra_spaces=bool(metadata.get(_KEY + "remove_extra_whitespaces", False)),
    )
    return sentencepiece.build(model)


def _word_pieces(metadata: Mapping[str, Any], pieces: list[str], types: list[int], unk_id: int) -> tokenizers.Tokenizer:
    """A WordPiece vocabulary, as BERT has one. GGUF files mark where a word begins; the library, where it goes on."""
    special = {i for i, kind in enumerate(types) if kind in (sentencepiece.UNKNOWN, sentencepiece.CONTROL)}
    names = [text if i in special or text.startswith("[") else _as_word_piece(text) for i, text in enumerate(pieces)]
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab={text: i for i, text in enumerate(names)}, unk_token=names[unk_id])
    )
    lowercase = bool(metadata.get(_KEY + "normalizer.lowercase", True))
    accents = bool(metadata.get(_KEY + "normalizer.strip_accents", lowercase))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    sentencepiece.mark_added(backend, names, types)
    return backend


def _as_word_piece(text: str) -> str:
    return text[len(sentencepiece.SPACE) :] if text.startswith(sentencepiece.SPACE) else f"##{text}"


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes: `metadata` maps its keys to plain values, arrays to
    lists or numpy arrays.

    Raises:
        TokenizerError: keys are missing or do not fit together, or the kind of tokenizer is not supported.
    """
    try:
        return _from_gguf(metadata)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"the tokenizer of the GGUF file has a value that cannot be right ({type(error).__name__}: {error})"
        ) from error


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get(_KEY + "model")
    if kind is None:
        raise TokenizerError(f"the GGUF file has no {_KEY}model: it holds no tokenizer. Name one with --tokenizer.")
    pieces: list[str] = _list(metadata, "tokens")
    types = (
        _list(metadata, "token_type", len(pieces))
        if _KEY + "token_type" in metadata
        else [sentencepiece.NORMAL] * len(pieces)
    )
    if not all(isinstance(text, str) for text in pieces) or not all(isinstance(kind, int) for kind in types):
        raise TokenizerError(f"the GGUF file has {_KEY}tokens that are no texts, or types of them that are no numbers")
    ids: dict[str, int] = dict(_DEFAULTS.get(kind, {}))
    for key in (*_NAMED.values(), *_MORE_ENDS):
        value = metadata.get(_KEY + key)
        if value is None and kind == "bert" and key == "eos_token_id":
            value = metadata.get(_KEY + "seperator_token_id")  # so spelt in the format
        if value is not None:
            ids[key] = int(value)
    for key, id in ids.items():
        if not 0 <= id < len(pieces) and _KEY + key in metadata and id != 0xFFFFFFFF:
            raise TokenizerError(f"the GGUF file has {_KEY}{key} = {id}, outside its {len(pieces)} tokens")
    ids = {key: id for key, id in ids.items() if 0 <= id < len(pieces)}
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, pieces, types)
    elif kind == "llama":
        scores = _list(metadata, "scores", len(pieces))
        space = bool(metadata.get(_KEY + "add_space_prefix", True))
        backend = sentencepiece.build_bpe(pieces, scores, types, ids.get("unknown_token_id", -1), space)
        add_bos = True
    elif kind == "t5":
        backend, add_bos = _unigram(metadata, pieces, types, ids.get("unknown_token_id", -1)), False
    elif kind == "bert":
        if "unknown_token_id" not in ids:
            raise TokenizerError(f"the GGUF file has no {_KEY}unknown_token_id, which a tokenizer of words needs")
        backend = _word_pieces(metadata, pieces, types, ids["unknown_token_id"])
        add_bos = True
    else:
        raise TokenizerError(
            f"the GGUF file's tokenizer is of the kind {kind!r}, which is "
            f"{'not built' if kind in _NOT_BUILT else 'not known'} here; there are 'gpt2' (byte-level BPE), 'llama' "
            "and 't5' (SentencePiece) and 'bert' (WordPiece). Name a folder with a tokenizer.json with --tokenizer."
        )
    templates = {"default": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}
    prefix = "tokenizer.chat_template."
    templates.update({key[len(prefix) :]: str(text) for key, text in metadata.items() if key.startswith(prefix)})
    return Tokenizer(
        backend,
        special_tokens={name: pieces[ids[key]] for name, key in _NAMED.items() if key in ids},
        extra_eos_ids=[ids[key] for key in _MORE_ENDS if key in ids],
        add_bos=bool(metadata.get(_KEY + "add_bos_token", add_bos)),
        add_eos=bool(
            metadata.get(_KEY + ("add_sep_token" if kind == "bert" else "add_eos_token"), kind in ("t5", "bert"))
        ),
        chat_templates=templates,
    )
