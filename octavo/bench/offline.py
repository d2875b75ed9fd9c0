"""`octavo bench throughput` and `octavo bench latency`: an engine in this process, without a server."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.bench.client import Ask
from octavo.bench.data import asks_of
from octavo.bench.figures import Distribution
from octavo.bench.options import BenchError, LatencyOptions, ThroughputOptions
from octavo.bench.profile import Profile
from octavo.config import EngineConfig
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def open_llm(config: EngineConfig) -> LLM:
    """Raises BenchError where the model cannot be run."""
    try:
        return LLM(**vars(config))
    except ValueError as error:
        raise BenchError(str(error)) from None


def throughput(options: ThroughputOptions, llm: LLM) -> dict[str, Any]:
    """Answer all prompts as fast as the engine can; print and return the figures. Raises BenchError."""
    tokenizer = llm.get_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    if options.num_warmups:
        warm = replace(options, seed=options.seed + 1, num_prompts=options.num_warmups)
        _answer(llm, asks_of(warm, count), warm, False)
    asks = asks_of(options, count)
    begun = time.perf_counter()
    outputs = _answer(llm, asks, options, not options.disable_tqdm)
    seconds = time.perf_counter() - begun
    failed = sum(one.finish_reason == "error" for output in outputs for one in output.outputs)
    prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    result = {
        "elapsed_time": seconds,
        "num_requests": len(asks),
        "failed": failed,
        "total_num_prompt_tokens": prompt,
        "total_num_output_tokens": output_tokens,
        "total_num_tokens": prompt + output_tokens,
        "requests_per_second": len(asks) / seconds,
        "tokens_per_second": (prompt + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt}\nTotal num output tokens:  {output_tokens}")
    if failed:
        print(f"Failed answers: {failed}")
    write_json(options.output_json, result)
    return result


def _answer(llm: LLM, asks: Sequence[Ask], options: ThroughputOptions, progress: bool) -> list[RequestOutput]:
    temperature = float(options.n > 1) if options.temperature is None else options.temperature
    params = [
        SamplingParams(temperature=temperature, max_tokens=ask.max_tokens, ignore_eos=True, n=options.n) for ask in asks
    ]
    prompts: Any = [ask.prompt for ask in asks]
    are_messages = {isinstance(prompt, list) and isinstance(prompt[0], dict) for prompt in prompts}
    if len(are_messages) != 1:
        raise BenchError(f"{options.dataset_path} mixes prompts and messages: offline, a file holds one or the other.")
    try:
        run = llm.chat if are_messages.pop() else llm.generate
        return run(prompts, params, use_tqdm=progress)
    except ValueError as error:
        raise BenchError(str(error)) from None


def latency(options: LatencyOptions, llm: LLM) -> dict[str, Any]:
    """Time batch after batch; print and return the figures, seconds. Raises BenchError."""
    profiled = llm.profiled if options.profile else None
    if options.profile and profiled is None:
        raise BenchError(f"--profile: the device {llm.info.device} does not time its operations.")
    rng = random.Random(f"latency/{options.seed}")
    known = [token for token in range(llm.info.vocab_size) if token not in llm.get_tokenizer().special_ids]
    params = SamplingParams(
        n=options.n, temperature=float(options.n > 1), max_tokens=options.output_len, ignore_eos=True
    )

    def once() -> float:
        prompts: Any = [
            {"prompt_token_ids": rng.choices(known, k=options.input_len)} for _ in range(options.batch_size)
        ]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        for output in outputs:
            for one in output.outputs:
                if len(one.token_ids) != options.output_len:
                    raise BenchError(
                        f"an answer has {len(one.token_ids)} tokens instead of {options.output_len} (finish reason "
                        f"{one.finish_reason}): --input-len and --output-len must fit into --max-model-len."
                    )
        return seconds

    try:
        for _ in tqdm(range(options.num_iters_warmup), desc="Warm-up", disable=options.disable_tqdm):
            once()
        if profiled:
            profiled.start_profile()
        times = [once() for _ in tqdm(range(options.num_iters), desc="Batches", disable=options.disable_tqdm)]
    except ValueError as error:
        raise BenchError(str(error)) from None
    found = Distribution.of(times, PERCENTILES)
    result = {
        "avg_latency": found.mean,
        "latencies": times,
        "percentiles": {f"{p:g}": value for p, value in found.percentiles.items()},
    }
    print(f"Avg latency: {found.mean:.4f} seconds")
    for p, value in found.percentiles.items():
        print(f"{p:g}% percentile latency: {value:.4f} seconds")
    if profiled:
        profile = Profile(profiled.stop_profile(), profiled.roofline(), sum(times))
        print(profile.table())
        result["profile"] = profile.figures()
    write_json(options.output_json, result)
    return result


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Nothing where no path is given. Raises BenchError."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}.") from None
