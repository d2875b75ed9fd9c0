"""How many tokens a text has: by the tokenizer of a server, or by one on this machine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from octavo.bench.client import Target
from octavo.bench.options import BenchError
from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.checkpoint.hub import locate
from octavo.config import cache_dir
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.tokenizer import Tokenizer, TokenizerError

Count = Callable[[str], int]
"""Tokens of a text with those that a prompt gets before and after it."""
_SECONDS = 60.0
_NAMES_OF_A_TEXT = ("prompt", "content", "inputs")
"""For /tokenize of vLLM and Octavo, of llama.cpp, and of TGI: each takes its own and lets the others be."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Benchmarks do not go through proxies; the client does neither."""


def counter(target: Target, tokenizer: str | None) -> Count:
    """Counts with `tokenizer` (repository, folder, GGUF file) if there is one, else by asking the server.

    Raises:
        BenchError: the tokenizer cannot be read, or the server has no /tokenize.
    """
    if tokenizer is not None:
        own = read_tokenizer(tokenizer)
        return lambda text: len(own.encode(text))
    _served(target, "Hello")
    return lambda text: _served(target, text)


def read_tokenizer(name: str) -> Tokenizer:
    """Raises BenchError."""
    try:
        path = locate(name, cache_dir=cache_dir(), weights=False)
        if path.suffix != ".gguf":
            return Tokenizer.from_folder(path)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.metadata is not None
            return from_gguf(checkpoint.metadata)
    except (CheckpointError, TokenizerError, OSError) as error:
        raise BenchError(f"--tokenizer {name}: {error}") from None


def _served(target: Target, text: str) -> int:
    body = {name: text for name in _NAMES_OF_A_TEXT}
    if target.model is not None:
        body["model"] = target.model
    try:
        answer = fetch(target, "/tokenize", body)
        return len(answer if isinstance(answer, list) else answer["tokens"])
    except (BenchError, KeyError, TypeError) as error:
        raise BenchError(
            f"{target.url} does not tell how many tokens a text has ({error}): name the model's tokenizer with "
            "--tokenizer, a folder or GGUF file."
        ) from None


def fetch(target: Target, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON that a route answers with. Raises BenchError."""
    headers = {"Content-Type": "application/json", **target.headers}
    if target.key:
        headers.setdefault("Authorization", f"Bearer {target.key}")
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(target.address(path), data, headers)
        with _OPENER.open(request, timeout=_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise BenchError(f"{path} answered HTTP {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BenchError(f"cannot talk to {target.address(path)}: {reason}") from None
