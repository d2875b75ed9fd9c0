"""Recording a body or a head: the operations append instructions, handles are buffers whose place is planned later.

A buffer lives from the instruction that writes it to the last one that reads it; when all are recorded, each gets an
offset in one arena such that buffers that live at the same time do not overlap. The program is then a flat list that
native code replays; nothing of Python runs in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from octavo.ops.check import check_router
from octavo.ops.contract import F32, I32, Activation, AttentionShape, HeadNorm, KVSpec, Rope, Router
from octavo.quant import LARGE_INTEGERS, SMALL_INTEGERS

Activations = Literal["float32", "int16", "bfloat16", "int8"]

FLOAT, INT8, INT16, BFLOAT16 = FORMS = 0, 1, 2, 3
"""Forms of an activation, as native code numbers them."""

ROUNDED = (INT8, INT16, BFLOAT16)
"""Forms that are made of the float form."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""As native code numbers them."""

GROUP = 32
"""Elements of an activation's quantization group."""

PANEL = 8
"""Rows of a weight that are packed together."""

EXPERT_ROWS = 512
"""Rows that go through a mixture of experts at a time: bounds the room for the inputs and results of all experts."""

ALIGNMENT = 64


class CpuWeight:
    """A packed matrix, the kinds of its parts, and the order in which it takes the columns of its input (None: their
    own)."""

    def __init__(self, packed: Any, kinds: tuple[str, ...], columns: I32 | None = None) -> None:
        self.packed = packed
        self.kinds = kinds
        self.columns = columns
        self.n_out: int = packed.n_out
        self.n_in: int = packed.n_in

    def forms(self, activations: Activations, head: bool) -> list[int]:
        """The form in which each part takes its input: fixed by the load, never by the batch."""
        return [_form(kind, self.n_in, activations, head) for kind in self.kinds]


def _form(kind: str, n_in: int, activations: Activations, head: bool) -> int:
    if activations == "float32" or n_in % GROUP:
        return FLOAT
    if kind in SMALL_INTEGERS and activations == "int8" and not head:
        return INT8
    if kind in SMALL_INTEGERS or kind in LARGE_INTEGERS:
        return INT16  # int8 would be the largest error of weights of more bits, and of the logits
    return BFLOAT16 if kind == "BF16" and activations in ("bfloat16", "int8") and not head else FLOAT


