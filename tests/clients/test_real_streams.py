"""Streamed and whole answers of a real model are the same, to the last bit of their logprobs, whatever runs beside
them; through plain HTTP and through the `openai` package."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.api.harness import until
from tests.cases.real import NAME, Real
from tests.clients.answers import CHAT, TEXT, Answer, ask, ask_stream

PROMPTS = ("Once upon a time", "List five animals:", "Ein Gedicht über den Herbst:", "def add(a, b):\n", "🙂 means")


def draw(dice: random.Random, real: Real) -> tuple[str, dict[str, Any]]:
    """A path and a body whose stop strings, if any, occur in the answer."""
    path = dice.choice([CHAT, TEXT])
    n = dice.randint(1, 3)
    prompt = dice.choice(PROMPTS)
    body: dict[str, Any] = {
        "n": n,
        "temperature": 0.9 if n > 1 else dice.choice([0, 0.9]),
        "top_p": dice.choice([1, 0.9]),
        "seed": dice.randrange(99),
        "max_tokens": dice.randint(4, 24),
        "return_token_ids": True,
        "include_stop_str_in_output": dice.random() < 0.5,
        "ignore_eos": dice.random() < 0.5,
        "frequency_penalty": dice.choice([0, 0.5]),
    }
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
        body |= {"logprobs": True, "top_logprobs": dice.randint(0, 4)} if dice.random() < 0.7 else {}
    else:
        body["prompt"] = [prompt, dice.choice(PROMPTS)] if dice.random() < 0.5 else prompt
        body["logprobs"] = dice.choice([None, 0, 3])
        body["echo"] = dice.random() < 0.5
    if dice.random() < 0.6:
        text = ask(real.http, path, {**body, "echo": False}).choices[0].text
        at = dice.randrange(max(len(text) - 6, 1))
        stop = text[at : at + dice.randint(2, 6)]
        body["stop"] = ["never", stop] if stop else None
    return path, body


def test_streams_beside_each_other_equal_whole_answers_alone(real: Real) -> None:
    dice = random.Random(3)
    asked = [draw(dice, real) for _ in range(24)]
    with ThreadPoolExecutor(12) as pool:
        streamed = list(pool.map(lambda each: ask_stream(real.http, *each, usage="always"), asked))
    reasons = set()
    for (path, body), found in zip(asked, streamed, strict=True):
        whole = ask(real.http, path, body)
        assert _comparable(found) == _comparable(whole)
        reasons |= {choice.finish_reason for choice in whole.choices.values()}
        for choice in whole.choices.values():
            assert choice.stop_reason == (body["stop"][1] if "stop" in body and choice.stop_reason else None)
            assert choice.token_ids is not None and len(choice.token_ids) <= body["max_tokens"]
    assert reasons == {"stop", "length"}
    assert real.number("vllm:num_requests_running") == 0


def _comparable(answer: Answer) -> Answer:
    """Without what depends on what the cache held before."""
    assert answer.usage is not None
    del answer.usage["prompt_tokens_details"]
    return answer


def test_the_openai_package(real: Real) -> None:
    messages: Any = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    body: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = real.client.chat.completions.create(**body, logprobs=True, top_logprobs=3)
    [choice] = whole.choices
    assert "Paris" in (choice.message.content or "")
    assert whole.usage is not None and choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0 and entry.top_logprobs[0].logprob == entry.logprob, "greedy: the best one is taken"
        assert [other.logprob for other in entry.top_logprobs] == sorted(
            (other.logprob for other in entry.top_logprobs), reverse=True
        )
    with real.client.chat.completions.stream(**body, logprobs=True, top_logprobs=3) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == choice.message.content
    assert streamed.choices[0].logprobs == choice.logprobs
    assert streamed.choices[0].finish_reason == choice.finish_reason


def test_the_openai_package_gives_up(real: Real) -> None:
    before = real.number("vllm:generation_tokens_total")
    stream = real.client.completions.create(
        model=NAME, prompt="A long story:", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(next(stream).choices[0].text for _ in range(5))
    stream.close()
    until(lambda: real.number("vllm:num_requests_running") == 0)
    assert real.number("vllm:generation_tokens_total") - before < 900
    assert real.number("vllm:kv_cache_usage_perc") == 0
