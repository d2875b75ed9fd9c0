"""Sharing of prefixes: who finds what, and that nobody ever reads another's tokens."""

from __future__ import annotations

import random

import pytest

from octavo.engine.fake import FakeModel
from octavo.types import KVGroup
from tests.engine.test_requests import engine_of, one
from tests.engine.workload import drive, request

FULL = KVGroup((0,))


@pytest.mark.parametrize("length", [16, 32, 48, 1, 17, 31])
def test_a_prompt_cached_whole_still_computes_a_token(length: int) -> None:
    model = FakeModel()
    engine = engine_of(model)
    first, second = request("a", range(length), 5), request("b", range(length), 5)
    assert one(engine, first).tokens["a", 0] == model.continuation(first)
    out = one(engine, second)
    assert out.tokens["b", 0] == model.continuation(second)
    assert out.first["b", 0].cached == length - 1


def test_every_divergence_in_the_last_blocks() -> None:
    """The earlier prompt ends anywhere in a block, the later one leaves it anywhere; hits are exact to the token."""
    for length in range(30, 44):
        model = FakeModel()
        engine = engine_of(model, max_model_len=256)
        one(engine, request("seed", range(length), 1))
        for leave in range(14, length + 1):
            wanted = request(f"r{leave}", [*range(leave), *range(100, 104)], 2)
            out = one(engine, wanted)
            assert out.tokens[wanted.id, 0] == model.continuation(wanted)
            assert out.first[wanted.id, 0].cached == leave, (length, leave)


def test_the_answer_is_found_too() -> None:
    model = FakeModel()
    engine = engine_of(model)
    first = request("a", range(20), 30)
    said = one(engine, first).tokens["a", 0]
    turn = request("b", [*range(20), *said, 1, 2, 3], 5)
    out = one(engine, turn)
    assert out.first["b", 0].cached == 20 + 29, "all but the last token drawn, which was never computed"
    assert out.tokens["b", 0] == model.continuation(turn)


def test_salt_and_adapter_isolate() -> None:
    engine = engine_of()

    def cached(name: str, **fields: object) -> int:
        return one(engine, request(name, range(64), 2, **fields)).first[name, 0].cached

    assert [cached("1", salt="A"), cached("2", salt="B"), cached("3", salt="A"), cached("4")] == [0, 0, 63, 0]
    assert [cached("5", adapter=1), cached("6", salt="1"), cached("7", adapter=1, salt="A")] == [0, 0, 0]
    assert cached("8") == 63


def test_caching_off_shares_nothing_between_requests() -> None:
    engine = engine_of(enable_prefix_caching=False)
    drive(engine, [request("a", range(64), 2)])
    assert one(engine, request("b", range(64), 2)).first["b", 0].cached == 0
    assert engine.stats().prefix_queries == engine.stats().prefix_hits == 0


def test_requests_of_one_step_share_their_head() -> None:
    model = FakeModel()
    engine = engine_of(model)
    wanted = [request(f"r{i}", [*range(64), 100 + i], 3) for i in range(4)]
    out = drive(engine, wanted)
    assert [out.first[each.id, 0].cached for each in wanted] == [0, 64, 64, 64]
    assert [out.tokens[each.id, 0] for each in wanted] == [model.continuation(each) for each in wanted]
    assert engine.stats().cached_prompt_tokens == 192
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (260, 192)


def test_the_same_prompt_three_times_then_churn() -> None:
    model = FakeModel()
    engine = engine_of(model, blocks=(45,))
    wanted = [request(f"same{i}", range(100), 64) for i in range(3)]
    wanted += [request(f"r{i}", range(i, 150 + i), 30) for i in range(5)]
    out = drive(engine, wanted)
    for each in wanted:
        assert out.tokens[each.id, 0] == model.continuation(each)


@pytest.mark.parametrize("caching", [True, False])
def test_random_prompts_with_random_heads(caching: bool) -> None:
    rng = random.Random(5)
    model = FakeModel()
    engine = engine_of(model, enable_prefix_caching=caching, max_model_len=100, blocks=(60,), depth=2)
    heads = [[rng.randrange(3) for _ in range(rng.randrange(40))] for _ in range(12)]
    wanted = [request(f"r{i}", rng.choice(heads)[: rng.randrange(1, 41)] + [rng.randrange(3)], 4) for i in range(300)]
    out = drive(engine, wanted)
    for each in wanted:
        assert out.tokens[each.id, 0] == model.continuation(each)
    assert (engine.stats().prefix_hits > 2000) == caching


def test_least_recently_used_content_goes_first() -> None:
    engine = engine_of(blocks=(12,), max_model_len=150)

    def cached(name: str, start: int) -> int:
        return one(engine, request(name, range(start, start + 64), 1)).first[name, 0].cached

    assert cached("a", 0) == 0
    assert cached("b", 100) == 0
    assert cached("a again", 0) == 63
    assert cached("c", 200) == 0, "12 blocks: four each for a, b and c, and a copy"
    assert cached("a third", 0) == 63, "a was used later than b"
    assert cached("b again", 100) < 63


def test_a_window_needs_only_its_blocks() -> None:
    """Window 33: a query at position 96 sees from 64 on. Blocks before that may be gone, and the hit stands."""
    model = FakeModel((KVGroup((0,), window=33),))
    engine = engine_of(model, blocks=(8,), max_num_batched_tokens=16, max_model_len=300)
    first = request("a", range(96), 1)
    assert one(engine, first).tokens["a", 0] == model.continuation(first)
    other = request("b", range(200, 248), 1)
    one(engine, other)
    again = request("c", [*range(96), 7], 3)
    out = one(engine, again)
    assert out.tokens["c", 0] == model.continuation(again)
    assert out.first["c", 0].cached == 96


def test_a_window_gives_its_blocks_back() -> None:
    groups = (FULL, KVGroup((1,), window=32))
    engine = engine_of(FakeModel(groups), blocks=(100, 5), max_num_batched_tokens=32)
    engine.add(request("a", range(400), 50))
    for _ in range(30):
        engine.step()
    pools = engine.scheduler.memory.pools
    assert pools[0].used == -(-(400 + 17) // 16)
    assert pools[1].used <= 3
    while not engine.idle:
        engine.step()


def test_a_hit_holds_for_all_groups() -> None:
    """The windowed group has lost what it needs for the long hit, so both groups take the short one."""
    model = FakeModel((FULL, KVGroup((1,), window=20)))
    engine = engine_of(model, blocks=(100, 9), max_num_batched_tokens=16, max_model_len=400)
    one(engine, request("a", range(160), 1))
    one(engine, request("b", range(500, 660), 1))
    wanted = request("c", [*range(160), 3], 4)
    out = one(engine, wanted)
    assert out.tokens["c", 0] == model.continuation(wanted)
    assert out.first["c", 0].cached < 160
