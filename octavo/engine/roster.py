"""`Roster`: which sequences there are, and where each of them is."""

from __future__ import annotations

from octavo.engine.admission import Reserve, WaitingQueue
from octavo.engine.limits import Suspects
from octavo.engine.memory import KVMemory
from octavo.engine.sequence import Family, Place, Sequence
from octavo.types import EngineStats, FinishReason


class Roster:
    """Moves sequences between their places, and keeps memory, slots and books in step with that."""

    def __init__(self, memory: KVMemory, reserve: Reserve, suspects: Suspects, stats: EngineStats, slots: int) -> None:
        self.memory = memory
        self.reserve = reserve
        self.suspects = suspects
        self.stats = stats
        self.families: dict[str, Family] = {}
        """Requests not ended, by id."""
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}
        """In the order in which they are served."""
        self.free_slots = list(range(slots - 1, -1, -1))
        self.leave: list[int] = []
        """Slots given up since the last plan."""

    def enqueue(self, seq: Sequence) -> None:
        seq.family.held_back.remove(seq)
        seq.place = Place.WAITING
        self.waiting.add(seq)

    def end(self, seq: Sequence, reason: FinishReason, keep: bool = True) -> None:
        """The sequence is over: its memory, slot and place go to others; its blocks stay cached if `keep`."""
        family = seq.family
        if seq.place is Place.RUNNING:
            if keep:
                self.memory.publish(seq, tail=True)
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
        self.stats.choice_preemptions.add(seq.preemptions)
        if not family.live:
            del self.families[seq.request.id]
        elif led and family.held_back:
            self.enqueue(family.held_back[0])

    def _stop(self, seq: Sequence) -> None:
        """Out of `running`, memory and slot; what it has planned is forgotten."""
        del self.running[seq]
        seq.farthest = max(seq.farthest, min(seq.computed, len(seq.tokens)))
        self.memory.release(seq)
        self.leave.append(seq.slot)
        self.free_slots.append(seq.slot)
        seq.slot = -1
        seq.draft = []

    def preempt(self, seq: Sequence) -> None:
        """Back to the waiting ones, to be computed again later. A token in flight is still taken."""
        self.memory.publish(seq, tail=True)
        self._stop(seq)
        seq.place = Place.WAITING
        self.waiting.add(seq)
        seq.preemptions += 1
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
