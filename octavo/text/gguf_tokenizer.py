"""The tokenizer inside a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models

from octavo.text import sentencepiece
from octavo.text.pretokenizers import WORD_RULES, normalizer, pre_tokenizer
from octavo.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_MORE_ENDS = ("eot_token_id", "eom_token_id")
_LLAMA_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


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
    name = str(metadata.get(_KEY + "pre", "default"))
    rule = WORD_RULES.get(name)
    if rule is None:
        logger.warning(
            "The GGUF file names the pre-tokenizer %r, which is unknown here: text is cut into words as GPT-2 does, "
            "and some prompts may be tokenized differently from how the model was trained.",
            name,
        )
        rule = WORD_RULES["default"]
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
    backend.pre_tokenizer = pre_tokenizer(rule, name)
    backend.decoder = decoders.ByteLevel()
    sentencepiece.mark_added(backend, pieces, types)
    return backend, rule.add_bos


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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
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
    ids: dict[str, int] = dict(_LLAMA_DEFAULTS) if kind == "llama" else {}
    for key in (*_NAMED.values(), *_MORE_ENDS):
        value = metadata.get(_KEY + key)
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
    else:
        raise TokenizerError(
            f"the GGUF file's tokenizer is of kind {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece). Name a folder with a tokenizer.json with --tokenizer."
        )
    templates = {"default": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}
    prefix = "tokenizer.chat_template."
    templates.update({key[len(prefix) :]: str(text) for key, text in metadata.items() if key.startswith(prefix)})
    return Tokenizer(
        backend,
        special_tokens={name: pieces[ids[key]] for name, key in _NAMED.items() if key in ids},
        extra_eos_ids=[ids[key] for key in _MORE_ENDS if key in ids],
        add_bos=bool(metadata.get(_KEY + "add_bos_token", add_bos)),
        add_eos=bool(metadata.get(_KEY + "add_eos_token", False)),
        chat_templates=templates,
    )
