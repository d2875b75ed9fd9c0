"""Models in GPTQ's, AWQ's and AutoRound's files against the same models with the values of those files in float32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.build import build
from octavo.checkpoint import open_checkpoint
from octavo.config import ConfigError, EngineConfig
from octavo.devices.cpu.device import CpuDevice
from octavo.models.weights import LoadError
from octavo.ops.reference import ReferenceDevice
from tests.devices import NAMES, make_device
from tests.models.quantized import Way, pair, wide
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded, make
from tests.quant import packing


def gptq(
    bits: int = 4,
    group: int = 32,
    version: int = 1,
    order: str = "",
    symmetric: bool = False,
    head: bool = False,
    skip: str = "?",
    bias: bool = False,
) -> Way:
    """`order`: "" as it is, "own" of each module, "inputs" of modules with the same input (as GPTQ does, whose order is
    that of their activations), "shared" of all with as many columns. `head`: lm_head too. `skip`:
    modules with this in their name stay as they are. `bias`: zeros where the model has none, as AutoGPTQ writes."""

    def way(module: str, weight: Any) -> Any:
        if skip in module or (module == "lm_head" and not head):
            return None
        n_in = weight.shape[1]
        groups = packing.consecutive(n_in, group)
        if order:
            name = re.sub("[qkv]_proj|w[13]$", "first", module) if order == "inputs" else module
            groups = packing.shuffled(n_in, group, n_in if order == "shared" else sum(map(ord, name)))
        matrix = packing.rounded(weight, bits, groups, symmetric)
        tensors = packing.gptq(matrix, version)
        if bias:
            tensors["bias"] = np.zeros(len(weight), np.float16)
        return matrix.values, tensors

    return way


def mixed(module: str, weight: Any) -> Any:
    """8 bits in groups of 64 for attention, 4 in groups of 32 for the MLP, and the first down_proj as it is."""
    return gptq(8, 64)(module, weight) if "self_attn" in module else gptq(skip="layers.0.mlp.down")(module, weight)


def awq(group: int, version: str = "gemm", symmetric: bool = False, skip: str = "lm_head") -> Way:
    def way(module: str, weight: Any) -> Any:
        if skip in module or module == "lm_head":
            return None
        n_in = weight.shape[1]
        matrix = packing.rounded(weight, 4, packing.consecutive(n_in, group), symmetric)
        return matrix.values, packing.awq(matrix, version, n_in if group == -1 else group)

    return way


def config(method: str, group: int, bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": bits, "group_size": group, **more}


def auto_round(form: str) -> dict[str, Any]:
    """As AutoRound writes it; extra_config says what `mixed` does."""
    extra = {".*self_attn.*": {"bits": 8, "group_size": 64}, "model.layers.0.mlp.down_proj": {"bits": 16}}
    return config("auto-round", 32, sym=True, data_type="int", packing_format=form, extra_config=extra)


ACT = {"desc_act": True, "static_groups": False, "true_sequential": True, "damp_percent": 0.01}
DYNAMIC = {"-:.*layers\\.0\\.mlp\\.down.*": {}, "+:.*self_attn.*": {"bits": 8, "group_size": 64}}
CASES: dict[str, tuple[str, Way, dict[str, Any], set[str]]] = {
    "gptq": ("llama", gptq(), config("gptq", 32), {"INT4_32"}),
    "gptq-v2": ("llama", gptq(version=2), config("gptq", 32, checkpoint_format="gptq_v2"), {"INT4_32"}),
    "gptq-symmetric": ("llama", gptq(symmetric=True, bias=True), config("gptq", 32, sym=True), {"INT4_32"}),
    "gptq-2": ("llama", gptq(2), config("gptq", 32, 2), {"INT4_32"}),
    "gptq-3": ("llama", gptq(3), config("gptq", 32, 3), {"INT4_32"}),
    "gptq-8": ("wide", gptq(8, 128), config("gptq", 128, 8), {"INT8_128"}),
    "gptq-one-group": ("wide", gptq(group=-1), config("gptq", -1), {"INT4_128"}),
    "gptq-small-groups": ("llama", gptq(group=16), config("gptq", 16), {"F32"}),
    "gptq-act-order": ("llama", gptq(order="own"), config("gptq", 32, **ACT), {"INT4_32"}),
    "gptq-act-order-shared": ("wide", gptq(8, order="shared"), config("gptq", 32, 8, **ACT), {"INT8_32"}),
    "gptq-head": ("llama", gptq(head=True), config("gptq", 32, lm_head=True), {"INT4_32"}),
    "gptq-dynamic": ("wide", mixed, config("gptq", 32, dynamic=DYNAMIC), {"INT4_32", "INT8_32"}),
    "gptq-experts": ("mixtral", gptq(order="inputs"), config("gptq", 32, **ACT), {"INT4_32"}),
    "awq-32": ("wide", awq(32), config("awq", 32, zero_point=True, version="gemm"), {"INT4_32"}),
    "awq-64": ("wide", awq(64), config("awq", 64, zero_point=True, version="gemm"), {"INT4_32"}),
    "awq-128": ("wide", awq(128), config("awq", 128, zero_point=True, version="gemm"), {"INT4_128"}),
    "awq-one-group": ("wide", awq(-1), config("awq", -1, zero_point=True, version="gemm"), {"INT4_128"}),
    "awq-symmetric": ("wide", awq(64, symmetric=True), config("awq", 64, zero_point=False), {"INT4_32"}),
    "awq-gemv": ("wide", awq(64, "gemv"), config("awq", 64, zero_point=True, version="gemv"), {"INT4_32"}),
    "awq-not-all": (
        "wide",
        awq(64, skip="v_proj"),
        config("awq", 64, modules_to_not_convert=["v_proj", "no_such_module"]),
        {"INT4_32"},
    ),
    "auto-round": ("wide", mixed, auto_round("auto_round:auto_gptq"), {"INT4_32", "INT8_32"}),
    "auto-round-as-is": ("llama", gptq(version=2), auto_round("auto_round"), {"INT4_32"}),
    "auto-round-awq": ("wide", awq(32), auto_round("auto_round:auto_awq"), {"INT4_32"}),
    "awq-experts": ("qwen3-moe", awq(32), config("awq", 32, zero_point=True), {"INT4_32"}),
}
"""Name -> a variant of `tests.models.tiny` or "wide", what is written, quantization_config, kinds beside F32."""

Pairs = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Of each case (quantized, the same in float32)."""
    sources: dict[str, Path] = {}
    made: Pairs = {}
    for name, (source, way, said, _) in CASES.items():
        if source not in sources:
            folder = tmp_path_factory.mktemp(source)
            sources[source] = wide(folder) if source == "wide" else make(source, folder)[0]
        made[name] = pair(sources[source], tmp_path_factory.mktemp(name), way, **said)
    return made


