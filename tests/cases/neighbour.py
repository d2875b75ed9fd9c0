"""A stream that runs beside requests that must do it no harm."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.api.conftest import Api, text_of
from tests.api.harness import SAID, until


@contextmanager
def neighbour(api: Api) -> Iterator[None]:
    """While the block runs, so does a stream; afterwards it has said everything, and the server still answers."""
    api.engine.pause = 0.1
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(api.stream, "/v1/completions", prompt="Me too", max_tokens=200)
        until(lambda: bool(api.engine.live))
        yield
        assert not stream.done(), "the neighbour has to run all the time"
        api.engine.pause = 0.0
        assert text_of(stream.result()) == SAID
    assert len(api.engine.seen) == 1, "a refused request must not reach the engine"
    api.alive()
