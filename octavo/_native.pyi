"""The native kernels (native/bindings.cpp): present on x86-64 Linux only; load it with `octavo.devices.cpu.native`.

Offsets are bytes into a program's arena; four of them stand for the forms of an activation (float32, int8,
int16, bfloat16), -1 where there is none. Arrays must have been checked (`octavo.ops.check`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import AttentionShape, BatchArrays, Drawn, HeadNorm, Router, Sampling, Stored

def missing_features() -> str:
    """Names of the instruction sets the kernels need and this CPU lacks; "" when it has all."""

def kernels() -> str:
    """The tier of kernels of this process, "avx2", "avx512" or "avx512bf16": what the environment variable
    OCTAVO_CPU_KERNELS says, else the fastest that the CPU can run. Raises RuntimeError where it cannot run that, or
    there is no such tier."""

def choose_kernels(
    leaf0_ebx: int, leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf7_1_eax: int, xcr0: int, wanted: str
) -> str:
    """The same for a CPU with these cpuid registers and this extended control register 0, and a wish or ""."""

def noise_bits(
    seed: int, choice: int, position: int, ids: npt.NDArray[np.int64], out: npt.NDArray[np.uint32], /
) -> None: ...
def exp(x: npt.NDArray[np.float32], out: npt.NDArray[np.float32], /) -> None: ...
def allocate(pool: Pool, store: Store, parts: Sequence[tuple[str, int]], n_in: int) -> Weight:
    """Zero panels for parts of (kind, n_out), of which each node of the pool owns a range. Raises ValueError for a kind
    without panels or rows of broken blocks, MemoryError."""

def touch_pages(pool: Pool, weight: Weight, part: int) -> None:
    """Write to each page of a part that is still zero, from the node that owns it, so that it lies there whoever
    packs."""

def pack(
    pool: Pool,
    weight: Weight,
    part: int,
    first_row: int,
    stored: Stored,
    packers: npt.NDArray[np.int32] | None = None,
) -> None:
    """Rows of a part, of its kind, from `first_row` (a multiple of 8) on; the workers of a node pack what it owns.
    `packers` [panels of these rows] is told who that was. Raises ValueError when the data does not fit kind and
    shape."""

def unpack(pool: Pool, weight: Weight, out: npt.NDArray[np.float32]) -> None:
    """Exact float32 values to `out` [n_out, n_in]."""

def copy_blocks(cache: KVCache, group: int, pairs: npt.NDArray[np.int32], /) -> None: ...
def measure_roofline(pool: Pool) -> tuple[float, tuple[float, float, float, float]]:
    """Bytes per second read from memory, and operations per second with inputs of each form; takes a second."""

def trace_phase(
    pool: Pool, starts: Sequence[int], times: int, local: bool, absent: Sequence[int], out: npt.NDArray[np.int32]
) -> None:
    """One phase of items [starts[n], starts[n + 1]) of each node n, each `times` times, of which the workers `absent`
    take nothing. `out` [times * items, 3], zero before: who did each, after how many others, and how often it was done.
    Others help where a node is late, unless the items are `local`."""

class Pool:
    """`nodes`: the node of each thread, from 0 on (empty: all are of one). `cpus`: those that each node's threads are
    bound to (empty: they are not). Raises ValueError."""

    def __init__(self, threads: int, nodes: Sequence[int] = ..., cpus: Sequence[Sequence[int]] = ...) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def nodes(self) -> int: ...

class Store:
    """Memory for weights, in huge pages."""

    def __init__(self) -> None: ...

class Weight:
    @property
    def n_out(self) -> int: ...
    @property
    def n_in(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def owners(self) -> list[tuple[int, int]]:
        """(first row, node that owns the rows from there on), in order."""

class KVCache:
    """`memory_nodes`: the system's numbers of the nodes that blocks are spread over (empty: where they are written)."""

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        latent: int,
        dtype: str,
        block_size: int,
        blocks: Sequence[int],
        group_of: Sequence[int],
        scales: Sequence[Sequence[float]],
        memory_nodes: Sequence[int],
    ) -> None: ...
    @property
    def bytes(self) -> int: ...

