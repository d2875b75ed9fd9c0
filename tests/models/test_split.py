"""A model split among ranks that run side by side and add what each computes equals the whole model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.ops.reference import ReferenceDevice, ReferenceOps
from octavo.parallel.rank import Cut, Rank, SplitError
from tests import realmodels
from tests.models.test_parity import prompt
from tests.models.tiny import VARIANTS, Loaded, make


class Meeting:
    """Where the ranks add their parts."""

    def __init__(self, count: int) -> None:
        self.parts: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)
        self.sums = 0


class RankOps(ReferenceOps):
    def __init__(self, rank: Rank, meeting: Meeting) -> None:
        self.rank, self.meeting = rank, meeting

    def reduce(self, x: Any) -> Any:
        self.meeting.parts[self.rank.index] = x
        self.meeting.barrier.wait()
        total = np.sum(self.meeting.parts, axis=0, dtype=np.float32)
        self.meeting.sums += self.rank.first
        self.meeting.barrier.wait()
        return total


def split_logits(path: Path, ids: list[int], count: int) -> tuple[list[Any], Meeting, list[Loaded]]:
    """Of each rank the logits of every position, computed in two chunks."""
    meeting = Meeting(count)
    ranks = [Loaded(path, ReferenceDevice(), rank=Rank(i, count)) for i in range(count)]
    for i, loaded in enumerate(ranks):
        loaded.compiled.ops = RankOps(Rank(i, count), meeting)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(count) as pool:
        logits = list(pool.map(lambda loaded: loaded.logits(ids, [20]), ranks))
    return logits, meeting, ranks


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_together_are_the_whole_model(variant: str, tmp_path: Path) -> None:
    path, _ = make(variant, tmp_path)
    ids = prompt(4, 50)
    whole = Loaded(path, ReferenceDevice())
    want = whole.logits(ids)
    logits, meeting, ranks = split_logits(path, ids, 2)
    assert meeting.sums >= 2 * whole.config.layers, "at most one branch of a layer may be left whole"
    for got, loaded in zip(logits, ranks, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
        assert elements(loaded) < elements(whole), "nothing was divided"


def elements(loaded: Loaded) -> int:
    """Elements of all matrices of a model's layers."""
    found = [need for block in loaded.model.blocks for _, leaf in block.leaves() for need in leaf.needs()]
    return sum(int(np.prod(need.shape)) for need in found if need.matrix)


def test_three_ranks_divide_a_gguf_file() -> None:
    """192 columns of the attention's last matrix and 512 of the MLP's, in blocks of 32."""
    path, ids = realmodels.smollm2_gguf(), [504, 3575, 282, 4649, 314]  # "The capital of France is"
    want = Loaded(path, ReferenceDevice()).logits(ids)
    logits, meeting, ranks = split_logits(path, ids, 3)
    assert meeting.sums == 2 * 30 and [r.spec.kv_heads for r in ranks] == [1] * 3
    for got in logits:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_fewer_kv_heads_than_ranks_are_shared(tmp_path: Path) -> None:
    path, _ = make("llama", tmp_path)
    ids = prompt(4, 30)
    want = Loaded(path, ReferenceDevice()).logits(ids)
    logits, _, ranks = split_logits(path, ids, 4)
    assert [r.spec.kv_heads for r in ranks] == [1] * 4
    for got in logits:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_what_cannot_be_divided_is_refused_with_its_number(tmp_path: Path) -> None:
    path, _ = make("llama", tmp_path)
    with pytest.raises(SplitError, match="4 query heads cannot be divided among 3 ranks"):
        Loaded(path, ReferenceDevice(), rank=Rank(0, 3))


def test_shares_cover_everything_once() -> None:
    for count in (1, 2, 4, 8):
        shares = [Rank(i, count).share(24, "rows") for i in range(count)]
        assert sorted(i for c in shares for i in range(c.start, c.start + c.size)) == list(range(24))
    assert [Rank(i, 4).share_or_copy(2, "heads") for i in range(4)] == [Cut(0, 1, 2)] * 2 + [Cut(1, 1, 2)] * 2
