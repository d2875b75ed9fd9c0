"""Typed look-ups in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.errors import CheckpointError


class Metadata:
    """The metadata of one file, and the shapes of its tensors by its own names; `own` keys are those that start with
    the architecture's name. Raises CheckpointError where a value is missing or of another type."""

    def __init__(self, path: Path, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self.values = values
        self.shapes = shapes
        self.architecture = self.text("general.architecture")

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

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """The array under an own key, of `layers` values; None where there is none, or one value for all."""
        value = self.own(key)
        if not isinstance(value, np.ndarray):
            return None
        if len(value) != layers:
            raise CheckpointError(
                f"{self.path}: the metadata '{self.architecture}.{key}' is {_said(value)} for {layers} layers. Convert "
                f"the model again."
            )
        return list(value.tolist())

    def has(self, part: str) -> bool:
        """Whether the first layer has this tensor."""
        return f"blk.0.{part}" in self.shapes

    def _not_one_number(self, key: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the metadata '{self.architecture}.{key}' is {_said(value)}, not one number. Convert the "
            f"model again."
        )


def _said(value: Any) -> str:
    if value is None:
        return "missing"
    return f"an array of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, str) else repr(value)