def compare(device: str, case: str, pairs: Pairs) -> None:
    """Equal where the device expands matrices; sums of the native kernels run in another order per format."""
    quantized, plain = pairs[case]
    with open_checkpoint(quantized) as checkpoint:
        kinds = {checkpoint.kind(name) for name in checkpoint.names() if name.endswith(".weight")}
    assert kinds == {"F32"} | CASES[case][3]
    ids = prompt(3, 60)
    got, want = (Loaded(path, make_device(device)).logits(ids, [17]) for path in (quantized, plain))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 if device == "cpu" else 0)


ONE_GROUP = [case for case in CASES if case.endswith("one-group")]
AWQ_GROUPS = ["awq-32", "awq-64", "awq-128", "awq-symmetric"]


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*ONE_GROUP, *AWQ_GROUPS)])
@pytest.mark.parametrize("device", NAMES)
def test_logits_are_those_of_the_values(device: str, case: str, pairs: Pairs) -> None:
    compare(device, case, pairs)


@pytest.mark.parametrize("case", ONE_GROUP)
@pytest.mark.parametrize("device", NAMES)
def test_quant_03_one_group_for_all_columns(device: str, case: str, pairs: Pairs) -> None:
    compare(device, case, pairs)


@pytest.mark.parametrize("case", AWQ_GROUPS)
@pytest.mark.parametrize("device", NAMES)
def test_quant_04_every_group_size_and_zero_point(device: str, case: str, pairs: Pairs) -> None:
    """With biases of q, k and v."""
    compare(device, case, pairs)


