"""Where the leaves of latent attention lie in a checkpoint: heads of projections hold two parts each."""

from __future__ import annotations

from octavo.layers.views import Flat, Rows, TurnedHeads, after, interleaved, part, part_of_heads
from octavo.models.names import Names


def latent_names(
    heads: int, nope: int, rotated: int, value: int, latent: int, *, compressed: bool, neighbours: bool
) -> Names:
    """Rows for `LatentAttention` in DeepSeek's layout; sizes as there.

    `compressed`: queries are projected down and up again; `neighbours`: rotary pairs are 2i and 2i + 1.
    """

    def turned(rows: Rows, count: int) -> Rows:
        return after(rows, interleaved(count, rotated)) if neighbours else rows

    attn, ours = "model.layers.{i}.self_attn.", "blocks.{i}.attn."
    queries = attn + ("q_b_proj" if compressed else "q_proj")
    keys = part_of_heads(heads, nope + value, 0, nope)
    return (
        (queries, ours + "q_nope", part_of_heads(heads, nope + rotated, 0, nope)),
        (queries, ours + "q_rope", turned(part_of_heads(heads, nope + rotated, nope, rotated), heads)),
        (attn + "q_a_proj", ours + "q_down"),
        (attn + "q_a_layernorm", ours + "q_norm"),
        (attn + "kv_a_proj_with_mqa", ours + "kv_down", part(0, latent, latent + rotated)),
        (attn + "kv_a_proj_with_mqa", ours + "k_rope", turned(part(latent, rotated, latent + rotated), 1)),
        (attn + "kv_a_layernorm", ours + "kv_norm"),
        (attn + "kv_b_proj", ours + "key_up", TurnedHeads(heads, keys, in_gguf=True)),
        (attn + "kv_b_proj", ours + "value_up", part_of_heads(heads, nope + value, nope, value)),
        # GGUF files of late have both parts apart, the first one turned already.
        (attn + "k_b_proj", ours + "key_up", Flat(heads)),
        (attn + "v_b_proj", ours + "value_up", Flat(heads)),
    )
