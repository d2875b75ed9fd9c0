"""Sampler rows: what each slot's request asks of a draw, kept as arrays, gathered into a `Sampling` each step.

Most requests are a few numbers, read with one indexing operation for the whole batch. Only slots whose request edits
logits (penalties, biases, allow lists, bad words, minimum lengths) have an `_Edits`, and only they cost time per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import I32, Sampling
from octavo.sampling_params import SamplingParams
from octavo.types import Enter, Request

NO_IDS: I32 = np.zeros(0, np.int32)
_NO_EDITS: dict[str, Any] = {
    "seen_ids": NO_IDS,
    "seen_counts": NO_IDS,
    "bias_ids": NO_IDS,
    "bias_values": np.zeros(0, np.float32),
    "allow_ids": NO_IDS,
}


class Rows(NamedTuple):
    """The R rows of the head of a step, as arrays."""

    token: I32
    """Index among the step's tokens, ascending."""
    slot: npt.NDArray[np.intp]
    """Of the type that numpy indexes with: with any other it is four times slower, and takes 4 KB each time."""
    position: I32
    """Absolute position of the token that the row draws or scores."""
    target: I32
    """-1: draw; otherwise score this id."""
    drafts: Sequence[tuple[int, ...]] = ()
    """Per row the guessed tokens between the slot's history and `position`; empty when no row has any."""


class _Edits:
    """What changes the logits of one slot's rows."""

    def __init__(self, request: Request, known: Sequence[int]):
        p = request.sampling
        self.prompt = len(request.prompt)
        self.history = list(known)
        self.min_tokens = p.min_tokens
        self.masked = request.masked_ids
        self.bad_words = request.bad_words
        self.longest = max(map(len, request.bad_words), default=0)
        self.bias = p.logit_bias or {}
        self.allow = np.asarray(p.allowed_token_ids or (), np.int32)
        self.penalties = _penalizes(p)
        self.seen: dict[int, int] = {}
        """Id -> how often it is in the output, in order of first occurrence; ids of the prompt alone have 0."""
        if self.penalties:
            self.seen = dict.fromkeys(known[: self.prompt], 0)
            for token in known[self.prompt :]:
                self.seen[token] = self.seen.get(token, 0) + 1

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.history.append(token)
            if self.penalties:
                self.seen[token] = self.seen.get(token, 0) + 1

    def counts(self, drafts: Sequence[int]) -> dict[int, int]:
        if not drafts or not self.penalties:
            return self.seen
        counts = dict(self.seen)
        for token in drafts:
            counts[token] = counts.get(token, 0) + 1
        return counts

    def biases(self, position: int, drafts: Sequence[int]) -> dict[int, float]:
        """Id -> what is added to its logit for the token drawn at `position`; -inf bans."""
        out = dict(self.bias)
        if position - self.prompt < self.min_tokens:
            out.update(dict.fromkeys(self.masked, -np.inf))
        if self.bad_words:
            tail = (*self.history[-self.longest :], *drafts)
            for word in self.bad_words:
                before = word[:-1]
                if not before or tail[-len(before) :] == before:
                    out[word[-1]] = -np.inf
        return out


