"""Random changes, repeatable by seed: of bytes, and of the values inside JSON and GGUF headers."""

from __future__ import annotations

import copy
import json
import pickletools
import random
import struct
from itertools import pairwise
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


SIZES = {1: ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"), 2: ("F16", "BF16", "I16"), 4: ("F32", "I32", "U32")}
"""Types by the bytes of an element."""
ENDINGS = [
    *(".weight", ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_packed"),
    *(".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale", ".weight_scale_2", ".SCB"),
    *(".W_q", ".scale", ".zero", ".shape", ".packing", ".axis", "_blocks", "_scales", "._weight_qdata"),
    *("._weight_scale", ".weight.absmax", ".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4", ".bias"),
]
"""What names of tensors end in, of all methods."""


def of_tensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is right, and some of whose tensors are of other values, types, shapes or names,
    are gone, or are there twice; or whose metadata are others."""
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    metadata = header.pop("__metadata__", {})
    tensors = {name: [e["dtype"], e["shape"], rest[slice(*e["data_offsets"])]] for name, e in header.items()}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(tensors))
        kind, shape, content = tensors[name]
        match rng.randrange(8):
            case 0:
                filled = rng.choice([b"\xff", b"\0", b"\x7f", b"\x80", b"\1", rng.randbytes(7)])
                tensors[name][2] = (filled * len(content))[: len(content)]
            case 1:
                at = rng.randrange(len(content) + 1)
                odd = rng.choice(ODD_BYTES)
                tensors[name][2] = (content[:at] + odd + content[at + len(odd) :])[: len(content)]
            case 2:
                elements = 1
                for n in shape:
                    elements *= n
                tensors[name][0] = rng.choice(SIZES.get(len(content) // max(elements, 1), (kind,)))
            case 3:
                tensors[name][1:] = _reshaped(shape, content, rng)
            case 4:
                del tensors[name]
            case 5:
                stem = max((e for e in ENDINGS if name.endswith(e)), key=len, default="")
                tensors[name.removesuffix(stem) + rng.choice(ENDINGS)] = tensors.pop(name)
            case 6:
                tensors[rng.choice(sorted(tensors))] = list(tensors[name])
            case _:
                said = _json_in(content)
                if said is not None:
                    content = json.dumps(of_json(said, rng)).encode()
                    tensors[name] = [kind, [len(content)], content]
                for key in rng.sample(sorted(metadata), min(2, len(metadata))):
                    metadata[key] = json.dumps(of_json(json.loads(metadata[key]), rng))
        if not tensors:
            break
    return _file(tensors, metadata)


def _reshaped(shape: list[int], content: bytes, rng: random.Random) -> tuple[list[int], bytes]:
    if not shape or not content:
        return [1, *shape], content
    row = len(content) // shape[0]
    keep = rng.choice([0, 1, shape[0] // 2, shape[0] - 1])
    return rng.choice(
        [
            (shape[::-1], content),
            ([1, *shape], content),
            ([*shape, 1], content),
            ([keep, *shape[1:]], content[: keep * row]),
            ([2 * shape[0], *shape[1:]], content * 2),
            ([0, *shape], b""),
        ]
    )


def _json_in(content: bytes) -> Any:
    try:
        return json.loads(content) if content[:1] == b"{" else None
    except ValueError:
        return None


def _file(tensors: dict[str, list[Any]], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (kind, shape, content) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(content for _, _, content in tensors.values())


def of_pickle(text: bytes, rng: random.Random) -> bytes:
    """With opcodes left out, twice, or in another order, and arguments of other values."""
    starts = [at for _, _, at in pickletools.genops(text) if at is not None]
    parts = [text[start:end] for start, end in pairwise([*starts, len(text)])]
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        match rng.randrange(5):
            case 0:
                del parts[at]
            case 1:
                parts[at] = parts[other]
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts.insert(at, rng.choice(ODD_OPCODES))
            case _:
                parts[at] = parts[at][:1] + rng.randbytes(len(parts[at]) - 1)
        parts = parts or [b"."]
    return b"".join(parts)


ODD_OPCODES = [
    *(b"N", b"I1\n", b"I-1\n", b"L99999999999999999999L\n", b"G\x7f\xf0" + bytes(6), b"]", b"}", b")", b"(t", b"0"),
    *(b"ccollections\nOrderedDict\n", b"ctorch\nFloatStorage\n", b"R", b"b", b"a", b"s", b"u", b"2", b"Q", b"\x85"),
]


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


def of_pairs(pairs: Pairs, rng: random.Random) -> Pairs:
    """Metadata with one key of another type or value, under another name, or gone."""
    out = list(pairs)
    at = rng.randrange(len(out))
    key, kind, value = out[at]
    odd = rng.choice(ODD)
    plain = odd if not isinstance(odd, dict) else 3
    changes = [
        (key, rng.choice(list(GGUF_TYPES)), value),
        (key, kind, plain),
        (key, rng.choice(list(GGUF_TYPES)), plain),
        (key, kind, [value] if not isinstance(value, list) else value[: rng.randrange(len(value) + 1)]),
        (rng.choice(EXTRA_KEYS), rng.choice(list(GGUF_TYPES)), odd if not isinstance(odd, dict) else [1]),
    ]
    out[at] = rng.choice(changes)
    if rng.random() < 0.1:
        del out[at]
    return out


def of_gguf(pairs: Pairs, infos: Infos, data: bytes, rng: random.Random) -> bytes:
    """With some keys or tensors of other types, values, shapes or names."""
    infos = list(infos)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.7:
            pairs = of_pairs(pairs, rng)
        else:
            at = rng.randrange(len(infos))
            name, shape, number, offset = infos[at]
            sizes = [0, 1, 2, 31, 32, 64, 2**31, 2**62, 2**63, 2**64 - 1]
            changes = [
                (name, tuple(rng.choice(sizes) for _ in range(rng.randint(0, 5))), number, offset),
                (name, shape, rng.randrange(45), offset),
                (name, shape, number, rng.choice([0, 1, 32, 2**40, 2**63, 2**64 - 32])),
                (rng.choice([i[0] for i in infos] + EXTRA_TENSORS), shape, number, offset),
            ]
            infos[at] = rng.choice(changes)
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
