"""Seed-OSS."""

from tests.models.variant import Variant

VARIANTS = {
    "seed-oss": Variant("SeedOss", {"head_dim": 32}),
    "seed-oss-all-biases": Variant("SeedOss", {"head_dim": None, "attention_out_bias": True, "mlp_bias": True}),
    "seed-oss-no-bias": Variant("SeedOss", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
}
