"""Random changes, repeatable by seed: of bytes, and of the values inside JSON and GGUF headers."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

ODD_BYTES = [b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"NaN", b"1e999", b"-1", b"[]", b"{}", b"null"]
"""What is likely to hurt: the largest and smallest integers, and values of other types."""
ODD = [
    *(0, -1, 1, 2, 7, 2**31, 2**63, 2**64 - 1, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(True, None, "", "x", "0", [], {}, [0], [None], [[]], {"a": 0}, [1] * 50, "\u2581" * 50),
]
MOST_CHANGES = 6


def of_bytes(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """`data` with a few changes, most of them near its beginning, where headers are; `other` lends parts."""
    out = bytearray(data)
    for _ in range(rng.randint(1, MOST_CHANGES)):
        end = len(out) if rng.random() < 0.3 else min(len(out), 2048)
        at = rng.randrange(end + 1)
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                odd = rng.choice(ODD_BYTES)
                out[at : at + len(odd)] = odd
            case 3:
                del out[at : at + rng.randint(1, 64)]
            case 4:
                start = rng.randrange(len(other) + 1)
                out[at:at] = other[start : start + rng.randint(1, 64)]
            case _:
                del out[at:]
    return bytes(out)


def of_json(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one to three of its parts replaced, doubled, renamed or removed."""
    out = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(out))
        if not places:
            return out
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(list(holder))] = holder[key]
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
    return out


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def of_safetensors(data: bytes, rng: random.Random) -> bytes:
    """With another header of the right length."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(of_json(json.loads(data[8 : 8 + size]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


GGUF_TYPES = {"u8": 0, "u16": 2, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "text": 8, "u64": 10, "f64": 12}
_CODES = {0: "<B", 2: "<H", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 12: "<d"}

Pairs = list[tuple[str, str, Any]]
"""Metadata of a GGUF file: key, type and value; a list is an array."""
Infos = list[tuple[str, tuple[int, ...], int, int]]
"""Tensors: name, shape, number of the type, offset."""


def gguf_file(pairs: Pairs, infos: Infos, data: bytes) -> bytes:
    """A GGUF file of version 3, whatever it says."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(infos), len(pairs))]
    for key, kind, value in pairs:
        out.append(_text(key))
        if isinstance(value, list):
            out.append(struct.pack("<IIQ", 9, GGUF_TYPES[kind], len(value)))
            out += [_value(kind, each) for each in value]
        else:
            out += [struct.pack("<I", GGUF_TYPES[kind]), _value(kind, value)]
    for name, shape, number, offset in infos:
        dimensions = [n % 2**64 for n in reversed(shape)]
        out += [
            _text(name),
            struct.pack(f"<I{len(shape)}Q", len(shape), *dimensions),
            struct.pack("<IQ", number, offset),
        ]
    head = b"".join(out)
    return head + bytes(-len(head) % 32) + data


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: str, value: Any) -> bytes:
    if kind == "text":
        return _text(value if isinstance(value, str) else repr(value))
    code = _CODES[GGUF_TYPES[kind]]
    number = value if isinstance(value, int | float) else 0
    if code in ("<f", "<d"):
        return (
            struct.pack("<d", float(number))[: struct.calcsize(code)]
            if code == "<d"
            else struct.pack("<f", _small(number))
        )
    size = struct.calcsize(code)
    return (int(number) if number == number and abs(number) < 1e300 else 0).to_bytes(64, "little", signed=True)[:size]


def _small(number: float) -> float:
    return float(number) if abs(number) < 3e38 or number != number else float("inf")


def of_gguf(pairs: Pairs, infos: Infos, data: bytes, rng: random.Random) -> bytes:
    """With some keys or tensors of other types, values, shapes or names."""
    pairs, infos = list(pairs), list(infos)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.7:
            at = rng.randrange(len(pairs))
            key, kind, value = pairs[at]
            odd = rng.choice(ODD)
            changes = [
                (key, rng.choice(list(GGUF_TYPES)), value),
                (key, kind, odd if not isinstance(odd, dict) else 3),
                (key, rng.choice(list(GGUF_TYPES)), odd if not isinstance(odd, dict) else 3),
                (key, kind, [value] if not isinstance(value, list) else value[: rng.randrange(len(value) + 1)]),
                (rng.choice(EXTRA_KEYS), rng.choice(list(GGUF_TYPES)), odd if not isinstance(odd, dict) else [1]),
            ]
            pairs[at] = rng.choice(changes)
            if rng.random() < 0.1:
                del pairs[at]
        else:
            at = rng.randrange(len(infos))
            name, shape, number, offset = infos[at]
            sizes = [0, 1, 2, 31, 32, 64, 2**31, 2**62, 2**63, 2**64 - 1]
            changes_of_tensors = [
                (name, tuple(rng.choice(sizes) for _ in range(rng.randint(0, 5))), number, offset),
                (name, shape, rng.randrange(45), offset),
                (name, shape, number, rng.choice([0, 1, 32, 2**40, 2**63, 2**64 - 32])),
                (rng.choice([i[0] for i in infos] + EXTRA_TENSORS), shape, number, offset),
            ]
            infos[at] = rng.choice(changes_of_tensors)
    return gguf_file(pairs, infos, data)


EXTRA_KEYS = [
    *("llama.expert_count", "llama.expert_used_count", "llama.rope.scaling.type", "llama.rope.scaling.factor"),
    *("llama.rope.scaling.original_context_length", "llama.rope.dimension_count", "llama.attention.key_length"),
    *("llama.attention.sliding_window", "llama.vocab_size", "general.alignment", "split.count", "split.no"),
    *("llama.attention.value_length", "llama.nextn_predict_layers", "tokenizer.ggml.eot_token_id"),
    *("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template.tool_use"),
    *("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.scores", "tokenizer.ggml.merges", "general.sampling.temp"),
]
EXTRA_TENSORS = ["rope_freqs.weight", "output.weight", "blk.0.ffn_gate_inp.weight", "blk.9.attn_q.weight", ""]
