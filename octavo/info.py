"""What a started engine says of itself: plain data that crosses from the engine's process to the front end."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, kw_only=True):
    """Facts of the model being served, fixed from the moment it is ready."""

    model: str
    """As the user named it: repository, folder or file."""
    path: str = ""
    """Where its files lie on this machine."""
    architecture: str = ""
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    block_size: int = 16
    kv_blocks: list[int] = []
    """KV blocks per KV group."""
    kv_bytes: int = 0
    kv_dtype: str = ""
    weight_bytes: int = 0
    quantization: str | None = None
    """The method of the checkpoint, or what was done while it was loaded; None for GGUF files and plain floats."""
    device: str = ""
    notes: list[str] = []
    """The sentences start-up prints."""
    created: int = 0
    """Seconds since the epoch at which the model became ready."""
