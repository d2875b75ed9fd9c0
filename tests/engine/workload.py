"""Random workloads for the engine, and the run that compares every token with the sequential answer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.engine import Engine, build_engine
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.engine.limits import Adapters, InFlight
from octavo.engine.sequence import Sequence
from octavo.sampling_params import SamplingParams
from octavo.types import Delta, KVGroup, Request, TokenLogprobs

FULL = KVGroup((0,))
SIZE = 4


@dataclass
class Case:
    """Sizes and switches of one workload."""

    seed: int
    groups: tuple[KVGroup, ...] = (FULL,)
    blocks: int = 60
    budget: int = 16
    slots: int = 6
    depth: int = 1
    drafts: int = 0
    caching: bool = True
    chunking: bool = True
    by_priority: bool = False
    aborts: float = 0.0
    step_faults: float = 0.0
    row_faults: float = 0.0
    adapters: int = 0
    requests: int = 12
    longest: int = 34
    outputs: int = 20


@dataclass
class Outcome:
    """What came back, by (request id, choice)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = field(default_factory=dict)
    finish: dict[tuple[str, int], Delta] = field(default_factory=dict)
    first: dict[tuple[str, int], Delta] = field(default_factory=dict)
    steps: int = 0

    def take(self, deltas: list[Delta], resumed: dict[tuple[str, int], int] | None = None) -> None:
        for delta in deltas:
            key = delta.request, delta.choice
            have = self.tokens.setdefault(key, [])
            assert key not in self.finish, f"{key}: news after the end"
            assert delta.start == len(have) + (resumed or {}).get(key, 0), f"{key}: a token is lost or doubled"
            have += delta.tokens
            if delta.logprobs is not None:
                assert len(delta.logprobs) == len(delta.tokens)
                self.logprobs.setdefault(key, []).extend(delta.logprobs)
            self.first.setdefault(key, delta)
            if delta.finish:
                self.finish[key] = delta


def request(
    name: str,
    prompt: list[int] | range | tuple[int, ...],
    max_tokens: int,
    *,
    n: int = 1,
    **fields: object,
) -> Request:
    """A request with the defaults tests want; sampling fields are recognised by name."""
    own = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__struct_fields__}
    fields.setdefault("seed", 7)
    return Request(
        id=name,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max(1, max_tokens), **own),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        n=n,
        **fields,  # type: ignore[arg-type]
    )


def check(engine: Engine) -> None:
    """Every block reference has an owner."""
    scheduler = engine.scheduler
    live = [seq for family in scheduler.roster.families.values() for seq in family.live.values()]
    scheduler.memory.check(live, [held for flight in scheduler.flights for held in flight.held])
    used = [seq.slot for seq in scheduler.roster.running]
    assert len(set(used)) == len(used)
    assert sorted(used + scheduler.roster.free_slots) == list(range(len(used) + len(scheduler.roster.free_slots)))
    stats = engine.stats()
    assert 0 <= stats.kv_slots_filled <= stats.kv_slots_allocated
    assert stats.running >= 0 and stats.waiting >= 0


def drive(engine: Engine, requests: list[Request], steps: int = 10_000) -> Outcome:
    """Add all, then step until idle."""
    out = Outcome()
    for one in requests:
        engine.add(one)
    while not engine.idle:
        out.take(engine.step())
        check(engine)
        out.steps += 1
        assert out.steps < steps, "stuck"
    assert engine.stats().blocks_used == 0
    return out


def draw_requests(case: Case, rng: random.Random) -> list[Request]:
    """Prompts with few letters (equal blocks with unequal pasts), common heads, exact repeats, whole blocks."""
    letters = rng.choice((1, 2, 50))

    def text(n: int) -> list[int]:
        return [rng.randrange(letters) for _ in range(n)]

    heads = [text(rng.randrange(1, case.longest)) for _ in range(2)] + [[]]
    prompts = [(rng.choice(heads) + text(rng.randrange(1, case.longest)))[: case.longest] for _ in range(case.requests)]
    for i in range(0, case.requests, 3):
        prompts[i] = rng.choice(prompts)[: rng.choice((SIZE, 2 * SIZE, 99))]
    requests = []
    for i, prompt in enumerate(prompts):
        n = rng.choice((1, 1, 1, 2, 5))
        max_tokens = rng.randrange(1, case.outputs)
        scored = rng.random() < 0.15
        requests.append(
            request(
                f"r{i}",
                prompt,
                max_tokens,
                n=n,
                seed=rng.randrange(3),
                arrival=i,
                priority=rng.randrange(3),
                eos_ids=(3,) if rng.random() < 0.5 else (),
                stop_ids=(5, 6) if rng.random() < 0.3 else (),
                masked_ids=(3, 5, 6),
                min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.3 else 0,
                salt=rng.choice(("", "", "s")),
                adapter=rng.randrange(case.adapters + 1),
                logprobs=2 if rng.random() < 0.2 else None,
                prompt_logprobs=1 if scored else None,
                read_prefix_cache=not scored and rng.random() < 0.9,
            )
        )
    return requests


