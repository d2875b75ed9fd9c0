"""Hugging Face folders: config.json beside safetensors files, or beside PyTorch's .bin files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.checkpoint import cache_scales
from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.errors import CheckpointError, believing
from octavo.checkpoint.multimodal import text_model
from octavo.checkpoint.pickled import read_bin
from octavo.checkpoint.quantized import quantized
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.tensor import Tensor, check_regular

_MAX_JSON = 200_000_000
"""Bytes; an index of 10^6 tensors has 100 MB."""


_MAX_NAME = 63
"""Characters of a file's name, of which some take four bytes: systems allow 255 bytes."""


_TEXTS = {".json", ".jinja", ".model", ".txt"}


def open_folder(folder: Path) -> Checkpoint:
    """Read the configuration and the headers of the weight files. Raises CheckpointError."""
    config = read_json(folder / "config.json", "Is this the folder of a Hugging Face model?")
    try:
        for file in folder.iterdir():  # of which other parts read some
            if file.suffix in _TEXTS and file.exists():
                check_regular(file)
    except OSError as e:
        raise CheckpointError(f"{folder} cannot be read: {e.strerror}.") from e
    generation = folder / "generation_config.json"
    generation_config = read_json(generation, "") if generation.exists() else {}
    with believing(f"{folder / 'config.json'}"):
        said = _quantization(folder, config)
        if said is not None:
            config = {**config, "quantization_config": said}
        weights, cache = cache_scales.split(config, _weights(folder))
        config, tensors = text_model(config, quantized(config, weights))
    return Checkpoint(folder, "hf", config, generation_config, tensors, cache=cache)


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """A file that holds one JSON object; `hint` is said when it is absent."""
    try:
        check_regular(path)
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: too large to be right.")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. {hint}".rstrip()) from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}.") from e
    except (ValueError, RecursionError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not JSON ({e}). Correct it, or download it again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


OLD_QUANTIZATION = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
}
"""Files of makers that write no quantization_config, and the method where they name none: AutoGPTQ, AutoAWQ, ModelOpt,
optimum-quanto."""


def _quantization(folder: Path, config: dict[str, Any]) -> Any:
    """quantization_config of config.json, or of the text model in it, or what an older maker's file says."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        if holder.get("quantization_config"):
            return holder["quantization_config"]
    for name, method in OLD_QUANTIZATION.items():
        if (folder / name).exists():
            return {"quant_method": method, **read_json(folder / name, "")}
    return None


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the first of the usual names that is there; files that no index names are never read."""
    for stem, ending, read in (("model", ".safetensors", read_safetensors), ("pytorch_model", ".bin", read_bin)):
        single, index = folder / f"{stem}{ending}", folder / f"{stem}{ending}.index.json"
        if single.exists():
            return read(single)
        if index.exists():
            return _sharded(index, read)
    raise CheckpointError(
        f"{folder} has no weights: none of model.safetensors, model.safetensors.index.json, pytorch_model.bin, "
        f"pytorch_model.bin.index.json is there. Complete the download."
    )


def _sharded(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors an index lists, each from the file it names."""
    where = read_json(index, "").get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} has no weight_map that names a file for each tensor. Download it again.")
    files: dict[str, dict[str, Tensor]] = {}
    for file in sorted(set(where.values())):
        if not file or Path(file).name != file or "\0" in file or len(file) > _MAX_NAME:
            raise CheckpointError(f"{index} names {file[:_MAX_NAME]!r}, which is not a file of its folder.")
        if not (index.parent / file).exists():
            raise CheckpointError(f"{index} lists {file!r}, which is not in the folder. Complete the download.")
        files[file] = read(index.parent / file)
    out: dict[str, Tensor] = {}
    for name, file in where.items():
        if name in files[file]:
            out[name] = files[file][name]
            continue
        start, _, attribute = name.rpartition(".")  # torchao's tensors in .bin files are several here
        parts = {n: t for n, t in files[file].items() if n.startswith(f"{start}._{attribute}_") and name in t.metadata}
        if not parts:
            raise CheckpointError(
                f"{index} says that tensor {name!r} is in {file}, but it is not. Download both again."
            )
        out |= parts
    return out
