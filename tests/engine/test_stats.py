"""The numbers an engine keeps of itself, and the waiting time it tells with a request."""

from __future__ import annotations

import msgspec

from octavo import buckets
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.types import BlockUse, Delta, EngineStats
from tests.engine.test_requests import engine_of
from tests.engine.workload import drive, request


class Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_tokens_of_each_step() -> None:
    engine = engine_of(max_num_batched_tokens=20)
    drive(engine, [request("a", range(30), 3)])
    tokens = engine.stats().step_tokens
    assert tokens.bounds == buckets.STEP_TOKENS
    found = dict(zip([*tokens.bounds, "more"], tokens.counts, strict=True))
    assert {bound: count for bound, count in found.items() if count} == {1: 2, 16: 1, 32: 1}, (
        "20, then 10, then one each"
    )
    assert tokens.sum == 32


def test_the_first_delta_tells_how_long_the_request_waited() -> None:
    clock = Clock()
    engine = engine_of(max_num_seqs=1, clock=clock)
    engine.add(request("first", range(10), 2))
    clock.now += 0.5
    engine.add(request("second", range(20, 30), 2, n=2))
    queued: dict[tuple[str, int], list[float]] = {}
    while not engine.idle:
        for delta in engine.step():
            queued.setdefault((delta.request, delta.choice), []).append(delta.queued)
        clock.now += 1.0
    assert queued["first", 0] == [0.5, 0.0], "added at 0, scheduled at 0.5; later deltas say nothing"
    assert queued["second", 0] == [2.0, 0.0] and queued["second", 1] == [2.0, 0.0], "its choices share a prompt"


def test_a_request_that_never_ran_did_not_wait() -> None:
    engine = engine_of()
    engine.add(request("a", range(10), 2))
    engine.abort("a")
    assert [(delta.finish, delta.queued) for delta in engine.step()] == [("abort", 0.0)]


def test_who_waits_and_why() -> None:
    engine = engine_of(max_num_seqs=1)
    engine.add(request("a", range(10), 4, n=3))
    engine.add(request("b", range(20, 30), 4))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.held_back) == (0, 4, 2), (
        "two of a wait for the first to read the prompt"
    )
    engine.step()
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.held_back) == (1, 3, 0)


def test_preemptions_are_told_by_choice() -> None:
    engine = engine_of(FakeModel(answer=lambda request, choice, out: len(out)), blocks=(12,), max_num_seqs=3)
    drive(engine, [request(f"r{i}", range(i, i + 16), 100, arrival=i) for i in range(3)])
    stats = engine.stats()
    assert stats.preemptions > 0
    assert sum(stats.choice_preemptions.counts) == 3 and stats.choice_preemptions.sum == stats.preemptions


def test_blocks_by_group() -> None:
    engine = engine_of(blocks=(50,))
    engine.add(request("a", range(40), 5))
    engine.step()
    assert engine.stats().groups == [BlockUse(50, 3, 3)]
    while not engine.idle:
        engine.step()
    assert engine.stats().groups == [BlockUse(50, 0, 3)], "free, but what they hold can still be shared"


def test_a_row_that_fails_is_counted() -> None:
    def fault(member: Member) -> str | None:
        return "not finite" if member.request.id == "bad" else None

    engine = engine_of(executor=FakeExecutor(row_fault=fault))
    drive(engine, [request("bad", range(10), 3), request("good", range(30, 40), 3)])
    stats = engine.stats()
    assert stats.failed_rows == 1 and stats.finished == {"error": 1, "length": 1}


def test_a_snapshot_stays_as_it_is_and_crosses_the_wire() -> None:
    engine = engine_of()
    drive(engine, [request("a", range(10), 3)])
    before = engine.stats()
    sums = before.step_tokens.sum
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=EngineStats)
    drive(engine, [request("b", range(10), 3)])
    assert before.step_tokens.sum == sums < engine.stats().step_tokens.sum
    assert again == before
    delta = Delta("a", queued=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta) == delta
