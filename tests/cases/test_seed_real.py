"""Seeds and choices with a real model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cases.real import NAME, Real

PROMPT = "My favourite animal is"


def ids(real: Real, **body: Any) -> list[int]:
    answer = real.complete(PROMPT, temperature=0.8, max_tokens=16, ignore_eos=True, return_token_ids=True, **body)
    found: list[int] = answer["choices"][0]["token_ids"]
    assert len(found) == 16
    return found


def test_seed_01_a_seed_holds_beside_a_request_without_one(real: Real) -> None:
    alone = ids(real, seed=42)
    others = []
    for _ in range(4):
        with ThreadPoolExecutor(2) as pool:
            mine, other = pool.submit(ids, real, seed=42), pool.submit(ids, real)
        assert mine.result() == alone
        others.append(tuple(other.result()))
    assert len(set(others)) > 1


def test_seed_03_without_a_seed_answers_differ(real: Real) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len({tuple(found) for found in pool.map(lambda _: ids(real), range(4))}) >= 2
    body = {"temperature": 1, "max_tokens": 8, "n": 4}
    assert len({choice["text"] for choice in real.complete(PROMPT, **body)["choices"]}) >= 2
    first, again = ([choice["text"] for choice in real.complete(PROMPT, seed=7, **body)["choices"]] for _ in range(2))
    assert first == again and len(set(first)) > 1


def test_seed_04_choices_of_a_stream(real: Real) -> None:
    messages = [{"role": "user", "content": "Name an animal"}]
    whole = real.chat(messages, n=2, temperature=1, seed=5, max_tokens=12)["choices"]
    parts: dict[int, str] = {0: "", 1: ""}
    ends = []
    for chunk in real.client.chat.completions.create(
        model=NAME,
        messages=messages,
        n=2,
        temperature=1,  # type: ignore
        seed=5,
        max_tokens=12,
        stream=True,
    ):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert parts == {choice["index"]: choice["message"]["content"] for choice in whole}
    assert sorted(ends) == [0, 1]
