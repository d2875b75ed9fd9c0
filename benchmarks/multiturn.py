"""What another turn of a long conversation costs before the engine computes anything: milliseconds per stage.

    python benchmarks/multiturn.py [--tokens 100000]

A conversation re-sends its whole history. Measured is the way from the bytes of a request's body to the frame that
goes to the engine's process, then what the engine's loop does with it until the step is planned. `cold`: the server
sees the history for the first time. `warm`: it has answered the turn before; median over the next turns. The aim is
under 5 ms, warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.api.body import decode
from octavo.api.callers_templates import CallersTemplates
from octavo.api.frontend import Frontend, make_frontend
from octavo.api.messages import checked_messages
from octavo.api.prompts import encode_chat
from octavo.api.schemas import ChatBody
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.engine import Engine, build_engine
from octavo.info import ModelInfo
from octavo.sampling_params import SamplingParams
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.request import RequestFactory
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.types import KVGroup
from octavo.wire import HEADER, Add, ToEngine, frame
from tests import realmodels

CONTEXT = 1 << 18
TURNS = 9
"""New turns that are measured after the first sight of a history."""
LLAMA3 = (
    "{{- bos_token }}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n"
    '    {%- set system_message = "" %}\n'
    "{%- endif %}\n"
    '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n'
    '{{- "Today Date: 26 Jul 2024\\n\\n" }}\n'
    "{{- system_message }}\n"
    '{{- "<|eot_id|>" }}\n'
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)
"""As the models of the Llama 3 family write a chat: texts are trimmed."""
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n"
    "    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if message.role == 'user' and ns.last == messages|length - 1 %}{%- set ns.last = index %}{%- endif %}\n"
    "{%- endfor %}\n"
    "{%- for message in messages %}\n"
    "    {%- set content = message.content %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- if '</think>' in content %}\n"
    "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
    "        {%- endif %}\n"
    "        {%- if loop.index0 > ns.last %}\n"
    "            {{- '<|im_start|>' + message.role + '\\n<think>\\n\\n</think>\\n\\n' + content }}\n"
    "        {%- else %}\n"
    "            {{- '<|im_start|>' + message.role + '\\n' + content }}\n"
    "        {%- endif %}\n"
    "        {{- '<|im_end|>\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
"""As reasoning models write it: what they thought in earlier turns is left out, the last turn is looked for first."""
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else "
    "message.role %}{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
WORDS = (
    "the of engine and a block to prompt is which turn in history token that cache for it was on are as with "
    "function returns value, number. However, naïve “quotes” déjà 42 2024 x=1; for (i = 0; i < n; i++) {\n}\n\n"
)


def smollm(*more: str) -> Tokenizer:
    """A vocabulary of 49,152 with `more` control tokens."""
    with open_checkpoint(realmodels.smollm2_gguf()) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata or {})
    if not more:
        return tokenizer
    tokenizer.backend.add_special_tokens(list(more))
    return Tokenizer(tokenizer.backend, special_tokens={"bos_token": more[0]})


def gemma() -> Tokenizer:
    """A vocabulary of 262,144."""
    with open_checkpoint(realmodels.gemma_gguf()) as checkpoint:
        return from_gguf(checkpoint.metadata or {})


def front_of(tokenizer: Tokenizer, source: str | None) -> Frontend:
    """A front end without an engine."""
    info = ModelInfo(model="m", max_model_len=CONTEXT, vocab_size=tokenizer.vocab_size)
    template = ChatTemplate.of(tokenizer, source)
    factory = RequestFactory(tokenizer, template, CONTEXT, tokenizer.vocab_size)
    engine: Any = None
    return make_frontend(engine, tokenizer, template, factory, info, EngineConfig(model="m"), CallersTemplates())


def history(front: Frontend, tokens: int, messages: int, draw: random.Random) -> list[dict[str, str]]:
    """An alternating conversation of about that many tokens."""
    sample = " ".join(draw.choices(WORDS.split(" "), k=5000))
    words = round(tokens * 5000 / len(front.tokenizer.encode(sample)) / messages)
    said = (" ".join(draw.choices(WORDS.split(" "), k=words)) for _ in range(messages))
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]


class Clock:
    """Times of the stages of one request, in milliseconds."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = work()
        self.times[stage] = self.times.get(stage, 0.0) + (time.perf_counter() - began) * 1e3
        return value


