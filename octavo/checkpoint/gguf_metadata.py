"""Typed look-ups in the metadata of a GGUF file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.errors import CheckpointError


class Metadata:
    """The metadata of one file, the shapes of its tensors by its own names, and the numbers of those about RoPE; `own`
    keys are those that start with the architecture's name. Raises CheckpointError where a value is missing or of
    another type."""

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        rotary: Mapping[str, list[float]],
    ) -> None:
        self.path = path
        self.values = values
        self.shapes = shapes
        self.rotary = rotary
        self.architecture = self.text("general.architecture")

    @functools.cached_property
    def layers(self) -> int:
        """Without those after the last that predict further tokens at once."""
        return max(0, self.integer("block_count") - self.integer("nextn_predict_layers", 0))

    def is_beyond(self, name: str) -> bool:
        """Whether a tensor is of a layer that predicts further tokens at once."""
        if not self.own("nextn_predict_layers"):
            return False
        _, _, rest = name.partition("blk.")
        layer = rest.partition(".")[0]
        return layer.isdecimal() and int(layer) >= self.layers

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise CheckpointError(
                f"{self.path}: the metadata {key!r} is {_said(value)}, not a text. Convert the model again."
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if type(value) is not int or value < 0:
            raise self._not_one_number(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if type(value) not in (int, float):
            raise self._not_one_number(key, value)
        return float(value)

    def plain(self, key: str) -> int | float | bool | None:
        """The number or truth under an own key, of whatever type; None where there is none."""
        value = self.own(key)
        if value is not None and not isinstance(value, int | float):
            raise self._not_one_number(key, value)
        return value

    def own(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def per_layer(self, key: str) -> list[Any] | None:
        """The array under a key (in full), a value per layer; None where there is none, or one value for all."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray):
            return None
        if len(value) != self.layers:
            raise CheckpointError(
                f"{self.path}: the metadata {key!r} is {_said(value)} for {self.layers} layers. Convert the model "
                "again."
            )
        return list(value.tolist())

    def has(self, part: str) -> bool:
        """Whether the first layer has this tensor."""
        return f"blk.0.{part}" in self.shapes

    def layers_with(self, part: str) -> list[int]:
        """Which layers have this tensor."""
        return [i for i in range(self.layers) if f"blk.{i}.{part}" in self.shapes]

    def width(self, part: str) -> int:
        """Columns of this tensor in the first layer that has it; 0 where none has."""
        found = self.layers_with(part)
        return self.shapes[f"blk.{found[0]}.{part}"][-1] if found else 0

    def _not_one_number(self, key: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the metadata '{self.architecture}.{key}' is {_said(value)}, not one number. Convert the "
            f"model again."
        )


def _said(value: Any) -> str:
    if value is None:
        return "missing"
    return f"an array of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, str) else repr(value)
