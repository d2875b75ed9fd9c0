"""The architectures Octavo knows, by the name that config.json gives."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo.layers.moe import ExpertsError
from octavo.layers.rope import RopeError
from octavo.models.config import ModelConfig, ModelConfigError, check_kinds
from octavo.models.decoder import Decoder
from octavo.models.names import Names

MODULES: dict[str, str] = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "BaichuanForCausalLM": "baichuan",
    "BaiChuanForCausalLM": "baichuan",
    "BloomForCausalLM": "bloom",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Ernie4_5ForCausalLM": "ernie",
    "Ernie4_5_ForCausalLM": "ernie",
    "Ernie4_5_MoeForCausalLM": "ernie_moe",
    "Ernie4_5_MoEForCausalLM": "ernie_moe",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "FalconForCausalLM": "falcon",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GlmForCausalLM": "glm",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "internlm3",
    "KimiK2ForCausalLM": "deepseek",
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4",
    "MiniCPMForCausalLM": "minicpm",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "ministral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "MptForCausalLM": "mpt",
    "MPTForCausalLM": "mpt",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "OPTForCausalLM": "opt",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "PhimoeForCausalLM": "phimoe",
    "PhiMoEForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Name of an architecture -> the module of this package that builds it. A module is imported when its model is."""


@dataclass(frozen=True)
class Architecture:
    """How to build a model and where its tensors come from: what a module of this package says about its families.

    A module has `make`, `NAMES` or `names`, and optionally `IGNORE` or `ignore`, and `rewrite`.
    """

    name: str
    make: Callable[[ModelConfig, int], Decoder]
    """(config, max_model_len) -> the model, unfilled."""
    names: Callable[[ModelConfig], Names]
    ignore: Callable[[ModelConfig], tuple[str, ...]]
    """Checkpoint tensors that may be left unused (glob patterns)."""
    rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """config.json with the family's own keys in the common words."""

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Read config.json. Raises ModelConfigError."""
        with _believing():
            check_kinds(raw)
            return ModelConfig.read(self.rewrite(raw), self.name)


@contextmanager
def _believing() -> Iterator[None]:
    """Around the reading of config.json: families read hundreds of keys, and not each has a check of its type."""
    try:
        yield
    except (ModelConfigError, RopeError):
        raise
    except ExpertsError as error:
        raise ModelConfigError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelConfigError(
            f"the model's config has a value that cannot be right ({type(error).__name__}: {error})"
        ) from error


IGNORE = ("*.rotary_emb.inv_freq", "rope_freqs.weight")
"""Rotary frequencies that old checkpoints carry: they follow from the config."""


def architecture(name: str) -> Architecture:
    """The architecture called `name`, a key of `MODULES`."""
    module = importlib.import_module(f"octavo.models.{MODULES[name]}")
    names = getattr(module, "names", None) or (lambda _: module.NAMES)
    unused = getattr(module, "ignore", None) or (lambda _: getattr(module, "IGNORE", ()))

    def ignore(config: ModelConfig) -> tuple[str, ...]:
        return (*IGNORE, *unused(config))

    def make(config: ModelConfig, max_model_len: int) -> Decoder:
        with _believing():
            decoder: Decoder = module.make(config, max_model_len)
            return decoder

    return Architecture(name, make, names, ignore, getattr(module, "rewrite", lambda raw: raw))


def find(raw: Mapping[str, Any]) -> Architecture:
    """The first entry of config.json's `architectures` that is known.

    Raises ModelConfigError that says what the checkpoint is and what could be run.
    """
    wanted = raw.get("architectures")
    if not wanted or not isinstance(wanted, list):
        raise ModelConfigError(
            "the model's config names no architecture (key 'architectures'): is this a model folder? "
            f"model_type is {raw.get('model_type')!r}"
        )
    for name in wanted:
        if isinstance(name, str) and name in MODULES:
            return architecture(name)
    near = difflib.get_close_matches(str(wanted[0]), MODULES, 1, 0.8)
    hint = f" (the nearest is {near[0]})" if near else ""
    raise ModelConfigError(
        f"architecture {wanted[0]} is not supported yet{hint}; supported: {', '.join(sorted(MODULES))}"
    )
