"""What `octavo inspect` tells of a model, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensors:
    """Those of one part of the model that are stored in one format."""

    part: str
    format: str
    count: int
    parameters: int
    bytes: int
    """In the files."""


@dataclass(frozen=True)
class TextFacts:
    tokenizer: str
    """Its kind, in words."""
    vocabulary: int
    chat_template: bool
    special: dict[str, int]
    """Ids of the tokens with a name ("bos_token") that the vocabulary has."""
    ends: tuple[int, ...]
    """Ids that end an answer."""
    adds_bos: bool
    """Whether plain text gets a begin-of-sequence token."""


@dataclass(frozen=True)
class Memory:
    """What runs in one place, and what it takes there; bytes."""

    place: str
    """In words: this machine, or which part of which GPUs."""
    available: int | None
    """For all of it; None where it was not asked."""
    weights: int
    """As they are multiplied with."""
    activations: int | None
    """Buffers of a step and scratch memory; None where it cannot be told."""
    max_model_len: int
    max_num_seqs: int
    kv_heads: int
    kv_per_token: int
    """In all layers together, while no window has passed it."""
    kv_per_sequence: int
    """Of max_model_len tokens."""
    kv_total: int
    kv_tokens: int
    sequences: int
    """How many of max_model_len tokens have room at once."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    model: str
    path: str
    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope: str
    """In words."""
    windows: dict[str, int]
    """What layers see -> how many see so."""
    experts: int
    experts_per_token: int
    parameters: int
    active_parameters: int
    """That a token is multiplied with: of a mixture the experts it is sent to, not the others."""
    file_bytes: int
    """Of all tensors."""
    tied: bool
    """Whether the head is the embedding table."""
    tensors: tuple[Tensors, ...]
    text: TextFacts | None
    notes: tuple[str, ...]
    """What start-up prints of the weights."""
    memory: tuple[Memory, ...]
    warnings: tuple[str, ...]
