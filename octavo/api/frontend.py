"""What the routes work with: `Frontend`, everything of a model that is ready, and `Service`, the server's state."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

from octavo.api.callers_templates import CallersTemplates
from octavo.api.errors import OVERLOADED, ApiError, model_not_found, unavailable
from octavo.api.logs import StatsLog, request_log
from octavo.api.metrics import Metrics
from octavo.api.record import Listener
from octavo.api.stored import StoredAnswers
from octavo.api.tracing import tracer_of
from octavo.config import EngineConfig
from octavo.info import ModelInfo

if TYPE_CHECKING:
    from octavo.client import AsyncEngine
    from octavo.text.request import RequestFactory
    from octavo.text.template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer

_NO_NAMES = frozenset({"tgi", "dummy"})
"""What clients of servers with one model send where they know no name: TGI's documentation says "tgi",
huggingface_hub sends "dummy"."""


@dataclass(frozen=True)
class Frontend:
    """A model that is ready to answer: its text side, and the engine that runs it."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None where the model has no chat template."""
    factory: RequestFactory
    info: ModelInfo
    config: EngineConfig
    served: tuple[str, ...]
    """Names clients may use, the reported one first."""
    callers: CallersTemplates

    def check_model(self, name: str | None) -> str:
        """The name to report; a request without a name means the first one.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if name in self.served:
            return name
        if not name or name in _NO_NAMES:
            return self.served[0]
        raise model_not_found(name, self.served)


class Service:
    """The server's state from the first moment on: loading, ready, failed or draining.

    Raises:
        ConfigError: traces cannot be sent as the configuration says.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.active = 0
        """Requests being answered with generated text."""
        self._active_by_key: Counter[int] = Counter()
        self._serials = itertools.count()
        self._frontend: Frontend | None = None
        self._loading: AsyncEngine | None = None
        self._reason = "The model is loading; try again in a moment."
        self.callers = CallersTemplates()
        self.metrics = Metrics(config)
        tracer = tracer_of(config)
        self.listeners: list[Listener] = [] if tracer is None else [tracer]
        """Who is told of every call."""
        self.stored = StoredAnswers()
        """Answers of /v1/responses."""
        self.stats_log = None if config.disable_log_stats else StatsLog(self.metrics)

    def watch_loading(self, engine: AsyncEngine) -> None:
        """While there is no model, say how far `engine` has come."""
        self._loading = engine
        self.metrics.watch(engine)

    def open(self, frontend: Frontend) -> None:
        """From now on requests are answered."""
        self._frontend = frontend
        self.metrics.engine.cache_dtype = frontend.info.kv_dtype
        if (log := request_log(self.config, frontend.tokenizer)) is not None:
            self.listeners.append(log)

    def close(self, reason: str) -> None:
        """From now on new requests get a 503 with `reason`."""
        self._frontend = None
        self._loading = None
        self._reason = reason

    def ready(self) -> Frontend:
        """The model.

        Raises:
            ApiError: 503 with the reason while there is none.
        """
        if self._frontend is None:
            progress = self._loading.status.reason if self._loading is not None else ""
            raise unavailable(f"{self._reason} ({progress})" if progress else self._reason)
        return self._frontend

    def next_serial(self) -> int:
        """A number never given before."""
        return next(self._serials)

    def check_room(self, key: int | None) -> None:
        """Make sure that one more generating request may start; `key` is the API key it came with.

        Raises:
            ApiError: 429 when `max_num_reqs_per_key` of the key are in progress, 503 when `max_num_queued_reqs` are.
        """
        most = self.config.max_num_reqs_per_key
        if most is not None and key is not None and self._active_by_key[key] >= most:
            self.metrics.requests.rejected["max_num_reqs_per_key"] += 1
            raise ApiError(
                429,
                f"This API key has {self._active_by_key[key]} requests in progress, the most it may have "
                "(--max-num-reqs-per-key); wait for one to end, then try again.",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        limit = self.config.max_num_queued_reqs
        if limit is not None and self.active >= limit:
            self.metrics.requests.rejected["max_num_queued_reqs"] += 1
            raise unavailable(
                f"The server is busy: {self.active} requests are in progress, the most it takes "
                "(--max-num-queued-reqs); try again later.",
                retry_after=1,
                code=OVERLOADED,
            )

    @contextmanager
    def admitted(self, key: int | None) -> Iterator[None]:
        """Counts a generating request while it runs.

        Raises:
            ApiError: as `check_room`.
        """
        self.check_room(key)
        self.active += 1
        if key is not None:
            self._active_by_key[key] += 1
        try:
            yield
        finally:
            self.active -= 1
            if key is not None:
                self._active_by_key[key] -= 1


def service_of(request: Request) -> Service:
    """The service behind a route."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def make_frontend(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    factory: RequestFactory,
    info: ModelInfo,
    config: EngineConfig,
    callers: CallersTemplates,
) -> Frontend:
    """The front end of a model whose engine is ready."""
    served = config.served_model_name or (config.model,)
    return Frontend(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        factory=factory,
        info=info,
        config=config,
        served=served,
        callers=callers,
    )
