"""What one row of a step's result means: tokens taken, the end found, the deltas that tell the client."""

from __future__ import annotations

from octavo.engine.memory import KVMemory
from octavo.engine.sequence import Place, Sequence, ending
from octavo.types import Delta, FinishReason, Sampled, TokenLogprobs, Work


class Ledger:
    """Deltas not yet handed out."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def note(
        self,
        seq: Sequence,
        tokens: list[int],
        finish: FinishReason | None = None,
        stop_reason: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> None:
        """News of `seq`, whose last known tokens are `tokens`. Its first delta carries what belongs to the prompt."""
        delta = Delta(
            request=seq.request.id,
            choice=seq.choice,
            start=seq.outputs - len(tokens),
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            stop_reason=stop_reason,
            error=error,
        )
        if not seq.answered:
            seq.answered = True
            delta.cached = seq.family.cached or 0
            delta.queued = seq.family.queued
            if seq.scores_prompt and len(seq.scores) == seq.prompt - 1:
                first = max(1, seq.request.sampling.prompt_logprob_start or 0)
                delta.prompt_logprobs = [None] * min(first, seq.prompt)
                delta.prompt_logprobs.extend(seq.scores[first - 1 :])
        self.deltas.append(delta)

    def take(self) -> list[Delta]:
        """All deltas so far, in order; they are forgotten here."""
        deltas, self.deltas = self.deltas, []
        return deltas


def receive(
    seq: Sequence,
    work: Work,
    row: Sampled,
    memory: KVMemory,
) -> tuple[list[int], tuple[FinishReason, int | None] | None]:
    """Take the result of one Work: returns the new tokens and the end they brought, if any.

    Raises:
        RuntimeError: the row does not fit the work; only this sequence is to blame.
    """
    if work.prompt_logprobs:
        _collect_scores(seq, work, row.prompt_logprobs)
    if not work.sample:
        done = seq.goal == seq.prompt and work.start + work.n >= seq.prompt
        return [], ("length", None) if done else None
    new = row.tokens
    if not 1 <= len(new) <= work.drafts + 1:
        raise RuntimeError(f"the step returned {len(new)} tokens for a work with {work.drafts} drafts")
    if row.logprobs is not None and len(row.logprobs) != len(new):
        raise RuntimeError(f"the step returned {len(row.logprobs)} logprobs for {len(new)} tokens")
    seq.pending -= 1
    seq.verifying = False
    rejected = work.drafts + 1 - len(new)
    if rejected and seq.place is Place.RUNNING:
        memory.retract(seq, rejected)
    taken: list[int] = []
    for token in new:
        seq.tokens.append(token)
        taken.append(token)
        if end := ending(seq, token):
            return taken, end
    return taken, None


def _collect_scores(seq: Sequence, work: Work, scores: tuple[TokenLogprobs, ...]) -> None:
    """Append those that are new: after a preemption some prompt positions are scored again."""
    wanted = min(work.start + work.n, seq.prompt - 1) - work.start
    if len(scores) != wanted:
        raise RuntimeError(f"the step returned {len(scores)} prompt logprobs instead of {wanted}")
    have = len(seq.scores) - work.start
    if have < 0:
        raise RuntimeError(f"prompt logprobs of positions before {work.start} are missing")
    seq.scores.extend(scores[have:])
