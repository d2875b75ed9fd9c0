"""What a user may say: one flat, frozen value. Flags, help, keyword arguments and checks all come from its fields.

This is the only module that reads environment variables: OCTAVO_CACHE, XDG_CACHE_HOME, OCTAVO_API_KEY, VLLM_API_KEY,
OMP_NUM_THREADS, and for the command line OCTAVO_ and the name of any option, such as OCTAVO_MAX_MODEL_LEN.
The native kernels read OCTAVO_CPU_KERNELS themselves, when they are chosen.
Those of the model hub (HF_TOKEN, HF_HUB_OFFLINE, HF_HOME) are left to its library; `octavo collect-env` shows them.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.unbuilt import NO_MEANING, UNBUILT, refuse

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
"""An alias that the build step turns into a small instruct model."""

TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""How booleans are written in text."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ConfigError(ValueError):
    """An option is unknown, out of its range, or not built."""


def count(text: str) -> int:
    """A whole number in vLLM's short form: 1k = 1000, 1K = 1024, 25.6k = 25600."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kmgtKMGT]?)\s*", text)
    if not match:
        raise ConfigError(f"{text!r} is not a number such as 4096, 4k (4000) or 4K (4096)")
    value = float(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number")
    return int(value)


def length(text: str) -> int:
    """A `count`, or -1 for "auto"."""
    return -1 if text.strip().lower() == "auto" else count(text)


def size(text: str) -> int:
    """Bytes: 2G and 2GiB are 2 * 2**30, 2GB and 2g are 2 * 10**9, a plain number is bytes."""
    match = re.fullmatch(r"\s*([\d.]+\s*)([kmgtKMGT]?)(ib|i|b)?\s*", text, re.IGNORECASE)
    if match:
        number, letter, suffix = match[1], match[2], (match[3] or "").lower()
        letter = {"": letter, "b": letter.lower()}.get(suffix, letter.upper())
        try:
            return count(number + letter)
        except ConfigError:
            pass
    raise ConfigError(f"{text!r} is not a size such as 2G, 512MiB or 1073741824")


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r} is not a JSON object")
    return value


def _about(
    group: str,
    help: str,
    *,
    kind: Callable[[str], Any] = str,
    flags: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    several: bool = False,
    least: float = -math.inf,
    most: float = math.inf,
) -> dict[str, Any]:
    """Everything the command line and the checks need to know of an option; `kind` reads its text."""
    return {
        "group": group,
        "help": help,
        "kind": kind,
        "flags": flags,
        "choices": choices,
        "several": several,
        "least": least,
        "most": most,
    }


