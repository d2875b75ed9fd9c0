"""Limits, one by one."""

from __future__ import annotations

from octavo.engine import Engine
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.engine.limits import END, Adapters, ChunkCap, InFlight, SequenceBudget, Suspects, TokenBudget
from octavo.engine.memory import KVMemory
from octavo.engine.sequence import Family, Sequence
from octavo.types import KVGroup, StepPlan, Work
from tests.engine.test_requests import engine_of
from tests.engine.workload import request


def sequence(length: int = 1, adapter: int = 0) -> Sequence:
    memory = KVMemory((KVGroup((0,)),), (4,), 16)
    asked = request("a", range(length), 5, adapter=adapter)
    return Sequence(Family(asked, b""), 0, (0, 0, 0, 0), [*asked.prompt], length, length + 5, memory.tables())


def test_token_budget_shrinks_then_ends_the_step() -> None:
    limit = TokenBudget(10)
    limit.begin(0)
    assert limit.clip(sequence(), 7) == 7
    limit.take(sequence(), 7)
    assert limit.clip(sequence(), 7) == 3
    limit.take(sequence(), 3)
    assert limit.clip(sequence(), 1) == END
    limit.begin(0)
    assert limit.clip(sequence(), 99) == 10


def test_sequence_budget_ends_the_step() -> None:
    limit = SequenceBudget(2)
    limit.begin(0)
    for _ in range(2):
        assert limit.clip(sequence(), 7) == 7
        limit.take(sequence(), 7)
    assert limit.clip(sequence(), 7) == END


def test_adapters_refuse_the_sequence_only() -> None:
    limit = Adapters(2)
    limit.begin(0)
    for adapter in (4, 5, 0):
        assert limit.clip(sequence(adapter=adapter), 1) == 1
        limit.take(sequence(adapter=adapter), 1)
    assert [limit.clip(sequence(adapter=adapter), 1) for adapter in (6, 5, 0, 4)] == [0, 1, 1, 1]
    limit.begin(0)
    assert limit.clip(sequence(adapter=6), 1) == 1


def test_in_flight() -> None:
    seq, limit = sequence(), InFlight(2)
    seq.in_flight = 1
    assert limit.clip(seq, 3) == 3
    seq.in_flight = 2
    assert limit.clip(seq, 3) == 0


def steps(cap: ChunkCap, decodes: int, prompt: int, seconds: float) -> None:
    work = [Work(i, 5, 1, (1,), sample=True) for i in range(decodes)]
    if prompt:
        work.append(Work(99, 0, prompt, ()))
    cap.observe(StepPlan(tuple(work)), seconds)


def test_chunk_cap_follows_the_measured_speed() -> None:
    cap = ChunkCap(stretch=2.0, floor=16, first=128)
    assert cap.cap == 128
    steps(cap, 0, 1000, 1.0)
    assert cap.cap == 128, "no decode step has been measured"
    steps(cap, 4, 0, 0.1)
    assert cap.cap == 100, "100 tokens of 1 ms stretch a step of 0.1 s to twice that"
    steps(cap, 4, 100, 0.3)
    assert cap.cap == 50, "they took 2 ms each: what was seen last counts"
    for _ in range(5):
        steps(cap, 4, 50, 0.125)
    assert cap.cap == 200
    steps(cap, 4, 10, 9.9)
    assert cap.cap == 16, "the floor"


def test_chunk_cap_lets_short_steps_grow_to_what_nobody_notices() -> None:
    cap = ChunkCap(stretch=2.0, unnoticed=0.05)
    steps(cap, 0, 1000, 1.0)
    steps(cap, 1, 0, 0.005)
    assert cap.cap == 45, "45 ms beside a decode step of 5 ms"


def test_chunk_cap_forgives_a_single_slow_decode_step() -> None:
    cap = ChunkCap(stretch=2.0)
    steps(cap, 0, 1000, 1.0)
    for seconds in (0.1, 0.1, 7.0, 0.1):
        steps(cap, 4, 0, seconds)
    assert cap.cap == 100


