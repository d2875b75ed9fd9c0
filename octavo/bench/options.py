"""What the user may say to `octavo bench`: each field is a flag of the command line, named as in vLLM if it has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.config import mapping

METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")


class BenchError(Exception):
    """A benchmark cannot be run as it was asked for; the text is one line for the user."""


def option(
    default: Any,
    group: str,
    help: str,
    *flags: str,
    kind: Callable[[str], Any] = str,
    choices: tuple[Any, ...] = (),
    several: bool = False,
    least: float = -math.inf,
) -> Any:
    """A field with what a flag needs (`octavo.api.flags.Flag`); numbers below `least` are refused."""
    about = {"group": group, "help": help, "flags": flags, "kind": kind}
    return field(default=default, metadata={**about, "choices": choices, "several": several, "least": least})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checks the numbers of the options made from it."""

    def __post_init__(self) -> None:
        """Raises BenchError."""
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= least:
                raise BenchError(f"{flag_of(one.name)} must be at least {least:g}, got {value}.")


def flag_of(name: str) -> str:
    """How the option `name` is written."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Which prompts."""

    dataset_name: str = option(
        "random",
        "prompts",
        "Where prompts come from: random words; burst, one prompt for all; prefix_repetition, few beginnings shared by "
        "many; multi-turn, conversations that send their history again; sharegpt and custom, files.",
        choices=("random", "burst", "prefix_repetition", "multi-turn", "sharegpt", "custom"),
    )
    dataset_path: str | None = option(
        None,
        "prompts",
        "The file: JSON of ShareGPT for sharegpt (and multi-turn, if given); for custom one JSON object per line with "
        "prompt or messages, and output_tokens if wanted.",
        kind=str,
    )
    num_prompts: int = option(1000, "prompts", "Requests to send.", "--num-prompt", kind=int, least=1)
    random_input_len: int = option(1024, "prompts", "Tokens of a random prompt.", "--input-len", kind=int, least=1)
    random_output_len: int = option(128, "prompts", "Tokens of each answer.", "--output-len", kind=int, least=1)
    random_range_ratio: float = option(
        0.0,
        "prompts",
        "Random lengths are drawn from [length * (1 - ratio), length * (1 + ratio)].",
        kind=float,
        least=0,
    )
    random_prefix_len: int = option(
        0, "prompts", "Tokens before each random prompt that are the same for all.", "--prefix-len", kind=int, least=0
    )
    sharegpt_output_len: int | None = option(
        None, "prompts", "Tokens of each answer. Default: as many as the answer in the file.", kind=int, least=1
    )
    custom_output_len: int = option(
        256, "prompts", "Tokens of an answer whose line does not tell output_tokens.", kind=int, least=1
    )
    prefix_repetition_prefix_len: int = option(256, "prompts", "Tokens of each shared beginning.", kind=int, least=1)
    prefix_repetition_suffix_len: int = option(256, "prompts", "Tokens after the beginning.", kind=int, least=1)
    prefix_repetition_num_prefixes: int = option(10, "prompts", "Different beginnings.", kind=int, least=1)
    prefix_repetition_output_len: int = option(128, "prompts", "Tokens of each answer.", kind=int, least=1)
    multi_turn_num_turns: int = option(4, "prompts", "Requests of each conversation.", kind=int, least=1)
    disable_shuffle: bool = option(False, "prompts", "Take the lines of a file in their order.", kind=bool)
    no_oversample: bool = option(
        False, "prompts", "Send fewer requests rather than lines of the file twice.", kind=bool
    )
    seed: int = option(0, "prompts", "Makes prompts, lengths and times of arrival repeatable.", kind=int)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random_range_ratio >= 1:
            raise BenchError(f"--random-range-ratio must be below 1, got {self.random_range_ratio}.")
        if self.dataset_name in ("sharegpt", "custom") and not self.dataset_path:
            raise BenchError(f"--dataset-name {self.dataset_name} reads a file: name it with --dataset-path.")