def _option(default: Any, group: str, help: str, *, secret: bool = False, **about: Any) -> Any:
    """A field of `EngineConfig`; the rest is for `_about`."""
    return field(default=default, metadata=_about(group, help, **about), repr=not secret)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of a model and of the server before it; None means "decide from the model and the machine".

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    # -- model
    model: str = _option(DEFAULT_MODEL, "model", "Repository name, folder, or GGUF file.")
    served_model_name: tuple[str, ...] = _option(
        (), "model", "Names clients may use; the first one is reported. Default: the model's.", several=True
    )
    tokenizer: str | None = _option(None, "model", "Repository or folder of the tokenizer. Default: the model's.")
    revision: str | None = _option(None, "model", "Branch, tag or commit of the model repository.")
    tokenizer_revision: str | None = _option(None, "model", "Branch, tag or commit of the tokenizer repository.")
    trust_remote_code: bool = _option(
        False, "model", "Accepted for vLLM's sake; no code of a repository is run.", kind=bool
    )
    hf_token: str | None = _option(
        None, "model", "Token for private repositories. Default: the hub's own login.", secret=True
    )
    download_dir: str | None = _option(None, "model", "Where downloads go. Default: the hub's cache.")
    converted_cache_bytes: int = _option(
        32 * 2**30,
        "model",
        "Most that weights which take work to read (quantized while loading, several tensors each, rewritten) may take "
        "on disk, in the cache folder, so that later starts find them: 50G; 0 keeps none.",
        kind=size,
        least=0,
    )
    dtype: str = _option(
        "auto",
        "model",
        "float32 computes with float32 activations and a float32 KV cache; with any "
        "value weights stay as they are stored and sums are float32.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = _option(
        None,
        "model",
        "bitsandbytes, fp8, fp8_per_block, int4, int8: what to do to the floats of a checkpoint while it is loaded. "
        "Default: its weights stay as they are. Of a quantized checkpoint, what it is: auto-round, awq, bitsandbytes, "
        "compressed-tensors, fbgemm_fp8, fp8, gguf, gptq, hqq, modelopt, mxfp4, quanto, torchao.",
        flags=("-q",),
    )
    max_model_len: int | None = _option(
        None,
        "model",
        "Prompt and output tokens of one request: 4096, 4k, 4K; auto or "
        "-1 fits it to the memory. Default: the model's own.",
        kind=length,
        least=-1,
    )
    seed: int = _option(0, "model", "Seed of the random numbers.", kind=int)
    max_logprobs: int = _option(
        20, "model", "Most logprobs a request may ask per token; -1: no limit.", kind=int, least=-1
    )
    generation_config: str = _option(
        "auto",
        "model",
        "Where default sampling parameters come from: auto (the model's "
        "generation_config.json), vllm (none), or a folder.",
    )
    override_generation_config: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about(
            "model", "JSON object of default sampling parameters that win over the generation config.", kind=mapping
        ),
    )

    # -- cache
    block_size: int = _option(16, "cache", "Tokens per KV block.", kind=int, choices=(16, 32, 64, 128))
    kv_cache_dtype: str = _option(
        "auto",
        "cache",
        "Type of keys and values: auto (float16, or what the checkpoint says), float16, float32, 8-bit floats (fp8 is "
        "fp8_e4m3), or 8-bit integers with a scale for each token and head (int8 is int8_per_token_head).",
        choices=("auto", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"),
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "cache",
        "Memory of the KV cache: 2G, 512MiB. Default: what "
        "max-num-seqs full contexts need, at most a share of free memory.",
        kind=size,
        least=1,
    )
    num_gpu_blocks_override: int | None = _option(
        None, "cache", "Number of KV blocks, whatever the memory.", kind=int, least=1
    )
    gpu_memory_utilization: float = _option(
        0.92,
        "cache",
        "Share of a GPU's memory to use; the CPU's is set with --kv-cache-memory-bytes.",
        kind=float,
        flags=("--device-memory-utilization",),
        least=0.0,
        most=1.0,
    )
    enable_prefix_caching: bool = _option(True, "cache", "Reuse the KV of a prompt's known beginning.", kind=bool)

    # -- scheduler
    max_num_seqs: int = _option(
        128, "scheduler", "Sequences that run at once; no more than --max-num-batched-tokens.", kind=count, least=1
    )
    max_num_batched_tokens: int = _option(2048, "scheduler", "Tokens computed in one step.", kind=count, least=1)
    enable_chunked_prefill: bool = _option(
        True, "scheduler", "Let long prompts share steps with other work.", kind=bool
    )
    scheduling_policy: str = _option(
        "fcfs", "scheduler", "Order of waiting requests: by arrival, or by priority.", choices=("fcfs", "priority")
    )
    depth: int = _option(
        1, "scheduler", "Steps in flight; 2 plans one step while another computes.", kind=int, choices=(1, 2)
    )

    # -- device
    device: str = _option("auto", "device", "Where the model runs.", choices=("auto", "cpu", "reference"))
    threads: int | None = _option(
        None,
        "device",
        "Compute threads. Default: OMP_NUM_THREADS, else the cores this process may use.",
        kind=int,
        least=1,
    )
    cpu_activations: str = _option(
        "auto",
        "device",
        "Type of activations in matrix products on the CPU; float32 is the most exact, int8 the fastest.",
        choices=("auto", "float32", "int16", "bfloat16", "int8"),
    )

    # -- server
    host: str = _option("0.0.0.0", "server", "Address to listen on.")
    port: int = _option(8000, "server", "Port to listen on.", kind=int, least=0, most=65535)
    api_key: tuple[str, ...] = _option(
        (),
        "server",
        "Keys of which a client must send one. Also from OCTAVO_API_KEY or VLLM_API_KEY.",
        several=True,
        secret=True,
    )
    uds: str | None = _option(None, "server", "Unix socket to listen on, instead of --host and --port.")
    root_path: str | None = _option(None, "server", "Path under which a proxy publishes the server.")
    ssl_keyfile: str | None = _option(None, "server", "TLS key file.")
    ssl_certfile: str | None = _option(None, "server", "TLS certificate file.")
    ssl_ca_certs: str | None = _option(None, "server", "File of authorities that client certificates must come from.")
    ssl_cert_reqs: int = _option(
        0, "server", "Client certificates: 0 not asked for, 1 optional, 2 required.", kind=int, choices=(0, 1, 2)
    )
    ssl_ciphers: str | None = _option(None, "server", "TLS ciphers, as OpenSSL writes them.")
    allowed_origins: tuple[str, ...] = _option((), "server", "Origins that browsers may call from, or *.", several=True)
    allowed_methods: tuple[str, ...] = _option(("*",), "server", "Methods that browsers may use.", several=True)
    allowed_headers: tuple[str, ...] = _option(("*",), "server", "Headers that browsers may send.", several=True)
    allow_credentials: bool = _option(False, "server", "Whether browsers may send cookies along.", kind=bool)
    disable_fastapi_docs: bool = _option(False, "server", "No /docs and no /openapi.json.", kind=bool)
    sse_keep_alive_interval: float = _option(
        15.0,
        "server",
        "Seconds without an event after which a stream sends a comment, so that proxies keep it open; 0: never.",
        kind=float,
        least=0.0,
    )
    shutdown_timeout: float = _option(
        0.0, "server", "Seconds that running requests get to finish after SIGTERM.", kind=float, least=0.0
    )
    watchdog_timeout: float = _option(
        300.0,
        "server",
        "Seconds after which a step of the engine counts as hung: its process is ended and started again; 0: never.",
        kind=float,
        least=0.0,
    )

    # -- requests
    max_request_bytes: int = _option(32 * 2**20, "requests", "Largest request body.", kind=size, least=1)
    max_num_queued_reqs: int | None = _option(
        None,
        "requests",
        "Requests in progress above which the server answers 503. Default: no limit.",
        kind=count,
        least=1,
    )
    max_num_reqs_per_key: int | None = _option(
        None,
        "requests",
        "Requests that one API key may have in progress; more get a 429. Default: no limit.",
        kind=count,
        least=1,
    )
    request_timeout: float | None = _option(
        None,
        "requests",
        "Seconds a request may take; then it ends with a 408, a stream with an error event (a request may ask for "
        "less with `timeout`). Default: no limit.",
        kind=float,
        least=0.001,
    )
    chat_template: str | None = _option(
        None, "requests", "Chat template (Jinja), or a file that holds it. Default: the model's."
    )
    chat_template_content_format: str = _option(
        "auto",
        "requests",
        "How a message's content reaches the template: as text, or as a list of parts.",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("requests", "JSON object of variables for the chat template.", kind=mapping),
    )
    trust_request_chat_template: bool = _option(
        False,
        "requests",
        "Let requests bring a chat template of their own: a Jinja program, run in a sandbox in a process of its own.",
        kind=bool,
    )
    response_role: str = _option("assistant", "requests", "Role of answers in chat.")
    return_tokens_as_token_ids: bool = _option(
        False, "requests", "Write tokens in logprobs as token_id:N, unless a request says otherwise.", kind=bool
    )
    enable_force_include_usage: bool = _option(
        False, "requests", "End every stream with its usage, asked for or not.", kind=bool
    )
    enable_per_request_metrics: bool = _option(
        False, "requests", "Add the times of a request to its answer, as `metrics`.", kind=bool
    )

    # -- observability
    log_level: str = _option(
        "info", "observability", "Log level of Octavo.", choices=("error", "warning", "info", "debug")
    )
    log_format: str = _option(
        "text", "observability", "Log lines as text, or as one JSON object each.", choices=("text", "json")
    )
    uvicorn_log_level: str = _option(
        "info",
        "observability",
        "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    disable_uvicorn_access_log: bool = _option(False, "observability", "Do not log each HTTP request.", kind=bool)
    disable_log_stats: bool = _option(
        False, "observability", "Do not log throughput and memory every ten seconds.", kind=bool
    )
    enable_log_requests: bool = _option(
        False, "observability", "Log each request: its id, its parameters and its prompt.", kind=bool
    )
    enable_log_outputs: bool = _option(
        False, "observability", "Log each answer too; needs --enable-log-requests.", kind=bool
    )
    max_log_len: int | None = _option(
        None, "observability", "Characters or tokens of a prompt or answer to log. Default: all.", kind=int, least=0
    )
    otlp_traces_endpoint: str | None = _option(
        None,
        "observability",
        "URL of an OpenTelemetry collector that gets a trace of each request; needs the `otel` extra.",
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            object.__setattr__(self, option.name, _checked(option.name, value, option.default, option.metadata))
        if self.max_num_batched_tokens < self.max_num_seqs:  # each running sequence needs a token per step
            logger.info("max_num_seqs is %s, as many as max_num_batched_tokens", self.max_num_batched_tokens)
            object.__setattr__(self, "max_num_seqs", self.max_num_batched_tokens)
        if self.max_model_len == 0:
            raise ConfigError("max_model_len must be at least 1, or -1 to fit it to the memory, got 0.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: give both or none.")
        if self.max_num_reqs_per_key is not None and not self.api_key:
            raise ConfigError("max_num_reqs_per_key counts by API key: give an api_key, or use max_num_queued_reqs.")
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ConfigError("enable_log_outputs needs enable_log_requests.")

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """From vLLM's keyword arguments, those that Octavo does not have included. None means the default.

        Raises:
            TypeError: an argument nobody knows.
            ConfigError: a wrong value, or one whose effect is not built.
        """
        known = {option.name for option in fields(cls)}
        unbuilt = {option.keyword: option for option in UNBUILT}
        passed = {option.keyword: option.reason for option in NO_MEANING}
        given = {}
        for name, value in keywords.items():
            if name in known and value is None:
                continue
            if name in known:
                given[name] = value
            elif name in unbuilt:
                if sentence := refuse(unbuilt[name], value):
                    raise ConfigError(sentence)
            elif name in passed:
                logger.warning("%s has no effect here: %s.", name, passed[name])
            else:
                near = difflib.get_close_matches(name, [*known, *unbuilt], n=2)
                raise TypeError(
                    f"There is no option {name!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
                )
        return cls(**given)


def read_option(name: str, value: Any) -> Any:
    """The value of an option that was written in a config file or an environment variable, where numbers and booleans
    may be text.

    Raises:
        ConfigError: it has the wrong type or is out of range.
    """
    option = next(option for option in fields(EngineConfig) if option.name == name)
    if isinstance(value, str) and not option.metadata["several"]:
        value = _from_text(name, value, option.metadata["kind"])
    return _checked(name, value, option.default, option.metadata)


def _from_text(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    if kind is bool:
        try:
            return TRUTH[text.strip().lower()]
        except KeyError:
            raise ConfigError(f"{name} must be true or false, got {text!r}.") from None
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name} must be {wanted}, got {text!r}.") from None
    return text


def _checked(name: str, value: Any, default: Any, metadata: Any) -> Any:
    """`value` with the type of its option: text is read as on the command line, lists become tuples."""
    kind = metadata["kind"]
    if metadata["several"]:
        if not isinstance(value, str | list | tuple | None):
            raise ConfigError(f"{name} must be a list of strings, got {value!r}.")
        value = (value,) if isinstance(value, str) else tuple(value or ())
        if len(value) == 1 and isinstance(value[0], str) and value[0].startswith("["):
            value = tuple(_json_list(name, value[0]))
        if not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of strings, got {value!r}.")
        if not all(item.strip() and _is_text(item) for item in value):
            raise ConfigError(f"{name} must not be empty, and UTF-8: leave it out, or give a text.")
        return value
    if value is None and default is None:
        return None
    if isinstance(value, str) and kind in (count, length, size, mapping):
        try:
            value = kind(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}.") from None
    if name in ("model", "tokenizer", "download_dir", "chat_template") and isinstance(value, Path):
        value = str(value)
    wanted = {count: int, length: int, size: int, mapping: dict}.get(kind, kind)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{name} must be {'text' if wanted is str else wanted.__name__}, got {value!r}.")
    if wanted is dict:
        return _plain(name, value)
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, metadata['choices']))}, got {value!r}.")
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{name} must be less than 2**63.")
    if isinstance(value, str) and not _is_text(value):
        raise ConfigError(f"{name} must be UTF-8 text, got {value!r}.")
    if isinstance(value, (int, float)) and not metadata["least"] <= value <= metadata["most"]:
        bound = f"at least {metadata['least']}" if value < metadata["least"] else f"at most {metadata['most']}"
        raise ConfigError(f"{name} must be {bound}, got {value}.")
    return value


