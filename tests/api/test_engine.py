"""The server over the real engine core, with a make-believe model: what the layers do together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from octavo.engine import build_engine
from octavo.engine.fake import FakeExecutor, FakeModel
from octavo.types import KVGroup
from tests.api.harness import EOS, MAX_MODEL_LEN, MODEL, make_tokenizer, parts_of, running, until
from tests.api.test_metrics import parsed

TOKENIZER = make_tokenizer()
PROMPT = "The capital of France is Paris; of Spain, Madrid; of Italy, Rome."


@contextmanager
def server(*, blocks: int = 512, step_tokens: int = 256, step_seconds: float = 0.0) -> Iterator[httpx.Client]:
    """A client of a server whose KV cache has `blocks` blocks of 16 tokens."""
    model = FakeModel(vocab_size=TOKENIZER.vocab_size)
    engine = build_engine(
        FakeExecutor(model, step_seconds=step_seconds),
        groups=(KVGroup((0,)),),
        blocks=(blocks,),
        max_num_seqs=64,
        max_num_batched_tokens=step_tokens,
        max_model_len=MAX_MODEL_LEN,
    )
    with running(parts_of(engine)) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with server() as client:
        yield client


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    full = {"model": MODEL, "prompt": PROMPT, "temperature": 1, "seed": 3, **body}
    response = http.post("/v1/completions", json=full)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_text_is_that_of_the_tokens(http: httpx.Client) -> None:
    choice = ask(http, max_tokens=40, ignore_eos=True, return_token_ids=True)["choices"][0]
    assert len(choice["token_ids"]) == 40
    visible = [token for token in choice["token_ids"] if token != EOS]
    assert choice["text"] == TOKENIZER.decode(visible)


def test_stop_01_a_stop_string_cuts_any_text(http: httpx.Client) -> None:
    whole = ask(http, max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    for start in range(3, len(whole) - 4, 5):
        stop = whole[start : start + 3]
        choice = ask(http, max_tokens=60, ignore_eos=True, stop=[stop])["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_seed_01_a_seeded_answer_does_not_depend_on_its_neighbours() -> None:
    with server(step_seconds=0.001) as http:
        alone = ask(http, max_tokens=16, seed=42, ignore_eos=True)["choices"][0]["text"]
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(ask, http, max_tokens=16, seed=None, ignore_eos=True) for _ in range(4)]
            mine = [pool.submit(ask, http, max_tokens=16, seed=42, ignore_eos=True) for _ in range(4)]
        assert [future.result()["choices"][0]["text"] for future in mine] == [alone] * 4
        assert len({future.result()["choices"][0]["text"] for future in others}) == 4


def test_logp_11_prompt_scores_do_not_depend_on_chunks() -> None:
    answers = []
    for step_tokens in (256, 64):
        with server(step_tokens=step_tokens) as http:
            answer = ask(http, prompt=list(range(100)), prompt_logprobs=1, max_tokens=2)
            answers.append(answer["choices"][0]["prompt_logprobs"])
    assert answers[0] == answers[1] and len(answers[0]) == 100
    assert answers[0][0] is None and all(answers[0][1:])


def test_logp_04_echo_of_two_choices_scores_the_prompt_in_both(http: httpx.Client) -> None:
    choices = ask(http, n=2, echo=True, logprobs=1, max_tokens=3, ignore_eos=True)["choices"]
    first, second = (choice["logprobs"] for choice in choices)
    count = len(PROMPT)
    assert first["token_logprobs"][:count] == second["token_logprobs"][:count]
    assert len(first["tokens"]) == len(second["tokens"]) == count + 3


def test_usage_03_cached_tokens_of_a_batch_add_up() -> None:
    with server() as http:
        other = PROMPT[::-1]
        one = [
            ask(http, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for prompt in (PROMPT, other, PROMPT, other)
        ]
        both = ask(http, prompt=[PROMPT, other], max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert one[0] == one[1] == 0 and one[2] > 0 and one[3] > 0
    assert both == one[2] + one[3]


def test_prefix_04_salts_keep_prompts_apart() -> None:
    with server() as http:
        cached = [
            ask(http, max_tokens=1, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for salt in ("A", "B", "A", None)
        ]
    assert cached[0] == cached[1] == cached[3] == 0 and cached[2] > 0


def test_sched_01_a_prompt_that_can_never_fit_is_refused() -> None:
    with server(blocks=8) as http:
        body = {"model": MODEL, "max_tokens": 4}
        response = http.post("/v1/completions", json={**body, "prompt": "x" * 200})
        assert response.status_code == 400, response.text
        assert ask(http, prompt="short", max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4


def test_abort_01_an_abort_frees_the_kv_cache() -> None:
    with server(step_seconds=0.002) as http:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 3}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert parsed(http.get("/metrics").text)["vllm:num_requests_running"] == 3
            assert parsed(http.get("/metrics").text)["vllm:kv_cache_usage_perc"] > 0
        until(lambda: parsed(http.get("/metrics").text)["vllm:num_requests_running"] == 0)
        after = parsed(http.get("/metrics").text)
        assert after["vllm:kv_cache_usage_perc"] == 0
        assert after["vllm:request_success_total/abort"] == 3
        assert 0 <= after["octavo:kv_cache_filled_ratio"] <= 1


def test_sched_07_many_requests_in_little_memory_all_finish() -> None:
    with server(blocks=24) as http, ThreadPoolExecutor(24) as pool:
        texts = [f"{i} {PROMPT}" for i in range(24)]
        together = list(pool.map(lambda text: ask(http, prompt=text, max_tokens=20, ignore_eos=True), texts))
        alone = [ask(http, prompt=text, max_tokens=20, ignore_eos=True) for text in texts]
        assert [a["choices"][0]["text"] for a in together] == [a["choices"][0]["text"] for a in alone]
        assert parsed(http.get("/metrics").text)["vllm:num_requests_waiting"] == 0
