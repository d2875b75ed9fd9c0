"""SentencePiece vocabularies as fast tokenizers: from `tokenizer.model` files and from the token lists of GGUF files.

SentencePiece (Kudo & Richardson 2018) comes in two kinds. *BPE* models merge, again and again, the adjacent pair of
pieces whose concatenation has the best score; as the scores are ranks, a byte-pair encoder with the right list of
merges gives the same pieces. *Unigram* models pick the most probable segmentation. Text the pieces do not cover
falls back to byte pieces `<0x00>` ... `<0xFF>` where the vocabulary has them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

SPACE = "▁"
"""The character that stands for a space inside pieces."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces, as SentencePiece and GGUF number them."""


class SentencePieceModel(NamedTuple):
    """What a `tokenizer.model` file says. `pieces`, `scores` and `types` are parallel; the index is the token id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    charsmap: bytes
    """Compiled normalisation rules of Unigram models, empty for none."""
    add_space_prefix: bool
    remove_extra_spaces: bool


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of one protobuf message; fixed-width and length-delimited values as bytes.

    ValueError on anything that is not a well-formed message.
    """
    at, end = 0, len(data)

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= end or shift > 63:
                raise ValueError("truncated or malformed number")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < end:
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise ValueError(f"unknown wire type {kind}")
            size = varint()
        if at + size > end:
            raise ValueError("a field is longer than the file")
        yield key >> 3, data[at : at + size]
        at += size