class Buffer:
    """One form of an activation of `rows` x `width`, live in instructions [first, last]."""

    def __init__(self, form: int, rows: int, width: int, first: int) -> None:
        self.width = width
        self.first = first
        self.last = first
        groups = rows * (width // GROUP)
        sizes = {
            FLOAT: 4 * rows * width,
            INT8: groups * (GROUP + 12),
            INT16: groups * (2 * GROUP + 4) + 4 * rows,
            BFLOAT16: 4 * rows * width,  # as float32 where the CPU cannot multiply bfloat16
        }
        self.bytes = -(-sizes[form] // ALIGNMENT) * ALIGNMENT


class CpuArray:
    """A recorded activation. `makes` are the rounded forms that its producer can make along with it."""

    def __init__(self, buffers: list[Buffer | None], width: int, makes: tuple[int, ...] = ()) -> None:
        self.buffers = buffers
        self.width = width
        self.makes = makes

    @property
    def floats(self) -> Buffer:
        buffer = self.buffers[FLOAT]
        assert buffer is not None
        return buffer

    def wanted(self) -> list[Buffer | None]:
        """The buffer of each form that a later instruction reads."""
        return [buffer if buffer is not None and buffer.last > buffer.first else None for buffer in self.buffers]


Offset = Callable[[Buffer | None], int]
Emit = Callable[[Any, Offset], None]


class Recorder:
    """The operations of a body (`rows` tokens) or a head (`rows` output rows); `Ops` of the contract.

    `positions`: how many a sequence of a step may have.
    """

    def __init__(
        self,
        activations: Activations,
        rows: int,
        spec: KVSpec,
        cache: Any,
        gathered_rows: int = 0,
        positions: int = 0,
    ) -> None:
        self.activations = activations
        self.rows = rows
        self.positions = positions
        self.spec = spec
        self.cache = cache
        self.gathered_rows = gathered_rows
        self.vocab: int | None = None
        """Rows of the smallest embedding: token ids must be below."""
        self._emits: list[Emit] = []
        self._buffers: list[Buffer] = []
        self._rotaries: dict[Rope, CpuArray] = {}

    # -- operations ---------------------------------------------------------------------------------------------
    def embed(self, batch: Any, table: Any, scale: float) -> CpuArray:
        self.vocab = min(table.n_out, self.vocab or table.n_out)
        out = self._array(table.n_in, makes=ROUNDED)
        self._add(lambda program, at: program.embed([at(b) for b in out.wanted()], table.packed, scale))
        return out

    def embed_positions(self, batch: Any, table: Any, offset: int, residual: Any) -> CpuArray:
        _same_width("embed_positions: residual", residual.width, table.n_in)
        if offset < 0 or self.positions + offset > table.n_out:
            raise ValueError(
                f"embed_positions: a table of {table.n_out} rows does not hold those of {self.positions} positions "
                f"from row {offset} on"
            )
        added = self._read(residual.floats)
        out = self._array(table.n_in, makes=ROUNDED)
        self._add(
            lambda program, at: program.embed_positions([at(b) for b in out.wanted()], table.packed, offset, at(added))
        )
        return out

    def rotary(self, batch: Any, rope: Rope) -> CpuArray:
        if rope not in self._rotaries:
            frequencies = np.array(rope.inv_freq, np.float32)
            out = self._array(2 * frequencies.size)
            self._add(lambda program, at: program.rotary(at(out.floats), frequencies, rope.scale))
            self._rotaries[rope] = out
        return self._rotaries[rope]

    def norm(
        self, x: Any, weight: Any, eps: float, residual: Any = None, *, bias: Any = None, center: bool = False
    ) -> CpuArray:
        _same_width("norm: weight", weight.size, x.width)
        if bias is not None:
            _same_width("norm: bias", bias.size, x.width)
        added = self._residual("norm", residual, x.width)
        out = self._array(x.width, makes=ROUNDED)
        source = self._read(x.floats)
        self._add(
            lambda program, at: program.norm(
                at(source), [at(b) for b in out.wanted()], weight, bias, eps, center, at(added)
            )
        )
        return out

    def activate(self, x: Any, activation: Activation, parameters: Any = None, times: Any = None) -> CpuArray:
        number = _activation("activate", activation, ("swiglu_oai",))
        if (activation == "xielu") != (parameters is not None):
            raise ValueError("activate: xielu, and no other activation, takes parameters")
        if parameters is not None:
            _same_width("activate: parameters of xielu", parameters.size, 4)
        if times is not None:
            _same_width("activate: times", times.width, x.width)
        source, factor = self._read(x.floats), None if times is None else self._read(times.floats)
        out = self._array(x.width, makes=ROUNDED)
        self._add(
            lambda program, at: program.activate(
                at(source), [at(b) for b in out.wanted()], x.width, number, parameters, at(factor)
            )
        )
        return out

    def linear(self, x: Any, weight: Any, bias: Any = None, residual: Any = None, scale: float = 1.0) -> CpuArray:
        if bias is not None:
            _same_width("linear: bias", bias.size, weight.n_out)
        forms, inputs = self._inputs("linear", x, weight, head=False)
        added = self._residual("linear", residual, weight.n_out)
        out = self._array(weight.n_out)
        self._add(
            lambda program, at: program.linear(
                [at(b) for b in inputs], at(out.floats), weight.packed, forms, bias, scale, at(added)
            )
        )
        return out

    def gated(self, x: Any, weight: Any, activation: Activation, bias: Any = None, limit: float = 0.0) -> CpuArray:
        number = _activation("gated", activation, ("xielu",))
        if weight.n_out % 2:
            raise ValueError(f"gated: {weight.n_out} rows are not gate and up rows in equal number")
        if bias is not None:
            _same_width("gated: bias", bias.size, weight.n_out)
        forms, inputs = self._inputs("gated", x, weight, head=False)
        # A work item of 32 columns is a whole group of int8; the scale of int16 needs the row.
        out = self._array(weight.n_out // 2, makes=(INT8, BFLOAT16))
        self._add(
            lambda program, at: program.gated(
                [at(b) for b in inputs], [at(b) for b in out.wanted()], weight.packed, forms, bias, number, limit
            )
        )
        return out

    def moe(
        self,
        x: Any,
        logits: Any,
        gate_up: tuple[Any, ...],
        down: tuple[Any, ...],
        router: Router,
        activation: Activation,
        *,
        correction: Any = None,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        limit: float = 0.0,
        residual: Any = None,
    ) -> CpuArray:
        check_router(router, len(gate_up))
        number = _activation("moe", activation, ("xielu",))
        experts, inner, width = len(gate_up), down[0].n_in, down[0].n_out
        _same_width("moe: logits", logits.width, experts)
        if len(down) != experts:
            raise ValueError(f"moe: {experts} experts have {len(down)} down projections")
        for first, second in zip(gate_up, down, strict=True):
            if (first.n_out, first.n_in, second.n_out, second.n_in) != (2 * inner, x.width, width, inner):
                raise ValueError(
                    f"moe: an expert of [{first.n_out}, {first.n_in}] and [{second.n_out}, {second.n_in}]; wanted "
                    f"[{2 * inner}, {x.width}] and [{width}, {inner}]"
                )
        for name, vector, size in (
            ("correction", correction, experts),
            ("gate_up_bias", gate_up_bias, experts * 2 * inner),
            ("down_bias", down_bias, experts * width),
        ):
            if vector is not None:
                _same_width(f"moe: {name}", vector.size, size)
        added = self._residual("moe", residual, width)
        source, scores = self._read(x.floats), self._read(logits.floats)
        passed = min(self.rows, EXPERT_ROWS)
        pairs = passed * router.top_k
        gate_forms, down_forms = ([w.forms(self.activations, False) for w in each] for each in (gate_up, down))
        given = self._rooms({form for forms in gate_forms for form in forms}, x.width, pairs)
        wanted = {form for forms in down_forms for form in forms}
        # The scale of int16 and another order of columns need the whole row, which is then kept.
        whole = INT16 in wanted or any(w.columns is not None for w in down)
        hidden = self._rooms(wanted | {FLOAT} if whole else wanted, inner, pairs)
        results = self._buffer(FLOAT, width, pairs)
        out = self._array(width, makes=ROUNDED)
        self._add(
            lambda program, at: program.moe(
                at(source),
                at(scores),
                [at(b) for b in given],
                [at(b) for b in hidden],
                at(results),
                [at(b) for b in out.wanted()],
                at(added),
                passed,
                [w.packed for w in gate_up],
                gate_forms,
                [w.columns for w in gate_up],
                [w.packed for w in down],
                down_forms,
                [w.columns for w in down],
                router,
                correction,
                gate_up_bias,
                down_bias,
                number,
                limit,
            )
        )
        return out

    def headwise(self, x: Any, weight: Any, heads: int) -> CpuArray:
        _same_width("headwise: input", x.width, heads * weight.n_in)
        if weight.n_out % heads or weight.n_out // heads % PANEL or weight.n_in % GROUP:
            raise ValueError(
                f"headwise: {heads} heads of a [{weight.n_out}, {weight.n_in}] weight need a multiple of {PANEL} "
                f"columns each, from a multiple of {GROUP} values"
            )
        source = self._read(x.floats)
        out = self._array(weight.n_out)
        self._add(lambda program, at: program.headwise(at(source), at(out.floats), weight.packed, heads))
        return out

    def add(self, x: Any, y: Any, scale: float = 1.0) -> CpuArray:
        _same_width("add: y", y.width, x.width)
        first, second = self._read(x.floats), self._read(y.floats)
        out = self._array(x.width, makes=ROUNDED)
        self._add(lambda program, at: program.add(at(first), at(second), [at(b) for b in out.wanted()], x.width, scale))
        return out

    def blend(self, x: Any, gate: Any, residual: Any = None) -> CpuArray:
        _same_width("blend: gate", gate.width, 1)
        added = self._residual("blend", residual, x.width)
        source, factor = self._read(x.floats), self._read(gate.floats)
        out = self._array(x.width, makes=ROUNDED)
        self._add(
            lambda program, at: program.blend(at(source), at(factor), [at(b) for b in out.wanted()], x.width, at(added))
        )
        return out

    def mix(self, coefficients: Any, first: int, streams: tuple[Any, ...], residual: Any = None) -> CpuArray:
        width = streams[0].width
        for stream in streams:
            _same_width("mix: stream", stream.width, width)
        if not 0 <= first <= coefficients.width - len(streams):
            raise ValueError(
                f"mix: {len(streams)} coefficients from column {first} on do not lie in {coefficients.width} columns"
            )
        added = self._residual("mix", residual, width)
        factors, sources = self._read(coefficients.floats), [self._read(stream.floats) for stream in streams]
        out = self._array(width, makes=ROUNDED)
        self._add(
            lambda program, at: program.mix(
                at(factors),
                coefficients.width,
                first,
                [at(b) for b in sources],
                [at(b) for b in out.wanted()],
                width,
                at(added),
            )
        )
        return out

    def match_rms(self, x: Any, like: Any, eps: float) -> CpuArray:
        _same_width("match_rms: like", like.width, x.width)
        source, wanted = self._read(x.floats), self._read(like.floats)
        out = self._array(x.width, makes=ROUNDED)
        self._add(
            lambda program, at: program.match_rms(at(source), at(wanted), [at(b) for b in out.wanted()], x.width, eps)
        )
        return out

    def keep_top(self, x: Any, deviations: float) -> CpuArray:
        source = self._read(x.floats)
        out = self._array(x.width, makes=ROUNDED)
        self._add(lambda program, at: program.keep_top(at(source), [at(b) for b in out.wanted()], x.width, deviations))
        return out

    def reduce(self, x: Any) -> CpuArray:
        only: CpuArray = x  # there is one rank
        return only

    def store_kv(
        self,
        batch: Any,
        qkv: Any,
        rotary: Any,
        shape: AttentionShape,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        v_norm: HeadNorm | None = None,
    ) -> CpuArray:
        self._check_shape(shape)
        if shape.latent:
            raise ValueError("store_kv: latent attention has no values to store; use store_latent")
        stored = shape.kv_heads * shape.stores
        _same_width("store_kv: qkv", qkv.width, (shape.heads + 2 * stored) * shape.head_dim)
        heads = (("q_norm", q_norm, shape.heads), ("k_norm", k_norm, stored), ("v_norm", v_norm, stored))
        norms = [_head_norm(name, norm, count, shape.head_dim) for name, norm, count in heads]
        turned = 0 if rotary is None else rotary.width
        if turned > shape.head_dim:
            raise ValueError(f"store_kv: rotary turns {turned} values of a head of {shape.head_dim}")
        source = self._read(qkv.floats)
        turns = None if rotary is None else self._read(rotary.floats)
        out = self._array(shape.heads * shape.head_dim)
        self._add(
            lambda program, at: program.store_kv(
                at(source), at(turns), turned, at(out.floats), shape, self.cache, *norms
            )
        )
        return out

    def store_latent(
        self, batch: Any, q_latent: Any, q_rope: Any, latent: Any, k_rope: Any, rotary: Any, shape: AttentionShape
    ) -> CpuArray:
        self._check_shape(shape)
        turned = shape.head_dim - shape.latent
        inputs = {
            "q_latent": (q_latent, shape.heads * shape.latent),
            "q_rope": (q_rope, shape.heads * turned),
            "latent": (latent, shape.latent),
            "k_rope": (k_rope, turned),
        }
        for name, (x, width) in inputs.items():
            _same_width(f"store_latent: {name}", x.width, width)
        if not shape.latent or rotary.width > turned:
            raise ValueError(
                f"store_latent: rotary turns {rotary.width} values of the {turned} beside {shape.latent} of the latent"
            )
        sources = [self._read(x.floats) for x, _ in inputs.values()]
        turns = self._read(rotary.floats)
        out = self._array(shape.heads * shape.head_dim)
        self._add(
            lambda program, at: program.store_latent(
                [at(b) for b in sources], at(turns), rotary.width, at(out.floats), shape, self.cache
            )
        )
        return out

    def attend(self, batch: Any, q: Any, shape: AttentionShape, sinks: Any = None) -> CpuArray:
        self._check_shape(shape)
        _same_width("attend: q", q.width, shape.heads * shape.head_dim)
        if sinks is not None:
            _same_width("attend: sinks", sinks.size, shape.heads)
        if shape.alibi:
            _same_width("attend: alibi", len(shape.alibi), shape.heads)
        source = self._read(q.floats)
        out = self._array(shape.heads * (shape.latent or shape.head_dim))
        self._add(lambda program, at: program.attend(at(source), at(out.floats), shape, self.cache, sinks))
        return out

    def gather(self, batch: Any, x: Any) -> CpuArray:
        source = self._read(x.floats)
        out = CpuArray(_buffers(self._buffer(FLOAT, x.width, self.gathered_rows)), x.width)
        self._add(lambda program, at: program.gather(at(source), at(out.floats), x.width))
        return out

    def logits(self, x: Any, weight: Any, softcap: float = 0.0, scale: float = 1.0, bias: Any = None) -> CpuArray:
        if bias is not None:
            _same_width("logits: bias", bias.size, weight.n_out)
        forms, inputs = self._inputs("logits", x, weight, head=True)
        out = self._array(weight.n_out)
        self._add(
            lambda program, at: program.logits(
                [at(b) for b in inputs], at(out.floats), weight.packed, forms, bias, softcap, scale
            )
        )
        return out

    # -- buffers ------------------------------------------------------------------------------------------------
    def input(self, width: int) -> CpuArray:
        """An activation that is there before the first instruction."""
        return self._array(width)

    def build(self, native: Any, pool: Any, result: CpuArray) -> tuple[Any, Offset]:
        """The native program, which leaves `result` in its arena, and the offset of each buffer."""
        result.floats.last = len(self._emits)
        offsets, size = _plan(self._buffers)
        program = native.Program(pool, self.cache, size)

        def offset(buffer: Buffer | None) -> int:
            return -1 if buffer is None else offsets[id(buffer)]

        for emit in self._emits:
            emit(program, offset)
        return program, offset

    def _buffer(self, form: int, width: int, rows: int) -> Buffer:
        buffer = Buffer(form, rows, width, len(self._emits))
        self._buffers.append(buffer)
        return buffer

    def _array(self, width: int, makes: tuple[int, ...] = ()) -> CpuArray:
        return CpuArray(_buffers(self._buffer(FLOAT, width, self.rows)), width, makes)

    def _rooms(self, forms: set[int], width: int, rows: int) -> list[Buffer | None]:
        """A buffer for each of `forms`, of the instruction about to be added alone."""
        return [self._buffer(form, width, rows) if form in forms else None for form in FORMS]

    def _add(self, emit: Emit) -> None:
        self._emits.append(emit)

    def _read(self, buffer: Buffer) -> Buffer:
        """`buffer`, which the instruction about to be added reads."""
        buffer.last = max(buffer.last, len(self._emits))
        return buffer

    def _residual(self, name: str, residual: Any, width: int) -> Buffer | None:
        if residual is None:
            return None
        _same_width(f"{name}: residual", residual.width, width)
        return self._read(residual.floats)

    def _inputs(self, name: str, x: Any, weight: Any, head: bool) -> tuple[list[int], list[Buffer | None]]:
        """Forms of the weight's parts, and the buffers of `x` in these forms, made where they do not exist yet."""
        _same_width(f"{name}: input", x.width, weight.n_in)
        if weight.columns is not None:
            x = self._reordered(x, weight.columns)
        forms = weight.forms(self.activations, head)
        for form in sorted(set(forms)):
            if x.buffers[form] is None:
                self._pack(x, form)
        return forms, [self._read(x.buffers[f]) if f in forms else None for f in FORMS]

    def _reordered(self, x: CpuArray, columns: I32) -> CpuArray:
        """`x` with its columns in another order."""
        source, out = self._read(x.floats), self._array(x.width, makes=ROUNDED)
        self._add(lambda program, at: program.reorder(at(source), [at(b) for b in out.wanted()], columns))
        return out

    def _pack(self, x: CpuArray, form: int) -> None:
        """Adds a form to `x`: by its producer where that can make it, else by an instruction of its own."""
        packed = self._buffer(form, x.width, self.rows)
        x.buffers[form] = packed
        if form in x.makes:
            packed.first = x.floats.first
            return
        source = self._read(x.floats)
        outputs = [packed if f == form else None for f in FORMS]
        self._add(lambda program, at: program.pack(at(source), [at(b) for b in outputs], x.width))

    def _check_shape(self, shape: AttentionShape) -> None:
        spec = self.spec
        if (shape.kv_heads, shape.head_dim, shape.latent) != (spec.kv_heads, spec.head_dim, spec.latent):
            raise ValueError(
                f"attention of {shape.kv_heads} KV heads of {shape.head_dim}, of which {shape.latent} latent, does not "
                f"fit the KV cache's {spec.kv_heads} of {spec.head_dim}, of which {spec.latent} latent"
            )
        if shape.kv_heads < 1 or shape.heads % shape.kv_heads:
            raise ValueError(f"attention: {shape.heads} query heads cannot share {shape.kv_heads} KV heads evenly")
        if not 0 <= shape.layer < spec.layers or spec.group_of[shape.layer] != shape.group:
            raise ValueError(f"attention: layer {shape.layer} is not in KV group {shape.group} of the cache")


def _buffers(floats: Buffer) -> list[Buffer | None]:
    """By form: of a row that has no other yet."""
    return [floats, *(None for _ in ROUNDED)]


def _head_norm(name: str, norm: HeadNorm | None, heads: int, head_dim: int) -> HeadNorm | None:
    """`norm` with a weight for each of `heads`."""
    if norm is None or not heads:
        return None
    if norm.weight.size == head_dim:
        return norm._replace(weight=np.tile(norm.weight, heads))
    _same_width(f"store_kv: {name}", norm.weight.size, heads * head_dim)
    return norm


def _same_width(name: str, width: int, wanted: int) -> None:
    if width != wanted:
        raise ValueError(f"{name} is {width} wide, wanted {wanted}")


def _activation(name: str, activation: Activation, excluded: tuple[Activation, ...]) -> int:
    """The number of an activation function that operation `name` knows."""
    known = [each for each in ACTIVATIONS if each not in excluded]
    if activation not in known:
        raise ValueError(f"{name}: unknown activation {activation!r}; there are {', '.join(known)}")
    return ACTIVATIONS.index(activation)


def _plan(buffers: list[Buffer]) -> tuple[dict[int, int], int]:
    """Offset by id of buffer, and the arena's size: first fit, in order of first use."""
    placed: list[tuple[int, Buffer]] = []
    offsets: dict[int, int] = {}
    size = 0
    for buffer in sorted(buffers, key=lambda b: b.first):
        at = 0
        # Neighbours in time, by offset: the first gap that is wide enough.
        for start, other in sorted(((s, o) for s, o in placed if o.last >= buffer.first), key=lambda entry: entry[0]):
            if at + buffer.bytes <= start:
                break
            at = max(at, start + other.bytes)
        placed.append((at, buffer))
        offsets[id(buffer)] = at
        size = max(size, at + buffer.bytes)
    return offsets, size


def row_vector(values: F32) -> F32:
    """A float32 vector as instructions take it: a contiguous copy."""
    return np.array(values, np.float32, order="C").reshape(-1)
