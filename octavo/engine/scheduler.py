"""The scheduler: which tokens of which sequences the next step computes, and what its result means for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.admission import RETRY_STEPS, Bounds, Reserve
from octavo.engine.chain import chain_root
from octavo.engine.commit import Ledger, receive
from octavo.engine.limits import END, Limit, Suspects
from octavo.engine.memory import Held, KVMemory
from octavo.engine.roster import Roster
from octavo.engine.sequence import Family, Place, Sequence, ending
from octavo.types import Delta, EngineStats, Enter, Request, Sampled, StepPlan, StepResult, Work

PATIENCE = 64
"""Steps for which younger sequences may pass a waiting one that a limit refuses; then they wait for it."""


@dataclass(slots=True)
class Flight:
    """A plan, planned or submitted, and what its commit must know."""

    number: int
    plan: StepPlan = StepPlan(())
    work: list[Work] = field(default_factory=list)
    entries: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, attempt) of each Work."""
    enter: list[Enter] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    """References that keep the sources of copies."""
    preempted: bool = False
    ended: bool = False
    """A limit has ended the step."""


class Scheduler:
    """Decides without ever looking at a tensor. Not thread-safe.

    Args:
        memory: the KV blocks.
        limits: asked in this order for every sequence.
        slots: sequences that may run at once.
        max_model_len: prompt and output tokens of one sequence at most.
        max_step_tokens: size of the largest step, to refuse prompts that may not be cut and are longer.
        caching: share prefixes between requests (choices of one request always share).
        chunking: a prompt may be computed in parts.
        by_priority: serve by `Request.priority` before arrival.
        watermark: share of the blocks kept free on admission.
        drafter: guesses the next tokens of a sequence; verified by the next step.
        clock: seconds, to tell how long a request waited.
    """

    def __init__(
        self,
        memory: KVMemory,
        limits: Iterable[Limit],
        *,
        slots: int,
        max_model_len: int,
        max_step_tokens: int,
        caching: bool = True,
        chunking: bool = True,
        by_priority: bool = False,
        watermark: float = 0.01,
        drafter: Callable[[Sequence], list[int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.memory = memory
        self.suspects = Suspects()
        self.limits: list[Limit] = [self.suspects, *limits]
        self._clips = [limit.clip for limit in self.limits]
        self._takes = [limit.take for limit in self.limits]
        self.bounds = Bounds(memory, max_model_len, max_step_tokens, chunking)
        self.caching = caching
        self.chunking = chunking
        self.by_priority = by_priority
        self.drafter = drafter
        self.reserve = Reserve(memory, watermark)
        self.stats = EngineStats()
        self.computed_tokens = 0
        self.ledger = Ledger()
        self.roster = Roster(memory, self.reserve, self.suspects, self.stats, slots)
        self.flights: deque[Flight] = deque()
        self._forking: list[Family] = []
        self._serial = 0
        self._clock = clock

    # -- coming and going ---------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        return not self.roster.families and not self.ledger.deltas

    def add(self, request: Request) -> None:
        """Take a request. Raises ValueError if it can never run, or if its id is in use."""
        if request.id in self.roster.families:
            raise ValueError(f"A request with id {request.id!r} is still running. Use another id, or wait for its end.")
        self.bounds.check(request)
        self._serial += 1
        private = None if self.caching else self._serial
        family = Family(request, chain_root(request.adapter, request.salt, private), self._clock())
        limit = min(request.max_tokens, self.bounds.max_model_len - len(request.prompt))
        priority = request.priority if self.by_priority else 0
        for choice in range(request.n):
            resume = request.resume[choice] if choice < len(request.resume) else ()
            seq = Sequence(
                family,
                choice,
                (priority, request.arrival, self._serial, choice),
                [*request.prompt],
                len(request.prompt),
                len(request.prompt) + limit,
                self.memory.tables(),
                scores_prompt=request.sampling.prompt_logprobs is not None and choice == 0 and not resume,
                place=Place.HELD_BACK,
            )
            family.live[choice] = seq
            family.held_back.append(seq)
        self.roster.families[request.id] = family
        self.stats.prompt_tokens += len(request.prompt)
        for seq in list(family.held_back):
            self._resume(seq)
        if family.held_back:
            self.roster.enqueue(family.held_back[0])

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it. No-op if it is unknown or has ended."""
        family = self.roster.families.get(request_id)
        if family is None:
            return
        for seq in list(family.live.values()):
            if choice is None or seq.choice == choice:
                self.ledger.note(seq, [], "abort")
                self.roster.end(seq, "abort")

    def isolate(self, request_id: str, tokens: int) -> None:
        """A request that may break a step: it runs apart from all others until each of its choices has made `tokens`
        new tokens. No-op if it is unknown or has ended."""
        if (family := self.roster.families.get(request_id)) is not None:
            self.suspects.isolate(list(family.live.values()), tokens)

    def in_flight(self) -> list[str]:
        """Ids of the requests that plans in flight compute."""
        return list(dict.fromkeys(seq.request.id for flight in self.flights for seq, _ in flight.entries))

    def _resume(self, seq: Sequence) -> None:
        """Take the output of an earlier life as known; it may have been the whole of it."""
        resume = seq.request.resume
        for token in resume[seq.choice] if seq.choice < len(resume) else ():
            seq.tokens.append(token)
            if end := ending(seq, token):
                self.ledger.note(seq, [], *end)
                self.roster.end(seq, end[0])
                return

    # -- planning -----------------------------------------------------------------------------------------------
    def plan(self) -> StepPlan:
        """The next step; empty if there is nothing to compute now."""
        self.memory.step += 1
        computed = self.computed_tokens
        for limit in self.limits:
            limit.begin(len(self.flights))
        for family in self._forking:
            for seq in list(family.held_back):
                self.roster.enqueue(seq)
        self._forking = []
        flight = Flight(self.memory.step)
        self._plan_running(flight)
        if self.roster.waiting and not flight.ended and not flight.preempted:
            self._plan_waiting(flight)
        while not flight.work and not self.flights and self.roster.waiting and self.roster.running:
            # Nothing that runs may go on, and nothing in flight will change that: make room for one who may.
            self.roster.preempt(max(self.roster.running, key=lambda seq: seq.order))
            self._plan_waiting(flight)
        if not flight.work:
            self.memory.step -= 1
            return flight.plan
        if not flight.preempted:
            self.reserve.relax()
        flight.plan = StepPlan(tuple(flight.work), tuple(flight.enter), tuple(self.roster.leave))
        self.roster.leave = []
        self.flights.append(flight)
        self.stats.step_tokens.add(self.computed_tokens - computed)
        return flight.plan

    def _plan_running(self, flight: Flight) -> None:
        """Those that need one token first, so that a budget never makes them wait for a prompt."""
        behind: list[tuple[Sequence, int]] = []
        served = 0
        for seq in list(self.roster.running):
            n = seq.todo
            if n - len(seq.draft) > 1:
                behind.append((seq, n))
            elif n > 0 and seq.place is Place.RUNNING:
                self._serve(flight, seq, n)
                if flight.ended:
                    break
            served += 1
        if flight.ended:
            self._rotate(served)
            return
        for seq, n in behind:
            if seq.place is Place.RUNNING:
                self._serve(flight, seq, n)
            if flight.ended:
                return

    def _rotate(self, served: int) -> None:
        """The step ended before all had a turn: next time those left out come first."""
        for seq in list(self.roster.running)[:served]:
            del self.roster.running[seq]
            self.roster.running[seq] = None

    def _serve(self, flight: Flight, seq: Sequence, n: int) -> None:
        """Plan up to `n` tokens of a running sequence; others may lose their memory for it."""
        n = self._clip(flight, seq, n)
        if n <= 0:
            return
        self.memory.slide(seq)
        while not (room := self.memory.room(seq, n)):
            if not self._make_room(flight, seq):
                return
        if room < n and seq.draft:
            seq.draft = []
            room = min(room, seq.todo)
        self._record(flight, seq, room)

    def _clip(self, flight: Flight, seq: Sequence, n: int) -> int:
        """What the limits leave of `n`; 0 if nothing. Drafts go whole or not at all."""
        whole = n
        for clip in self._clips:
            n = clip(seq, n)
            if n <= 0:
                flight.ended = flight.ended or n == END
                return 0
        if n < whole and seq.draft:
            seq.draft = []
            return min(n, seq.todo)
        return n

    def _make_room(self, flight: Flight, seq: Sequence) -> bool:
        """Preempt the last in order that this step has not planned, if it comes after `seq`. While suspects run,
        those who may not run give way whatever their order."""
        planned = {other for other, _ in flight.entries}
        others = [other for other in self.roster.running if other not in planned and other is not seq]
        if self.suspects.active:
            others = [other for other in others if not self.suspects.suspected(other)] or others
        if not others:
            return False
        victim = max(others, key=lambda other: other.order)
        bystander = self.suspects.active and not self.suspects.suspected(victim)
        if victim.order < seq.order and not bystander:
            return False
        self.roster.preempt(victim)
        flight.preempted = True
        return True

    def _plan_waiting(self, flight: Flight) -> None:
        """Admit in order until one does not fit. Who is refused by a limit is passed over, but not for ever."""
        index = 0
        while index < len(self.roster.waiting) and self.roster.free_slots and not flight.ended:
            seq = self.roster.waiting[index]
            if seq.in_flight:  # preempted with a token on its way
                index += 1
                continue
            admitted = self._admit(flight, seq)
            if admitted is None:
                return
            if not admitted:
                index += 1
                if not self.suspects.active:
                    seq.refused = seq.refused or self.memory.step
                    if self.memory.step - seq.refused > PATIENCE:
                        return

    def _admit(self, flight: Flight, seq: Sequence) -> bool | None:
        """Let a waiting sequence run. False: a limit refuses it. None: there is no room, so no other may pass it."""
        group, blocks, step = seq.retry
        if self.roster.running and self.memory.step < step and self.memory.pools[group].free < blocks:
            return None
        if not self._clip(flight, seq, 1):  # the cache may leave as little as one token to compute
            return False
        alone = not self.roster.running and not self.flights
        for copy in (True, False) if alone else (True,):
            copies, held = self.memory.attach(seq, self._readable(seq), copy)
            todo = seq.todo
            n = self._clip(flight, seq, todo)
            least = 1 if self.chunking or seq.outputs else todo  # a prompt that may not be cut goes whole
            room = self.memory.room(seq, n) if n >= least else 0
            short = self.reserve.shortage(seq, self.roster.running) if room >= least else None
            if room >= least and short is None:
                self._enter(flight, seq, held)
                self._record(flight, seq, room, tuple(copies))
                return True
            self.memory.release(seq)
            self.memory.release_held(held)
            if short is not None:
                seq.retry = (*short, self.memory.step + RETRY_STEPS)
        return None

    def _readable(self, seq: Sequence) -> int:
        """Tokens that may come from the prefix cache: not the last one, which must be computed to draw the next, nor
        prompt tokens yet to be scored; none if the request says so, until its own prompt has been computed."""
        limit = len(seq.tokens) - 1
        if seq.scores_prompt:
            limit = min(limit, len(seq.scores))
        return limit if seq.request.read_prefix_cache or seq.family.forking else 0

    def _enter(self, flight: Flight, seq: Sequence, held: list[Held]) -> None:
        self.roster.waiting.remove(seq)
        self.roster.running[seq] = None
        seq.place = Place.RUNNING
        seq.refused = 0
        seq.slot = self.roster.free_slots.pop()
        flight.enter.append(Enter(seq.slot, seq.request, seq.choice, tuple(seq.tokens)))
        flight.held += held
        if seq.family.cached is None:
            seq.family.cached = min(seq.computed, seq.prompt)
            seq.family.queued = self._clock() - seq.family.added
            self.stats.cached_prompt_tokens += seq.family.cached
            if self.caching and seq.request.read_prefix_cache:
                self.stats.prefix_queries += len(seq.tokens)
                self.stats.prefix_hits += seq.computed

    def _record(self, flight: Flight, seq: Sequence, n: int, copies: tuple[tuple[int, int, int], ...] = ()) -> None:
        """Write the Work for the next `n` tokens and move the sequence past them."""
        for take in self._takes:
            take(seq, n)
        start, family = seq.computed, seq.family
        sample = n == seq.todo and len(seq.tokens) + seq.pending < seq.goal
        drafts = len(seq.draft)
        self.memory.grow(seq, n)
        # Tables of all groups grow together.
        grown = seq.tables[0].sent < len(seq.tables[0].blocks)
        blocks = tuple([table.news() for table in seq.tables]) if grown else ()
        flight.work.append(
            Work(
                seq.slot,
                start,
                n,
                seq.known(start, n),
                blocks,
                copies,
                sample,
                seq.scores_prompt and start < seq.prompt - 1,
                drafts,
                family.request.adapter,
            )
        )
        flight.entries.append((seq, seq.attempt))
        seq.computed = start + n
        seq.in_flight += 1
        seq.pending += sample
        seq.verifying = drafts > 0
        seq.draft = []
        self.computed_tokens += n
        if start < seq.farthest:
            self.stats.recomputed_tokens += min(seq.computed, seq.farthest) - start
        prompt_done = start < seq.prompt <= seq.computed
        self.memory.publish(seq, tail=prompt_done)
        if not family.forking and seq.computed >= seq.prompt:  # one that resumes may have found all of it in the cache
            family.forking = True
            self._forking.append(family)

    # -- results ------------------------------------------------------------------------------------------------
    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Take the result of the oldest plan in flight: what it means for every choice.

        Raises:
            ValueError: `plan` is not the oldest, or `result` has not one row per work; nothing has changed then.
        """
        flight = self.flights[0]
        if flight.plan is not plan or len(result.rows) != len(plan.work):
            raise ValueError(f"a result of {len(result.rows)} rows does not belong to a plan of {len(plan.work)} works")
        self.flights.popleft()
        self.memory.release_held(flight.held)
        self.stats.steps += 1
        for (seq, attempt), row in zip(flight.entries, result.rows, strict=True):
            seq.in_flight -= 1
            if row.error is not None and attempt == seq.attempt and seq.place is not Place.GONE:
                self.stats.failed_rows += 1
                self._lose(seq, row.error)
        for (seq, attempt), work, row in zip(flight.entries, plan.work, result.rows, strict=True):
            if attempt != seq.attempt or seq.place is Place.GONE:
                continue
            try:
                self._commit_row(seq, work, row)
            except Exception as error:  # whatever it is, it is this row's
                self._lose(seq, f"{type(error).__name__}: {error}")
        self.memory.settle(flight.number)
        return self.ledger.take()

    def _commit_row(self, seq: Sequence, work: Work, row: Sampled) -> None:
        tokens, end = receive(seq, work, row, self.memory)
        if not tokens and end is None:
            return
        if self.suspects.active:
            self.suspects.acquit(seq, len(tokens))
        self.stats.generation_tokens += len(tokens)
        logprobs = None
        if row.logprobs is not None and seq.request.sampling.logprobs is not None:
            logprobs = list(row.logprobs[: len(tokens)])
        finish, reason = end or (None, None)
        self.ledger.note(seq, tokens, finish, reason, logprobs)
        if finish is not None:
            self.roster.end(seq, finish)
        elif seq.place is Place.RUNNING:
            self.memory.publish(seq)
            if self.drafter is not None and not seq.pending:
                seq.draft = self.drafter(seq)[: seq.goal - len(seq.tokens) - 1]

    def _lose(self, seq: Sequence, error: str) -> None:
        """A row has failed: its choice ends, what it computed leaves the cache, and who reads that starts again."""
        tainted = self.memory.disown(seq)
        self.ledger.note(seq, [], "error", error=error)
        self.roster.end(seq, "error", keep=False)
        for other in list(self.roster.running):
            held = ((group, block) for group, table in enumerate(other.tables) for block in table.blocks)
            if not tainted.isdisjoint(held):
                self.roster.roll_back(other)
        for other in list(self.roster.waiting):
            if other.in_flight:  # preempted: it may have read them
                self.roster.roll_back(other)

    def fail(self, error: Exception) -> list[Delta]:
        """The oldest plan in flight has raised `error`: all plans in flight count for nothing. Their sequences start
        again from what is known; those of the failed plan are suspects, and one that fails alone is lost."""
        flights = list(self.flights)
        self.flights.clear()
        self.stats.failed_steps += 1
        self.memory.forget()
        for flight in flights:
            self.memory.release_held(flight.held)
            for seq, _ in flight.entries:
                seq.in_flight = 0
                if seq.place is not Place.GONE:
                    self.roster.roll_back(seq)
        entries = [seq for seq, _ in flights[0].entries]
        alive = [seq for seq in entries if seq.place is not Place.GONE]
        if len(entries) > 1:
            self.suspects.accuse(alive)
        elif alive:
            self.ledger.note(alive[0], [], "error", error=f"{type(error).__name__}: {error}")
            self.roster.end(alive[0], "error")
        return self.ledger.take()
