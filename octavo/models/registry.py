"""The architectures Octavo knows, by the name that config.json gives."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.models import gemma3, llama, mistral, qwen2, qwen3
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.names import Names


@dataclass(frozen=True)
class Architecture:
    """How to build a model and where its tensors come from."""

    make: Callable[[ModelConfig, int], Decoder]
    """(config, max_model_len) -> the model, unfilled."""
    names: Names
    ignore: tuple[str, ...] = ("*.rotary_emb.inv_freq", "rope_freqs.weight")
    """Checkpoint tensors that may be left unused (glob patterns)."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama.make, llama.NAMES),
    "MistralForCausalLM": Architecture(mistral.make, mistral.NAMES),
    "Qwen2ForCausalLM": Architecture(qwen2.make, qwen2.NAMES),
    "Qwen3ForCausalLM": Architecture(qwen3.make, qwen3.NAMES),
    "Gemma3ForCausalLM": Architecture(gemma3.make, gemma3.NAMES),
}


def find(raw: Mapping[str, Any]) -> tuple[str, Architecture]:
    """(name, architecture) of the first entry of config.json's `architectures` that is known.

    Raises ModelConfigError that says what the checkpoint is and what could be run.
    """
    wanted = raw.get("architectures")
    if not wanted or not isinstance(wanted, list):
        raise ModelConfigError(
            "the model's config names no architecture (key 'architectures'): is this a model folder? "
            f"model_type is {raw.get('model_type')!r}"
        )
    for name in wanted:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    near = difflib.get_close_matches(str(wanted[0]), ARCHITECTURES, 1, 0.8)
    hint = f" (the nearest is {near[0]})" if near else ""
    raise ModelConfigError(
        f"architecture {wanted[0]} is not supported yet{hint}; supported: {', '.join(sorted(ARCHITECTURES))}"
    )
