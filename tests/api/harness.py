"""A whole server over HTTP without a model: a byte-level tokenizer made here, and an engine that says a script."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.api.serve import Parts, bind, url_of
from octavo.api.server import Server
from octavo.client import InProcess
from octavo.config import EngineConfig
from octavo.info import ModelInfo
from octavo.text.request import RequestFactory
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import BYTE_CHARACTERS, Tokenizer
from octavo.types import Delta, EngineStats, FinishReason, Request, TokenLogprobs
from octavo.wire import Engine

MODEL = "tiny"
MAX_MODEL_LEN = 512
WORDS = ("Alpha", " beta", ", DEF", " gamma", " two", " spaces", ".\n", "End")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 256 + len(WORDS) + 2
SAID = "Alpha beta, DEF gamma 🙂 naïve 漢字  two  spaces.\nEnd"
"""What the engine says; emoji and Chinese characters are one token per byte."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'forbidden' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Ids 0-255: the bytes; then `WORDS`, which encoding never makes; then `SPECIAL`, the last of which is EOS."""
    characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    for word in WORDS:
        vocabulary["".join(characters[byte] for byte in word.encode())] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"}, chat_templates={"default": TEMPLATE})


def ids_of(text: str) -> list[int]:
    """`text` as the engine says it: in words where there are any, else byte by byte."""
    ids: list[int] = []
    at = 0
    while at < len(text):
        word = next((word for word in WORDS if text.startswith(word, at)), None)
        ids += [256 + WORDS.index(word)] if word else list(text[at].encode())
        at += len(word or text[at])
    return ids


def _say(request: Request, choice: int) -> list[int]:
    """`SAID`; when sampling, begun at a place that depends on seed and choice."""
    ids = ids_of(SAID)
    if request.sampling.temperature == 0:
        return ids
    start = (request.seed * 7 + choice * 5) % 3
    return ids[start:] + ids[:start]


def token_scores(token: int, rank: int, top: int) -> TokenLogprobs:
    """A made-up distribution: the token itself, then its neighbours; the last of five is impossible."""
    others = [(token, -0.25), *((token + i, -1.0 - i) for i in (1, 2, 3)), (token + 4, float("-inf"))]
    return TokenLogprobs(token, -0.25, rank, tuple(others[:top]))


@dataclass
class _Live:
    request: Request
    script: list[int]
    done: int = 0


@dataclass
class ScriptEngine:
    """One token per choice and step, from `script`; then EOS, or the script again where EOS does not end it."""

    script: Callable[[Request, int], list[int]] = _say
    pause: float = 0.0
    """Seconds per step."""
    live: dict[tuple[str, int], _Live] = field(default_factory=dict)
    seen: list[Request] = field(default_factory=list)
    """Requests in the order they came."""
    aborts: list[tuple[str, int | None]] = field(default_factory=list)
    """Aborts of requests that were running."""
    fail_after: int | None = None
    """Output tokens after which a row fails, as one with NaN logits does."""
    cached: int = 0
    queued: float = 0.0
    """Seconds that each request says it waited."""
    numbers: EngineStats = field(default_factory=EngineStats)
    announce: Callable[[list[str]], None] | None = None

    @property
    def idle(self) -> bool:
        return not self.live

    def add(self, request: Request) -> None:
        if len(request.prompt) == 300:
            raise ValueError("the prompt can never fit in the KV cache")
        self.seen.append(request)
        for choice in range(request.n):
            done = len(request.resume[choice]) if request.resume else 0
            self.live[request.id, choice] = _Live(request, self.script(request, choice), done)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        found = [key for key in self.live if key[0] == request_id and choice in (None, key[1])]
        if found:
            self.aborts.append((request_id, choice))
        for key in found:
            del self.live[key]

    def isolate(self, request_id: str, tokens: int) -> None:
        pass

    def step(self) -> list[Delta]:
        time.sleep(self.pause)
        self.numbers.steps += 1
        deltas = []
        for key, live in list(self.live.items()):
            delta = self._next(key, live)
            deltas.append(delta)
            if delta.finish is not None:
                del self.live[key]
        return deltas

    def _next(self, key: tuple[str, int], live: _Live) -> Delta:
        request, sampling = live.request, live.request.sampling
        first = live.done == 0
        scores = None
        if first and key[1] == 0 and sampling.prompt_logprobs is not None:
            scores = [
                token_scores(token, 1, sampling.prompt_logprobs) if i else None
                for i, token in enumerate(request.prompt)
            ]
        cached = self.cached if first else 0
        if request.max_tokens == 0:
            return Delta(*key, prompt_logprobs=scores, finish="length", cached=cached)
        if live.done == self.fail_after:
            return Delta(*key, finish="error", error="the logits of this request are not finite")
        end = live.done >= len(live.script) and EOS in request.eos_ids
        token = EOS if end else live.script[live.done % len(live.script)]
        live.done += 1
        self.numbers.generation_tokens += 1
        finish: FinishReason | None = None
        reason = None
        if end:
            finish = "stop"
        elif token in request.stop_ids:
            finish, reason = "stop", token
        elif live.done == request.max_tokens:
            finish = "length"
        logprobs = [token_scores(token, 1, sampling.logprobs)] if sampling.logprobs is not None else None
        return Delta(
            *key,
            start=live.done - 1,
            tokens=[token],
            logprobs=logprobs,
            prompt_logprobs=scores,
            finish=finish,
            stop_reason=reason,
            cached=cached,
            queued=self.queued if first else 0.0,
        )

    def stats(self) -> EngineStats:
        self.numbers.running = len(self.live)
        self.numbers.blocks_total = 100
        self.numbers.blocks_used = len(self.live)
        return self.numbers

    def close(self) -> None:
        self.live.clear()


