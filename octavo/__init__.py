"""Octavo serves large language models.

Everything public is here; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.llm import LLM
    from octavo.offline.inputs import PromptType, TextPrompt, TokensPrompt
    from octavo.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
    from octavo.sampling_params import (
        BeamSearchParams,
        ParameterError,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "Logprob",
    "ParameterError",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "octavo.config": ("EngineConfig",),
    "octavo.offline.inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "octavo.llm": ("LLM",),
    "octavo.outputs": ("BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestOutput"),
    "octavo.sampling_params": (
        "BeamSearchParams",
        "ParameterError",
        "RepetitionDetectionParams",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
