"""The list of operations a device must offer: what a model may ask for, and nothing else.

Layers receive an `Ops` and opaque `Array` handles. A handle has no operators, no indexing and no shape arithmetic, so
the same forward can be *run* (the numpy reference, torch) or *recorded* once and replayed by one native call (the
CPU device). A forward therefore never looks at a value and never branches on the batch.

Notation: T tokens of the step, R rows whose next-token distribution is wanted, D hidden size, H query heads,
G KV heads, d head size, V vocabulary. Activations are float32 on the CPU; "rows" is T in a body and R in a head.

Every implementation must obey the rules of batch invariance: row r of a result depends on row r of the inputs, on the
weights and on the KV cache of its own sequence only, with one order of floating-point operations whatever T, the
chunking, the block ids, the thread count. `ops/reference.py` is the executable specification.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "tanh", "identity", "xielu", "swiglu_oai"]
"""Functions of one value. "gelu" is x Phi(x), "gelu_tanh" its tanh form; "relu2" is max(x, 0)^2 (So et al., "Primer",
2021). "xielu" (Huang and Schlag, 2024) takes four parameters (p, n, beta, eps): p x^2 + beta x for x > 0, otherwise
n (expm1(min(x, eps)) - x) + beta x. "swiglu_oai" is for gated products only: x sigmoid(1.702 x), and its partner plus
one (the gpt-oss release)."""

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]


class Array(Protocol):
    """An activation of some device: [rows, width], seen by layers as a value without parts."""


class Weight(Protocol):
    """A matrix [n_out, n_in] as the device packed it: one or more parts stacked along n_out, each in its own format."""

    n_out: int
    n_in: int


class Vector(Protocol):
    """A float32 vector of some device: a norm's weight, a bias."""


class Stored(NamedTuple):
    """A matrix as the checkpoint stores it: [n_out, n_in] in format `kind`.

    `kind` names a format of `octavo.quant` ("F32", "F16", "BF16", "Q4_0", …). `data` is uint8 [n_out, bytes per row],
    a view of the file where possible; rows are independent, so a slice or permutation of rows is a valid matrix.
    """

    kind: str
    n_out: int
    n_in: int
    data: npt.NDArray[np.uint8]
    columns: I32 | None = None
    """Element j of a stored row is column columns[j] of the matrix (GPTQ's act-order); None: they are in order."""