def make_engine(case: Case, rng: random.Random, executor: FakeExecutor) -> Engine:
    model = executor.model

    def guess(seq: Sequence) -> list[int]:
        truth = model.continuation(seq.request, seq.choice)[seq.outputs : seq.outputs + case.drafts]
        return [token if rng.random() < 0.7 else rng.randrange(50) for token in truth]

    drafter: Callable[[Sequence], list[int]] | None = guess if case.drafts else None
    engine = build_engine(
        executor,
        groups=case.groups,
        blocks=(case.blocks,) * len(case.groups),
        block_size=SIZE,
        max_num_seqs=case.slots,
        max_num_batched_tokens=case.budget,
        max_model_len=200,
        enable_prefix_caching=case.caching,
        enable_chunked_prefill=case.chunking,
        policy="priority" if case.by_priority else "fcfs",
        depth=case.depth,
        drafter=drafter,
        limits=[Adapters(2)] if case.adapters else [],
    )
    for limit in engine.scheduler.limits:
        if isinstance(limit, InFlight) and case.depth > 2:
            limit.count = 2  # with drafts too: who is not overlapped may have some
    return engine


def run(case: Case) -> Engine:
    """Play one workload and compare. Returns the engine, for its statistics."""
    rng = random.Random(case.seed)
    model = FakeModel(case.groups)
    requests = draw_requests(case, rng)
    doomed = {(one.id, rng.randrange(one.n)) for one in requests if rng.random() < case.row_faults}
    truth = {(one.id, i): model.continuation(one, i) for one in requests for i in range(one.n)}

    def step_fault(members: list[Member]) -> Exception | None:
        return RuntimeError("the device is unwell") if rng.random() < case.step_faults else None

    def row_fault(member: Member) -> str | None:
        key = member.request.id, member.choice
        late = member.work.start + member.work.n > len(member.request.prompt) + len(truth[key]) // 2
        return "not a number" if key in doomed and late else None

    executor = FakeExecutor(model, SIZE, eager=rng.random() < 0.5, step_fault=step_fault, row_fault=row_fault)
    engine = make_engine(case, rng, executor)
    out, left, aborted = Outcome(), deque(requests), set()
    while left or not engine.idle:
        for _ in range(rng.randrange(0, 4)):
            if left:
                engine.add(left.popleft())
        if engine.scheduler.roster.families and rng.random() < case.aborts:
            name = rng.choice(list(engine.scheduler.roster.families))
            choice = rng.choice((None, 0, 1))
            engine.abort(name, choice)
            aborted.add((name, choice))
        out.take(engine.step())
        if out.steps % 3 == 0:
            check(engine)
        out.steps += 1
        assert out.steps < 5000, "stuck"
    for one in requests:
        for choice in range(one.n):
            compare(case, out, one, choice, truth[one.id, choice], aborted, doomed, model)
    assert case.step_faults or not engine.stats().failed_steps, "recovered from a plan that made no sense"
    assert engine.stats().blocks_used == 0 and engine.stats().running == engine.stats().waiting == 0
    return engine


def compare(
    case: Case,
    out: Outcome,
    one: Request,
    choice: int,
    want: list[int],
    aborted: set[tuple[str, int | None]],
    doomed: set[tuple[str, int]],
    model: FakeModel,
) -> None:
    """One choice ended as it should, with the right tokens."""
    key = one.id, choice
    got, end = out.tokens.get(key, []), out.finish[key]
    if end.finish == "abort":
        assert (one.id, None) in aborted or key in aborted
        assert got == want[: len(got)]
    elif end.finish == "error":
        assert key in doomed or case.step_faults
        assert end.error and got == want[: len(got)]
    else:
        assert got == want, (key, got, want)
        last = want[-1]
        stopped = len(want) > one.sampling.min_tokens and last in (*one.eos_ids, *one.stop_ids)
        assert end.finish == ("stop" if stopped else "length")
        assert end.stop_reason == (last if stopped and last not in one.eos_ids else None)
    if one.sampling.logprobs is not None:
        assert [entry.token for entry in out.logprobs.get(key, [])] == got
    first = out.first[key]
    if one.sampling.prompt_logprobs is not None and choice == 0 and first.tokens:
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert [entry.token for entry in first.prompt_logprobs[1:] if entry] == list(one.prompt[1:])
