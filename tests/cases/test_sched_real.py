"""What can never run, and what needs more memory than there is, with real engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.cases.conftest import EOS, LINE_BREAK, SAID, SAID_IDS
from tests.cases.real import Real
from tests.cases.successor import write_successor

SHORT = {"prompt_token_ids": [LINE_BREAK]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("sched")
    return str(write_successor(folder, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf()))


def outcome(llm: LLM, count: int) -> str:
    """The error of a prompt of `count` tokens, which must not wait for ever; the next request must be served."""
    prompt = {"prompt_token_ids": [LINE_BREAK] * count}
    with pytest.raises(ValueError) as caught:
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    [output] = llm.generate(SHORT, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
    assert output.outputs[0].text == SAID
    return str(caught.value)


def test_sched_01_a_prompt_larger_than_the_cache(model: str) -> None:
    """Eight blocks of 16 tokens, a context of 1024: 200 tokens never fit."""
    with LLM(model, num_gpu_blocks_override=8, max_model_len=1024) as llm:
        problem = outcome(llm, 200)
        assert "203 tokens" in problem and "128 tokens" in problem


def test_sched_05_a_prompt_longer_than_a_step_without_chunks(model: str) -> None:
    options = {"max_num_batched_tokens": 64, "max_model_len": 1024}
    with LLM(model, enable_chunked_prefill=False, **options) as llm:
        assert "64" in outcome(llm, 100)
    with LLM(model, **options) as llm:
        [output] = llm.generate(
            {"prompt_token_ids": [LINE_BREAK] * 100}, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False
        )
        assert output.outputs[0].text == SAID


def test_sched_07_more_requests_than_memory(model: str) -> None:
    """Memory for about three of the longest: all finish, and nothing is left behind."""
    with LLM(model, num_gpu_blocks_override=16, max_model_len=128) as llm:
        prompts: list[Any] = [{"prompt_token_ids": [LINE_BREAK] * (1 + 7 * i % 70)} for i in range(60)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == [SAID] * 60
        gauges = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        assert gauges["vllm:num_requests_running"] == gauges["vllm:num_requests_waiting"] == 0


def test_sched_08_two_requests_with_one_id(real: Real) -> None:
    def ask(_: int) -> Any:
        return real.http.post(
            "/v1/chat/completions",
            headers={"X-Request-Id": "id"},
            json={
                "messages": [{"role": "user", "content": "Hello"}],
                "temperature": 0,
                "max_tokens": 16,
                "request_id": "id",
            },
        )

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    real.alive()
    assert real.number("vllm:num_requests_running") == real.number("vllm:num_requests_waiting") == 0
