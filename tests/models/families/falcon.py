"""Falcon.

With 4 or 6 heads all slopes are powers of two, and with positions below 256 their products are exact in bfloat16, to
which transformers rounds them.
"""

from tests.models.variant import Variant

VARIANTS = {
    "falcon-7b": Variant("Falcon"),
    "falcon-40b": Variant("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": Variant(
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    "falcon-rw": Variant("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi-6-heads": Variant("Falcon", {"alibi": True, "hidden_size": 96, "num_attention_heads": 6}),
}
