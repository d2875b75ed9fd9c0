"""What the turns of a comparison say: figures per server and load, who is faster, whether the answers agree, and what
speaks against believing it. Everything is made from the results as results.json holds them."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from octavo.bench.figures import METRICS, Distribution

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
Results = Mapping[str, Any]

_SAME = 0.95
"""Share of identical answers from which two servers answer alike."""
_BEGINNING = 16
"""Characters that make up the beginning of an answer."""
_BUSY = 0.25
"""Cores that others may keep busy before it is worth a warning."""
_SLOWER = 1.1
"""How much longer than at its fastest a probe may take."""
_SPREAD = 0.1
"""Difference between rounds, as a share of their median, that is worth a warning."""
_LENGTHS = 0.05
"""Difference between numbers of tokens that is worth a warning."""


# -- figures


def values_of(turn: Results, metric: str) -> list[float]:
    """All values of one of `METRICS` in a turn, milliseconds."""
    done = [request for request in turn["requests"] if request["error"] is None]
    if metric == "itl":
        return [gap for request in done for gap in request["gaps_ms"]]
    return [request[f"{metric}_ms"] for request in done if request[f"{metric}_ms"] is not None]


def complete(results: Results, server: str, concurrency: int) -> list[Results]:
    """The turns that count."""
    return [
        turn
        for turn in results["turns"]
        if turn["complete"] and turn["server"] == server and turn["concurrency"] == concurrency
    ]


def summary(results: Results) -> list[dict[str, Any]]:
    """A row per load and server: the median of the rounds with what they ranged over, and latencies of all rounds."""
    rows = []
    for level in results["setup"]["levels"]:
        for server in results["servers"]:
            turns = complete(results, server["name"], level["concurrency"])
            rows.append(_row(server["name"], level["concurrency"], turns) if turns else _empty(server["name"], level))
    return rows


def _empty(server: str, level: Mapping[str, Any]) -> dict[str, Any]:
    return {"server": server, "concurrency": level["concurrency"], "rounds": 0}


def _row(server: str, concurrency: int, turns: Sequence[Results]) -> dict[str, Any]:
    figures = [turn["figures"] for turn in turns]
    latencies = {}
    for metric in METRICS:
        values = [value for turn in turns for value in values_of(turn, metric)]
        if values:
            found = Distribution.of(values, PERCENTILES)
            latencies[metric] = {
                "mean": found.mean,
                **{f"p{percent:g}": value for percent, value in found.percentiles.items()},
            }
    requests = [request for turn in turns for request in turn["requests"]]
    done = [request for request in requests if request["error"] is None]
    return {
        "server": server,
        "concurrency": concurrency,
        "rounds": len(turns),
        "output_tok_s": _range([f["output_throughput"] for f in figures]),
        "total_tok_s": _range([f["total_token_throughput"] for f in figures]),
        "requests_s": _range([f["request_throughput"] for f in figures]),
        "latency_ms": latencies,
        "requests": len(requests),
        "errors": len(requests) - len(done),
        "prompt_tokens": sum(request["prompt_tokens"] for request in done),
        "output_tokens": sum(request["output_tokens"] for request in done),
        "events": sum(request["events"] for request in done),
        "memory_peak": _largest(turn["memory"]["peak_resident"] for turn in turns),
        "memory_proportional": _largest(turn["memory"]["proportional"] for turn in turns),
        "gpu_peak": _largest(turn["memory"]["peak_gpu"] or turn["memory"]["peak_gpu_of_all"] for turn in turns),
        "cores": _mean(turn["cores"]["server"] for turn in turns),
        "client_cores": _mean(turn["cores"]["client"] for turn in turns),
    }


def _range(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


# -- who is faster


def spread(row: Results) -> float:
    """How far the rounds are apart, as a share of their median."""
    found = row["output_tok_s"]
    return float((found["max"] - found["min"]) / found["median"]) if found["median"] else 0.0


def findings(rows: Sequence[Results]) -> list[str]:
    """A sentence per load: which server writes most tokens a second, how many times the others', and whether the rounds
    bear that out."""
    sentences = []
    for concurrency, group in _by_concurrency(rows):
        ranked = sorted((row for row in group if row["rounds"]), key=lambda row: -row["output_tok_s"]["median"])
        if len(ranked) < 2 or not ranked[-1]["output_tok_s"]["median"]:
            continue
        best, *others = ranked
        parts = [_than(best, other) for other in others]
        speed = f"{best['output_tok_s']['median']:,.1f}"
        sentences.append(f"{_at(concurrency)} {best['server']} writes {speed} tokens/s, {', '.join(parts)}.")
    return sentences


def _than(best: Results, other: Results) -> str:
    one, two = best["output_tok_s"], other["output_tok_s"]
    if one["min"] <= two["max"]:
        return f"not told apart from {other['server']} ({two['median']:,.1f}) by these rounds"
    doubt = " (one round only)" if min(best["rounds"], other["rounds"]) < 2 else ""
    return f"{one['median'] / two['median']:.2f} times {other['server']}'s {two['median']:,.1f}{doubt}"


def _at(concurrency: int) -> str:
    return "One request at a time:" if concurrency == 1 else f"{concurrency} requests at a time:"


def _by_concurrency(rows: Sequence[Results]) -> Iterator[tuple[int, list[Results]]]:
    groups: dict[int, list[Results]] = defaultdict(list)
    for row in rows:
        groups[row["concurrency"]].append(row)
    yield from groups.items()


# -- do they answer alike


def agreement(results: Results) -> list[dict[str, Any]]:
    """For each two servers: how far their answers to the same prompts agree."""
    answers = {server["name"]: _answers(results, server["name"]) for server in results["servers"]}
    return [{"servers": [one, two], **agree(answers[one], answers[two])} for one, two in combinations(list(answers), 2)]


def _answers(results: Results, server: str) -> dict[tuple[int, int, int], str]:
    """The complete answers of a server by round, load and place of the prompt."""
    return {
        (turn["round"], turn["concurrency"], request["index"]): request["text"]
        for turn in results["turns"]
        if turn["server"] == server and turn["complete"]
        for request in turn["requests"]
        if request["error"] is None
    }


def agree(one: Mapping[Any, str], two: Mapping[Any, str]) -> dict[str, Any]:
    """
    Args:
        one, two: answers by prompt.

    Returns:
        Shares are of the prompts that both have answered; lengths are characters.
    """
    pairs = [(one[key], two[key]) for key in one if key in two]
    if not pairs:
        return {"compared": 0}
    common = [len(os.path.commonprefix(pair)) for pair in pairs]
    longest = [max(map(len, pair)) for pair in pairs]
    begins = [
        length >= min(_BEGINNING, longer) for length, longer in zip(common, longest, strict=True)
    ]  # an answer of less than `_BEGINNING` characters must be the same in full
    return {
        "compared": len(pairs),
        "identical": sum(first == second for first, second in pairs) / len(pairs),
        "same_beginning": sum(begins) / len(pairs),
        "common_prefix_median": statistics.median(common),
        "common_share_median": statistics.median(
            length / longer if longer else 1.0 for length, longer in zip(common, longest, strict=True)
        ),
    }


def judge(pair: Results) -> str:
    """What the agreement of two servers means, as a sentence."""
    one, two = pair["servers"]
    if not pair["compared"]:
        return f"{one} and {two} have no answered prompts in common."
    if pair["identical"] >= _SAME:
        return f"{one} and {two} answer alike: the same model, computed alike."
    if pair["same_beginning"] >= 0.8:
        return (
            f"{one} and {two} begin alike and part later: the same model, most likely, with other rounding, another "
            "quantization, or draws."
        )
    if pair["same_beginning"] >= 0.3:
        return f"{one} and {two} agree now and then: other weights or precision, or another template of the same model."
    return f"{one} and {two} answer differently: not the same model, or the prompts reach it in another form."


# -- what speaks against it


def warnings(results: Results) -> list[str]:
    """Sentences, the gravest first."""
    return [
        *_of_runs(results),
        *_of_answers(results),
        *_of_tokens(results),
        *_of_gpus(results),
        *_of_spread(results),
        *_of_noise(results),
        *_of_client(results),
        *results["notes"],
    ]


def _of_runs(results: Results) -> Iterator[str]:
    if results["interrupted"]:
        yield "The comparison was interrupted; what it has measured until then is here."
    for server in results["servers"]:
        if failure := server["failure"]:
            yield f"{server['name']} {failure['reason']} ({failure['when']}); its later turns were left out."
    for turn in results["turns"]:
        failed = turn["figures"]["failed"]
        if turn["complete"] and failed:
            share = f"{failed} of {len(turn['requests'])} requests failed"
            first = next(request["error"] for request in turn["requests"] if request["error"])
            yield f"{turn['server']}, {turn['concurrency']} at a time, round {turn['round']}: {share}: {first}"


def _of_answers(results: Results) -> Iterator[str]:
    for pair in results["agreement"]:
        if pair["compared"] and pair["same_beginning"] < 0.8:
            yield judge(pair)


def _of_tokens(results: Results) -> Iterator[str]:
    for concurrency, group in _by_concurrency(results["summary"]):
        rows = [row for row in group if row["rounds"] and row["requests"] > row["errors"]]
        for what, why in (
            (
                "output_tokens",
                "a server that answers shorter is not faster; compare tokens per second, not requests, or make "
                "the lengths the same with --ignore-eos",
            ),
            ("prompt_tokens", "the servers cut or wrap the same prompts differently"),
        ):
            means = {row["server"]: row[what] / (row["requests"] - row["errors"]) for row in rows}
            if means and min(means.values()) < (1 - _LENGTHS) * max(means.values()):
                listed = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
                yield f"{_at(concurrency)} {what.replace('_', ' ')} per request differ ({listed}): {why}."
    sent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in results["summary"]:
        if row["rounds"]:
            sent[row["server"]][0] += row["events"]
            sent[row["server"]][1] += row["output_tokens"]
    for name, (events, tokens) in sent.items():
        if events and tokens > 1.2 * events:
            yield (
                f"{name} sends {tokens / events:.1f} tokens per event: its ITL is the time between events, "
                "TPOT the time per token."
            )


def _of_gpus(results: Results) -> Iterator[str]:
    shared = {
        turn["server"]: None
        for turn in results["turns"]
        if turn["memory"]["peak_gpu_of_all"] and not turn["memory"]["peak_gpu"]
    }
    if shared:
        yield (
            f"GPU memory of {', '.join(shared)} is that of all programs: the driver does not tell which of it these "
            "servers have, or they have none."
        )


def _of_spread(results: Results) -> Iterator[str]:
    for row in results["summary"]:
        if row["rounds"] and spread(row) > _SPREAD:
            yield (
                f"{row['server']}, {row['concurrency']} at a time: the rounds are {spread(row):.0%} of their median "
                "apart; smaller differences between servers mean nothing."
            )
    if results["setup"]["rounds"] < 2:
        yield "One round only: how much of a difference is chance cannot be told (--rounds)."


def _of_noise(results: Results) -> Iterator[str]:
    turns = results["turns"]
    if not turns:
        return
    fastest = min(turn["before"]["probe_ms"] for turn in turns)
    slow = [turn for turn in turns if turn["before"]["probe_ms"] > _SLOWER * fastest]
    if slow:
        worst = max(turn["before"]["probe_ms"] for turn in slow) / fastest
        yield (
            f"The machine's speed varied: before {len(slow)} of {len(turns)} turns a fixed loop took up to {worst:.2f} "
            "times as long as at best."
        )
    busy = [turn for turn in turns if turn["before"]["busy_cores"] > _BUSY]
    if busy:
        most = max(turn["before"]["busy_cores"] for turn in busy)
        yield f"Before {len(busy)} of {len(turns)} turns the machine was not quiet: up to {most:.1f} cores were busy."
    others = [turn for turn in turns if (turn["cores"]["others"] or 0) > _BUSY]
    if others:
        most = max(turn["cores"]["others"] for turn in others)
        yield (
            f"During {len(others)} of {len(turns)} turns programs that are neither the server nor its load used up to "
            f"{most:.1f} cores."
        )
    stolen = max(turn["cores"]["stolen"] for turn in turns)
    if stolen > 0.02 * (results["setup"]["machine"]["threads"] or 1):
        yield f"The hypervisor kept up to {stolen:.2f} cores from this machine."
    idle: dict[str, float] = defaultdict(float)
    for turn in turns:
        for name, cores in turn["cores"]["idle_servers"].items():
            idle[name] = max(idle[name], cores)
    for name, cores in idle.items():
        if cores > 0.05:
            yield f"{name} used {cores:.2f} cores while others were measured; --one-at-a-time stops servers meanwhile."


def _of_client(results: Results) -> Iterator[str]:
    for row in results["summary"]:
        if row["rounds"] and (row["client_cores"] or 0) > 0.8:
            yield (
                f"{row['server']}, {row['concurrency']} at a time: the load client itself used "
                f"{row['client_cores']:.1f} of its one core and may have been what was slow."
            )