def test_chunk_cap_caps_prompts_only_and_only_beside_decodes() -> None:
    cap = ChunkCap(first=30)
    steps(cap, 4, 0, 0.1)
    cap.begin(0)
    assert cap.clip(sequence(500), 500) == 500, "nothing decodes in this step"
    cap.take(sequence(), 1)
    assert cap.clip(sequence(), 1) == 1
    assert cap.clip(sequence(500), 500) == 30
    cap.take(sequence(500), 30)
    assert cap.clip(sequence(500), 500) == 0 and cap.clip(sequence(), 1) == 1


def test_chunk_cap_measures_decodes_alone_now_and_then() -> None:
    cap = ChunkCap(first=30)
    allowed = []
    for _ in range(130):
        cap.begin(0)
        cap.take(sequence(), 1)
        n = cap.clip(sequence(500), 500)
        allowed.append(n)
        steps(cap, 4, n, 0.1 + 0.001 * n)
    assert [i for i, n in enumerate(allowed) if n == 0] == [0, 65]


class Simulated:
    """A device whose steps take 20 ms, and 1 ms per prompt token more, growing with its context."""

    def __init__(self) -> None:
        self.now = 0.0
        executor = FakeExecutor(FakeModel(answer=lambda request, choice, out: len(out) % 40), step_fault=self.spend)
        self.engine: Engine = engine_of(
            executor=executor, clock=lambda: self.now, max_num_batched_tokens=8192, max_model_len=8000, blocks=(2000,)
        )

    def spend(self, members: list[Member]) -> None:
        self.now += 0.020
        for member in members:
            if member.work.n > 1:
                self.now += member.work.n * 0.001 * (1 + member.work.start / 6000)


def test_a_long_prompt_does_not_hold_up_the_streams() -> None:
    """6,000 tokens join 16 streams: no gap between their tokens is longer than three times the usual one."""
    device = Simulated()
    engine = device.engine
    for i in range(16):
        engine.add(request(f"s{i}", range(i, i + 30), 900))
    for _ in range(40):
        engine.step()
    engine.add(request("long", [i % 39 for i in range(6000)], 5))
    gaps, last, done = [], device.now, False
    while not done:
        deltas = engine.step()
        streams = {delta.request for delta in deltas if delta.request != "long"}
        assert len(streams) == 16, "every step serves every stream"
        gaps.append(device.now - last)
        last = device.now
        done = any(delta.request == "long" for delta in deltas)
    assert max(gaps) < 3 * 0.020
    assert sum(gaps) < 3 * 6000 * 0.0015, "and the prompt gets its half of the time"
    for i in range(16):
        engine.abort(f"s{i}")
    while not engine.idle:
        engine.step()


def test_suspects_are_halved_until_one_is_left() -> None:
    a, b, c, d, e = (sequence() for _ in range(5))
    suspects = Suspects()
    suspects.begin(0)
    assert suspects.clip(a, 4) == 4 and not suspects.active
    suspects.accuse([a, b, c, d])
    assert [suspects.clip(seq, 4) for seq in (a, b, c, d, e)] == [4, 4, 0, 0, 0]
    suspects.begin(1)
    assert suspects.clip(a, 4) == END, "one step at a time"
    suspects.begin(0)
    suspects.accuse([a, b])
    assert [suspects.clip(seq, 4) for seq in (a, b, c, d, e)] == [4, 0, 0, 0, 0]
    suspects.clear(a)
    assert [suspects.clip(seq, 4) for seq in (a, b, c, d, e)] == [0, 4, 0, 0, 0]
    suspects.clear(b)
    assert [suspects.clip(seq, 4) for seq in (a, b, c, d, e)] == [0, 0, 4, 4, 0]
    suspects.clear(c)
    suspects.clear(d)
    assert not suspects.active and suspects.clip(e, 4) == 4