def _penalizes(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


class SamplerRows:
    """The sampler state of every slot.

    `enter` resets a slot from its request and known tokens, `gather` makes the arrays for a step's rows, `keep` records
    what was drawn. A slot that enters again (preemption, a failed step) is rebuilt from its known tokens, so a step
    can always be run again.
    """

    def __init__(self, slots: int):
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.choice = np.zeros(slots, np.int32)
        self.logprobs = np.full(slots, -1, np.int32)
        self.prompt_logprobs = np.full(slots, -1, np.int32)
        self.repetition = np.ones(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.last = np.zeros(slots, np.int32)
        """Last known token of each slot: the input of a decode whose token the host has not seen yet."""
        self.report: dict[int, I32] = {}
        """Ids to report with every token drawn."""
        self.prompt_report: dict[int, list[I32]] = {}
        """Per prompt token the ids to report with its score."""
        self.edits: dict[int, _Edits] = {}

    def enter(self, e: Enter, vocab: int) -> None:
        p, i = e.request.sampling, e.slot
        self.temperature[i] = p.temperature
        self.top_k[i] = p.top_k if p.top_k < vocab else 0
        self.top_p[i] = p.top_p
        self.min_p[i] = p.min_p
        self.seed[i] = np.uint64(e.request.seed & (2**64 - 1))
        self.choice[i] = e.choice
        self.logprobs[i] = _count(p.logprobs, vocab)
        self.prompt_logprobs[i] = _count(p.prompt_logprobs, vocab)
        self.repetition[i] = p.repetition_penalty
        self.presence[i] = p.presence_penalty
        self.frequency[i] = p.frequency_penalty
        self.last[i] = e.tokens[-1] if e.tokens else 0
        self.edits.pop(i, None)
        edits = p.logit_bias or p.allowed_token_ids or e.request.bad_words or (p.min_tokens and e.request.masked_ids)
        if edits or _penalizes(p):
            self.edits[i] = _Edits(e.request, e.tokens)
        self.report.pop(i, None)
        self.prompt_report.pop(i, None)
        if p.logprob_token_ids:
            self.report[i] = np.asarray(p.logprob_token_ids, np.int32)
        if p.prompt_logprob_token_ids:
            self.prompt_report[i] = [np.asarray(ids, np.int32) for ids in p.prompt_logprob_token_ids]

    def reported(self, slot: int, position: int, target: int) -> I32 | None:
        """Ids whose logprobs a row reports in place of the most probable ones; None: the most probable ones."""
        if target < 0:
            return self.report.get(slot)
        rows = self.prompt_report.get(slot)
        return None if rows is None else rows[position] if position < len(rows) else NO_IDS

    def gather(self, rows: Rows) -> Sampling:
        slots = rows.slot
        temperature = self.temperature.take(slots)
        logprobs = self.logprobs.take(slots)
        scores = rows.target >= 0
        if scores.any():
            temperature[scores] = 0
            logprobs[scores] = self.prompt_logprobs[slots[scores]]
        return Sampling(
            temperature=temperature,
            top_k=self.top_k.take(slots),
            top_p=self.top_p.take(slots),
            min_p=self.min_p.take(slots),
            seed=self.seed.take(slots),
            choice=self.choice.take(slots),
            position=rows.position,
            target=rows.target,
            logprobs=logprobs,
            repetition=self.repetition.take(slots),
            presence=self.presence.take(slots),
            frequency=self.frequency.take(slots),
            **self._edited(rows),
        )

    def _edited(self, rows: Rows) -> dict[str, Any]:
        """The CSR arrays of a `Sampling`."""
        if not (self.edits or self.report or self.prompt_report):
            none = np.zeros(rows.slot.size + 1, np.int32)
            return {**_NO_EDITS, "seen_ptr": none, "bias_ptr": none, "allow_ptr": none}
        edits = _EditArrays(rows.slot.size)
        drafts = rows.drafts or [()] * rows.slot.size
        each = zip(rows.slot.tolist(), rows.position.tolist(), rows.target.tolist(), drafts, strict=True)
        for index, (slot, position, target, guesses) in enumerate(each):
            report = self.reported(slot, position, target)
            edits.add(index, position, guesses, self.edits.get(slot) if target < 0 else None, report)
        return edits.arrays()

    def drew(self, rows: Rows, tokens: I32, ok: npt.NDArray[np.bool_]) -> None:
        """Record the last tokens of the rows that are `ok`; of a slot with several rows, what the last of them drew."""
        if ok.all():
            self.last.put(rows.slot, tokens)
        else:
            self.last[rows.slot[ok]] = tokens[ok]

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Record what `slot` drew."""
        self.last[slot] = tokens[-1]
        edits = self.edits.get(slot)
        if edits is not None:
            edits.extend(tokens)


def _count(logprobs: int | None, vocab: int) -> int:
    if logprobs is None:
        return -1
    return vocab if logprobs < 0 else min(logprobs, vocab)


class _EditArrays:
    """The CSR arrays of a `Sampling`, filled row by row."""

    def __init__(self, rows: int):
        self.sizes = {name: np.zeros(rows + 1, np.int32) for name in ("seen", "bias", "allow", "report")}
        self.seen_ids: list[int] = []
        self.seen_counts: list[int] = []
        self.bias_ids: list[int] = []
        self.bias_values: list[float] = []
        self.allow: list[I32] = []
        self.report: list[I32] = []

    def add(self, index: int, position: int, drafts: Sequence[int], edits: _Edits | None, report: I32 | None) -> None:
        if report is not None:
            self.report.append(report)
            self.sizes["report"][index + 1] = len(report)
        if edits is None:
            return
        counts = edits.counts(drafts)
        self.seen_ids += counts.keys()
        self.seen_counts += counts.values()
        biases = edits.biases(position, drafts)
        self.bias_ids += biases.keys()
        self.bias_values += biases.values()
        self.allow.append(edits.allow)
        for name, count in (("seen", len(counts)), ("bias", len(biases)), ("allow", len(edits.allow))):
            self.sizes[name][index + 1] = count

    def arrays(self) -> dict[str, Any]:
        pointers = {f"{name}_ptr": np.cumsum(size, dtype=np.int32) for name, size in self.sizes.items()}
        if not self.report:
            pointers["report_ptr"] = NO_IDS
        return {
            **pointers,
            "seen_ids": np.array(self.seen_ids, np.int32),
            "seen_counts": np.array(self.seen_counts, np.int32),
            "bias_ids": np.array(self.bias_ids, np.int32),
            "bias_values": np.array(self.bias_values, np.float32),
            "allow_ids": np.concatenate(self.allow) if self.allow else NO_IDS,
            "report_ids": np.concatenate(self.report) if self.report else NO_IDS,
        }
