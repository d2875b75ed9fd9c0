"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be read: the message names the file, the cause and what to do."""
