"""What each type of the KV cache costs: KL divergence and top-1 agreement with a float32 cache, over a text.

    python -m benchmarks.cache_types [folder ...]

The folders are models of Hugging Face with their tokenizers; without any, those of the tests in float32. Weights and
activations are the same in all runs, so that the cache is all that differs; keys and values of a checkpoint without
scales are rounded as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.formats.losses import TEXT, distance
from octavo.devices.cpu.device import CpuDevice
from octavo.ops.contract import KV_TYPES
from octavo.text.tokenizer import Tokenizer
from tests import realmodels
from tests.models.tiny import Loaded

TOKENS = 256


def main(folders: Sequence[Path]) -> None:
    print(f"{'model':32}{'cache':12}{'bytes per token':>16}{'KL':>10}{'top-1':>8}")
    for folder in folders:
        tokens = Tokenizer.from_folder(folder).encode(TEXT.read_text())[:TOKENS]
        want = None
        for dtype in KV_TYPES:
            loaded = Loaded(
                folder, CpuDevice(), max_model_len=TOKENS, blocks=TOKENS // 16, tokens=TOKENS, kv_dtype=dtype
            )
            got = loaded.logits(tokens)
            want = got if want is None else want  # float32 is the first
            kl, top1 = distance(got, want)
            size = loaded.model.kv.bytes(dtype) * len(loaded.model.caches)
            print(f"{folder.name:32}{dtype:12}{size:16}{kl:10.1e}{top1:8.1%}", flush=True)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]] or [realmodels.smollm2_hf(), realmodels.gemma_hf()])