def _plain(name: str, value: dict[Any, Any]) -> dict[str, Any]:
    """`value` as JSON holds it, which is what reaches other processes and templates."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be what a JSON object can hold: {error}.") from None
    if not _is_text(text):
        raise ConfigError(f"{name} must be UTF-8 text, got {value!r}.")
    return dict(json.loads(text))


def _is_text(value: str) -> bool:
    """Whether `value` can be sent to another process: an argument that is not UTF-8 holds halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _json_list(name: str, text: str) -> list[Any]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} is not a JSON list: {error}.") from None
    return list(items)


def environment_api_key() -> tuple[str, ...]:
    """The key from OCTAVO_API_KEY, or VLLM_API_KEY; empty where neither is set."""
    key = os.environ.get("OCTAVO_API_KEY") or os.environ.get("VLLM_API_KEY")
    return (key,) if key else ()


def environment_options() -> dict[str, str]:
    """What the variables OCTAVO_<NAME> say, by name in small letters, except those that are no options. Empty ones
    count as not set, and so do those that Kubernetes makes for a service called octavo (OCTAVO_PORT=tcp://...)."""
    return {
        name.removeprefix("OCTAVO_").lower(): text
        for name, text in os.environ.items()
        if name.startswith("OCTAVO_") and name not in ("OCTAVO_CACHE", "OCTAVO_API_KEY", "OCTAVO_CPU_KERNELS")
        if text.strip() and not _OF_KUBERNETES.search(f"{name}={text}")
    }


