"""Whether the client of `octavo bench` tells the same figures as another load script, on the same prompts.

    python benchmarks/agreement.py LOADTEST.py [--workload closed16] [--rounds 3] [--model smollm2 | --url URL]

LOADTEST.py has a function `workload(name, seed)` that gives (prompt, max_tokens, extra) triples and how many run at a
time, and prints its figures as one JSON line. Without --url a server of --model is started on a free loopback port,
without a prefix cache, as every round sends the same prompts. The two clients take turns, each time in a process of
its own, and the order changes from round to round. Prints the medians of the rounds; the exit status is 1 when one of
the compared figures differs by more than --limit percent.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from octavo.bench.client import Ask, Outcome, Target, load
from octavo.bench.figures import e2el, itls, ttft
from octavo.bench.servers import find_model, start, wait_ready

COMPARED = ("wall_s", "out_tok_s", "total_tok_s", "lat_p50", "lat_p95", "ttft_p50", "itl_p50")
"""Figures that must agree; the others are shown: they hang on single events, which differ from run to run."""
SHOWN = ("ttft_p95", "itl_p95", "itl_p99")


def workload_of(script: Path) -> Callable[[str, str], tuple[list[tuple[str, int, dict[str, Any]]], int]]:
    """The script's function, without running the rest of the script."""
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(script.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, kept) or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    names: dict[str, Any] = {}
    exec(compile(tree, str(script), "exec"), names)
    found: Callable[[str, str], tuple[list[tuple[str, int, dict[str, Any]]], int]] = names["workload"]
    return found


@contextmanager
def server(model: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        flags = "--host 127.0.0.1 --port {port} --no-enable-prefix-caching --disable-uvicorn-access-log"
        started, port = start(f"{sys.executable} -m octavo serve {model} {flags}", Path(folder) / "log")
        try:
            target = Target(f"http://127.0.0.1:{port}")
            wait_ready(target, 120, started)
            yield target
        finally:
            started.stop()


def ours(script: Path, target: Target, workload: str, seed: str) -> dict[str, float]:
    """The figures of our client, measured in this process."""
    asked, at_a_time = workload_of(script)(workload, seed)
    asks = [
        Ask(prompt, tokens, extra={"temperature": 0, "ignore_eos": True, **extra}) for prompt, tokens, extra in asked
    ]
    warm = [Ask("Warm up the server, please. " * 4, 8, extra={"temperature": 0})] * 2
    asyncio.run(load(target, warm, concurrency=1))
    outcomes = asyncio.run(load(target, asks, concurrency=at_a_time))
    for error in {outcome.error for outcome in outcomes if outcome.error is not None}:
        print(error, file=sys.stderr)
    return figures(outcomes)


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Under the names of the script, by its definition of a quantile; latencies in seconds."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    wall = max(outcome.ended for outcome in outcomes) - min(outcome.asked for outcome in outcomes)
    output = sum(outcome.output_tokens for outcome in done)
    latencies = {
        "lat": [e2el(outcome) / 1000 for outcome in done],
        "ttft": [value / 1000 for outcome in done if (value := ttft(outcome)) is not None],
        "itl": [gap / 1000 for outcome in done for gap in itls(outcome)],
    }
    return {
        "failed": len(outcomes) - len(done),
        "in_tok": sum(outcome.prompt_tokens for outcome in done),
        "out_tok": output,
        "wall_s": wall,
        "out_tok_s": output / wall,
        "total_tok_s": sum(outcome.prompt_tokens + outcome.output_tokens for outcome in done) / wall,
        **{
            f"{name}_p{percent}": quantile(values, percent / 100)
            for name, values in latencies.items()
            for percent in (50, 95, 99)
        },
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measured(program: Path, *arguments: str) -> dict[str, float]:
    """What a program prints as JSON in its last line."""
    done = subprocess.run([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if found["wall_s"] and not found["out_tok"]:
        raise SystemExit(f"{program} got no answer: {done.stdout}")
    return found


def compare(options: argparse.Namespace, target: Target) -> bool:
    """Runs the rounds and prints them; True where the figures agree."""
    script, model = options.script, options.name or str(find_model(target))
    same = ("--workload", options.workload, "--seed", options.seed)
    clients = {
        "octavo bench": lambda: measured(
            Path(__file__), str(script), "--only-ours", "--url", target.url, "--name", model, *same
        ),
        script.name: lambda: measured(script, "--base-url", target.address(""), "--model", model, *same),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for number in range(options.rounds):
        for name in list(clients)[:: -1 if number % 2 else 1]:
            found = clients[name]()
            rounds[name].append(found)
            brief = ", ".join(f"{figure} {found[figure]:.4g}" for figure in COMPARED)
            print(f"round {number + 1}, {name}: failed {found['failed']:g}; {brief}", flush=True)
    mine, other = rounds.values()
    good = True
    print(f"\n{'figure':12} {'octavo bench':>14} {script.name:>14} {'difference':>11}")
    for figure in ("failed", "in_tok", "out_tok"):  # the same requests must have the same tokens
        equal = {found[figure] for found in mine} == {found[figure] for found in other}
        good = good and equal
        print(f"{figure:12} {mine[0][figure]:14g} {other[0][figure]:14g} {'' if equal else 'differs':>11}")
    for figure in (*COMPARED, *SHOWN):
        left, right = (median(found[figure] for found in side) for side in (mine, other))
        percent = 100 * (left / right - 1) if right else 0.0
        good = good and (figure not in COMPARED or abs(percent) <= options.limit)
        print(f"{figure:12} {left:14.4f} {right:14.4f} {percent:+10.1f}%")
    print(f"load of the machine (1 min): {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--workload", default="closed16")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--name", help="the model in the requests")
    parser.add_argument("--limit", type=float, default=5.0, help="percent by which figures may differ")
    parser.add_argument("--only-ours", action="store_true", help="print the figures of octavo's client as JSON")
    options = parser.parse_args()
    if options.only_ours:
        target = Target(options.url, model=options.name)
        print(json.dumps(ours(options.script, target, options.workload, options.seed)))
        return 0
    if options.url:
        return 0 if compare(options, Target(options.url)) else 1
    with server(options.model) as target:
        return 0 if compare(options, target) else 1


if __name__ == "__main__":
    sys.exit(main())