class Rope(NamedTuple):
    """Rotary embedding: position p turns the pair (i, i + d/2) by p * inv_freq[i] and scales it by `scale`.

    `inv_freq` is a tuple of d_rot/2 float32 values, fixed at load (dynamic and long kinds included).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


class Temperature(NamedTuple):
    """Queries of position p are multiplied by 1 + scale * log(1 + (p + start) // floor), in float32."""

    scale: float
    floor: float
    start: int = 1
    """What position 0 counts as: 1 in Llama 4, 0 in Ministral 3."""


class AttentionShape(NamedTuple):
    """What the attention of one layer is: heads, head size, softmax scale, and which KV it reads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k before the softmax."""
    layer: int
    """Which of the model's caches it uses: layers that read the keys and values of another have none of their own."""
    group: int
    """KV group whose block table it uses."""
    window: int = 0
    """A query at p sees keys in (p - window, p]; 0 sees all up to p."""
    softcap: float = 0.0
    """When > 0, scores become softcap * tanh(score / softcap)."""
    chunk: int = 0
    """When > 0, a query at p sees keys in [p - p % chunk, p] (Llama 4); never together with `window`."""
    latent: int = 0
    """When > 0, there are no values in the cache: the value of a key is its first `latent` elements (DeepSeek-V2's
    multi-head latent attention with absorbed projections). One KV head; attend returns [T, H latent]."""
    alibi: tuple[float, ...] = ()
    """Per query head a slope: slope * (key position - query position) is added to the scaled score (Press et al.,
    "Train short, test long", 2021). Not together with `softcap`."""
    clip: float = 0.0
    """When > 0, store_kv clamps q, k and v to [-clip, clip], after their norms and before the rotation."""
    temperature: Temperature | None = None
    """What store_kv multiplies q by, after everything else (Llama 4's layers without RoPE, Ministral 3)."""
    stores: bool = True
    """False: the layer reads the KV of another (`layer` is that one's index): `qkv` of store_kv is q alone, nothing is
    written."""


class HeadNorm(NamedTuple):
    """A norm of queries, keys or values inside store_kv."""

    weight: Any
    """A Vector [head_dim], the same for every head, or [heads * head_dim]."""
    eps: float
    over: Literal["head", "all"] = "head"
    """The width of the mean: one head, or all heads of the token together (OLMo 2)."""
    center: bool = False
    """Subtract the mean first: a layer norm."""
    after: bool = False
    """After the rotation instead of before it (Hunyuan, Llama 4)."""


class Router(NamedTuple):
    """How a mixture of experts picks experts for a token, and what their outputs are multiplied by.

    1. scores s = softmax or sigmoid of the E logits, in float32. 2. For the choice only, the correction vector is added
    where there is one. 3. With `groups` > 1 the experts lie in groups of E / groups; a group's score is its largest
    value ("max") or the sum of its two largest ("top2"), and only experts of the best `top_groups` stay (ties: lower
    group). 4. The `top_k` largest stay, in descending order (ties: lower id). 5. Their weights are s (without the
    correction); with `renormalize` divided by their sum in that order, plus `eps`, or by `floor` where that is larger;
    and all times `scale`.

    "sparsemixer" (Phi-3.5-MoE): twice, m = the largest logit left, its expert is taken, and its weight is its share of
    the softmax over the logits l left with (m - l) / max(|l|, m) <= 2 * jitter; the expert taken is then left out.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale: float = 1.0
    eps: float = 0.0
    floor: float = 0.0
    jitter: float = 0.01
    """Of "sparsemixer"."""
    weigh_input: bool = False
    """The weight multiplies the expert's input instead of its output (Llama 4)."""


class Ops(Protocol):
    """The operations of a body and a head. `batch` is the step's `Batch`, opaque to layers."""

    # -- body ---------------------------------------------------------------------------------------------------
    def embed(self, batch: Any, table: Weight, scale: float) -> Array:
        """[T, D]: rows of `table` at the batch's token ids, dequantized, times `scale`."""

    def embed_positions(self, batch: Any, table: Weight, offset: int, residual: Array) -> Array:
        """[T, D]: rows of `table` at position + `offset`, dequantized, plus `residual`. `table` has at least
        max_model_len + offset rows."""

    def rotary(self, batch: Any, rope: Rope) -> Array:
        """[T, 2 * d_rot/2] cos then sin at the batch's positions: float32 angle = float32(position) * inv_freq
        (one float32 product), its cosine and sine correctly rounded to float32 within 1 ulp, times `scale`."""

    def norm(
        self,
        x: Array,
        weight: Vector,
        eps: float,
        residual: Array | None = None,
        *,
        bias: Vector | None = None,
        center: bool = False,
    ) -> Array:
        """RMS norm over the width: x / sqrt(mean(x^2) + eps) * weight. With `center` a layer norm: y = x - mean(x),
        then y / sqrt(mean(y^2) + eps) * weight. Plus `bias` and `residual`, in this order, each where given."""

    def activate(
        self, x: Array, activation: Activation, parameters: Vector | None = None, times: Array | None = None
    ) -> Array:
        """activation(x), element by element, times `times` where given. `parameters`: of "xielu"."""

    def linear(
        self,
        x: Array,
        weight: Weight,
        bias: Vector | None = None,
        residual: Array | None = None,
        scale: float = 1.0,
    ) -> Array:
        """[rows, n_out] = scale * (x @ weight^T + bias) + residual (each where given)."""

    def headwise(self, x: Array, weight: Weight, heads: int) -> Array:
        """[rows, n_out]: head h's share of x, [rows, heads * n_in], times rows [h n, (h + 1) n) of `weight` with
        n = n_out / heads, a multiple of 8; n_in a multiple of 32. Activations are float32 whatever the device's
        mode."""

    def gated(
        self,
        x: Array,
        weight: Weight,
        activation: Activation,
        bias: Vector | None = None,
        limit: float = 0.0,
    ) -> Array:
        """[rows, n_out/2]: `weight` holds gate rows, then up rows, and `bias` likewise; activation(gate) * up with
        gate = x @ gate^T + its bias and up = x @ up^T + its bias. With `limit` > 0, gate is clamped to at most `limit`
        and up to [-limit, limit] first; "swiglu_oai" then multiplies by up + 1."""

    def moe(
        self,
        x: Array,
        logits: Array,
        gate_up: tuple[Weight, ...],
        down: tuple[Weight, ...],
        router: Router,
        activation: Activation,
        *,
        correction: Vector | None = None,
        gate_up_bias: Vector | None = None,
        down_bias: Vector | None = None,
        limit: float = 0.0,
        residual: Array | None = None,
    ) -> Array:
        """[rows, D]: a mixture of E gated experts (Shazeer et al., "Outrageously large neural networks", 2017).

        `logits` [rows, E] go to `router`; expert e computes down[e] of gated(x, gate_up[e], activation) with its rows
        [e 2I, (e + 1) 2I) of `gate_up_bias` [E 2I] and [e D, (e + 1) D) of `down_bias` [E D] where given. The outputs
        of a row's experts, each times its weight, are added in router order, and then to `residual`. `correction` [E]:
        see `Router`. A row's result does not depend on which experts other rows chose."""

    def blend(self, x: Array, gate: Array, residual: Array | None = None) -> Array:
        """[rows, width]: sigmoid(gate) * x + residual; `gate` is [rows, 1] (the shared expert of Qwen2-MoE)."""

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        """(x + y) * scale."""

    def mix(self, coefficients: Array, first: int, streams: tuple[Array, ...], residual: Array | None = None) -> Array:
        """The sum over j, in order, of column `first` + j of `coefficients` [rows, n] times streams[j], plus `residual`
        (AltUp: Baykal et al., "Alternating updates for efficient transformers", 2023)."""

    def match_rms(self, x: Array, like: Array, eps: float) -> Array:
        """x times sqrt(mean(like^2)) / sqrt(max(mean(x^2), eps)): the magnitude of `like`, row by row."""

    def keep_top(self, x: Array, deviations: float) -> Array:
        """max(x - (mean(x) + deviations * std(x)), 0), with the mean and population standard deviation of the row: the
        largest values, were they normal (Gemma 3n)."""

    def store_kv(
        self,
        batch: Any,
        qkv: Array,
        rotary: Array | None,
        shape: AttentionShape,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        v_norm: HeadNorm | None = None,
    ) -> Array:
        """Split qkv [T, (H + 2G) d]; norm, clip (`shape.clip`), rotate q and k (the first `2 * d_rot/2` values of every
        head); write k and v of every token to the KV cache in its type; return q [T, H d]."""

    def store_latent(
        self,
        batch: Any,
        q_latent: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        rotary: Array,
        shape: AttentionShape,
    ) -> Array:
        """Latent attention: with n = shape.latent and r = head_dim - n, rotate each of the H heads of q_rope [T, H r]
        and k_rope [T, r]; write latent [T, n] then k_rope as the one key of every token; return q [T, H (n + r)] whose
        heads are q_latent's [T, H n] followed by q_rope's."""

    def attend(self, batch: Any, q: Array, shape: AttentionShape, sinks: Vector | None = None) -> Array:
        """[T, H d]: softmax(scale * q k^T) v over the keys of the token's own sequence at positions <= its own (and
        in the window or chunk), read from the KV cache only, the current step included. One softmax per absolute
        256-token chunk, from all its scores, and these partials combined in ascending order; masked positions are
        never read. `sinks` [H]: a logit per head that takes part in the softmax and has no value, added
        last (Xiao et al., "Efficient streaming language models with attention sinks", 2023; gpt-oss)."""

    def reduce(self, x: Array) -> Array:
        """The sum of x over all ranks that hold a part of the model, added in order of rank."""

    def gather(self, batch: Any, x: Array) -> Array:
        """[R, width]: the rows at `batch.rows`. The last op of a body."""

    # -- head ---------------------------------------------------------------------------------------------------
    def logits(
        self, x: Array, weight: Weight, softcap: float = 0.0, scale: float = 1.0, bias: Vector | None = None
    ) -> Array:
        """[R, V] = scale * (x @ weight^T + bias), then softcap * tanh(. / softcap) when softcap > 0. The last op of a
        head."""


class Sampling(NamedTuple):
    """Per-row parameters of a draw, as arrays; R rows. CSR pairs are (ptr int32 [R + 1], values)."""

    temperature: F32
    """0 = greedy."""
    top_k: I32
    """0 = off."""
    top_p: F32
    min_p: F32
    seed: npt.NDArray[np.uint64]
    choice: I32
    position: I32
    """Absolute position of the token to be drawn."""
    target: I32
    """-1: draw. >= 0: draw nothing, report this id (prompt logprobs)."""
    logprobs: I32
    """-1: none; k >= 0: the token's own logprob and rank, and the k most probable ids."""
    repetition: F32
    presence: F32
    frequency: F32
    seen_ptr: I32
    seen_ids: I32
    """Distinct ids of prompt and output, for the penalties (empty for rows without)."""
    seen_counts: I32
    """How often each occurs in the *output* (0: prompt only)."""
    bias_ptr: I32
    bias_ids: I32
    bias_values: F32
    """Added to the logit; -inf bans the id."""
    allow_ptr: I32
    allow_ids: I32
    """A non-empty list bans every other id."""
    report_ptr: I32 = np.zeros(0, np.int32)
    """Empty when no row asks for any; otherwise [R + 1] like the others."""
    report_ids: I32 = np.zeros(0, np.int32)
    """Ids whose raw logprobs are reported, whatever is drawn."""


class Drawn(NamedTuple):
    """What came of a draw; R rows, K = the largest `logprobs` asked."""

    token: I32
    logprob: F32
    rank: I32
    top_ids: I32
    """[R, K], most probable first, ties by lower id; -1 pads."""
    top_logprobs: F32
    ok: npt.NDArray[np.uint8]
    """0 where the row's logits held NaN or +inf (or nothing was left to draw): the token is then -1."""
    report_logprobs: F32 = np.zeros(0, np.float32)
    """One value per id of `Sampling.report_ids`."""


SAMPLING_ORDER = """
1. Raw logits must be finite (ok = 0 otherwise; -inf alone is fine). Reported logprobs are log-softmax of the
   *raw* logits.
2. repetition penalty r on every seen id: l > 0 ? l / r : l * r. frequency f and presence p on ids with count c > 0:
   l - f * c - p.
3. bias added; ids outside a non-empty allow list become -inf.
4. temperature 0: the largest logit, ties by lower id. Otherwise l / T, then survivors of
   min_p (probability >= min_p * largest), then top_k (order: value descending, id ascending), then top_p (smallest
   prefix of that order whose mass among the top_k survivors reaches top_p; at least one), and the token is the
   survivor with the largest l / T + g, g = -log(-log(u)), u = uniform(seed, choice, position, id) (ties by lower id).
"""


def uniform_bits(seed: int, choice: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """32 random bits per id, a pure function of (seed, choice, position, id): the splitmix64 finalizer (Steele, Lea,
    Flood: Fast splittable pseudorandom number generators, 2014) over a mixed key. u = (bits + 0.5) / 2^32."""
    m = (1 << 64) - 1
    key = _mix(_mix((seed + 0x9E3779B97F4A7C15 * (choice + 1)) & m) ^ position)
    z = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15) * (ids.astype(np.uint64) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits: npt.NDArray[np.uint32] = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
    return bits


def _mix(z: int) -> int:
    m = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m
    return z ^ (z >> 31)


class KVType(NamedTuple):
    """How the KV cache stores keys and values: an element is a number of this type times a scale."""

    bytes: int
    """Of an element."""
    largest: float = np.inf
    """Magnitudes above become this one, infinity too; NaN stays NaN."""
    scale_bytes: int = 0
    """Of the scale that each head of each token has of its own; 0: the scales are `KVSpec.scales`."""


KV_TYPES = {
    "float32": KVType(4),
    "float16": KVType(2),
    "fp8_e4m3": KVType(1, 448.0),
    "fp8_e5m2": KVType(1, 57344.0),
    "int8": KVType(1, 127.0, 4),
}
"""By name. Elements are rounded to the nearest, ties to even. fp8 is the quotient of value and scale as a float of 8
bits (Micikevicius et al., "FP8 formats for deep learning", 2022).

int8: the scale of a head of a token is its largest magnitude / 127 in float32, at least `KV_LEAST_SCALE`; where that
magnitude is not finite the scale is NaN, and so are all elements."""

KV_LEAST_SCALE = 1e-30
"""Smaller ones would be denormal, or close to it."""

KV_LARGEST_SCALE = 1e30
"""Elements times larger ones would overflow, or come close to it. Those of layers lie between the two."""


class KVScales(NamedTuple):
    """What the keys and the values of a layer are divided by before they are stored, and multiplied by when they are
    read: one number for each KV head."""

    k: tuple[float, ...]
    v: tuple[float, ...]
    """Of latent attention (), for values are keys."""


class KVShape(NamedTuple):
    """What a layer keeps of a token."""

    kv_heads: int
    head_dim: int
    latent: int = 0
    """When > 0, only keys are kept, and the first `latent` elements of a key are its value (one KV head)."""

    def bytes(self, dtype: str) -> int:
        """What a token takes in one layer of a cache of this type."""
        kind = KV_TYPES[dtype]
        return self.kv_heads * (self.head_dim * kind.bytes + kind.scale_bytes) * (1 if self.latent else 2)


class KVSpec(NamedTuple):
    """Size of the KV cache: what a device allocates."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """A name of `KV_TYPES`."""
    block_size: int
    """Tokens per block: 16, 32, 64 or 128."""
    blocks: tuple[int, ...]
    """Blocks per KV group."""
    group_of: tuple[int, ...]
    """KV group of each layer."""
    latent: int = 0
    """See `KVShape`."""
    scales: tuple[KVScales, ...] = ()
    """Of each layer, where `dtype` is fp8; () are all 1."""


class Program(Protocol):
    """A body or a head, ready to run."""


class Device(Protocol):
    """A place where models run. `body`/`head` are functions of (ops, batch) / (ops, x) given once at load."""

    name: str
    notes: tuple[str, ...]
    """Sentences that start-up prints about the device."""

    def weight(self, parts: list[Stored]) -> Weight:
        """Pack matrices of equal n_in, stacked along n_out. Lossless for every kind the device lists."""

    def vector(self, values: F32) -> Vector: ...

    def kv_cache(self, spec: KVSpec) -> Any: ...

    def compile(self, body: Any, head: Any, limits: BatchLimits, cache: Any) -> CompiledModel: ...


class BatchLimits(NamedTuple):
    """The largest step: sizes of every persistent buffer."""

    tokens: int
    sequences: int
    """Slots."""
    rows: int
    """Output rows of one step."""
    max_model_len: int


class BatchArrays(NamedTuple):
    """A step as arrays; S sequences with work in it, T tokens in sequence order."""

    tokens: I32
    """[T]"""
    positions: I32
    """[T]: absolute position of each token."""
    starts: I32
    """[S + 1]: sequence s owns tokens [starts[s], starts[s + 1])."""
    slots: I32
    """[S]: row of the block tables."""
    rows: I32
    """[R]: token indices whose hidden rows go to the head (in ascending order)."""
    tables: tuple[I32, ...]
    """Per KV group [slots, blocks per sequence]: block ids by absolute block index; entries behind a window are stale
    and never read."""


class CompiledModel(Protocol):
    """The two programs of a model on a device."""

    def run(self, batch: BatchArrays, sampling: Sampling) -> Drawn:
        """Body, then head and draw over the R rows; R may be 0. Raises on failure; safe to call again after."""

    def raw_logits(self, batch: BatchArrays) -> F32:
        """[R, V] float32: the body and head without a draw (tests, scoring)."""

    def copy_blocks(self, group: int, pairs: I32) -> None:
        """[n, 2] (source, destination): copy whole blocks of every layer in the group, in order."""


class OpTime(NamedTuple):
    """What one kind of operation took, in all steps of a profile together."""

    decode: bool
    """Of steps in which every sequence has one token; else of those in which some has more."""
    name: str
    calls: int
    seconds: float
    """On the clock, by all threads at once."""
    bytes: int
    """Of weights and of the KV cache that had to be read or written; activations stay in the processor's caches."""
    operations: tuple[int, int, int, int]
    """With inputs of float32, int8, int16 and bfloat16; a multiply-add counts as two."""


class Roofline(NamedTuple):
    """What a device can do at most, as measured (Williams, Waterman, Patterson: "Roofline", 2009)."""

    bytes_per_second: float
    """Read from memory."""
    operations_per_second: tuple[float, float, float, float]
    """As `OpTime.operations` counts them."""

    def seconds(self, time: OpTime) -> float:
        """What the device would need at least for the bytes or the operations of `time`, whichever takes longer."""
        peaks = zip(time.operations, self.operations_per_second, strict=True)
        return max(time.bytes / self.bytes_per_second, sum(count / peak for count, peak in peaks))


@runtime_checkable
class Profiled(Protocol):
    """A compiled model that can time its operations."""

    def start_profile(self) -> None:
        """Time the steps from here on."""

    def stop_profile(self) -> list[OpTime]:
        """What was timed since the start; steps are not timed any more."""

    def roofline(self) -> Roofline:
        """Measured now, which takes a second or two; for a quiet machine."""
