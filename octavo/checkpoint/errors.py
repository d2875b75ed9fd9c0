"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint cannot be read: the message names the file, the cause and what to do."""


@contextmanager
def believing(what: str) -> Iterator[None]:
    """Around the reading of values that a file may have wrong in more ways than are checked one by one: what is of an
    impossible type or size becomes a CheckpointError that names `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} holds a value that cannot be right ({type(error).__name__}: {error}). Download the file again."
        ) from error