class Program:
    def __init__(self, pool: Pool, cache: KVCache, arena_bytes: int) -> None: ...
    def embed(self, out: Sequence[int], table: Weight, scale: float, /) -> None: ...
    def rotary(self, out: int, inv_freq: npt.NDArray[np.float32], scale: float, /) -> None: ...
    def embed_positions(self, out: Sequence[int], table: Weight, offset: int, residual: int, /) -> None: ...
    def norm(
        self,
        in_: int,
        out: Sequence[int],
        weight: npt.NDArray[np.float32],
        bias: npt.NDArray[np.float32] | None,
        eps: float,
        center: bool,
        residual: int,
    ) -> None: ...
    def activate(
        self,
        in_: int,
        out: Sequence[int],
        width: int,
        activation: int,
        parameters: npt.NDArray[np.float32] | None,
        times: int,
    ) -> None: ...
    def add(self, x: int, y: int, out: Sequence[int], width: int, scale: float, /) -> None: ...
    def blend(self, x: int, gate: int, out: Sequence[int], width: int, residual: int, /) -> None: ...
    def mix(
        self,
        coefficients: int,
        coefficients_width: int,
        first: int,
        streams: Sequence[int],
        out: Sequence[int],
        width: int,
        residual: int,
        /,
    ) -> None: ...
    def match_rms(self, x: int, like: int, out: Sequence[int], width: int, eps: float, /) -> None: ...
    def keep_top(self, x: int, out: Sequence[int], width: int, deviations: float, /) -> None: ...
    def reorder(self, x: int, out: Sequence[int], columns: npt.NDArray[np.int32], /) -> None: ...
    def pack(self, in_: int, out: Sequence[int], width: int, /) -> None: ...
    def headwise(self, in_: int, out: int, weight: Weight, heads: int, /) -> None: ...
    def linear(
        self,
        in_: Sequence[int],
        out: int,
        weight: Weight,
        forms: Sequence[int],
        bias: npt.NDArray[np.float32] | None,
        scale: float,
        residual: int,
    ) -> None: ...
    def gated(
        self,
        in_: Sequence[int],
        out: Sequence[int],
        weight: Weight,
        forms: Sequence[int],
        bias: npt.NDArray[np.float32] | None,
        activation: int,
        limit: float,
    ) -> None: ...
    def moe(
        self,
        in_: int,
        logits: int,
        given: Sequence[int],
        hidden: Sequence[int],
        results: int,
        out: Sequence[int],
        residual: int,
        pass_rows: int,
        gate_up: Sequence[Weight],
        gate_up_forms: Sequence[Sequence[int]],
        down: Sequence[Weight],
        down_forms: Sequence[Sequence[int]],
        router: Router,
        correction: npt.NDArray[np.float32] | None,
        gate_up_bias: npt.NDArray[np.float32] | None,
        down_bias: npt.NDArray[np.float32] | None,
        activation: int,
        limit: float,
    ) -> None:
        """`given`, `hidden` and `results`: room for `top_k` rows for each of `pass_rows` rows."""

    def store_kv(
        self,
        qkv: int,
        rotary: int,
        rotary_width: int,
        out: int,
        shape: AttentionShape,
        cache: KVCache,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
        v_norm: HeadNorm | None,
    ) -> None:
        """The weight of each norm covers all of its heads."""

    def store_latent(
        self,
        inputs: Sequence[int],
        rotary: int,
        rotary_width: int,
        out: int,
        shape: AttentionShape,
        cache: KVCache,
        /,
    ) -> None:
        """`inputs`: q_latent, q_rope, latent, k_rope."""

    def attend(
        self, q: int, out: int, shape: AttentionShape, cache: KVCache, sinks: npt.NDArray[np.float32] | None
    ) -> None: ...
    def gather(self, in_: int, out: int, width: int, /) -> None: ...
    def logits(
        self,
        in_: Sequence[int],
        out: int,
        weight: Weight,
        forms: Sequence[int],
        bias: npt.NDArray[np.float32] | None,
        softcap: float,
        scale: float,
    ) -> None: ...

class Model:
    def __init__(
        self,
        pool: Pool,
        cache: KVCache,
        body: Program,
        head: Program,
        hidden: int,
        input: int,
        logits: int,
        width: int,
        vocab: int,
        max_tokens: int,
        head_rows: int,
    ) -> None: ...
    def run(self, batch: BatchArrays, sampling: Sampling, drawn: Drawn) -> None:
        """Raises ValueError on a block id out of range; the GIL is released."""

    def raw_logits(self, batch: BatchArrays, out: npt.NDArray[np.float32]) -> None: ...
    def start_profile(self) -> None:
        """Time the operations of steps from here on."""

    def stop_profile(self) -> list[tuple[bool, str, int, float, int, tuple[int, int, int, int]]]:
        """Per kind of steps and operation: whether the steps are decodes, name, calls, seconds, bytes, and operations
        with inputs of each form."""

    @property
    def bytes(self) -> int: ...
