"""Too many requests for too little memory: all finish, little is computed twice, little memory is wasted."""

from __future__ import annotations

import random

import pytest

from octavo.engine.fake import FakeModel
from octavo.engine.limits import Adapters, TokenBudget
from octavo.types import Delta
from tests.engine.test_requests import engine_of
from tests.engine.workload import drive, request


@pytest.mark.parametrize("depth", [1, 2])
def test_two_hundred_requests_with_memory_for_three(depth: int) -> None:
    rng = random.Random(1)
    model = FakeModel()
    engine = engine_of(model, blocks=(24,), depth=depth)
    wanted = [
        request(f"r{i}", [rng.randrange(50) for _ in range(rng.randrange(5, 90))], rng.randrange(1, 60))
        for i in range(200)
    ]
    out = drive(engine, wanted)
    for each in wanted:
        assert out.tokens[each.id, 0] == model.continuation(each)
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.blocks_used == stats.kv_slots_filled == 0
    assert stats.recomputed_tokens < 0.1 * stats.extra["computed_tokens"]


def test_a_common_head_and_memory_for_four() -> None:
    model = FakeModel()
    engine = engine_of(model, blocks=(16,))
    wanted = [request(f"r{i}", [*range(40), i], 32) for i in range(64)]
    out = drive(engine, wanted)
    for each in wanted:
        assert out.tokens[each.id, 0] == model.continuation(each)
    stats = engine.stats()
    assert stats.recomputed_tokens < 0.1 * stats.extra["computed_tokens"]


def test_no_thrash_when_answers_are_long() -> None:
    """32 answers of 200 tokens to short prompts, memory for eight of them: admission by the prompt alone would
    preempt all the time."""
    engine = engine_of(FakeModel(answer=lambda request, choice, out: len(out)), blocks=(110,))
    out = drive(engine, [request(f"r{i}", range(i, i + 16), 200) for i in range(32)])
    assert all(len(tokens) == 200 for tokens in out.tokens.values())
    stats = engine.stats()
    assert stats.preemptions > 0, "the test is about preemption"
    assert stats.recomputed_tokens < 0.1 * stats.extra["computed_tokens"]
    assert out.steps < 32 * 200 / 4, "at least four at a time on average"


def test_the_youngest_is_preempted_first() -> None:
    engine = engine_of(FakeModel(answer=lambda request, choice, out: len(out)), blocks=(12,), max_num_seqs=3)
    out = drive(engine, [request(f"r{i}", range(i, i + 16), 100, arrival=i) for i in range(3)])
    order = list(out.finish)
    assert order == [("r0", 0), ("r1", 0), ("r2", 0)] and engine.stats().preemptions > 0


def test_priority_is_served_first_and_preempted_last() -> None:
    def order_of(policy: str) -> list[str]:
        engine = engine_of(
            FakeModel(answer=lambda request, choice, out: len(out)), blocks=(12,), max_num_seqs=2, policy=policy
        )
        return [
            name
            for name, _ in drive(
                engine, [request(f"r{i}", range(i, i + 16), 100, arrival=i, priority=5 - i) for i in range(4)]
            ).finish
        ]

    assert order_of("fcfs") == ["r0", "r1", "r2", "r3"]
    assert order_of("priority") == ["r3", "r2", "r1", "r0"]


def test_decodes_are_never_left_out_for_a_prompt() -> None:
    """With 8 tokens a step, 6 decodes and a long prompt: each step has all decodes in it."""
    engine = engine_of(max_num_batched_tokens=8, max_num_seqs=7)
    for i in range(6):
        engine.add(request(f"r{i}", [i], 60))
    engine.step()
    engine.add(request("long", range(40), 5))
    for _ in range(10):
        assert {delta.request for delta in engine.step()} >= {f"r{i}" for i in range(6)}


def test_a_budget_smaller_than_the_batch_takes_turns() -> None:
    engine = engine_of(max_num_batched_tokens=6, max_num_seqs=6)
    for i in range(6):
        engine.add(request(f"r{i}", [i], 50))
    engine.step()
    budget = next(limit for limit in engine.scheduler.limits if isinstance(limit, TokenBudget))
    budget.tokens = 2
    made = dict.fromkeys((f"r{i}" for i in range(6)), 0)
    for _ in range(60):
        for delta in engine.step():
            made[delta.request] += len(delta.tokens)
    assert max(made.values()) - min(made.values()) <= 2, made


def test_little_memory_is_wasted() -> None:
    engine = engine_of(
        FakeModel(answer=lambda request, choice, out: len(out)),
        blocks=(3000,),
        max_num_seqs=100,
        max_num_batched_tokens=8192,
    )
    rng = random.Random(3)
    for i in range(100):
        engine.add(request(f"r{i}", [rng.randrange(1000) for _ in range(rng.randrange(370, 400))], 60))
    for _ in range(20):
        engine.step()
    stats = engine.stats()
    assert stats.running == 100
    assert stats.kv_slots_filled == sum(seq.computed for seq in engine.scheduler.roster.running)
    assert 0.95 < stats.kv_slots_filled / stats.kv_slots_allocated <= 1


def test_a_request_that_a_limit_keeps_refusing_gets_its_turn() -> None:
    """Adapter 9 never fits beside 1 and 2, which keep coming; after a while nothing younger may pass it."""
    engine = engine_of(limits=[Adapters(2)], max_num_seqs=4)
    for i in range(4):
        engine.add(request(f"start{i}", [i], 20 + 5 * i, adapter=1 + i % 2, arrival=i))
    engine.step()
    engine.add(request("nine", [9], 3, adapter=9, arrival=10))
    news: list[Delta] = []
    for step in range(400):
        if step % 5 == 0:
            engine.add(request(f"more{step}", [step], 40, adapter=1 + step % 2, arrival=11 + step))
        news += [delta for delta in engine.step() if delta.request == "nine"]
        if news and news[-1].finish:
            break
    assert news and news[-1].finish == "length" and step < 250
