"""What a tiny random checkpoint is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A model of transformers with a small config."""

    family: str
    """Names transformers' classes: "Llama" -> LlamaConfig and LlamaForCausalLM."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What the config has beside, or in place of, `tests.models.tiny.COMMON`."""
    config: str = ""
    """Name of the config's class, where it does not follow from the family."""
    model: str = ""
    """Name of the model's class, likewise."""
    common: bool = True
    """False: the config is `changes` alone (families with words of their own)."""
    adjust: Callable[[Any], None] | None = None
    """Changes parameters that would otherwise have no effect, such as a router's correction that starts at 0."""
    rewrite: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    """Turns (config, tensors) as saved into another layout of the same model, in place: how to test a family that
    transformers does not have against one that computes the same."""
