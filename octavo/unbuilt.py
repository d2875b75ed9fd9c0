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
        return self.flags[0].lstrip("-").replace("-", "_")

    def is_neutral(self, value: Any) -> bool:
        return value is None or any(value == calm and type(value) is type(calm) for calm in self.neutral)


def _json(text: str) -> Any:
    """JSON, or the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_ONE_PROCESS = "Octavo runs a model in one process on one machine for now; leave it at 1."
_STRUCTURED = "Structured outputs are not built yet; leave it out."
_TOOLS = "Tool calls are not parsed yet; leave it out and read them from the text."
_REASONING = "Reasoning is not parsed yet; leave it out and read it from the text."
_SPECULATION = "Speculative decoding is not built yet; leave it out."
_LORA = "LoRA adapters are not built yet; merge the adapter into the checkpoint."
_OFFLOAD = "Weights are not moved between devices; on a CPU they are in its memory already. Leave it at 0."
_TEXT_ONLY = "Only text goes in for now; leave it out."
_GENERATE_ONLY = "Only text generation is built so far; leave it at auto or generate."

UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt(("--tensor-parallel-size", "-tp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--pipeline-parallel-size", "-pp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--data-parallel-size", "-dp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--decode-context-parallel-size", "-dcp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--prefill-context-parallel-size", "-pcp"), int, (1,), _ONE_PROCESS),
    Unbuilt(("--nnodes",), int, (1,), _ONE_PROCESS),
    Unbuilt(("--api-server-count", "-asc"), int, (1,), "One front end serves; leave it at 1."),
    Unbuilt(("--enable-expert-parallel", "-ep"), bool, (False,), _ONE_PROCESS),
    Unbuilt(
        ("--distributed-executor-backend",),
        str,
        ("uni", "mp"),
        "Ray and other executors are not built yet; leave it out.",
    ),
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
        ("--load-format",),
        str,
        ("auto", "hf", "safetensors", "gguf"),
        "Safetensors, PyTorch .bin and GGUF files are told apart by themselves; leave it at auto.",
    ),
    Unbuilt(("--model-impl",), str, ("auto", "vllm"), "Octavo runs its own implementation; leave it at auto."),
    Unbuilt(("--hf-overrides",), _json, ({}, ""), "The checkpoint's config is taken as it is; edit its config.json."),
    Unbuilt(
        ("--logits-processors",),
        str,
        ("",),
        "Custom logits processors are not built yet; use logit_bias, allowed_token_ids or bad_words.",
    ),
    Unbuilt(("--logprobs-mode",), str, ("raw_logprobs",), "Logprobs are those of the raw distribution; leave it out."),
    Unbuilt(("--enable-lora",), bool, (False,), _LORA),
    Unbuilt(("--lora-modules",), _json, ("", []), _LORA),
    Unbuilt(("--speculative-config", "-sc"), _json, ({}, ""), _SPECULATION),
    Unbuilt(("--spec-method",), str, ("",), _SPECULATION),
    Unbuilt(("--spec-model",), str, ("",), _SPECULATION),
    Unbuilt(("--spec-tokens",), int, (0,), _SPECULATION),
    Unbuilt(("--speculative-model",), str, ("",), _SPECULATION),
    Unbuilt(("--enable-auto-tool-choice",), bool, (False,), _TOOLS),
    Unbuilt(("--tool-call-parser",), str, ("",), _TOOLS),
    Unbuilt(("--tool-parser-plugin",), str, ("",), _TOOLS),
    Unbuilt(("--reasoning-parser",), str, ("",), _REASONING),
    Unbuilt(("--structured-outputs-config",), _json, ({}, "", {"backend": "auto"}), _STRUCTURED),
    Unbuilt(("--cpu-offload-gb",), float, (0.0, 0), _OFFLOAD),
    Unbuilt(("--kv-offloading-size",), float, (0.0, 0), "KV blocks are not offloaded yet; leave it out."),
    Unbuilt(("--kv-transfer-config",), _json, ({}, ""), "KV transfer is not built yet; leave it out."),
    Unbuilt(("--limit-mm-per-prompt",), _json, ({}, ""), _TEXT_ONLY),
    Unbuilt(("--mm-processor-kwargs",), _json, ({}, ""), _TEXT_ONLY),
    Unbuilt(("--enable-prompt-embeds",), bool, (False,), _TEXT_ONLY),
    Unbuilt(("--enable-sleep-mode",), bool, (False,), "Sleep mode is not built yet; leave it out."),
    Unbuilt(
        ("--long-prefill-token-threshold",),
        int,
        (0,),
        "The share of long prompts in a step follows from measured speed; leave it at 0.",
    ),
    Unbuilt(
        ("--rope-scaling",), _json, ({}, ""), "RoPE scaling is read from the checkpoint's config.json; put it there."
    ),
    Unbuilt(("--rope-theta",), float, (), "The RoPE base is read from the checkpoint's config.json; put it there."),
)

NO_MEANING: dict[str, tuple[Callable[[str], Any], str]] = {
    "--swap-space": (str, "preempted requests are computed again, nothing is swapped"),
    "--task": (str, "the task follows from the model"),
    "--code-revision": (str, "no code of a repository is run"),
    "--disable-log-requests": (bool, "requests are logged only with --enable-log-requests"),
    "--enable-server-load-tracking": (bool, "/load always tells"),
    "--enable-prompt-tokens-details": (bool, "usage always has them"),
    "--enable-request-id-headers": (bool, "answers always have an X-Request-Id header"),
    "--use-v2-block-manager": (bool, "there is one block manager"),
    "--enforce-eager": (bool, "nothing is compiled at start"),
    "--max-seq-len-to-capture": (int, "there is no length limit to the recorded step"),
    "--num-scheduler-steps": (int, "each step is scheduled by itself"),
    "--multi-step-stream-outputs": (bool, "each step is scheduled by itself"),
    "--preemption-mode": (str, "preempted requests are computed again"),
    "--num-lookahead-slots": (int, "blocks are taken as they are needed"),
    "--guided-decoding-backend": (str, "structured outputs are not built yet"),
    "--disable-custom-all-reduce": (bool, "there is one process"),
    "--worker-use-ray": (bool, "there is one process"),
    "--max-parallel-loading-workers": (int, "weights are streamed"),
    "--max-num-partial-prefills": (int, "prefills share each step already"),
    "--async-scheduling": (bool, "see --depth"),
    "--compilation-config": (_json, "nothing is compiled at start"),
    "--optimization-level": (str, "nothing is compiled at start"),
    "--disable-frontend-multiprocessing": (bool, "the server's engine always runs in its own process"),
    "--calculate-kv-scales": (bool, "KV scales are not used"),
}
"""Options that change nothing here, how to read them, and why."""


def keyword(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def refuse(option: Unbuilt, value: Any) -> str | None:
    """The sentence that says why `value` of this option cannot be had; None where it is neutral."""
    if option.is_neutral(value):
        return None
    return f"{keyword(option.flags[0])}={value!r} cannot be used: {option.sentence}"