def _signed(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a number was expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = _signed(value)
    return text, score, kind


def read_model(path: Path) -> SentencePieceModel:
    """Parse a SentencePiece `tokenizer.model` file (a protobuf `ModelProto`). ValueError names the file when it is
    not one."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(path.read_bytes()):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                text, score, kind = _piece(value)
                pieces.append(text)
                scores.append(score)
                types.append(kind)
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        if not pieces:
            raise ValueError("it holds no pieces")
        kind = _signed(trainer.get(3, 1))
        if kind not in (1, 2):
            raise ValueError(f"its model type {kind} is neither unigram (1) nor BPE (2)")
        charsmap = normalizer.get(2, b"")
        return SentencePieceModel(
            pieces=pieces,
            scores=scores,
            types=types,
            unigram=kind == 1,
            unk_id=_signed(trainer.get(40, 0)),
            bos_id=_signed(trainer.get(41, 1)),
            eos_id=_signed(trainer.get(42, 2)),
            pad_id=_signed(trainer.get(43, (1 << 64) - 1)),
            charsmap=charsmap if isinstance(charsmap, bytes) else b"",
            add_space_prefix=bool(normalizer.get(3, 1)),
            remove_extra_spaces=bool(normalizer.get(4, 1)),
        )
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a SentencePiece model this program can read: {error}") from error


_ODD = 0x9E3779B97F4A7C15
_SLOT_BITS = 22


def _substring_hashes(
    pieces: Sequence[str],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """(hash of every piece, left part and right part of every cut of every piece, index of the piece cut).

    A polynomial hash modulo 2**64 over all characters laid end to end: the hash of any substring is a difference of
    two prefix sums, shifted back by the inverse power of the (odd, hence invertible) base.
    """
    count = len(pieces)
    lengths = np.fromiter(map(len, pieces), np.int64, count)
    codes = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    mixed = codes * np.uint64(0xD1B54A32D192ED03)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    powers = np.full(len(codes) + 1, _ODD, np.uint64)
    inverses = np.full(len(codes) + 1, pow(_ODD, -1, 1 << 64), np.uint64)
    powers[0] = inverses[0] = 1
    np.cumprod(powers, out=powers)
    np.cumprod(inverses, out=inverses)
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(mixed * powers[:-1], out=sums[1:])
    end = np.cumsum(lengths)
    start = end - lengths
    whole = (sums[end] - sums[start]) * inverses[start]
    owner = np.repeat(np.arange(count), lengths)
    inside = np.ones(len(codes), bool)
    inside[start[lengths > 0]] = False
    cut = np.flatnonzero(inside)  # the first character right of each cut
    owner = owner[cut]
    begin = start[owner]
    middle = sums[cut]
    left = (middle - sums[begin]) * inverses[begin]
    right = (sums[end[owner]] - middle) * inverses[cut]
    return whole, left, right, owner


def derive_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a byte-pair encoder that segments as SentencePiece does with these pieces and scores.

    Every way to cut a piece into two pieces is a merge; merges are ordered by the score of what they make, best
    first, and among equals the longer left part first (SentencePiece merges the leftmost pair first).
    A quarter of a million pieces have some two million cuts: they are looked up by hash in bulk.
    """
    if not pieces:
        return []
    values = np.asarray(scores, np.float64)
    by_score = np.argsort(-values, kind="stable")
    if (np.diff(by_score) < 0).any():
        pieces, values = [pieces[i] for i in by_score.tolist()], values[by_score]
    whole, left, right, owner = _substring_hashes(pieces)
    shift = np.uint64(64 - _SLOT_BITS)
    slots = np.zeros(1 << _SLOT_BITS, np.int32)
    slots[whole >> shift] = np.arange(1, len(pieces) + 1, dtype=np.int32)
    order = np.argsort(whole)
    ordered = whole[order]

    def find(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Index of the piece with each hash, or -1."""
        found: npt.NDArray[np.int64] = slots[keys >> shift].astype(np.int64) - 1
        doubtful = np.flatnonzero((found >= 0) & (whole[found] != keys))  # two pieces may want one slot
        place = np.minimum(np.searchsorted(ordered, keys[doubtful]), len(pieces) - 1)
        found[doubtful] = np.where(ordered[place] == keys[doubtful], order[place], -1)
        return found

    first = find(left)
    keep = np.flatnonzero(first >= 0)
    second = find(right[keep])
    both = second >= 0
    keep, second = keep[both], second[both]
    first = first[keep]
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    level = np.cumsum(np.diff(values, prepend=values[0]) != 0)[owner[keep]]  # 0 for the best score, 1 for the next
    most = 1 << 20
    key = (level << 40) | ((most - 1 - np.minimum(lengths[first], most - 1)) << 20)
    key |= most - 1 - np.minimum(lengths[second], most - 1)
    ranks = np.argsort(key, kind="stable")
    text = pieces.__getitem__
    return list(zip(map(text, first[ranks].tolist()), map(text, second[ranks].tolist()), strict=True))


def mark_added(backend: tokenizers.Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    """Make control and unknown pieces special tokens, and user-defined pieces tokens that are cut out of the text
    before anything else. Runs of `SPACE` are left out: they never stand in a text, only in its normal form."""
    named = [(text, kind) for text, kind in zip(pieces, types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    special = [AddedToken(text, special=True, normalized=False) for text, kind in named if kind != USER_DEFINED]
    ordinary = [
        AddedToken(text, special=False, normalized=False)
        for text, kind in named
        if kind == USER_DEFINED and text.strip(SPACE)
    ]
    if special:
        backend.add_special_tokens(special)
    if ordinary:
        backend.add_tokens(ordinary)


def _check_charsmap(charsmap: bytes) -> None:
    """Raise ValueError unless every step through the rules stays inside of them: who follows them does not look.

    The rules are their length, a double array (Aoe, "An efficient digital search algorithm", 1989) of little-endian
    words, and texts that end in 0. Word i leads to the words (i xor its offset) xor any byte, or, with bit 31 set, to a
    text. The first word is where every search begins.
    """
    size = int.from_bytes(charsmap[:4], "little")
    words, texts = charsmap[4 : 4 + size], np.frombuffer(charsmap[4 + size :], np.uint8)
    if size < 4 or size % 4 or len(words) < size or not len(texts) or texts[-1]:
        raise ValueError("its rules of normalisation are cut off")
    array = np.frombuffer(words, "<u4").astype(np.int64)
    ends = array >> 31 != 0
    ends[0] = False
    leads_to = np.arange(len(array)) ^ (array >> 10 << ((array & 1 << 9) >> 6))
    text = array[ends] & 0x7FFFFFFF
    if (leads_to[~ends] | 0xFF >= len(array)).any() or (text >= len(texts)).any():
        raise ValueError("its rules of normalisation lead beyond their end")
    if (texts[text] & 0xC0 == 0x80).any():
        raise ValueError("its rules of normalisation lead into the middle of a character")


def _decoder(strip: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def build_bpe(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], unk_id: int, add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """A fast tokenizer for a SentencePiece BPE vocabulary; token ids are the indices.

    User-defined runs of spaces (GGUF files spell them with plain spaces) are made by merging before all other
    merges, as in Hugging Face's tokenizers. SentencePiece cuts the longest run first; the two differ only on runs
    longer than the longest piece.
    """
    pieces = [
        text.replace(" ", SPACE) if kind == USER_DEFINED else text for text, kind in zip(pieces, types, strict=True)
    ]
    mergeable = [i for i, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    first = max(scores, default=0.0) + len(pieces)
    ranks = [first - i if types[i] == USER_DEFINED else scores[i] for i in mergeable]
    model = models.BPE(
        vocab={text: i for i, text in enumerate(pieces)},
        merges=derive_merges([pieces[i] for i in mergeable], ranks),
        unk_token=pieces[unk_id] if 0 <= unk_id < len(pieces) else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if add_space_prefix else spaces
    backend.decoder = _decoder(add_space_prefix)
    mark_added(backend, pieces, types)
    return backend


def build(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """A fast tokenizer for a parsed `tokenizer.model`. ValueError for rules of normalisation that are broken."""
    if not model.unigram:
        return build_bpe(model.pieces, model.scores, model.types, model.unk_id, model.add_space_prefix)
    backend = tokenizers.Tokenizer(
        models.Unigram(
            vocab=list(zip(model.pieces, model.scores, strict=True)),
            unk_id=model.unk_id,
            byte_fallback=BYTE in model.types,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        _check_charsmap(model.charsmap)
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_spaces:
        steps.append(normalizers.Strip(left=True, right=True))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="always" if model.add_space_prefix else "never", split=True
    )
    backend.decoder = _decoder(model.add_space_prefix)
    mark_added(backend, model.pieces, model.types)
    return backend
