"""Headers of weight files on the Hugging Face hub, by requests for parts of them: enough to say what a model is.

What arrives is written into files of the true length that are empty otherwise, with holes that take no room on the
disk: whatever opens a model reads them as it reads the files themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf import HeaderCutOff, read_gguf
from octavo.checkpoint.gguf_model import ROTARY
from octavo.checkpoint.quantized import READ_AT_ONCE
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.tensor import Tensor, offset_of

_TIMEOUT = 30
"""Seconds to wait for a part of a file."""
_FIRST = 1 << 17
"""Bytes of a file that are asked for at first: most headers of safetensors are shorter."""
_MAX_HEADER = 1 << 28
"""Bytes of a header; those of GGUF hold the vocabulary, which has some megabytes."""
_MAX_VALUES = 1 << 20
"""Bytes of a tensor whose values are asked for."""
_GAP = 1 << 16
"""Bytes between two tensors below which they are asked for together."""
_AT_ONCE = 8
"""Requests under way."""


class Source(NamedTuple):
    """A repository of the hub."""

    repo: str
    revision: str | None
    token: str | None

    def part(self, name: str, start: int, length: int) -> tuple[bytes, int]:
        """Up to `length` bytes of a file from `start` on, and the size of the whole. Raises CheckpointError, and what
        the hub's library raises."""
        url = hf_hub_url(self.repo, name, revision=self.revision, endpoint=constants.ENDPOINT)
        headers = {**build_hf_headers(token=self.token), "range": f"bytes={start}-{start + length - 1}"}
        response = get_session().get(url, headers=headers, timeout=_TIMEOUT)
        hf_raise_for_status(response)
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("content-range", ""))
        if total is None or len(response.content) > length:
            raise CheckpointError(
                f"{constants.ENDPOINT} does not send parts of {name}. Download the model, and look at its folder."
            )
        return response.content, int(total[1])


def write_headers(source: Source, names: Iterable[str], folder: Path) -> None:
    """Of each safetensors or .gguf file, by its last name in `folder`: its header, and the values of the few small
    tensors that say how others are to be read; zeros elsewhere. Raises as `Source.part` does."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        paths = list(pool.map(partial(_write_header, source, folder), names))
        parts = [(name, path, *span) for name, path in paths for span in _values(path)]
        for _ in pool.map(lambda part: _write_part(source, *part), parts):
            pass


def _write_header(source: Source, folder: Path, name: str) -> tuple[str, Path]:
    path = folder / Path(name).name
    content, total = source.part(name, 0, _FIRST)
    path.write_bytes(content)
    while len(content) < total and (needed := _needed(path, content)) > len(content):
        if needed > _MAX_HEADER:
            raise CheckpointError(f"{name} has a header of more than {_MAX_HEADER >> 20} MiB: too large to be right.")
        more, _ = source.part(name, len(content), min(needed, total) - len(content))
        if not more:
            raise CheckpointError(f"{constants.ENDPOINT} sends {name} only up to byte {len(content):,}. Try again.")
        content += more
        path.write_bytes(content)
    os.truncate(path, total)
    return name, path


def _needed(path: Path, content: bytes) -> int:
    """Bytes of the file that its header takes, as far as its beginning tells."""
    if path.suffix != ".gguf":
        return 8 + int.from_bytes(content[:8], "little")
    try:
        read_gguf(path)
    except HeaderCutOff:
        return 2 * len(content)
    except CheckpointError:  # the tensors lie beyond what is there, or it says what is wrong when it is opened
        pass
    return len(content)


def _values(path: Path) -> Iterator[tuple[int, int]]:
    """Start and length of the parts of a file that hold values which its header alone does not tell."""
    wanted = sorted((offset_of(tensor), tensor.data.nbytes) for tensor in _telling(path) if tensor.data.nbytes)
    start = end = 0
    for at, size in wanted:
        if at > end + _GAP or at + size > start + _MAX_VALUES:
            if end > start:
                yield start, end - start
            start = at
        end = at + size
    if end > start:
        yield start, end - start


def _telling(path: Path) -> Iterator[Tensor]:
    try:
        tensors = read_gguf(path)[1] if path.suffix == ".gguf" else read_safetensors(path)
    except CheckpointError:  # which opening it will say
        return
    endings = tuple(f"{name}.weight" for name in ROTARY) if path.suffix == ".gguf" else READ_AT_ONCE
    for name, tensor in tensors.items():
        if name.endswith(endings) and tensor.data.nbytes <= _MAX_VALUES:
            yield tensor


def _write_part(source: Source, name: str, path: Path, start: int, length: int) -> None:
    content, _ = source.part(name, start, length)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)
