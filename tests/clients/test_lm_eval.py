"""lm-eval's local-completions against the server: its scores equal those of transformers in float32.

The tasks lie in `tasks/`; the command line of lm-eval runs them, as users do, in a process that may not reach a
network.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import realmodels
from tests.cases.real import NAME, Real

TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 1e-3
"""Of a loglikelihood, in nats."""


class Outcome(NamedTuple):
    """What lm-eval says: metrics by task, and per task what it recorded of each item."""

    metrics: dict[str, dict[str, float]]
    samples: dict[str, list[dict[str, Any]]]


def evaluate(real: Real, folder: Path, tasks: Sequence[str], batch_size: int = 1, **arguments: Any) -> Outcome:
    """Run `tasks` against the server, `batch_size` prompts in a call; `arguments` go to lm-eval's client."""
    options = {
        "model": NAME,
        "base_url": f"{real.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": realmodels.smollm2_hf(),
        "max_length": 1024,
        "max_retries": 1,
        **arguments,
    }
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(tasks)),
            *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
            *("--include_path", str(TASKS), "--output_path", str(folder / "results"), "--log_samples"),
            *("--batch_size", str(batch_size)),
        ],
        cwd=TASKS,
        env={**os.environ, **quiet},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [results] = (folder / "results").rglob("results_*.json")
    samples = {task: _samples(results.parent, task) for task in tasks}
    return Outcome(json.loads(results.read_text())["results"], samples)


def _samples(folder: Path, task: str) -> list[dict[str, Any]]:
    [path] = folder.glob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])


class Reference:
    """The same figures from transformers, each computed once."""

    def __init__(self, logits: Any) -> None:
        from transformers import AutoTokenizer

        self._logits = logits
        self.of_pair = functools.cache(self._of_pair)
        self.of_text = functools.cache(self._of_text)
        self.greedy = functools.cache(self._greedy)
        self._tokenizer = AutoTokenizer.from_pretrained(realmodels.smollm2_hf())

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """The loglikelihood of `continuation`, and whether each of its tokens is the most probable one."""
        ids = [*context, *continuation]
        rows = self._logits(ids)[len(context) - 1 : -1]
        top = rows.max(axis=-1, keepdims=True)
        scores = rows - top - np.log(np.exp(rows - top).sum(axis=-1, keepdims=True))
        total = sum(float(row[token]) for row, token in zip(scores, continuation, strict=True))
        return total, bool((rows.argmax(axis=-1) == np.asarray(continuation)).all())

    def _of_pair(self, context: str, continuation: str) -> tuple[float, bool]:
        """The score of a text after another, cut where the tokens of `context` alone end."""
        whole = self.ids(context + continuation)
        start = len(self.ids(context))
        return self.score(whole[:start], whole[start:])

    def _of_text(self, text: str) -> float:
        """The score of a text after begin-of-sequence alone."""
        return self.score([self._tokenizer.bos_token_id], self.ids(text))[0]

    def _greedy(self, prompt: str, until: tuple[str, ...], most: int) -> str:
        """The most probable text after `prompt`, up to a stop string, an end or `most` tokens."""
        start = self.ids(prompt)
        ids: list[int] = []
        text = ""
        while len(ids) < most and not any(stop in text for stop in until):
            token = int(self._logits([*start, *ids])[-1].argmax())
            if token == self._tokenizer.eos_token_id:
                break
            ids.append(token)
            text = self._tokenizer.decode(ids)
        return text[: min((text.index(stop) for stop in until if stop in text), default=None)]


@pytest.fixture(scope="module")
def reference(oracle: Any) -> Reference:
    return Reference(oracle)


@pytest.fixture(scope="module", params=["one by one, as tokens", "several at once, as text"])
def outcome(request: pytest.FixtureRequest, real: Real, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    several = {"num_concurrent": 4, "batch_size": 3, "tokenized_requests": False}
    yield evaluate(
        real,
        tmp_path_factory.mktemp("lm-eval"),
        ("capitals", "last_word", "passages", "continuations"),
        **(several if request.param.startswith("several") else {}),
    )


def answers(sample: dict[str, Any]) -> list[Any]:
    """What the client returned for the requests of an item."""
    return [response[0] for response in sample["resps"]]


def test_multiple_choice(outcome: Outcome, reference: Reference) -> None:
    right = 0
    for sample in outcome.samples["capitals"]:
        doc = sample["doc"]
        expected = [reference.of_pair(f"The capital of {doc['country']} is", f" {each}") for each in doc["choices"]]
        for (score, greedy), (wanted, most_probable) in zip(answers(sample), expected, strict=True):
            assert float(score) == pytest.approx(wanted, abs=TOLERANCE)
            assert (str(greedy) == "True") == most_probable
        right += int(np.argmax([score for score, _ in expected]) == doc["answer"])
    assert len(outcome.samples["capitals"]) == 8
    assert outcome.metrics["capitals"]["acc,none"] == pytest.approx(right / 8)
    assert right >= 4, "a model that knows capitals is better than chance"


def test_loglikelihood(outcome: Outcome, reference: Reference) -> None:
    docs = [sample["doc"] for sample in outcome.samples["last_word"]]
    expected = [reference.of_pair(doc["text"], f" {doc['word']}") for doc in docs]
    found = [answers(sample)[0] for sample in outcome.samples["last_word"]]
    assert [float(score) for score, _ in found] == pytest.approx([score for score, _ in expected], abs=TOLERANCE)
    assert [str(greedy) == "True" for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in expected} == {True, False}
    metrics = outcome.metrics["last_word"]
    assert metrics["acc,none"] == pytest.approx(np.mean([greedy for _, greedy in expected]))
    assert metrics["perplexity,none"] == pytest.approx(math.exp(-np.mean([score for score, _ in expected])), rel=1e-3)


def test_rolling_loglikelihood(outcome: Outcome, reference: Reference) -> None:
    texts = [sample["doc"]["passage"] for sample in outcome.samples["passages"]]
    expected = [reference.of_text(text) for text in texts]
    found = [float(answers(sample)[0]) for sample in outcome.samples["passages"]]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    size = sum(len(text.encode()) for text in texts)
    assert outcome.metrics["passages"]["byte_perplexity,none"] == pytest.approx(math.exp(-sum(expected) / size))


def test_generate_until(outcome: Outcome, reference: Reference) -> None:
    samples = outcome.samples["continuations"]
    assert len(samples) == 5
    for sample in samples:
        prompt = f"Question: {sample['doc']['question']}\nAnswer:"
        assert answers(sample)[0] == reference.greedy(prompt, ("\n", "."), 10)