@dataclass
class Served:
    engine: Engine
    info: ModelInfo


def build_slow(config: EngineConfig, on_progress: Callable[[str], None]) -> Served:
    """For `octavo.process`: an engine that takes 10 ms per token."""
    return Served(ScriptEngine(pause=0.01), make_info(make_tokenizer()))


class Telling(ScriptEngine):
    """Tells on stderr with each request whether the garbage collector leaves alone what was loaded."""

    def add(self, request: Request) -> None:
        print("frozen:", gc.get_freeze_count() > 1000, file=sys.stderr, flush=True)
        super().add(request)


def build_telling(config: EngineConfig, on_progress: Callable[[str], None]) -> Served:
    return Served(Telling(), make_info(make_tokenizer()))


def make_info(tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo(
        model=MODEL,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        kv_dtype="float16",
        created=1,
        notes=["a note"],
    )


@dataclass
class TinyText:
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def factory(self, info: ModelInfo, config: EngineConfig) -> RequestFactory:
        return RequestFactory(
            tokenizer=self.tokenizer,
            template=self.template,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_ids=(EOS,),
            default_sampling={},
            max_logprobs=config.max_logprobs,
        )


def parts_of(engine: Engine, loaded: threading.Event | None = None) -> Parts:
    """What a server with this engine is made of; it loads until `loaded` is set."""
    info = make_info(make_tokenizer())

    def build() -> Served:
        if loaded is not None:
            loaded.wait()
        return Served(engine, info)

    return Parts(engine=lambda config: InProcess(build), text=tiny_text)


def tiny_text(config: EngineConfig) -> TinyText:
    tokenizer = make_tokenizer()
    return TinyText(tokenizer, ChatTemplate.of(tokenizer))


@contextmanager
def running(
    parts: Parts, *, wait: bool = True, listening: AbstractContextManager[socket.socket] | None = None, **options: Any
) -> Iterator[str]:
    """A server on a thread of this process, at a free local port or where it is said; gives its URL."""
    config = EngineConfig(model=MODEL, **{"uvicorn_log_level": "critical", **options})
    ready = threading.Event()
    stops: list[Callable[[], None]] = []

    async def serve(bound: socket.socket) -> None:
        server = Server(config, bound, parts.engine(config), parts.text, lambda info: ready.set())
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(server.stop))
        await server.run()

    with listening or bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(serve(bound)), daemon=True)
        thread.start()
        try:
            if wait:
                assert ready.wait(10), "the server did not become ready"
            yield url_of(bound, config)
        finally:
            stops[0]()
            thread.join(10)
            assert not thread.is_alive(), "the server did not end"


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for `condition`; fails when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def events_of(lines: Iterable[str]) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line]


GREEDY = {"model": MODEL, "temperature": 0}
