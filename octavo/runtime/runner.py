"""The runner: a plan becomes tokens, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ops.contract import BatchLimits, CompiledModel, Drawn, Sampling
from octavo.runtime.batch import BatchTables, Spans, head_rows, scored
from octavo.runtime.sampler import Rows, SamplerRows
from octavo.types import Request, Sampled, StepPlan, StepResult, TokenLogprobs, Work

NOT_FINITE = (
    "the model's output for this request is not finite (NaN or infinity): the weights or the activations overflow; "
    "other requests are not affected"
)


class Runner:
    """Holds what belongs to a slot (block tables, sampler row, last token) and runs plans in order.

    `vocab` is the number of ids the head can draw. Exceptions leave the runner usable: whatever a step had changed is
    rebuilt when its sequences enter again.
    """

    def __init__(self, model: CompiledModel, limits: BatchLimits, groups: int, block_size: int, vocab: int):
        self.model = model
        self.vocab = vocab
        self.tables = BatchTables(limits, groups, block_size)
        self.sampler = SamplerRows(limits.sequences)
        self.requests: dict[int, Request] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.leave:
            self.requests.pop(slot, None)
        for e in plan.enter:
            self.requests[e.slot] = e.request
            self.sampler.enter(e, self.vocab)
        self.tables.update(plan.work)
        self._copy(plan)
        spans = Spans.of(plan.work)
        rows = head_rows(plan.work, spans, self.requests)
        batch = self.tables.arrays(plan.work, spans, self.sampler.last, rows.token)
        sampling = self.sampler.gather(rows)
        return StepResult(tuple(self._results(plan.work, rows, sampling, self.model.run(batch, sampling))))

    def _copy(self, plan: StepPlan) -> None:
        copies: dict[int, list[tuple[int, int]]] = {}
        for w in plan.work:
            for group, source, target in w.copies:
                copies.setdefault(group, []).append((source, target))
        for group, pairs in copies.items():
            self.model.copy_blocks(group, np.array(pairs, np.int32))

    def _results(self, work: Sequence[Work], rows: Rows, sampling: Sampling, drawn: Drawn) -> list[Sampled]:
        """What each Work gave back."""
        sampler, edits = self.sampler, self.sampler.edits
        good = drawn.ok != 0
        sampler.drew(rows, drawn.token, good)
        told = sampling.logprobs.tolist()
        tokens = drawn.token.tolist()
        ok = good.tolist()
        results: list[Sampled] = []
        row = 0
        for w in work:
            if w.drafts or w.prompt_logprobs or (w.sample and told[row] >= 0):
                end = row + (scored(w, self.requests[w.slot].prompt) - w.start if w.prompt_logprobs else 0)
                draws, end = end, end + (w.drafts + 1 if w.sample else 0)
                results.append(self._several(w, range(row, draws), range(draws, end), rows, sampling, drawn))
                row = end
            elif w.sample:  # nearly every row of nearly every step
                if not ok[row]:
                    results.append(Sampled(error=NOT_FINITE))
                else:
                    results.append(Sampled((tokens[row],)))
                    if w.slot in edits:
                        sampler.keep(w.slot, (tokens[row],))
                row += 1
            else:
                results.append(NOTHING)
        return results

    def _several(self, w: Work, scores: range, draws: range, rows: Rows, sampling: Sampling, drawn: Drawn) -> Sampled:
        """The result of a Work that has several rows, or whose rows report logprobs."""
        if not drawn.ok[scores.start : draws.stop].all():
            return Sampled(error=NOT_FINITE)
        prompt = tuple(self._logprobs(r, rows, drawn, sampling, int(rows.target[r])) for r in scores)
        if not draws:
            return Sampled(prompt_logprobs=prompt)
        tokens = [int(drawn.token[draws[0]])]
        for r in draws[1:]:
            if rows.drafts[r][-1] != tokens[-1]:
                break
            tokens.append(int(drawn.token[r]))
        self.sampler.keep(w.slot, tokens)
        logprobs = None
        if self.sampler.logprobs[w.slot] >= 0:
            logprobs = tuple(
                self._logprobs(r, rows, drawn, sampling, token) for r, token in enumerate(tokens, draws.start)
            )
        return Sampled(tuple(tokens), logprobs, prompt)

    def _logprobs(self, r: int, rows: Rows, drawn: Drawn, sampling: Sampling, token: int) -> TokenLogprobs:
        slot, position, target = int(rows.slot[r]), int(rows.position[r]), int(rows.target[r])
        count = int(self.sampler.logprobs[slot] if target < 0 else self.sampler.prompt_logprobs[slot])
        top = zip(drawn.top_ids[r, :count].tolist(), drawn.top_logprobs[r, :count].tolist(), strict=True)
        report = self.sampler.reported(slot, position, target)
        if report is not None:
            begin, end = sampling.report_ptr[r], sampling.report_ptr[r + 1]
            top = zip(report.tolist(), drawn.report_logprobs[begin:end].tolist(), strict=True)
        return TokenLogprobs(token, float(drawn.logprob[r]), int(drawn.rank[r]), tuple(top))


NOTHING = Sampled()