@pytest.mark.parametrize(("activations", "bound"), [("int16", 5e-4), ("int8", 256 * 5e-4)])
@pytest.mark.parametrize("case", ["gptq", "gptq-8", "gptq-act-order", "gptq-act-order-shared", "awq-128"])
def test_rounded_activations_stay_near(case: str, activations: str, bound: float, pairs: Pairs) -> None:
    """Root mean square of the difference over that of the logits. 16 bits of a row err by 2^-16 of its largest value at
    most, of which these models' large weights make some ten times as much; 8 bits are 256 times as coarse."""
    quantized, plain = pairs[case]
    ids = prompt(3, 60)
    got = Loaded(quantized, CpuDevice(2, activations)).logits(ids)
    want = Loaded(plain, ReferenceDevice()).logits(ids)
    assert np.sqrt(np.mean((got - want) ** 2)) < bound * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("case", ["gptq-8", "gptq-act-order-shared", "gptq-dynamic", "awq-32", "awq-64", "auto-round"])
def test_two_ranks_together_are_the_whole_model(case: str, pairs: Pairs) -> None:
    """Rows and columns of every matrix are cut, also of one whose columns lie in another order."""
    quantized, plain = pairs[case]
    ids = prompt(4, 50)
    want = Loaded(plain, ReferenceDevice()).logits(ids)
    for got in split_logits(quantized, ids, 2)[0]:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_quant_01_both_versions_of_zero_points_give_the_same_logits(pairs: Pairs) -> None:
    ids = prompt(3, 60)
    first, second = (Loaded(pairs[case][0], make_device("cpu")).logits(ids) for case in ("gptq", "gptq-v2"))
    np.testing.assert_array_equal(first, second)


def test_parts_with_orders_of_their_own_are_expanded(pairs: Pairs) -> None:
    """q, k and v are one product, which takes its input in one order: else they are float32 in memory."""
    kinds = {case: set(Loaded(pairs[case][0], CpuDevice(1)).model.blocks[0].attn.qkv.weight.kinds) for case in pairs}
    assert kinds["gptq"] == {"INT4_32"} and kinds["gptq-act-order-shared"] == {"INT8_32"}
    assert kinds["gptq-act-order"] == {"F32"}


def test_experts_in_orders_of_their_own_stay_as_they_are(pairs: Pairs) -> None:
    device = CpuDevice(1)
    moe = Loaded(pairs["gptq-experts"][0], device).model.blocks[0].mlp
    weights = (*moe.gate_up.weights, *moe.down.weights)
    assert {kind for weight in weights for kind in weight.kinds} == {"INT4_32"}
    assert len({weight.columns.tobytes() for weight in weights}) == len(weights)


def test_a_bias_that_is_not_zero_is_not_left_out(pairs: Pairs, tmp_path: Path) -> None:
    tensors = load_file(pairs["gptq-symmetric"][0] / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pairs["gptq-symmetric"][0] / "config.json").read_text())
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj\.bias is in the checkpoint, but"):
        Loaded(tmp_path, ReferenceDevice())


@pytest.mark.parametrize(
    ("case", "asked", "notes"),
    [
        ("gptq", "gptq", ("F32/INT4_32 weights", "activations int8 because")),
        ("gptq-8", "gptq_marlin", ("F32/INT8_128 weights", "activations int16 because")),
        ("awq-128", "awq_marlin", ("F32/INT4_128 weights", "activations int8 because")),
    ],
)
def test_start_up_says_what_it_is(case: str, asked: str, notes: tuple[str, ...], pairs: Pairs) -> None:
    built = build(EngineConfig(model=str(pairs[case][0]), quantization=asked, max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert all(note in text for note in notes), text
    built.engine.close()


def test_another_method_than_the_checkpoints_is_refused(pairs: Pairs) -> None:
    with pytest.raises(ConfigError, match="--quantization awq_marlin was asked for, but the checkpoint is gptq"):
        build(EngineConfig(model=str(pairs["gptq"][0]), quantization="awq_marlin"))
