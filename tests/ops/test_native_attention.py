"""How the native attention cuts its work changes no bit: tiles of rows, keys read in place or copied, long contexts in
pieces of chunks over threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ops import truth
from tests.ops.harness import Pages, Span, attention_model, compile_op, device, f32
from tests.ops.test_attention_ops import Case

LENGTH = 1300
CUTS = (
    (0, LENGTH),
    (0, 1200, 1201, 1204, 1220, LENGTH),
)
"""A prompt whole; and then decoded, verified by 3 and 16 tokens, and continued: few rows, some more, many."""


@pytest.mark.parametrize(
    "case",
    [
        Case(20, 1, 80, 0, 0.0, 16, "float16"),
        Case(71, 1, 64, 300, 0.0, 64, "float32"),
        Case(7, 7, 40, 0, 10.0, 128, "float16"),
        Case(5, 1, 36, 70, 0.0, 32, "float16"),
        Case(12, 2, 96, 0, 0.0, 16, "float32"),
        Case(6, 2, 64, 0, 0.0, 16, "float16", chunk=650, sunk=True),
        Case(71, 1, 20, 0, 0.0, 32, "float16", alibi=0.25, sunk=True),
        Case(16, 1, 60, 0, 0.0, 16, "float16", latent=44),
        Case(128, 1, 24, 700, 0.0, 64, "float32", sunk=True, latent=16),
        Case(9, 3, 64, 0, 0.0, 16, "int8"),
        Case(20, 1, 80, 300, 10.0, 64, "fp8_e4m3", scaled=True),
        Case(4, 1, 256, 0, 0.0, 16, "fp8_e5m2"),
        Case(16, 1, 60, 0, 0.0, 16, "int8", latent=44),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_how_the_work_is_cut(case: Case) -> None:
    qkv, checked = case.qkv(LENGTH), range(1199, LENGTH)
    answers = []
    for threads in (1, 2, 3):
        pages = Pages(2, LENGTH, case.block_size, seed=threads)
        model = attention_model(
            device("cpu", threads), qkv, case.shape(), pages, case.dtype, case.sinks(), case.scales()
        )
        for cuts in CUTS:
            steps = []
            for start, end in zip(cuts[:-1], cuts[1:], strict=True):
                rows = [p - start for p in range(start, end) if p in checked]
                steps.append(model.raw_logits(pages.step([Span(1, start, range(start, end))], rows)))
            answers.append(np.concatenate(steps))
    truth.assert_within(answers[0][[0, 1, 57]], case.truth(qkv, [checked[i] for i in (0, 1, 57)]))
    for answer in answers[1:]:
        assert np.array_equal(answer.view(np.uint32), answers[0].view(np.uint32))


def test_more_long_contexts_than_there_is_room_to_share() -> None:
    """Partials of contexts in pieces have a fixed place; those beyond it are computed whole, with the same bits."""
    case, slots, length = Case(64, 1, 64, 0, 0.0, 128, "float16"), 3, 256 * 180
    dev, pages, shape = device("cpu", 2), Pages(slots, length, 128), case.shape()
    table, few = dev.weight([f32(case.qkv(512))]), dev.weight([f32(case.qkv(8)[:, : 64 * 64])])
    cache = dev.kv_cache(pages.spec(1, 64, "float16"))

    def body(attends: bool) -> Callable[[Any, Any], Any]:
        def build(ops: Any, batch: Any) -> Any:
            q = ops.store_kv(batch, ops.embed(batch, table, 1.0), None, shape)
            return ops.gather(batch, ops.attend(batch, q, shape) if attends else q)

        return build

    fill, model = (
        dev.compile(body(attends), lambda ops, x: ops.logits(x, few), pages.limits(2048), cache)
        for attends in (False, True)
    )
    for slot in range(slots):
        for start in range(0, length, 2048):
            tokens = np.random.default_rng([slot, start]).integers(0, 512, min(2048, length - start))
            fill.raw_logits(pages.step([Span(slot, start, tokens.tolist())], []))
    spans = [Span(slot, length - 1, [slot]) for slot in range(slots)]
    together = model.raw_logits(pages.step(spans))
    alone = np.concatenate([model.raw_logits(pages.step([span])) for span in spans])
    assert np.array_equal(together.view(np.uint32), alone.view(np.uint32))
    assert len(np.unique(together[:, 0])) == slots


@pytest.mark.parametrize(
    ("word", "fields", "sinks"),
    [
        ("sinks is 3 wide, wanted 4", {}, 3),
        ("alibi is 5 wide, wanted 4", {"alibi": (1.0,) * 5}, None),
        ("20 latent", {"latent": 20}, None),
        ("KV heads of 64", {"head_dim": 64}, None),
    ],
)
def test_shapes_that_do_not_fit_are_refused(word: str, fields: dict[str, Any], sinks: int | None) -> None:
    """When the model is compiled, before anything could be written beyond a buffer."""
    dev, pages = device("cpu"), Pages(1, 16)
    shape, q = Case(4, 1, 32, 0, 0.0, 16, "float16").shape()._replace(**fields), np.zeros((1, 4 * 32), np.float32)
    table, sunk = dev.weight([f32(q)]), None if sinks is None else dev.vector(np.zeros(sinks, np.float32))
    with pytest.raises(ValueError, match=word):
        compile_op(dev, lambda ops, batch: ops.attend(batch, ops.embed(batch, table, 1.0), shape, sunk), 128, pages)
