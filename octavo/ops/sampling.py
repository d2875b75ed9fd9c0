"""One draw per row, in numpy: `SAMPLING_ORDER` of the contract as code.

A row is drawn alone, from its own logits and parameters, so it cannot depend on its neighbours. The choice among the
survivors is the Gumbel-max trick (Gumbel 1954; Maddison, Tarlow, Minka: A* Sampling, 2014): the largest of
l / T + g, with g from a counter-based generator, is a sample of softmax(l / T).

Numbers: the adjusted logits, l / T and g are float32, as on every device; sums of probabilities are float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, I32, Drawn, Sampling, uniform_bits

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def draw(logits: F32, sampling: Sampling) -> Drawn:
    """Draw (or score, where `target` >= 0) a token for each of the R rows of `logits` [R, V].

    Rows that did not ask for logprobs report logprob 0 and rank 0; so do failed rows. `sampling` is taken as checked
    (`octavo.ops.check.check_sampling`).
    """
    rows = logits.shape[0]
    width = max(0, int(sampling.logprobs.max())) if rows else 0
    drawn = Drawn(
        token=np.full(rows, -1, np.int32),
        logprob=np.zeros(rows, np.float32),
        rank=np.zeros(rows, np.int32),
        top_ids=np.full((rows, width), -1, np.int32),
        top_logprobs=np.zeros((rows, width), np.float32),
        ok=np.zeros(rows, np.uint8),
        report_logprobs=np.zeros(sampling.report_ids.size, np.float32),
    )
    for r in range(rows):
        token = _token(logits[r], sampling, r)
        if token < 0:
            continue
        drawn.token[r] = token
        drawn.ok[r] = 1
        if sampling.logprobs[r] >= 0 or sampling.report_ids.size:
            _report(logits[r], token, sampling, drawn, r)
    return drawn


def _token(raw: F32, sampling: Sampling, r: int) -> int:
    """The id drawn for row r (its target, when it has one); -1 when the row cannot be drawn."""
    if not np.isfinite(raw.max()):  # NaN or +inf somewhere, or -inf everywhere
        return -1
    if sampling.target[r] >= 0:
        return int(sampling.target[r])
    adjusted = _adjust(raw, sampling, r)
    best = int(np.argmax(adjusted))
    if not np.isfinite(adjusted[best]):  # everything banned, or a penalty overflowed
        return -1
    temperature = sampling.temperature[r]
    if temperature == 0:
        return best
    with np.errstate(over="ignore"):
        scores = adjusted / temperature
    if not np.isfinite(scores[best]):  # so small a temperature that it is greedy
        return best
    ids = _survivors(scores, float(sampling.min_p[r]), int(sampling.top_k[r]), float(sampling.top_p[r]))
    noise = gumbel(int(sampling.seed[r]), int(sampling.choice[r]), int(sampling.position[r]), ids)
    return int(ids[np.argmax(scores[ids] + noise)])


def _adjust(raw: F32, sampling: Sampling, r: int) -> F32:
    """[V]: the logits after penalties, bias and allow list."""
    out: F32 = raw.copy()
    ids, counts = _row(sampling.seen_ptr, r, sampling.seen_ids, sampling.seen_counts)
    if ids.size:
        with np.errstate(over="ignore"):
            seen = out[ids]
            seen = np.where(seen > 0, seen / sampling.repetition[r], seen * sampling.repetition[r])
            penalized = seen - sampling.frequency[r] * counts.astype(np.float32) - sampling.presence[r]
        out[ids] = np.where(counts > 0, penalized, seen)
    ids, values = _row(sampling.bias_ptr, r, sampling.bias_ids, sampling.bias_values)
    np.add.at(out, ids, values)
    (allowed,) = _row(sampling.allow_ptr, r, sampling.allow_ids)
    if allowed.size:
        kept = out[allowed]
        out[:] = -np.inf
        out[allowed] = kept
    return out


def _row(pointers: I32, r: int, *values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """Row r of each array of a CSR set."""
    return tuple(v[pointers[r] : pointers[r + 1]] for v in values)


def _survivors(scores: F32, min_p: float, top_k: int, top_p: float) -> I64:
    """Ids, ascending, that min_p, then top_k, then top_p leave of `scores` [V] (logits / temperature)."""
    mass = np.exp(scores.astype(np.float64) - float(scores.max()))  # relative to the most probable
    ids = np.flatnonzero((mass >= min_p) & (scores > -np.inf))
    cut_k = 0 < top_k < ids.size
    if not cut_k and top_p >= 1:
        return ids
    order = ids[np.argsort(-scores[ids], kind="stable")]  # value descending, id ascending
    if cut_k:
        order = order[:top_k]
    if top_p < 1:
        reached = np.cumsum(mass[order])
        order = order[: int(np.searchsorted(reached, top_p * reached[-1])) + 1]
    return np.sort(order)


def gumbel(seed: int, choice: int, position: int, ids: I64) -> F32:
    """One standard Gumbel variate per id. In float64 up to the last step: (bits + 0.5) / 2^32 is never 0 or 1 there."""
    u = (uniform_bits(seed, choice, position, ids).astype(np.float64) + 0.5) / 2.0**32
    noise: F32 = (-np.log(-np.log(u))).astype(np.float32)
    return noise


def _report(raw: F32, token: int, sampling: Sampling, drawn: Drawn, r: int) -> None:
    """Write what row r asked to know, by the raw logits: logprob and rank of `token`, the most probable ids, and the
    logprobs of `report_ids`."""
    values = raw.astype(np.float64)
    top = float(values.max())
    logprobs = values - (top + float(np.log(np.exp(values - top).sum())))
    wanted = int(sampling.logprobs[r])
    if wanted >= 0:
        drawn.logprob[r] = logprobs[token]
        drawn.rank[r] = 1 + np.count_nonzero(raw > raw[token]) + np.count_nonzero(raw[:token] == raw[token])
        ids = np.argsort(-raw, kind="stable")[:wanted]
        drawn.top_ids[r, : ids.size] = ids
        drawn.top_logprobs[r, : ids.size] = logprobs[ids]
    if sampling.report_ids.size:
        asked = slice(sampling.report_ptr[r], sampling.report_ptr[r + 1])
        drawn.report_logprobs[asked] = logprobs[sampling.report_ids[asked]]
