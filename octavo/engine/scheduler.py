"""The scheduler: which tokens of which sequences the next step computes, and what its result means for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.admission import RETRY_STEPS, Reserve, WaitingQueue
from octavo.engine.commit import Ledger, receive
from octavo.engine.limits import END, Limit, Suspects
from octavo.engine.memory import Held, KVMemory
from octavo.engine.sequence import Family, Place, Sequence, chain_root, ending
from octavo.types import Delta, EngineStats, Enter, FinishReason, Request, Sampled, StepPlan, StepResult, Work

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
        epoch: life of the engine, written into every delta.
        drafter: guesses the next tokens of a sequence; verified by the next step.
    """

    def __init__(
        self, memory: KVMemory, limits: Iterable[Limit], *, slots: int, max_model_len: int, max_step_tokens: int,
        caching: bool = True, chunking: bool = True, by_priority: bool = False, watermark: float = 0.01,
        epoch: int = 0, drafter: Callable[[Sequence], list[int]] | None = None,
    ) -> None:
        self.memory = memory
        self.suspects = Suspects()
        self.limits: list[Limit] = [self.suspects, *limits]
        self.max_model_len = max_model_len
        self.max_step_tokens = max_step_tokens
        self.caching = caching
        self.chunking = chunking
        self.by_priority = by_priority
        self.drafter = drafter
        self.reserve = Reserve(memory, watermark)
        self.stats = EngineStats()
        self.computed_tokens = 0
        self.ledger = Ledger(epoch)
        self.families: dict[str, Family] = {}
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}
        self.flights: deque[Flight] = deque()
        self._forking: list[Family] = []
        self._free_slots = list(range(slots - 1, -1, -1))
        self._leave: list[int] = []
        self._serial = 0
        self._number = 0

    # -- coming and going ---------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        return not self.families and not self.ledger.deltas

    def add(self, request: Request) -> None:
        """Take a request. Raises ValueError if it can never run, or if its id is in use."""
        self._check(request)
        self._serial += 1
        private = None if self.caching else self._serial
        family = Family(request, chain_root(request.adapter, request.salt, private))
        limit = min(request.max_tokens, self.max_model_len - len(request.prompt))
        priority = request.priority if self.by_priority else 0
        for choice in range(request.n):
            resume = request.resume[choice] if choice < len(request.resume) else ()
            seq = Sequence(
                family, choice, (priority, request.arrival, self._serial, choice), [*request.prompt],
                len(request.prompt), len(request.prompt) + limit, self.memory.tables(),
                scores_prompt=request.sampling.prompt_logprobs is not None and choice == 0 and not resume,
                place=Place.HELD_BACK,
            )
            family.live[choice] = seq
            family.held_back.append(seq)
        self.families[request.id] = family
        self.stats.prompt_tokens += len(request.prompt)
        for seq in list(family.held_back):
            self._resume(seq)
        if family.held_back:
            self._enqueue(family.held_back[0])

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it. No-op if it is unknown or has ended."""
        family = self.families.get(request_id)
        if family is None:
            return
        for seq in list(family.live.values()):
            if choice is None or seq.choice == choice:
                self.ledger.note(seq, [], "abort")
                self.end(seq, "abort")

    def _check(self, request: Request) -> None:
        length = len(request.prompt)
        if request.id in self.families:
            raise ValueError(f"A request with id {request.id!r} is still running. Use another id, or wait for its end.")
        if not length:
            raise ValueError("The prompt is empty. Give at least one token.")
        if request.n < 1:
            raise ValueError(f"n must be at least 1, got {request.n}.")
        if length + (request.max_tokens > 0) > self.max_model_len:
            raise ValueError(
                f"The prompt has {length} tokens, which leaves no room to answer: the model takes "
                f"{self.max_model_len} tokens, prompt and output together. Shorten the prompt."
            )
        if not self.chunking and length > self.max_step_tokens:
            raise ValueError(
                f"The prompt has {length} tokens, but a step takes at most {self.max_step_tokens} "
                "(max_num_batched_tokens) and chunked prefill is off. Shorten the prompt, raise "
                "max_num_batched_tokens or turn chunked prefill on."
            )
        # The last token drawn is never computed.
        most = min(length + request.max_tokens, self.max_model_len) - (request.max_tokens > 0)
        refusal = self.memory.refusal(most, 1 if self.chunking else length)
        if refusal:
            raise ValueError(refusal)

    def _resume(self, seq: Sequence) -> None:
        """Take the output of an earlier life as known; it may have been the whole of it."""
        resume = seq.request.resume
        for token in resume[seq.choice] if seq.choice < len(resume) else ():
            seq.tokens.append(token)
            if end := ending(seq, token):
                self.ledger.note(seq, [], *end)
                self.end(seq, end[0])
                return

    def _enqueue(self, seq: Sequence) -> None:
        seq.family.held_back.remove(seq)
        seq.place = Place.WAITING
        self.waiting.add(seq)

    def end(self, seq: Sequence, reason: FinishReason, keep: bool = True) -> None:
        """The sequence is over: its memory, slot and place go to others; its blocks stay cached if `keep`."""
        family = seq.family
        if seq.place is Place.RUNNING:
            if keep:
                self.memory.publish(seq, self._number, tail=True)
            self._stop(seq)
        elif seq.place is Place.WAITING:
            self.waiting.remove(seq)
        else:
            family.held_back.remove(seq)
        led = seq.place is not Place.HELD_BACK and not family.forking
        seq.place = Place.GONE
        self.suspects.clear(seq)
        if reason in ("stop", "length", "repetition") and seq.goal > seq.prompt:
            self.reserve.learn(seq.outputs / (seq.goal - seq.prompt))
        del family.live[seq.choice]
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        if not family.live:
            del self.families[seq.request.id]
        elif led and family.held_back:
            self._enqueue(family.held_back[0])

    def _stop(self, seq: Sequence) -> None:
        """Out of `running`, memory and slot; what it has planned is forgotten."""
        del self.running[seq]
        seq.farthest = max(seq.farthest, min(seq.computed, len(seq.tokens)))
        self.memory.release(seq)
        self._leave.append(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = -1
        seq.draft = []

    def preempt(self, seq: Sequence) -> None:
        """Back to the waiting ones, to be computed again later. A token in flight is still taken."""
        self.memory.publish(seq, self._number, tail=True)
        self._stop(seq)
        seq.place = Place.WAITING
        self.waiting.add(seq)
        self.stats.preemptions += 1
        self.reserve.tighten()

    def roll_back(self, seq: Sequence) -> None:
        """Forget all planned work: the sequence starts again from its known tokens."""
        seq.attempt += 1
        seq.pending = 0
        seq.verifying = False
        if seq.place is Place.RUNNING:
            self._stop(seq)
            seq.place = Place.WAITING
            self.waiting.add(seq)

    # -- planning -----------------------------------------------------------------------------------------------
    def plan(self) -> StepPlan:
        """The next step; empty if there is nothing to compute now."""
        self._number += 1
        for limit in self.limits:
            limit.begin(len(self.flights))
        for family in self._forking:
            for seq in list(family.held_back):
                self._enqueue(seq)
        self._forking = []
        flight = Flight(self._number)
        self._plan_running(flight)
        if self.waiting and not flight.ended and not flight.preempted:
            self._plan_waiting(flight)
        while not flight.work and not self.flights and self.waiting and self.running:
            # Nothing that runs may go on, and nothing in flight will change that: make room for one who may.
            self.preempt(max(self.running, key=lambda seq: seq.order))
            self._plan_waiting(flight)
        if not flight.work:
            self._number -= 1
            return flight.plan
        if not flight.preempted:
            self.reserve.relax()
        flight.plan = StepPlan(tuple(flight.work), tuple(flight.enter), tuple(self._leave))
        self._leave = []
        self.flights.append(flight)
        return flight.plan

    def _plan_running(self, flight: Flight) -> None:
        """Those that need one token first, so that a budget never makes them wait for a prompt."""
        behind: list[tuple[Sequence, int]] = []
        served = 0
        for seq in list(self.running):
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
        for seq in list(self.running)[:served]:
            del self.running[seq]
            self.running[seq] = None

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
        for limit in self.limits:
            n = limit.clip(seq, n)
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
        others = [other for other in self.running if other not in planned and other is not seq]
        if self.suspects.active:
            others = [other for other in others if not self.suspects.suspected(other)] or others
        if not others:
            return False
        victim = max(others, key=lambda other: other.order)
        bystander = self.suspects.active and not self.suspects.suspected(victim)
        if victim.order < seq.order and not bystander:
            return False
        self.preempt(victim)
        flight.preempted = True
        return True

    def _plan_waiting(self, flight: Flight) -> None:
        """Admit in order until one does not fit. Who is refused by a limit is passed over, but not for ever."""
        index = 0
        while index < len(self.waiting) and self._free_slots and not flight.ended:
            seq = self.waiting[index]
            if seq.in_flight:  # preempted with a token on its way
                index += 1
                continue
            admitted = self._admit(flight, seq)
            if admitted is None:
                return
            if not admitted:
                index += 1
                if not self.suspects.active:
                    seq.refused = seq.refused or self._number
                    if self._number - seq.refused > PATIENCE:
                        return

    def _admit(self, flight: Flight, seq: Sequence) -> bool | None:
        """Let a waiting sequence run. False: a limit refuses it. None: there is no room, so no other may pass it."""
        group, blocks, step = seq.retry
        if self.running and self._number < step and self.memory.pools[group].free < blocks:
            return None
        if not self._clip(flight, seq, 1):  # the cache may leave as little as one token to compute
            return False
        alone = not self.running and not self.flights
        for copy in (True, False) if alone else (True,):
            copies, held = self.memory.attach(seq, self._readable(seq), self._number, copy)
            todo = seq.todo
            n = self._clip(flight, seq, todo)
            least = 1 if self.chunking or seq.outputs else todo  # a prompt that may not be cut goes whole
            room = self.memory.room(seq, n) if n >= least else 0
            short = self.reserve.shortage(seq, self.running) if room >= least else None
            if room >= least and short is None:
                self._enter(flight, seq, held)
                self._record(flight, seq, room, tuple(copies))
                return True
            self.memory.release(seq)
            self.memory.release_held(held)
            if short is not None:
                seq.retry = (*short, self._number + RETRY_STEPS)
        return None

    def _readable(self, seq: Sequence) -> int:
        """Tokens that may come from the prefix cache: not the last one, which must be computed to draw the next, nor
        prompt tokens yet to be scored; none if the request says so, until its own prompt has been computed."""
        limit = len(seq.tokens) - 1
        if seq.scores_prompt:
            limit = min(limit, len(seq.scores))
        return limit if seq.request.read_prefix_cache or seq.family.forking else 0

    def _enter(self, flight: Flight, seq: Sequence, held: list[Held]) -> None:
        self.waiting.remove(seq)
        self.running[seq] = None
        seq.place = Place.RUNNING
        seq.refused = 0
        seq.slot = self._free_slots.pop()
        flight.enter.append(Enter(seq.slot, seq.request, seq.choice, tuple(seq.tokens)))
        flight.held += held
        if seq.family.cached is None:
            seq.family.cached = min(seq.computed, seq.prompt)
            self.stats.cached_prompt_tokens += seq.family.cached
            if self.caching and seq.request.read_prefix_cache:
                self.stats.prefix_queries += len(seq.tokens)
                self.stats.prefix_hits += seq.computed

    def _record(self, flight: Flight, seq: Sequence, n: int, copies: tuple[tuple[int, int, int], ...] = ()) -> None:
        """Write the Work for the next `n` tokens and move the sequence past them."""
        for limit in self.limits:
            limit.take(seq, n)
        start, family = seq.computed, seq.family
        sample = n == seq.todo and len(seq.tokens) + seq.pending < seq.goal
        drafts = len(seq.draft)
        self.memory.grow(seq, n)
        # Tables of all groups grow together.
        grown = seq.tables[0].sent < len(seq.tables[0].blocks)
        blocks = tuple([table.news() for table in seq.tables]) if grown else ()
        flight.work.append(Work(
            seq.slot, start, n, seq.known(start, n), blocks, copies, sample,
            seq.scores_prompt and start < seq.prompt - 1, drafts, family.request.adapter,
        ))
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
        self.memory.publish(seq, self._number, tail=prompt_done)
        if prompt_done and not family.forking:
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
            self.suspects.clear(seq)
        self.stats.generation_tokens += len(tokens)
        logprobs = None
        if row.logprobs is not None and seq.request.sampling.logprobs is not None:
            logprobs = list(row.logprobs[: len(tokens)])
        finish, reason = end or (None, None)
        self.ledger.note(seq, tokens, finish, reason, logprobs)
        if finish is not None:
            self.end(seq, finish)
        elif seq.place is Place.RUNNING:
            self.memory.publish(seq, self._number)
            if self.drafter is not None and not seq.pending:
                seq.draft = self.drafter(seq)[: seq.goal - len(seq.tokens) - 1]

    def _lose(self, seq: Sequence, error: str) -> None:
        """A row has failed: its choice ends, what it computed leaves the cache, and who reads that starts again."""
        tainted = self.memory.disown(seq)
        self.ledger.note(seq, [], "error", error=error)
        self.end(seq, "error", keep=False)
        for other in list(self.running):
            held = ((group, block) for group, table in enumerate(other.tables) for block in table.blocks)
            if not tainted.isdisjoint(held):
                self.roll_back(other)
        for other in list(self.waiting):
            if other.in_flight:  # preempted: it may have read them
                self.roll_back(other)

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
                    self.roll_back(seq)
        entries = [seq for seq, _ in flights[0].entries]
        alive = [seq for seq in entries if seq.place is not Place.GONE]
        if len(entries) > 1:
            self.suspects.accuse(alive)
        elif alive:
            self.ledger.note(alive[0], [], "error", error=f"{type(error).__name__}: {error}")
            self.end(alive[0], "error")
        return self.ledger.take()