def front_end(front: Frontend, raw: bytes, name: str, clock: Clock, loop: asyncio.AbstractEventLoop) -> bytes:
    """What the server does with a body; the frame for the engine's process."""
    data = clock("json", lambda: decode(raw))
    body = clock("schema", lambda: ChatBody.model_validate(data))
    messages = clock("messages", lambda: checked_messages(body.messages))
    ids = clock("render + tokenize", lambda: loop.run_until_complete(encode_chat(front, body, messages)))
    make = front.factory.make
    request = clock("request", lambda: make(name, ids, SamplingParams(max_tokens=16), known=True))
    return clock("frame", lambda: frame(Add(request)))


def engine_side(engine: Engine, data: bytes, clock: Clock, decoder: msgspec.msgpack.Decoder[ToEngine]) -> None:
    """What the engine's loop does with the frame before the first step can be computed."""
    message: Any = clock("engine: decode", lambda: decoder.decode(data[HEADER.size :]))
    clock("engine: add", lambda: engine.add(message.request))
    plan = clock("engine: plan", engine.scheduler.plan)
    engine.scheduler.commit(plan, engine.executor.submit(plan).result())
    while not engine.idle:
        engine.step()


def measure(front: Frontend, tokens: int, messages: int) -> None:
    from benchmarks.engine_host import InstantExecutor

    draw = random.Random(messages)
    said = history(front, tokens, messages - 1 + messages % 2, draw)
    loop = asyncio.new_event_loop()
    engine = build_engine(
        InstantExecutor(),
        groups=(KVGroup((0,)),),
        blocks=(3 * tokens // 16,),
        max_num_seqs=4,
        max_num_batched_tokens=CONTEXT,
        max_model_len=CONTEXT,
        clock=lambda: 0.0,
    )
    decoder = msgspec.msgpack.Decoder(ToEngine)
    rounds: list[dict[str, float]] = []
    size = 0
    for turn in range(TURNS + 1):
        raw = json.dumps({"model": "m", "messages": said, "max_tokens": 16}, ensure_ascii=False).encode()
        clock = Clock()
        data = front_end(front, raw, str(turn), clock, loop)
        size = len(msgspec.msgpack.decode(data[HEADER.size :])[1]["prompt"])
        clock.times["front end"] = sum(clock.times.values())
        engine_side(engine, data, clock, decoder)
        rounds.append(clock.times)
        answer = {"role": "assistant", "content": " ".join(draw.choices(WORDS.split(" "), k=40))}
        said = [*said, answer, {"role": "user", "content": " ".join(draw.choices(WORDS.split(" "), k=40))}]
    loop.close()
    print(f"  {messages} messages, {len(raw):,} bytes, {size:,} tokens")
    print(f"    {'':20}{'cold':>9}{'warm':>9}{'slowest':>9}")
    for stage in rounds[0]:
        warm = [times[stage] for times in rounds[1:]]
        print(f"    {stage:20}{rounds[0][stage]:9.2f}{statistics.median(warm):9.2f}{max(warm):9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--messages", type=int, nargs="*", default=[43, 400])
    arguments = parser.parse_args()
    headers = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    for name, front in (
        ("SmolLM2, its own template", lambda: front_of(smollm(), None)),
        ("SmolLM2's vocabulary, a template as Llama 3's", lambda: front_of(smollm(*headers), LLAMA3)),
        ("SmolLM2's vocabulary, a template as Qwen 3's", lambda: front_of(smollm(), QWEN3)),
        ("Gemma 3, a template as Gemma's", lambda: front_of(gemma(), GEMMA)),
    ):
        for messages in arguments.messages:
            print(name)
            measure(front(), arguments.tokens, messages)


if __name__ == "__main__":
    main()
