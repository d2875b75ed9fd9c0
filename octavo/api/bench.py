"""The commands `octavo bench ...`: their flags, which are the fields of `octavo.bench.options`, and what they run."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from dataclasses import fields
from typing import TypeVar

from octavo.api.flags import OPTIONS, Command, Flag, Positional, flag_of
from octavo.bench.compare_options import CompareOptions
from octavo.bench.options import (
    BenchError,
    LatencyOptions,
    Options,
    ServeOptions,
    StartupOptions,
    ThroughputOptions,
)
from octavo.config import EngineConfig, environment_api_key

T = TypeVar("T", bound=Options)


def _serve(namespace: argparse.Namespace) -> int:
    options = _options(ServeOptions, namespace)
    _need("aiohttp", "psutil")
    from octavo.bench.serve import serve

    keys = environment_api_key()
    return serve(options, keys[0] if keys else None)


def _throughput(namespace: argparse.Namespace) -> int:
    options = _options(ThroughputOptions, namespace)
    config = _configuration("bench throughput", namespace)
    _need("aiohttp")
    from octavo.bench.offline import open_llm, throughput

    with open_llm(config) as llm:
        return 1 if throughput(options, llm)["failed"] else 0


def _latency(namespace: argparse.Namespace) -> int:
    options = _options(LatencyOptions, namespace)
    if namespace.enable_prefix_caching is None:  # what is measured is the work of a batch
        namespace.enable_prefix_caching = False
    config = _configuration("bench latency", namespace)
    _need("aiohttp")
    from octavo.bench.offline import latency, open_llm

    with open_llm(config) as llm:
        latency(options, llm)
    return 0


def _startup(namespace: argparse.Namespace) -> int:
    options = _options(StartupOptions, namespace)
    config = _configuration("bench startup", namespace)
    _need("aiohttp", "psutil")
    from octavo.bench.startup import startup

    startup(options, config)
    return 0


def _compare(namespace: argparse.Namespace) -> int:
    options = _options(CompareOptions, namespace)
    _need("aiohttp", "psutil")
    from octavo.bench.compare import compare

    return compare(options, shlex.join(["octavo", *sys.argv[1:]]))


def _options(kind: type[T], namespace: argparse.Namespace) -> T:
    """The options that were given; wrong ones end the program with exit status 2."""
    given = {field.name: value for field in fields(kind) if (value := getattr(namespace, field.name)) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return kind(**given)
    except BenchError as error:
        parser: argparse.ArgumentParser = namespace.parser
        parser.error(str(error))


def _configuration(name: str, namespace: argparse.Namespace) -> EngineConfig:
    from octavo.api.cli import COMMANDS, configure

    namespace.log_level = namespace.log_level or "warning"
    return configure(COMMANDS[name], namespace)


def _need(*packages: str) -> None:
    """Raises BenchError where packages of the extra are not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise BenchError(f"octavo bench needs {package}: pip install 'octavo[bench]'.")


def _flags(kind: type[Options]) -> tuple[Flag, ...]:
    return tuple(flag_of(field)._replace(variable="") for field in fields(kind))


_MODEL = Positional("model_tag", "MODEL", "Repository name, folder, or GGUF file.", False)
_OF_A_MODEL = (
    *(name for name, flag in OPTIONS.items() if flag.group in ("model", "cache", "scheduler", "device")),
    "log_level",
)
_WITHOUT_A_SEED = tuple(name for name in _OF_A_MODEL if name != "seed")
"""The seed of these commands is that of the prompts."""

BENCHES = (
    Command(
        "bench serve",
        "measure a running server under load",
        "[--base-url URL] [options]",
        "Sends requests to a server of any kind and tells how fast it answers: latencies, throughput, goodput.",
        (),
        _flags(ServeOptions),
        (),
        _serve,
    ),
    Command(
        "bench throughput",
        "measure how much a model answers offline",
        "[MODEL] [options]",
        "Answers prompts as fast as the model can, without a server, and tells requests and tokens per second.",
        (_MODEL,),
        _flags(ThroughputOptions),
        _WITHOUT_A_SEED,
        _throughput,
    ),
    Command(
        "bench latency",
        "measure how long one batch takes offline",
        "[MODEL] [options]",
        "Answers batches of equal size one after the other, without a server, and tells how long each takes.",
        (_MODEL,),
        _flags(LatencyOptions),
        _WITHOUT_A_SEED,
        _latency,
    ),
    Command(
        "bench startup",
        "measure how long a server takes to start",
        "[MODEL] [options]",
        "Starts a server of the model again and again: with its files read from disk, and with them in memory.",
        (_MODEL,),
        _flags(StartupOptions),
        _OF_A_MODEL,
        _startup,
    ),
    Command(
        "bench compare",
        "measure several servers in turn and compare them",
        '--server NAME=URL --start "NAME=COMMAND --port {port}" [options]',
        "Sends the same prompts to several servers, running or started here, and writes one page that compares them.",
        (),
        _flags(CompareOptions),
        (),
        _compare,
    ),
)
"""Commands of two words."""