_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?=|_PORT_\d+_(TCP|UDP|SCTP)|=(tcp|udp|sctp)://")


def environment_threads() -> int | None:
    """The number of threads in OMP_NUM_THREADS; None where it holds no single positive number."""
    text = os.environ.get("OMP_NUM_THREADS") or ""
    return int(text) if re.fullmatch(r"0*[1-9]\d{0,4}", text) else None


_TELLING = re.compile(
    r"(OCTAVO|HF|HUGGING_FACE|OMP|GOMP|KMP|MALLOC|CUDA|NVIDIA)_\w+|VLLM_API_KEY|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH"
    r"|XDG_CACHE_HOME|(HTTPS?|ALL|NO)_PROXY|LANG|LC_ALL",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"(^|_)(KEYS?|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)$", re.IGNORECASE)
_SECRET_TEXT = re.compile(r"(?<=://)[^/\s]+(?=@)|\b(?:hf_|sk-)[\w-]{8,}")
"""The login in a URL, and keys by how they begin."""


def telling_variables() -> dict[str, str]:
    """The environment variables that may change what happens, for a bug report: secrets are shown as ***."""
    return {
        name: "***" if text and _SECRET_NAME.search(name) else _SECRET_TEXT.sub("***", text)
        for name, text in sorted(os.environ.items())
        if _TELLING.fullmatch(name)
    }


def cache_dir() -> Path:
    """Where Octavo keeps what it may rebuild: OCTAVO_CACHE, or `octavo` in the user's cache folder."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
