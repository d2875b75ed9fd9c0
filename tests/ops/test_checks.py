"""Steps that no device may run: refused with a ValueError that names the array, and the model is usable after."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.ops.contract import AttentionShape, KVScales, KVSpec, Stored
from tests.ops.harness import DEVICES, Pages, Span, attention_model, device, f32, parameters

pytestmark = pytest.mark.parametrize("name", DEVICES)

VOCAB = 64


def _model(name: str) -> tuple[Any, Pages]:
    dev, pages = device(name), Pages(4, 64)
    table = dev.weight([f32(np.eye(VOCAB))])
    model = dev.compile(
        lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
        lambda ops, x: ops.logits(x, table),
        pages.limits(20)._replace(rows=12),
        dev.kv_cache(pages.spec(1, 32)),
    )
    return model, pages


def _ints(*values: int) -> Any:
    return np.array(values, np.int32)


BATCHES: dict[str, tuple[str, Any]] = {
    "token beyond the vocabulary": ("tokens", {"tokens": _ints(1, 2, VOCAB, 4, 5)}),
    "negative token": ("tokens", {"tokens": _ints(1, 2, -1, 4, 5)}),
    "tokens of another type": ("tokens", {"tokens": np.arange(5)}),
    "tokens that are strided": ("tokens", {"tokens": np.arange(10, dtype=np.int32)[::2]}),
    "too few positions": ("positions", {"positions": _ints(0, 1, 2)}),
    "negative position": ("positions", {"positions": _ints(-1, 0, 1, 7, 8)}),
    "position beyond the model's length": ("positions", {"positions": _ints(0, 1, 2, 63, 64)}),
    "positions with a hole": ("positions", {"positions": _ints(0, 1, 3, 7, 8)}),
    "positions backwards": ("positions", {"positions": _ints(0, 1, 2, 8, 7)}),
    "starts not from 0": ("starts", {"starts": _ints(1, 3, 5)}),
    "starts not to the end": ("starts", {"starts": _ints(0, 3, 4)}),
    "starts of a sequence without tokens": ("starts", {"starts": _ints(0, 5, 5)}),
    "starts that decrease": ("starts", {"starts": _ints(0, 7, 5)}),
    "too many starts": ("starts", {"starts": _ints(0, 1, 3, 5)}),
    "slot that is not there": ("slots", {"slots": _ints(0, 4)}),
    "negative slot": ("slots", {"slots": _ints(-1, 2)}),
    "a slot twice": ("slots", {"slots": _ints(2, 2)}),
    "row that is not there": ("rows", {"rows": _ints(2, 5)}),
    "rows out of order": ("rows", {"rows": _ints(4, 2)}),
    "too many rows": ("rows", {"rows": _ints(*[4] * 13)}),
    "no table": ("tables", {"tables": ()}),
    "table for fewer slots": ("tables", {"tables": (np.zeros((2, 4), np.int32),)}),
    "table too narrow": ("tables", {"tables": (np.zeros((4, 0), np.int32),)}),
    "block that is not there": ("tables", {"tables": (np.full((4, 4), 16, np.int32),)}),
    "negative block": ("tables", {"tables": (np.full((4, 4), -1, np.int32),)}),
}


@pytest.mark.parametrize("case", BATCHES)
def test_bad_batches(name: str, case: str) -> None:
    word, fields = BATCHES[case]
    model, pages = _model(name)
    good = pages.step([Span(0, 0, [1, 2, 3]), Span(2, 7, [4, 5])], [2, 4])
    with pytest.raises(ValueError, match=word):
        model.raw_logits(good._replace(**fields))
    with pytest.raises(ValueError, match=word):
        model.run(good._replace(**fields), parameters(len(fields.get("rows", good.rows))))
    assert model.run(good, parameters(2)).token.tolist() == [3, 5]


@pytest.mark.parametrize("block", [-1, 8, 100_000_000])
@pytest.mark.parametrize("fields", [{}, {"window": 30}, {"chunk": 30}], ids=str)
def test_blocks_that_are_only_read(name: str, block: int, fields: dict[str, int]) -> None:
    shape, pages = AttentionShape(2, 1, 32, 0.2, 0, 0, **fields), Pages(2, 64)
    model = attention_model(device(name), np.ones((64, 128), np.float32), shape, pages, "float16")
    model.raw_logits(pages.step([Span(0, 0, range(40))]))
    good = pages.tables[0][0, 1]
    pages.tables[0][0, 1] = block
    with pytest.raises(ValueError, match=r"tables\[0\]"):
        model.raw_logits(pages.step([Span(0, 40, [40])]))
    pages.tables[0][0, 1] = good
    assert np.allclose(model.raw_logits(pages.step([Span(0, 40, [40])])), 1, rtol=1e-6)


def test_too_many_tokens(name: str) -> None:
    model, pages = _model(name)
    with pytest.raises(ValueError, match="tokens: 21 in one step"):
        model.raw_logits(pages.step([Span(0, 0, [1] * 21)], [0]))


SAMPLINGS: dict[str, tuple[str, Any]] = {
    "other number of rows": ("top_k", {"top_k": _ints(0)}),
    "another type": ("temperature", {"temperature": np.zeros(2)}),
    "NaN temperature": ("temperature", {"temperature": np.array([1, np.nan], np.float32)}),
    "negative temperature": ("temperature", {"temperature": np.array([1, -1], np.float32)}),
    "infinite temperature": ("temperature", {"temperature": np.array([1, np.inf], np.float32)}),
    "top_p above 1": ("top_p", {"top_p": np.array([1, 1.5], np.float32)}),
    "min_p below 0": ("min_p", {"min_p": np.array([-0.1, 0], np.float32)}),
    "negative top_k": ("top_k", {"top_k": _ints(0, -1)}),
    "no repetition": ("repetition", {"repetition": np.zeros(2, np.float32)}),
    "NaN presence": ("presence", {"presence": np.array([0, np.nan], np.float32)}),
    "infinite frequency": ("frequency", {"frequency": np.array([-np.inf, 0], np.float32)}),
    "target beyond the vocabulary": ("target", {"target": _ints(0, VOCAB)}),
    "more logprobs than ids": ("logprobs", {"logprobs": _ints(0, VOCAB + 1)}),
    "seen id beyond the vocabulary": ("seen_ids", {"seen": [{VOCAB: 1}, {}]}),
    "bias of a negative id": ("bias_ids", {"bias": [{-1: 1.0}, {}]}),
    "NaN bias": ("bias_values", {"bias": [{1: np.nan}, {}]}),
    "infinite bias": ("bias_values", {"bias": [{1: np.inf}, {}]}),
    "allowed id beyond the vocabulary": ("allow_ids", {"allow": [[], [VOCAB]]}),
    "report of a negative id": ("report_ids", {"report": [[], [-1]]}),
    "pointers beyond the list": ("seen_ptr", {"seen_ptr": _ints(0, 0, 1)}),
    "pointers that decrease": ("allow_ptr", {"allow_ptr": _ints(0, 3, 2), "allow_ids": _ints(1, 2)}),
    "too few pointers": ("bias_ptr", {"bias_ptr": _ints(0)}),
    "too few counts": ("seen_counts", {"seen_ptr": _ints(0, 1, 1), "seen_ids": _ints(1)}),
    "too few bias values": ("bias_values", {"bias_ptr": _ints(0, 1, 1), "bias_ids": _ints(1)}),
}


@pytest.mark.parametrize("case", SAMPLINGS)
def test_bad_parameters(name: str, case: str) -> None:
    word, fields = SAMPLINGS[case]
    model, pages = _model(name)
    lists = {n: v for n, v in fields.items() if n in ("seen", "bias", "allow", "report")}
    arrays = {n: v for n, v in fields.items() if n not in lists}
    step = pages.step([Span(0, 0, [1, 2])])
    with pytest.raises(ValueError, match=word):
        model.run(step, parameters(2, **lists)._replace(**arrays))
    assert model.run(step, parameters(2)).token.tolist() == [1, 2]


def test_bad_copies(name: str) -> None:
    model, _ = _model(name)
    for group, pairs in ((1, [[0, 1]]), (-1, [[0, 1]]), (0, [[0, 16]]), (0, [[-1, 0]]), (0, [0, 1])):
        with pytest.raises(ValueError, match="copy_blocks"):
            model.copy_blocks(group, np.array(pairs, np.int32))


def test_bad_weights(name: str) -> None:
    dev = device(name)
    part = f32(np.zeros((4, 64)))
    for parts in ([], [part, f32(np.zeros((4, 32)))], [part._replace(n_out=5)], [part._replace(n_in=32)]):
        with pytest.raises(ValueError):
            dev.weight(parts)
    with pytest.raises(ValueError, match="Q9"):
        dev.weight([Stored("Q9", 4, 64, np.zeros((4, 256), np.uint8))])


def test_bad_caches(name: str) -> None:
    dev, good = device(name), KVSpec(2, 1, 32, "float16", 16, (4,), (0, 0))
    one = KVScales((1.0,), (1.0,))
    for fields in (
        {"dtype": "int7"},
        {"block_size": 24},
        {"group_of": (0,)},
        {"group_of": (0, 1)},
        {"scales": (one, one)},
        {"dtype": "int8", "scales": (one, one)},
        {"dtype": "fp8_e4m3", "scales": (one,)},
        {"dtype": "fp8_e4m3", "scales": (one, KVScales((1.0, 1.0), (1.0,)))},
        {"dtype": "fp8_e4m3", "latent": 16, "scales": (one, one)},
        {"dtype": "fp8_e4m3", "scales": (one, KVScales((0.0,), (1.0,)))},
        {"dtype": "fp8_e4m3", "scales": (one, KVScales((1.0,), (float("nan"),)))},
    ):
        with pytest.raises(ValueError, match="KV cache"):
            dev.kv_cache(good._replace(**fields))