KINDS = {
    "openai": "openai",
    "octavo": "openai",
    "vllm": "openai",
    "sglang": "openai",
    "llama.cpp": "openai",
    "openai-chat": "openai-chat",
    "vllm-chat": "openai-chat",
    "tgi": "tgi",
}
"""How the client speaks with each `--backend`."""


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    "logprobs",
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DataOptions):
    """`octavo bench serve`."""

    backend: str = option(
        "openai",
        "target",
        "How to speak with the server: openai and its aliases ask /v1/completions, those with -chat "
        "/v1/chat/completions, and tgi /generate_stream.",
        "--endpoint-type",
        choices=tuple(KINDS),
    )
    base_url: str | None = option(None, "target", "Where the server is, in place of --host and --port.", "--url")
    host: str = option("127.0.0.1", "target", "Host of the server.")
    port: int = option(8000, "target", "Port of the server.", kind=int, least=1)
    endpoint: str | None = option(None, "target", "Path of the requests. Default: that of the backend.")
    model: str | None = option(None, "target", "Name of the model in the requests. Default: the first one served.")
    served_model_name: str | None = option(None, "target", "The same; wins over --model.")
    tokenizer: str | None = option(
        None,
        "target",
        "Repository, folder or GGUF file whose tokenizer counts the tokens of prompts. Default: the server's own, "
        "through /tokenize.",
    )
    api_key: str | None = option(None, "target", "Key to send. Default: that of the variable OCTAVO_API_KEY.")
    header: tuple[str, ...] = option((), "target", "Headers to send, NAME=VALUE.", several=True)
    ready_check_timeout_sec: float = option(
        0.0, "target", "Seconds to wait for a server that is still starting.", kind=float, least=0
    )
    request_timeout: float = option(
        21600.0, "target", "Seconds after which a request has failed.", kind=float, least=0.001
    )

    request_rate: float = option(
        math.inf, "load", "Requests per second; inf sends all of them at once.", kind=float, least=0
    )
    burstiness: float = option(
        1.0,
        "load",
        "Shape of the gamma distribution of the times between requests: 1 is a Poisson process, less is burstier, more "
        "is more even.",
        kind=float,
        least=0,
    )
    max_concurrency: int | None = option(
        None, "load", "Most requests under way at one time. Default: no limit.", kind=int, least=1
    )
    ramp_up_strategy: str | None = option(
        None, "load", "Let the request rate grow from the first request to the last.", choices=("linear", "exponential")
    )
    ramp_up_start_rps: float | None = option(None, "load", "Requests per second at the beginning.", kind=float, least=0)
    ramp_up_end_rps: float | None = option(None, "load", "Requests per second at the end.", kind=float, least=0)
    num_warmups: int = option(0, "load", "Requests before the measured ones.", kind=int, least=0)

    ignore_eos: bool = option(False, "sampling", "Answers have their full length.", kind=bool)
    temperature: float = option(0.0, "sampling", "0 always takes the most probable token.", kind=float, least=0)
    top_p: float | None = option(None, "sampling", "Draw from the tokens that make up this share.", kind=float)
    top_k: int | None = option(None, "sampling", "Draw from this many tokens.", kind=int)
    min_p: float | None = option(None, "sampling", "Draw from tokens that have this share of the best.", kind=float)
    frequency_penalty: float | None = option(None, "sampling", "As in OpenAI's API.", kind=float)
    presence_penalty: float | None = option(None, "sampling", "As in OpenAI's API.", kind=float)
    repetition_penalty: float | None = option(None, "sampling", "Above 1 discourages repetition.", kind=float)
    logprobs: int | None = option(None, "sampling", "Ask for log probabilities.", kind=int, least=0)
    extra_body: dict[str, Any] | None = option(None, "sampling", "More fields of every request.", kind=mapping)

    goodput: tuple[str, ...] = option(
        (),
        "results",
        "Limits in milliseconds, such as ttft:500 tpot:50 e2el:9000: requests that meet all of them are counted too.",
        several=True,
    )
    percentile_metrics: str = option(
        "ttft,tpot,itl,e2el", "results", f"Which latencies to tell, of {','.join(METRIC_NAMES)}."
    )
    metric_percentiles: str = option("99", "results", "Which percentiles to tell, such as 25,50,99.9.")
    save_result: bool = option(False, "results", "Write the figures to a JSON file.", kind=bool)
    save_detailed: bool = option(False, "results", "Write all about each request too.", kind=bool)
    append_result: bool = option(False, "results", "Add the figures to the file as one line.", kind=bool)
    result_dir: str = option(".", "results", "Folder of the file.")
    result_filename: str | None = option(
        None, "results", "Name of the file. Default: from backend, rate, model and time."
    )
    plot_timeline: bool = option(
        False,
        "results",
        "Write a page beside the file that shows when each request waited and was answered.",
        kind=bool,
    )
    timeline_itl_thresholds: str = option(
        "25,50", "results", "Milliseconds between tokens from which the timeline changes colour."
    )
    label: str | None = option(None, "results", "Name of this run in the file, in place of the backend.")
    metadata: tuple[str, ...] = option((), "results", "More to write to the file, KEY=VALUE.", several=True)
    disable_tqdm: bool = option(False, "results", "Show no progress.", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("request_rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps"):
            if getattr(self, name) == 0:
                raise BenchError(f"{flag_of(name)} must be above 0.")
        given = [self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps]
        if any(one is not None for one in given):
            if any(one is None for one in given):
                raise BenchError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together.")
            if math.isinf(max(self.ramp_up_start_rps or 0, self.ramp_up_end_rps or 0)):
                raise BenchError("the rates of a ramp must be finite.")
            if not math.isinf(self.request_rate):
                raise BenchError("--request-rate and --ramp-up-strategy both say when requests are sent; give one.")
        _ = self.limits, self.metrics, self.percentiles, self.thresholds, self.headers, self.more  # all can be read

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of every request in OpenAI's names."""
        found = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        return {**found, "ignore_eos": True} if self.ignore_eos else found

    @property
    def limits(self) -> dict[str, float]:
        """Of goodput, in milliseconds. Raises BenchError."""
        found: dict[str, float] = {}
        for text in self.goodput:
            name, _, limit = text.partition(":")
            if name not in ("ttft", "tpot", "e2el") or not limit:
                raise BenchError(f"--goodput takes limits such as ttft:500 tpot:50 e2el:9000, got {text}.")
            found[name] = _number(limit, f"--goodput {text}")
        return found

    @property
    def metrics(self) -> tuple[str, ...]:
        """Raises BenchError."""
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        for name in names:
            if name not in METRIC_NAMES:
                raise BenchError(f"--percentile-metrics takes any of {','.join(METRIC_NAMES)}, got {name!r}.")
        return names

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Raises BenchError."""
        found = _numbers(self.metric_percentiles, "--metric-percentiles")
        if not all(0 <= value <= 100 for value in found):
            raise BenchError(f"--metric-percentiles are from 0 to 100, got {self.metric_percentiles}.")
        return found

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Milliseconds, in ascending order. Raises BenchError."""
        return tuple(sorted(_numbers(self.timeline_itl_thresholds, "--timeline-itl-thresholds")))

    @property
    def headers(self) -> dict[str, str]:
        """Raises BenchError."""
        return _pairs(self.header, "--header")

    @property
    def more(self) -> dict[str, str]:
        """`metadata`. Raises BenchError."""
        return _pairs(self.metadata, "--metadata")


def _pairs(texts: tuple[str, ...], flag: str) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise BenchError(f"{flag} takes NAME=VALUE, got {text!r}.")
        found[name] = value
    return found


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    return tuple(_number(part, f"{flag} {text}") for part in text.split(","))


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BenchError(f"{what}: {text!r} is no number.")
    return value


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(DataOptions):
    """`octavo bench throughput`."""

    n: int = option(1, "sampling", "Answers to each prompt.", kind=int, least=1)
    temperature: float | None = option(
        None,
        "sampling",
        "0 always takes the most probable token. Default: 0, or 1 for several answers.",
        kind=float,
        least=0,
    )
    num_warmups: int = option(0, "load", "Requests before the measured ones.", kind=int, least=0)
    output_json: str | None = option(None, "results", "File for the figures.")
    disable_tqdm: bool = option(False, "results", "Show no progress.", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name == "multi-turn":
            raise BenchError("the turns of a conversation depend on each other: measure them with octavo bench serve.")
        if self.n > 1 and self.temperature == 0:
            raise BenchError("with --temperature 0 all answers to a prompt are the same: leave out --n.")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(Options):
    """`octavo bench latency`."""

    input_len: int = option(32, "prompts", "Tokens of each prompt.", kind=int, least=1)
    output_len: int = option(128, "prompts", "Tokens of each answer.", kind=int, least=1)
    batch_size: int = option(8, "prompts", "Prompts at a time.", kind=int, least=1)
    seed: int = option(0, "prompts", "Makes the prompts repeatable.", kind=int)
    n: int = option(1, "sampling", "Answers to each prompt.", kind=int, least=1)
    num_iters_warmup: int = option(3, "load", "Batches before the measured ones.", kind=int, least=0)
    num_iters: int = option(10, "load", "Measured batches.", kind=int, least=1)
    profile: bool = option(
        False,
        "results",
        "Tell what each kind of operation took in the measured batches, and what this machine could do at most.",
        kind=bool,
    )
    output_json: str | None = option(None, "results", "File for the figures.")
    disable_tqdm: bool = option(False, "results", "Show no progress.", kind=bool)


@dataclass(frozen=True, kw_only=True)
class StartupOptions(Options):
    """`octavo bench startup`."""

    num_iters_cold: int = option(
        3, "load", "Starts with the model's files not in the memory of the system.", kind=int, least=0
    )
    num_iters_warm: int = option(3, "load", "Starts with the files in memory.", kind=int, least=0)
    start_timeout: float = option(600.0, "load", "Seconds after which a start has failed.", kind=float, least=0.001)
    output_json: str | None = option(None, "results", "File for the figures.")
    disable_tqdm: bool = option(False, "results", "Show no progress.", kind=bool)
