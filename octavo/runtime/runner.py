"""The runner: a plan becomes tokens, on one device."""

from __future__ import annotations

import numpy as np

from octavo.ops.contract import BatchLimits, CompiledModel, Drawn, Sampling
from octavo.runtime.batch import BatchTables, head_rows
from octavo.runtime.sampler import Row, SamplerRows
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
        rows, spans = self._rows(plan)
        batch = self.tables.arrays(plan, self.sampler.last, rows)
        sampling = self.sampler.gather(rows)
        drawn = self.model.run(batch, sampling)
        return StepResult(
            tuple(self._result(w, rows, span, drawn, sampling) for w, span in zip(plan.work, spans, strict=True))
        )

    def _copy(self, plan: StepPlan) -> None:
        copies: dict[int, list[tuple[int, int]]] = {}
        for w in plan.work:
            for group, source, target in w.copies:
                copies.setdefault(group, []).append((source, target))
        for group, pairs in copies.items():
            self.model.copy_blocks(group, np.array(pairs, np.int32))

    def _rows(self, plan: StepPlan) -> tuple[list[Row], list[tuple[int, int, int]]]:
        """The head's rows, and per Work (first row, first drawing row, end)."""
        rows: list[Row] = []
        spans: list[tuple[int, int, int]] = []
        first = 0
        for w in plan.work:
            begin = len(rows)
            if w.sample and not w.drafts and not w.prompt_logprobs:  # nearly every row of nearly every step
                rows.append(Row(first + w.n - 1, w.slot, w.start + w.n))
            elif w.sample or w.prompt_logprobs:
                rows += head_rows(w, first, self.requests[w.slot].prompt)
            draws = len(rows) - (w.drafts + 1 if w.sample else 0)
            spans.append((begin, draws, len(rows)))
            first += w.n
        return rows, spans

    def _result(
        self, w: Work, rows: list[Row], span: tuple[int, int, int], drawn: Drawn, sampling: Sampling
    ) -> Sampled:
        begin, draws, end = span
        if begin == end:
            return NOTHING
        if not drawn.ok[begin:end].all():
            return Sampled(error=NOT_FINITE)
        scored = tuple(self._logprobs(r, rows[r], drawn, sampling, rows[r].target) for r in range(begin, draws))
        if draws == end:
            return Sampled(prompt_logprobs=scored)
        tokens = [int(drawn.token[draws])]
        for r in range(draws + 1, end):
            if rows[r].drafts[-1] != tokens[-1]:
                break
            tokens.append(int(drawn.token[r]))
        self.sampler.keep(w.slot, tokens)
        logprobs = None
        if self.sampler.logprobs[w.slot] >= 0:
            logprobs = tuple(
                self._logprobs(r, rows[r], drawn, sampling, token) for r, token in enumerate(tokens, draws)
            )
        return Sampled(tuple(tokens), logprobs, scored)

    def _logprobs(self, r: int, row: Row, drawn: Drawn, sampling: Sampling, token: int) -> TokenLogprobs:
        count = int(self.sampler.logprobs[row.slot] if row.target < 0 else self.sampler.prompt_logprobs[row.slot])
        top = zip(drawn.top_ids[r, :count].tolist(), drawn.top_logprobs[r, :count].tolist(), strict=True)
        report = self.sampler.reported(row)
        if report is not None:
            begin, end = sampling.report_ptr[r], sampling.report_ptr[r + 1]
            top = zip(report.tolist(), drawn.report_logprobs[begin:end].tolist(), strict=True)
        return TokenLogprobs(token, float(drawn.logprob[r]), int(drawn.rank[r]), tuple(top))


NOTHING = Sampled()
