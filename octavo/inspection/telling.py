"""How it is told: to people, and to programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.inspection.facts import Inspection, Memory


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Plain values; sizes are bytes."""
    return asdict(inspection)


def as_text(found: Inspection) -> str:
    """For people."""
    facts: list[tuple[str, str]] = [
        ("model", found.model if found.model == found.path else f"{found.model} ({found.path})"),
        (
            "architecture",
            f"{found.architecture}, {found.layers} layers of {found.hidden_size}, vocabulary {found.vocabulary}",
        ),
        ("attention", f"{found.heads} heads, {found.kv_heads} KV heads of {found.head_dim}"),
        ("layers see", ", ".join(f"{what} ({count} layers)" for what, count in found.windows.items())),
        ("context", f"{found.context} tokens"),
        ("RoPE", found.rope),
    ]
    if found.experts:
        facts.append(("experts", f"{found.experts}, of which a token takes {found.experts_per_token}"))
    active = f", {_count(found.active_parameters)} active" if found.active_parameters != found.parameters else ""
    facts.append(("parameters", f"{_count(found.parameters)}{active}"))
    if found.text is not None:
        text = found.text
        ids = ", ".join(f"{name.removesuffix('_token')} {id}" for name, id in text.special.items())
        facts += [
            ("tokenizer", f"{text.tokenizer}, {text.vocabulary} tokens; {ids or 'no special ids'}"),
            ("answers end at", ", ".join(map(str, text.ends)) or "nothing"),
            ("plain text", "begins with bos" if text.adds_bos else "begins as it is"),
            ("chat template", "yes" if text.chat_template else "no"),
        ]
    lines = [f"{name:15} {value}" for name, value in facts]
    lines += ["", f"{'tensors':15} {'format':8} {'count':>7} {'parameters':>12} {'in the files':>13}"]
    lines += [
        f"{row.part:15} {row.format:8} {row.count:>7} {_count(row.parameters):>12} {in_bytes(row.bytes):>13}"
        for row in found.tensors
    ]
    if found.tied:
        lines.append(f"{'head':15} the embedding table")
    lines.append(f"{'all':15} {'':8} {'':7} {_count(found.parameters):>12} {in_bytes(found.file_bytes):>13}")
    for place in found.memory:
        lines += ["", *_place(place)]
    lines += [""] * bool(found.warnings) + [f"! {warning}" for warning in found.warnings]
    return "\n".join(lines)


def _place(place: Memory) -> list[str]:
    step = "not known" if place.activations is None else in_bytes(place.activations)
    rows = [
        ("on", place.place + (f", {in_bytes(place.available)}" if place.available else "")),
        ("weights", in_bytes(place.weights)),
        ("activations", step),
        ("KV cache", f"{in_bytes(place.kv_total)}: {place.kv_tokens} tokens of {in_bytes(place.kv_per_token)}"),
        (
            "sequences",
            f"{place.sequences} of {place.max_model_len} tokens ({in_bytes(place.kv_per_sequence)} each) at once, at "
            f"most {place.max_num_seqs} run",
        ),
    ]
    return [f"{name:15} {value}" for name, value in rows] + [f"{'':15} {note}" for note in place.notes]


def _count(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)


def in_bytes(n: int) -> str:
    """In words."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
