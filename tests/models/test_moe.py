"""Mixtures of experts in models: what a router chooses, and that a token's result is its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from octavo.layers.moe import MoE
from octavo.ops.contract import F32
from tests.devices import NAMES, make_device
from tests.models.test_parity import Checkpoints, prompt
from tests.models.tiny import Loaded
from tests.ops.harness import routes

ROUTED = (
    "mixtral",
    "qwen2-moe",
    "qwen2-moe-some-layers",
    "qwen3-moe",
    "olmoe",
    "phimoe",
    "phimoe-plain",
    "granite-moe-bias",
    "hunyuan-moe-layers",
    "ernie-moe",
    "ernie-moe-some-layers",
    "glm4-moe-published",
    "glm4-moe-groups",
)
"""Every way to choose: softmax of all or of the chosen, with and without shares, with a correction, with a smallest
sum; sigmoids with a correction, a scale, groups; SparseMixer."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("mixtures"))


def mixtures(loaded: Loaded) -> Iterator[tuple[int, MoE]]:
    for i, block in enumerate(loaded.model.blocks):
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, MoE):
            yield i, mlp


def choose_like_transformers(layer: Any, logits: F32) -> tuple[F32, F32 | None]:
    """(weights [rows, E] with 0 for what is not chosen, correction) of a layer's router for these logits."""
    mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    router = mlp.gate if hasattr(mlp, "gate") else mlp.router
    weight = (router.wg if hasattr(router, "wg") else router).weight
    corrections = [value for name, value in router.state_dict().items() if name.endswith("e_score_correction_bias")]
    rows, experts = logits.shape
    padded = np.zeros((rows, weight.shape[1]), np.float32)
    padded[:, :experts] = logits
    out = np.zeros((rows, experts), np.float32)
    with torch.no_grad():
        weight.copy_(torch.eye(*weight.shape))  # so that the first elements of a row are its logits
        _, weights, chosen = router(torch.from_numpy(padded))
        np.put_along_axis(out, chosen.numpy(), weights.numpy(), axis=1)
    return out, corrections[0].numpy().ravel() if corrections else None


@pytest.mark.parametrize("variant", ROUTED)
def test_routers_choose_as_those_of_transformers(variant: str, checkpoints: Checkpoints) -> None:
    path, oracle = checkpoints[variant]
    loaded = Loaded(path, make_device("reference"))
    rng, seen = np.random.default_rng(3), 0
    for i, mixture in mixtures(loaded):
        logits = (rng.standard_normal((200, loaded.config.experts)) * 2).astype(np.float32)
        kept = {name: value.clone() for name, value in oracle.model.layers[i].state_dict().items()}
        want, correction = choose_like_transformers(oracle.model.layers[i], logits)
        oracle.model.layers[i].load_state_dict(kept)
        assert (mixture.correction is None) == (correction is None)
        for device in NAMES:
            got = routes(make_device(device), logits, mixture.rule, correction)
            np.testing.assert_array_equal(got != 0, want != 0)
            np.testing.assert_allclose(got, want, rtol=1e-5)
        seen += 1
    assert seen, "no layer has experts"


def edited(path: Path, folder: Path, change: Callable[[str, F32], F32]) -> Path:
    """A copy of a checkpoint with every tensor changed."""
    (folder / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    save_file({name: change(name, value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe", "phimoe", "ernie-moe", "glm4-moe", "glm4-moe-groups"])
@pytest.mark.parametrize("device", NAMES)
def test_ties_go_to_the_lower_id(variant: str, device: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """With routers of zeros all experts tie: the first ones are chosen, and no other has any effect."""
    folder, ids = tmp_path / "tied", prompt(6, 20)
    folder.mkdir()
    router = re.compile(r"\.gate\.weight$|e_score_correction_bias$")
    path = edited(checkpoints[variant][0], folder, lambda n, v: np.zeros_like(v) if router.search(n) else v)
    tied = Loaded(path, make_device(device))
    taken = next(mixtures(tied))[1].rule.top_k
    assert 0 < taken < tied.config.experts
    want = tied.logits(ids)
    for first, same in ((taken, True), (taken - 1, False)):

        def without(name: str, value: F32, first: int = first) -> F32:
            expert = re.search(r"\.experts\.(\d+)\.", name)
            return -value if expert and int(expert[1]) >= first else value

        changed = tmp_path / f"from {first}"
        changed.mkdir()
        got = Loaded(edited(path, changed, without), make_device(device)).logits(ids)
        assert np.array_equal(got, want) == same


@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe", "phimoe", "granite-moe-shared", "glm4-moe-groups"])
def test_a_token_does_not_depend_on_the_experts_of_others(variant: str, checkpoints: Checkpoints) -> None:
    """Bitwise, alone and with 1 to 32 others: of the same tokens, so that all choose the same experts, or of any."""
    loaded = Loaded(checkpoints[variant][0], make_device("cpu"))
    length, ids = 5, prompt(20, 5)
    want = loaded.logits(ids)
    for count in range(1, 34):
        place = count // 2
        tables = [[i] for i in range(count)]
        for others in ([ids] * count, [prompt(count * 100 + i, length) for i in range(count)]):
            sequences = [(ids if i == place else others[i], 0) for i in range(count)]
            got = loaded.compiled.raw_logits(loaded.batch(sequences, tables, "all"))
            np.testing.assert_array_equal(got[place * length : (place + 1) * length], want)
