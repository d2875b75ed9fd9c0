"""Many completions asked for at once, each put together to one answer, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """The whole answer of a request, put together where it is streamed: by choice text, ids, logprobs and end; or the
    error."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        raw = (await response.aread()).decode()
    if not body["stream"] or response.status_code != 200:
        answer = json.loads(raw)
        return answer.get("error") or [(choice, 1) for choice in map(_parts, answer["choices"])]
    *chunks, last = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    if last != "[DONE]":
        return json.loads(last)["error"]
    whole: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in json.loads(chunk)["choices"]):
        text, ids, scores, end = _parts(choice)
        if choice["index"] not in whole:
            whole[choice["index"]] = [text, ids, scores, end]
            continue
        known = whole[choice["index"]]
        assert known[3] is None, "nothing follows the end"
        known[0] += text
        known[1] += ids
        known[2] += scores
        known[3] = end
    return [(tuple(whole[index]), 1) for index in sorted(whole)]


def _parts(choice: dict[str, Any]) -> tuple[str, list[int], list[Any], Any]:
    scores = choice["logprobs"]
    return choice["text"], choice["token_ids"], scores["token_logprobs"] if scores else [], choice["finish_reason"]


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        return list(await asyncio.gather(*(ask(http, body) for body in bodies)))
