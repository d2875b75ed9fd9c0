"""`octavo bench serve`: load a running server and tell how fast it answers."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from octavo.bench.arrivals import arrivals
from octavo.bench.client import Ask, Kind, Outcome, Target, load
from octavo.bench.data import asks_of
from octavo.bench.figures import METRICS, Figures, e2el, itls
from octavo.bench.options import KINDS, BenchError, ServeOptions
from octavo.bench.servers import ServerError, find_model, wait_ready
from octavo.bench.timeline import page
from octavo.bench.tokens import Count, counter

_WIDTH = 50
"""Characters of a line of the table."""
_ERRORS = 5
"""Kinds of errors that are told."""


def serve(options: ServeOptions, key: str | None = None) -> int:
    """Run the benchmark, print its table and write its files. Returns the exit status: 1 when no request was answered.

    Args:
        key: API key where `options` have none.

    Raises:
        BenchError: the server does not answer, or the options do not fit it or the files they name.
    """
    target = target_of(options, key)
    file = _result_file(options, target)
    asks = requests_of(options, target)
    outcomes, duration = asyncio.run(_measure(options, target, asks))
    figures = Figures.of(outcomes, duration=duration, percentiles=options.percentiles, goodput=options.limits)
    print("\n".join(table(figures, options)))
    for sentence in _failures(outcomes):
        print(sentence, file=sys.stderr)
    if options.save_result or options.append_result:
        _write(file, as_json(options, target, figures, outcomes), options.append_result)
    if options.plot_timeline:
        drawn = file.with_name(f"{file.stem}.timeline.html")
        _write_text(drawn, page(outcomes, options.thresholds, f"{target.model} at {target.url}"))
        print(f"Timeline: {drawn}")
    return 0 if figures.completed else 1


def target_of(options: ServeOptions, key: str | None = None) -> Target:
    """The server, waited for if asked, with the model that is meant. Raises BenchError."""
    kind = next(kind for kind in get_args(Kind) if kind == KINDS[options.backend])
    model = options.served_model_name or options.model
    target = Target(options.url, kind, model, options.api_key or key, options.headers, options.endpoint)
    try:
        if options.ready_check_timeout_sec:
            wait_ready(target, options.ready_check_timeout_sec)
    except ServerError as error:
        raise BenchError(f"{target.url} {error}.") from None
    try:
        return replace(target, model=target.model or find_model(target))
    except ServerError:
        raise BenchError(
            f"{target.url} lists no model. Start the server, or name the model with --model if it has no /v1/models."
        ) from None


def requests_of(options: ServeOptions, target: Target) -> list[Ask]:
    """The requests as `target` takes them, with the sampling parameters and the extra body of `options`. Raises
    BenchError."""
    from_file = options.dataset_name == "custom" or (options.dataset_name == "multi-turn" and options.dataset_path)
    count: Count = len if from_file else counter(target, options.tokenizer)
    extra = {**options.sampling, **(options.extra_body or {})}
    asks = [replace(ask, extra=extra) for ask in asks_of(options, count)]
    return [_as_messages(ask) for ask in asks] if target.kind == "openai-chat" else asks


def _as_messages(ask: Ask) -> Ask:
    """A text becomes the message of a user, so that turns after it can be added."""
    if isinstance(ask.prompt, str):
        return replace(ask, prompt=[{"role": "user", "content": ask.prompt}])
    return ask


def starts_of(options: ServeOptions, asks: Sequence[Ask]) -> list[float]:
    """When each request is sent, seconds; those that follow an answer are sent as soon as it is complete."""
    ramp = None
    if options.ramp_up_strategy is not None:
        ramp = options.ramp_up_strategy, options.ramp_up_start_rps or 0.0, options.ramp_up_end_rps or 0.0
    heads = sum(ask.after is None for ask in asks)
    times = iter(arrivals(heads, options.request_rate, options.burstiness, options.seed, ramp))
    return [next(times) if ask.after is None else 0.0 for ask in asks]


async def _measure(options: ServeOptions, target: Target, asks: Sequence[Ask]) -> tuple[list[Outcome], float]:
    """What came of the requests, and seconds from the beginning to the last answer."""
    if options.num_warmups:
        warm = replace(options, seed=options.seed + 1, num_prompts=options.num_warmups)
        await load(
            target, requests_of(warm, target), concurrency=options.max_concurrency, timeout=options.request_timeout
        )
    with tqdm(total=len(asks), desc="Requests", dynamic_ncols=True, disable=options.disable_tqdm) as bar:

        def on_done(outcome: Outcome) -> None:
            bar.update(1)

        begun = time.perf_counter()
        outcomes = await load(
            target,
            asks,
            starts=starts_of(options, asks),
            concurrency=options.max_concurrency,
            on_done=on_done,
            timeout=options.request_timeout,
        )
    return outcomes, time.perf_counter() - begun


def table(figures: Figures, options: ServeOptions) -> list[str]:
    """The lines that are printed: vLLM's names of figures."""
    rate = None if math.isinf(options.request_rate) else options.request_rate
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        *_line("Successful requests:", figures.completed),
        *_line("Failed requests:", figures.failed),
        *_line("Maximum request concurrency:", options.max_concurrency),
        *_line("Request rate configured (RPS):", rate),
        *_line("Benchmark duration (s):", figures.duration),
        *_line("Total input tokens:", figures.total_input_tokens),
        *_line("Total generated tokens:", figures.total_output_tokens),
        *_line("Request throughput (req/s):", figures.request_throughput),
        *_line("Request goodput (req/s):", figures.request_goodput),
        *_line("Output token throughput (tok/s):", figures.output_throughput),
        *_line("Peak output token throughput (tok/s):", figures.max_output_tokens_per_s),
        *_line("Peak concurrent requests:", figures.max_concurrent_requests),
        *_line("Total token throughput (tok/s):", figures.total_token_throughput),
    ]
    for metric in options.metrics:
        found, name = figures.latencies[metric], metric.upper()
        lines += [
            f"{METRICS[metric]:-^{_WIDTH}}",
            *_line(f"Mean {name} (ms):", found.mean),
            *_line(f"Median {name} (ms):", found.median),
            *(line for p, value in found.percentiles.items() for line in _line(f"P{p:g} {name} (ms):", value)),
        ]
    return [*lines, "=" * _WIDTH]


