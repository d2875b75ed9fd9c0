"""vLLM's options that Octavo does not have: those still to come, and those that time has passed by.

Scripts and command lines carry them along. One that asks for nothing (its neutral value) is accepted; one whose effect
would be missed is refused in one sentence; one that has no meaning here is accepted with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Unbuilt(NamedTuple):
    """An option whose effect is not built. `flags[0]` names it; the keyword is the same with underscores."""

    flags: tuple[str, ...]
    kind: Callable[[str], Any]
    """Reads the flag's text; bool for a switch without a value."""
    neutral: tuple[Any, ...]
    sentence: str

    @property
    def keyword(self) -> str:
        return keyword(self.flags[0])

    def is_neutral(self, value: Any) -> bool:
        return value is None or any(value == calm and type(value) is type(calm) for calm in self.neutral)


class NoMeaning(NamedTuple):
    """An option that changes nothing here. `flags[0]` names it."""

    flags: tuple[str, ...]
    takes: str
    """How many values follow the flag: "nothing", "one" or "several"."""
    reason: str
    """Why it changes nothing, and which flag to use today; the end of a sentence, without its full stop."""

    @property
    def keyword(self) -> str:
        return keyword(self.flags[0])


def _json(text: str) -> Any:
    """JSON, or the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_ONE_PROCESS = "Octavo runs a model in one process on one machine for now; leave it at 1."
_REPLICAS = "Octavo runs a model in one process for now; start several servers behind a proxy, and leave it out."
_STRUCTURED = "Structured outputs are not built yet; leave it out."
_TOOLS = "Tool calls are not parsed yet; leave it out and read them from the text."
_REASONING = "Reasoning is not parsed yet; leave it out and read it from the text."
_SPECULATION = "Speculative decoding is not built yet; leave it out."
_LORA = "LoRA adapters are not built yet; merge the adapter into the checkpoint."
_OFFLOAD = "Weights are not moved between devices; on a CPU they are in its memory already. Leave it at 0."
_KV_OFFLOAD = "KV blocks are not offloaded yet; leave it out."
_KV_TRANSFER = "KV transfer is not built yet; leave it out."
_TEXT_ONLY = "Only text goes in for now; leave it out."
_GENERATE_ONLY = "Only text generation is built so far; leave it at auto or generate."
_PLUGIN = "Classes and modules of the user are not loaded into the server; leave it out."

UNBUILT: tuple[Unbuilt, ...] = (
    # -- model
    Unbuilt(("--runner",), str, ("auto", "generate"), _GENERATE_ONLY),
    Unbuilt(("--convert",), str, ("auto", "none"), "Models are served as what they are; leave it at auto."),
    Unbuilt(
        ("--tokenizer-mode",),
        str,
        ("auto", "hf"),
        "One kind of tokenizer is built (tokenizer.json or GGUF); leave it at auto.",
    ),
    Unbuilt(
        ("--skip-tokenizer-init",),
        bool,
        (False,),
        "The tokenizer is always loaded; leave it out and pass prompt_token_ids.",
    ),
    Unbuilt(
        ("--quantization-config",),
        _json,
        ({}, ""),
        "The format of the weights is read from the checkpoint; leave it out, and see --quantization.",
    ),
    Unbuilt(
        ("--disable-sliding-window",),
        bool,
        (False,),
        "Sliding windows are kept as the model has them; leave it out and set --max-model-len to the window's size.",
    ),
    Unbuilt(("--hf-config-path",), str, ("",), "The config is read from the checkpoint; put config.json there."),
    Unbuilt(("--config-format",), str, ("auto", "hf"), "Only config.json and GGUF are read; leave it at auto."),
    Unbuilt(("--hf-overrides",), _json, ({}, ""), "The checkpoint's config is taken as it is; edit its config.json."),
    Unbuilt(
        ("--rope-scaling",), _json, ({}, ""), "RoPE scaling is read from the checkpoint's config.json; put it there."
    ),
    Unbuilt(("--rope-theta",), float, (), "The RoPE base is read from the checkpoint's config.json; put it there."),
    Unbuilt(("--model-impl",), str, ("auto", "vllm"), "Octavo runs its own implementation; leave it at auto."),
    Unbuilt(
        ("--logits-processors",),
        str,
        ("",),
        "Custom logits processors are not built yet; use logit_bias, allowed_token_ids or bad_words.",
    ),
    Unbuilt(("--logprobs-mode",), str, ("raw_logprobs",), "Logprobs are those of the raw distribution; leave it out."),
    Unbuilt(("--io-processor-plugin",), str, ("",), _PLUGIN),
    Unbuilt(("--enable-prompt-embeds",), bool, (False,), _TEXT_ONLY),
    Unbuilt(("--enable-sleep-mode",), bool, (False,), "Sleep mode is not built yet; leave it out."),
    # -- load
    Unbuilt(
        ("--load-format",),
        str,
        ("auto", "hf", "safetensors", "gguf"),
        "Safetensors, PyTorch .bin and GGUF files are told apart by themselves; leave it at auto.",
    ),
    Unbuilt(
        ("--model-loader-extra-config",),
        _json,
        ({}, ""),
        "There is one loader, which maps the files; leave it out.",
    ),
    # -- parallel
    Unbuilt(("--tensor-parallel-size", "-tp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--pipeline-parallel-size", "-pp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--data-parallel-size", "-dp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--data-parallel-size-local", "-dpl"), int, (0, 1), _ONE_PROCESS),
    Unbuilt(("--data-parallel-rank", "-dpn"), int, (0,), _REPLICAS),
    Unbuilt(("--data-parallel-start-rank", "-dpr"), int, (0,), _REPLICAS),
    Unbuilt(("--data-parallel-backend", "-dpb"), str, ("mp",), _REPLICAS),
    Unbuilt(("--data-parallel-hybrid-lb", "-dph"), bool, (False,), _REPLICAS),
    Unbuilt(("--data-parallel-external-lb", "-dpe"), bool, (False,), _REPLICAS),
    Unbuilt(("--decode-context-parallel-size", "-dcp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--prefill-context-parallel-size", "-pcp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--nnodes",), int, (1,), _ONE_PROCESS),
    Unbuilt(("--node-rank",), int, (0,), "Octavo runs a model on one machine for now; leave it at 0."),
    Unbuilt(("--enable-expert-parallel", "-ep"), bool, (False,), _ONE_PROCESS),
    Unbuilt(
        ("--distributed-executor-backend",),
        str,
        ("uni", "mp"),
        "Ray and other executors are not built yet; leave it out.",
    ),
    Unbuilt(("--worker-use-ray",), bool, (False,), "Ray is not used; leave it out."),
    Unbuilt(("--worker-cls",), str, ("auto", ""), _PLUGIN),
    Unbuilt(("--worker-extension-cls",), str, ("",), _PLUGIN),
    # -- cache
    Unbuilt(("--cpu-offload-gb",), float, (0.0, 0), _OFFLOAD),
    Unbuilt(("--kv-offloading-size",), float, (0.0, 0), _KV_OFFLOAD),
    Unbuilt(("--kv-offloading-backend",), str, ("native",), _KV_OFFLOAD),
    # -- scheduler
    Unbuilt(
        ("--max-num-active-seqs",),
        int,
        (),
        "Sequences that run and sequences that hold memory are the same here; use --max-num-seqs.",
    ),
    Unbuilt(
        ("--max-num-scheduled-tokens",),
        int,
        (),
        "A step computes as many tokens as it schedules; use --max-num-batched-tokens.",
    ),
    Unbuilt(
        ("--max-num-queued-tokens",), int, (), "Queues are limited by requests; use --max-num-queued-reqs instead."
    ),
    Unbuilt(
        ("--long-prefill-token-threshold",),
        int,
        (0,),
        "The share of long prompts in a step follows from measured speed; leave it at 0.",
    ),
    Unbuilt(("--scheduler-cls",), str, ("",), _PLUGIN),
    Unbuilt(("--stream-interval",), int, (1,), "Streams send each token as it comes; leave it at 1."),
    # -- adapters, speculation, structured outputs, tools
    Unbuilt(("--enable-lora",), bool, (False,), _LORA),
    Unbuilt(("--lora-modules",), _json, ("", []), _LORA),
    Unbuilt(("--default-mm-loras",), _json, ({}, ""), _LORA),
    Unbuilt(("--speculative-config", "-sc"), _json, ({}, ""), _SPECULATION),
    Unbuilt(("--spec-method",), str, ("",), _SPECULATION),
    Unbuilt(("--spec-model",), str, ("",), _SPECULATION),
    Unbuilt(("--spec-tokens",), int, (0,), _SPECULATION),
    Unbuilt(("--speculative-model",), str, ("",), _SPECULATION),
    Unbuilt(("--num-speculative-tokens",), int, (0,), _SPECULATION),
    Unbuilt(("--structured-outputs-config",), _json, ({}, "", {"backend": "auto"}), _STRUCTURED),
    Unbuilt(("--reasoning-parser",), str, ("",), _REASONING),
    Unbuilt(("--reasoning-parser-plugin",), str, ("",), _REASONING),
    Unbuilt(("--enable-reasoning",), bool, (False,), _REASONING),
    Unbuilt(("--enable-auto-tool-choice",), bool, (False,), _TOOLS),
    Unbuilt(("--tool-call-parser",), str, ("",), _TOOLS),
    Unbuilt(("--tool-parser-plugin",), str, ("",), _TOOLS),
    Unbuilt(("--tool-server",), str, ("",), "Tools are run by the client; leave it out."),
    Unbuilt(
        ("--exclude-tools-when-tool-choice-none",),
        bool,
        (False,),
        "Tools always reach the chat template; leave it out and send no tools.",
    ),
    Unbuilt(("--tool-strict-level",), str, ("auto",), _TOOLS),
    # -- other inputs
    Unbuilt(("--limit-mm-per-prompt",), _json, ({}, ""), _TEXT_ONLY),
    Unbuilt(("--mm-processor-kwargs",), _json, ({}, ""), _TEXT_ONLY),
    Unbuilt(("--media-io-kwargs",), _json, ({}, ""), _TEXT_ONLY),
    # -- observability
    Unbuilt(
        ("--collect-detailed-traces",),
        str,
        ("",),
        "A trace has one span per request; leave it out, and see --otlp-traces-endpoint.",
    ),
    Unbuilt(("--log-config-file",), str, ("",), "Use --log-level, --log-format and --uvicorn-log-level instead."),
    Unbuilt(("--profiler-config",), _json, ({}, ""), "Profiling over HTTP is not built; use py-spy or perf."),
    # -- KV transfer
    Unbuilt(("--kv-transfer-config",), _json, ({}, ""), _KV_TRANSFER),
    Unbuilt(("--kv-events-config",), _json, ({}, ""), _KV_TRANSFER),
    Unbuilt(("--ec-transfer-config",), _json, ({}, ""), _KV_TRANSFER),
    # -- front end
    Unbuilt(("--api-server-count", "-asc"), int, (1,), "One front end serves; leave it at 1."),
    Unbuilt(("--headless",), bool, (False,), "Octavo runs a model on one machine for now; leave it out."),
    Unbuilt(("--grpc",), bool, (False,), "Only HTTP is served; leave it out."),
    Unbuilt(("--middleware",), str, ("",), _PLUGIN + " Put a proxy in front instead."),
    Unbuilt(
        ("--enable-ssl-refresh",),
        bool,
        (False,),
        "Certificates are read at start only; leave it out, and restart the server when they change.",
    ),
    Unbuilt(
        ("--enable-tokenizer-info-endpoint",),
        bool,
        (False,),
        "/tokenizer_info is not built; leave it out and use /tokenize.",
    ),
)

_COMPILED = "nothing is compiled at start"
_KERNELS = "each device has one set of kernels, chosen from the machine (see --device)"
_SINGLE = "there is one process on one machine"
_NO_LORA = "LoRA adapters are not built yet"
_NO_MEDIA = "only text goes in for now"
_NO_MAMBA = "no architecture with Mamba layers is built"
_NO_EXPERTS = "experts are not spread over devices"
_RECOMPUTED = "preempted requests are computed again, nothing is swapped"
_EVERY_STEP = "each step is scheduled by itself; --depth 2 overlaps two of them"
_STRUCTURED_LATER = "structured outputs are not built yet; requests will choose them with structured_outputs"
_METRICS = "/metrics has a fixed set of metrics, memory of the KV cache included"

NO_MEANING: tuple[NoMeaning, ...] = (
    # -- model
    NoMeaning(("--task",), "one", "the task follows from the model; today's flag is --runner"),
    NoMeaning(("--code-revision",), "one", "no code of a repository is run; see --revision"),
    NoMeaning(("--enforce-eager",), "nothing", _COMPILED),
    NoMeaning(("--max-seq-len-to-capture",), "one", "there is no length limit to the recorded step"),
    NoMeaning(("--allowed-local-media-path",), "one", _NO_MEDIA),
    NoMeaning(("--allowed-media-domains",), "several", _NO_MEDIA),
    NoMeaning(("--renderer-num-workers",), "one", "one front end renders and tokenizes"),
    # -- load
    NoMeaning(("--safetensors-load-strategy",), "one", "files are always mapped into memory"),
    NoMeaning(("--ignore-patterns",), "several", "only the files that are needed are fetched"),
    NoMeaning(("--use-tqdm-on-load",), "nothing", "a terminal gets a progress bar, a log file does not"),
    NoMeaning(("--pt-load-map-location",), "one", "weights are read where they are used"),
    NoMeaning(("--max-parallel-loading-workers",), "one", "weights are streamed"),
    # -- parallel
    NoMeaning(("--data-parallel-address", "-dpa"), "one", _SINGLE),
    NoMeaning(("--data-parallel-rpc-port", "-dpp"), "one", _SINGLE),
    NoMeaning(("--all2all-backend",), "one", _NO_EXPERTS),
    NoMeaning(("--enable-eplb",), "nothing", _NO_EXPERTS),
    NoMeaning(("--eplb-config",), "one", _NO_EXPERTS),
    NoMeaning(("--master-addr",), "one", _SINGLE),
    NoMeaning(("--master-port",), "one", _SINGLE),
    NoMeaning(("--disable-custom-all-reduce",), "nothing", _SINGLE),
    NoMeaning(("--enable-dbo",), "nothing", _SINGLE),
    NoMeaning(("--numa-bind",), "nothing", "threads are bound to the NUMA nodes anyway"),
    NoMeaning(("--numa-bind-nodes",), "several", "start the program with numactl --cpunodebind: threads follow it"),
    NoMeaning(("--numa-bind-cpus",), "several", "start the program with taskset: threads follow it"),
    # -- cache
    NoMeaning(("--swap-space",), "one", f"{_RECOMPUTED}; the cache is sized with --kv-cache-memory-bytes"),
    NoMeaning(("--prefix-caching-hash-algo",), "one", "known beginnings are found by SHA-256"),
    NoMeaning(("--offload-backend",), "one", "weights are not moved between devices"),
    NoMeaning(("--mamba-cache-dtype",), "one", _NO_MAMBA),
    NoMeaning(("--mamba-ssm-cache-dtype",), "one", _NO_MAMBA),
    NoMeaning(("--mamba-cache-mode",), "one", _NO_MAMBA),
    NoMeaning(("--mamba-block-size",), "one", _NO_MAMBA),
    NoMeaning(("--prefix-cache-retention-interval",), "one", "the beginnings used last are kept longest"),
    NoMeaning(
        ("--kv-sharing-fast-prefill",),
        "nothing",
        "layers that read the keys of another are computed for every token",
    ),
    NoMeaning(("--calculate-kv-scales",), "nothing", "scales come from the checkpoint; see --kv-cache-dtype"),
    NoMeaning(("--use-v2-block-manager",), "nothing", "there is one block manager"),
    NoMeaning(("--num-lookahead-slots",), "one", "blocks are taken as they are needed"),
    # -- scheduler
    NoMeaning(("--async-scheduling",), "nothing", "today's flag is --depth: 2 plans one step while another computes"),
    NoMeaning(("--num-scheduler-steps",), "one", _EVERY_STEP),
    NoMeaning(("--multi-step-stream-outputs",), "nothing", _EVERY_STEP),
    NoMeaning(("--preemption-mode",), "one", _RECOMPUTED),
    NoMeaning(("--max-num-partial-prefills",), "one", "prefills share each step already"),
    NoMeaning(("--max-long-partial-prefills",), "one", "prefills share each step already"),
    NoMeaning(
        ("--long-prefill-token-threshold-adaptive",),
        "nothing",
        "the share of long prompts in a step always follows from measured speed",
    ),
    NoMeaning(
        ("--scheduler-reserve-full-isl",), "nothing", "admission keeps room for what running requests may still need"
    ),
    NoMeaning(("--watermark",), "one", "admission keeps room for what running requests may still need"),
    NoMeaning(("--prefill-schedule-interval",), "one", "every step may take prompts"),
    NoMeaning(("--disable-hybrid-kv-cache-manager",), "nothing", "each kind of layer has its own blocks"),
    NoMeaning(("--disable-chunked-mm-input",), "nothing", _NO_MEDIA),
    # -- adapters
    NoMeaning(("--max-loras",), "one", _NO_LORA),
    NoMeaning(("--max-lora-rank",), "one", _NO_LORA),
    NoMeaning(("--max-cpu-loras",), "one", _NO_LORA),
    NoMeaning(("--lora-dtype",), "one", _NO_LORA),
    NoMeaning(("--lora-extra-vocab-size",), "one", _NO_LORA),
    NoMeaning(("--fully-sharded-loras",), "nothing", _NO_LORA),
    NoMeaning(("--lora-target-modules",), "several", _NO_LORA),
    # -- structured outputs
    NoMeaning(("--guided-decoding-backend",), "one", _STRUCTURED_LATER),
    NoMeaning(("--guided-decoding-disable-fallback",), "nothing", _STRUCTURED_LATER),
    NoMeaning(("--guided-decoding-disable-any-whitespace",), "nothing", _STRUCTURED_LATER),
    # -- other inputs
    NoMeaning(("--mm-processor-cache-gb",), "one", _NO_MEDIA),
    NoMeaning(("--mm-processor-cache-type",), "one", _NO_MEDIA),
    NoMeaning(("--mm-encoder-tp-mode",), "one", _NO_MEDIA),
    NoMeaning(("--disable-mm-preprocessor-cache",), "nothing", _NO_MEDIA),
    NoMeaning(("--language-model-only",), "nothing", _NO_MEDIA),
    NoMeaning(("--skip-mm-profiling",), "nothing", _NO_MEDIA),
    NoMeaning(("--video-pruning-rate",), "one", _NO_MEDIA),
    NoMeaning(("--trust-request-mm-kwargs",), "nothing", _NO_MEDIA),
    # -- compilation and kernels
    NoMeaning(("--optimization-level", "-O"), "one", _COMPILED),
    NoMeaning(("--compilation-config", "-cc"), "one", _COMPILED),
    NoMeaning(("--performance-mode",), "one", "steps are sized by measured speed"),
    NoMeaning(("--cudagraph-capture-sizes",), "several", _COMPILED),
    NoMeaning(("--cuda-graph-sizes",), "several", _COMPILED),
    NoMeaning(("--max-cudagraph-capture-size",), "one", _COMPILED),
    NoMeaning(("--attention-backend",), "one", _KERNELS),
    NoMeaning(("--attention-config", "-ac"), "one", _KERNELS),
    NoMeaning(("--kernel-config",), "one", _KERNELS),
    NoMeaning(("--moe-backend",), "one", _KERNELS),
    NoMeaning(("--linear-backend",), "one", _KERNELS),
    # -- observability
    NoMeaning(("--disable-log-requests",), "nothing", "requests are logged only with --enable-log-requests"),
    NoMeaning(("--kv-cache-metrics",), "nothing", _METRICS),
    NoMeaning(("--kv-cache-metrics-sample",), "one", _METRICS),
    NoMeaning(("--custom-histogram-buckets",), "one", _METRICS),
    NoMeaning(("--enable-mfu-metrics",), "nothing", _METRICS),
    NoMeaning(("--cudagraph-metrics",), "nothing", _METRICS),
    NoMeaning(("--show-hidden-metrics-for-version",), "one", _METRICS),
    NoMeaning(("--enable-logging-iteration-details",), "nothing", "throughput is logged every ten seconds"),
    # -- front end
    NoMeaning(("--enable-server-load-tracking",), "nothing", "/load always tells"),
    NoMeaning(("--enable-prompt-tokens-details",), "nothing", "usage always has them"),
    NoMeaning(("--enable-request-id-headers",), "nothing", "answers always have an X-Request-Id header"),
    NoMeaning(("--disable-frontend-multiprocessing",), "nothing", "the server's engine always runs in its own process"),
    NoMeaning(("--h11-max-incomplete-event-size",), "one", "see --max-request-bytes"),
    NoMeaning(("--h11-max-header-count",), "one", "see --max-request-bytes"),
    NoMeaning(("--enable-offline-docs",), "nothing", "see --disable-fastapi-docs"),
)
"""Options that change nothing here, and why."""


def keyword(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def refuse(option: Unbuilt, value: Any) -> str | None:
    """The sentence that says why `value` of this option cannot be had; None where it is neutral."""
    if option.is_neutral(value):
        return None
    return f"{keyword(option.flags[0])}={value!r} cannot be used: {option.sentence}"
