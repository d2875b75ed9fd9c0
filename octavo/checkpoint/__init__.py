"""Reading model files: Hugging Face folders and GGUF files, checked before anything is believed."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.folder import open_folder
from octavo.checkpoint.gguf_model import open_gguf
from octavo.checkpoint.gguf_split import models_in

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a .gguf file (the first one of a model in several), or a folder that holds one model
    in .gguf files and no config.json.

    Only headers and configuration are read. Raises CheckpointError, which names the file, the cause and what to do.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Give a folder with config.json, or a .gguf file.")
    if not path.is_dir():
        return open_gguf(path)
    if not (path / "config.json").exists():
        files = models_in(path)
        if len(files) == 1:
            return open_gguf(files[0])
        if files:
            raise CheckpointError(f"{path} holds several models; name one: {', '.join(f.name for f in files)}.")
    return open_folder(path)