def _line(name: str, value: float | None) -> list[str]:
    """One line; none for what is not known."""
    if value is None:
        return []
    return [f"{name:<40} {value if isinstance(value, int) else format(value, '.2f')}"]


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    """A line per kind of error, the most frequent ones first."""
    found = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    lines = [f"failed {number} times: {error}" for error, number in found.most_common(_ERRORS)]
    left = sum(found.values()) - sum(number for _, number in found.most_common(_ERRORS))
    return [*lines, f"failed {left} times otherwise"] if left else lines


def as_json(options: ServeOptions, target: Target, figures: Figures, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The result file, under vLLM's names; times of single requests are seconds."""
    ramp = {name: getattr(options, f"ramp_up_{name}") for name in ("strategy", "start_rps", "end_rps")}
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": target.model,
        "tokenizer_id": options.tokenizer or target.model,
        "num_prompts": len(outcomes),
        **options.more,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **{f"ramp_up_{name}": value for name, value in ramp.items() if options.ramp_up_strategy is not None},
        **({"goodput": options.limits} if options.limits else {}),
        **figures.as_json(options.metrics),
    }
    if options.save_detailed:
        begun = min(outcome.asked for outcome in outcomes)
        result |= {
            "input_lens": [outcome.prompt_tokens for outcome in outcomes],
            "output_lens": [outcome.output_tokens for outcome in outcomes],
            "start_times": [outcome.asked - begun for outcome in outcomes],
            "ttfts": [0.0 if o.first is None else o.first - o.asked for o in outcomes],
            "itls": [[gap / 1000 for gap in itls(outcome)] for outcome in outcomes],
            "latencies": [e2el(outcome) / 1000 for outcome in outcomes],
            "generated_texts": [outcome.text for outcome in outcomes],
            "errors": [outcome.error or "" for outcome in outcomes],
        }
    return result


def _result_file(options: ServeOptions, target: Target) -> Path:
    """Where the result goes; its folder is made. Raises BenchError."""
    rate = "inf" if math.isinf(options.request_rate) else f"{options.request_rate:g}"
    at_a_time = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    model = (target.model or "model").rstrip("/").rpartition("/")[2]
    name = f"{options.label or options.backend}-{rate}qps{at_a_time}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json"
    file = Path(options.result_dir) / (options.result_filename or name)
    if options.save_result or options.append_result or options.plot_timeline:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"cannot write to {file.parent}: {error.strerror}.") from None
    return file


def _write(file: Path, result: dict[str, Any], append: bool) -> None:
    _write_text(file, json.dumps(result) + "\n", append)
    print(f"Result: {file}")


def _write_text(file: Path, text: str, append: bool = False) -> None:
    try:
        with file.open("a" if append else "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror}.") from None
