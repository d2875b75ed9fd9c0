"""What is quantized while a model is loaded, and when --quantization means that."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.checkpoint.quantized import METHODS
from octavo.config import ConfigError, EngineConfig
from octavo.models.weights import LoadError, quantizable
from octavo.ops.contract import F32, Stored
from octavo.ops.reference import ReferenceDevice
from octavo.parallel.rank import Rank
from octavo.quant import slabs
from octavo.quant.onload import RULES, Rule, quantize, saved
from octavo.resolve import check_quantization
from tests.models.tiny import Loaded, make


def stored(values: F32) -> Stored:
    return Stored("F32", *values.shape, np.ascontiguousarray(values, np.float32).view(np.uint8))


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_share_scales_come_together(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[F32] = []

    def rows(values: F32) -> np.ndarray:  # type: ignore[type-arg]
        seen.append(values)
        return values.astype("<f2").view(np.uint8)

    monkeypatch.setattr(slabs, "SLAB", 32)
    values = np.arange(56, dtype=np.float32).reshape(14, 4)
    got = quantize(Rule("F16", rows, "", together=3), stored(values), threads)
    seen.sort(key=lambda part: float(part[0, 0]))
    assert [len(part) for part in seen] == [6, 6, 2]  # of 8 rows in a slab
    np.testing.assert_array_equal(np.concatenate(seen), values)
    assert got[:3] == ("F16", 14, 4)
    np.testing.assert_array_equal(got.data.view("<f2"), values)


def test_what_is_no_float_or_does_not_fill_blocks_stays() -> None:
    rule = Rule("Q8_0", lambda values: pytest.fail("nothing is to be quantized"), "")
    narrow = stored(np.ones((2, 33), np.float32))
    already = Stored("Q4_0", 2, 32, np.zeros((2, 18), np.uint8))
    assert quantize(rule, narrow) is narrow and quantize(rule, already) is already


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_products_are_quantized_but_not_what_chooses(variant: str, tmp_path: Path) -> None:
    """Routers stay, embeddings and the head are told apart; a rank gets its part of a matrix quantized in whole."""
    path, model = make(variant, tmp_path)
    seen: list[tuple[int, int]] = []
    tables: list[tuple[int, int]] = []

    def note(matrix: Stored) -> Stored:
        seen.append((matrix.n_out, matrix.n_in))
        return matrix

    def note_table(matrix: Stored) -> Stored:
        tables.append((matrix.n_out, matrix.n_in))
        return matrix

    loaded = Loaded(path, ReferenceDevice(), quantize=note, quantize_tables=note_table)
    whole, of_tables = sorted(seen), list(tables)
    ends = ("embed_tokens.weight", "lm_head.weight")
    kept = ("mlp.gate.weight", "shared_expert_gate.weight")
    matrices = [(n, p.numel()) for n, p in model.named_parameters() if p.ndim > 1 and not n.endswith(kept)]
    elements = sum(count for name, count in matrices if not name.endswith(ends))
    assert sum(a * b for a, b in whole) == quantizable(loaded.model)[0] == elements
    assert sum(a * b for a, b in tables) == quantizable(loaded.model)[1] == sum(c for _, c in matrices) - elements > 0
    seen.clear(), tables.clear()
    loaded = Loaded(path, ReferenceDevice(), quantize=note, quantize_tables=note_table, rank=Rank(1, 2))
    assert sorted(seen) == whole and tables == of_tables and quantizable(loaded.model)[0] == elements


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_matrix_that_is_not_finite_is_refused_by_name(name: str, bad: float, tmp_path: Path) -> None:
    path, _ = make("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = bad
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadError, match=r"^model\.layers\.1\.mlp\.down_proj\.weight: .*not finite"):
        Loaded(path, ReferenceDevice(), quantize=partial(quantize, RULES[name]))


def test_what_is_saved_is_of_the_smallest_kind() -> None:
    rule = RULES["fp8"]
    assert saved(rule, {"BF16", "F32"}) == 2 - 36 / 32
    assert saved(rule, {"F32"}) == 4 - 36 / 32
    assert saved(rule, {"F8_E5M2_32"}) == 0


def test_the_flag_means_it_for_plain_floats_only() -> None:
    plain = frozenset({"BF16", "F32"})
    assert check_quantization("int8", None, plain, ["fp8", "int8"])
    assert not check_quantization(None, None, plain, ["fp8", "int8"])
    assert not check_quantization("int8", "int8", plain, ["fp8", "int8"])
    with pytest.raises(ConfigError, match="quantize it while it is loaded with one of fp8, int8, or point --model"):
        check_quantization("awq", None, plain, ["fp8", "int8"])
    for says, kinds in (("gptq", {"INT4_128"}), (None, {"Q4_1", "F32"})):
        with pytest.raises(ConfigError, match="drop the flag"):
            check_quantization("int8", says, frozenset(kinds), ["fp8", "int8"])


def test_the_help_of_the_flag_lists_every_name() -> None:
    option = next(option for option in fields(EngineConfig) if option.name == "quantization")
    done, of_checkpoints = (set(re.findall(r"[\w-]+", part)) for part in option.metadata["help"].split("Default:"))
    methods = {name.rpartition("/")[2] for name in METHODS}  # a maker's name before the method's is another spelling
    assert RULES.keys() <= done and methods <= of_checkpoints
