"""`LLM` over the real engine and a make-believe model that says what it is told."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import octavo
from octavo import LLM, BeamSearchParams, ParameterError, RequestOutput, SamplingParams
from octavo.config import EngineConfig
from octavo.engine import build_engine
from octavo.engine.fake import FakeExecutor, FakeModel
from octavo.info import ModelInfo
from octavo.offline.metrics import Counter, Gauge, Histogram
from octavo.text.request import RequestFactory
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import BYTE_CHARACTERS, Tokenizer
from octavo.types import KVGroup, Request

EOS = 256
MAX_MODEL_LEN = 128
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0-255 are the bytes, 256 is EOS."""
    characters = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    backend = tokenizers.Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"}, chat_templates={"default": TEMPLATE})


def say(text: str) -> Callable[[Request, int, list[int]], int]:
    """Says `text`, then EOS for ever."""
    return lambda request, choice, out: text.encode()[len(out)] if len(out) < len(text.encode()) else EOS


def make(
    answer: Any = None,
    template: bool = True,
    blocks: int = 200,
    config: EngineConfig | None = None,
    defaults: dict[str, Any] | None = None,
    **fake: Any,
) -> LLM:
    config = config or EngineConfig(model="fake")
    tokenizer = byte_tokenizer()
    groups = (KVGroup((0,)),)
    engine = build_engine(
        FakeExecutor(FakeModel(groups, 257, answer), **fake),
        groups=groups,
        blocks=(blocks,),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
    )
    info = ModelInfo(model="fake", max_model_len=MAX_MODEL_LEN, vocab_size=257)
    chat = ChatTemplate.of(tokenizer) if template else None
    factory = RequestFactory(tokenizer, chat, MAX_MODEL_LEN, 257, default_sampling=defaults)
    return LLM.of(config, engine, info, tokenizer, chat, factory)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make(say("Hello, naïve world.")) as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [choice.text for output in outputs for choice in output.outputs]


def at_rest(llm: LLM) -> bool:
    values = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Gauge)}
    return set(values.values()) == {0}


def test_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate("Say", SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("Hello, naïve world.", "stop", None)
    assert choice.finished() and output.finished
    assert choice.token_ids == [*"Hello, naïve world.".encode(), EOS]
    assert (output.prompt, output.prompt_token_ids) == ("Say", list(b"Say"))
    assert choice.logprobs is None and choice.cumulative_logprob is None
    times = output.metrics
    assert times is not None and times.num_generation_tokens == 21
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts


def test_outputs_keep_the_order_of_mixed_prompts(llm: LLM) -> None:
    prompts: Any = ["long" * 20, [1, 2], {"prompt": "c"}, {"prompt_token_ids": [3], "cache_salt": "x"}]
    limits = [9, 1, 5, 3]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=n) for n in limits])
    assert texts(outputs) == ["Hello, na", "H", "Hello", "Hel"]
    assert [output.prompt_token_ids for output in outputs] == [list(b"long" * 20), [1, 2], list(b"c"), [3]]
    assert [output.prompt for output in outputs] == ["long" * 20, None, "c", None]
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert llm.generate([]) == []


def test_more_requests_than_fit_at_once() -> None:
    with make(blocks=12) as llm:
        params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
        prompts = [[i, i + 1, i + 2] for i in range(40)]
        together = llm.generate(prompts, params, use_tqdm=False)
        assert together[7].outputs[0].token_ids == make().generate(prompts[7], params)[0].outputs[0].token_ids
        assert len({tuple(output.outputs[0].token_ids) for output in together}) == 40
        assert at_rest(llm)


def test_stop_strings_end_the_request_in_the_engine(llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(max_tokens=50, stop=["wor"], ignore_eos=True))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("Hello, naïve ", "wor")
    assert output.outputs[0].finish_reason == "stop"
    outputs = llm.generate("x", SamplingParams(max_tokens=50, stop=[","], n=3))
    assert texts(outputs) == ["Hello"] * 3
    llm.generate("y", SamplingParams(max_tokens=2))
    assert at_rest(llm)


def test_choices_and_seeds() -> None:
    params = SamplingParams(n=3, max_tokens=8, ignore_eos=True)
    config = EngineConfig(model="fake", seed=1)
    first, second = (make(config=config).generate(["a", "a"], params) for _ in range(2))
    ids = [[tuple(choice.token_ids) for choice in output.outputs] for output in first]
    assert ids == [[tuple(choice.token_ids) for choice in output.outputs] for output in second]
    assert len({*ids[0], *ids[1]}) == 6
    other = make(config=EngineConfig(model="fake", seed=2)).generate("a", params)
    assert [tuple(choice.token_ids) for choice in other[0].outputs] != ids[0]


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1))
    (choice,) = output.outputs
    assert choice.logprobs is not None and len(choice.logprobs) == 4
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert token in entry and len(entry) == 2
        assert (entry[token].rank, entry[token].decoded_token) == (1, chr(token))
    assert choice.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == list(b"bc")
    (bare,) = llm.generate("abc", SamplingParams(max_tokens=2, logprobs=0))
    assert bare.outputs[0].logprobs is not None and [len(entry) for entry in bare.outputs[0].logprobs] == [1, 1]


def test_cached_tokens_are_told(llm: LLM) -> None:
    prompt = list(range(64))
    assert llm.generate(prompt)[0].num_cached_tokens == 0
    assert llm.generate(prompt)[0].num_cached_tokens == 63
    assert llm.generate({"prompt_token_ids": prompt, "cache_salt": "mine"})[0].num_cached_tokens == 0


def test_max_tokens_ends_at_the_context_length(llm: LLM) -> None:
    for asked in (None, 1000):
        (output,) = llm.generate([7] * 120, SamplingParams(max_tokens=asked, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 8
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["ok", ""], None, "empty"),
        (["ok", [1] * 128], None, "128 tokens"),
        (["ok", [257]], None, "out of vocabulary"),
        (["ok", 3], None, "prompt 1 must be"),
        ("ok", SamplingParams(logprobs=21), "greater than max allowed: 20"),
        ("ok", SamplingParams(stop_token_ids=[300]), "out of vocabulary"),
        ("ok", [SamplingParams(), SamplingParams()], "1 prompts but 2 sampling_params"),
        ("ok", {"temperature": 1}, "must be a SamplingParams"),
    ],
)
def test_bad_calls_run_nothing(llm: LLM, prompts: Any, params: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        llm.generate(prompts, params)
    totals = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
    assert totals["vllm:generation_tokens"] == 0
    assert texts(llm.generate("ok", SamplingParams(max_tokens=5))) == ["Hello"]


def test_what_the_engine_refuses_runs_nothing() -> None:
    with make(say("abc"), blocks=3) as llm:
        with pytest.raises(ValueError, match="KV"):
            llm.generate(["ok", [1] * 100], SamplingParams(max_tokens=5))
        assert at_rest(llm)
        assert texts(llm.generate("ok", SamplingParams(max_tokens=3))) == ["abc"]


def test_a_failing_request_leaves_the_others_alone() -> None:
    with make(say("fine"), row_fault=lambda m: "not finite" if m.request.prompt == (13,) else None) as llm:
        outputs = llm.generate(["a", [13], "b"], SamplingParams(max_tokens=4), use_tqdm=False)
        assert texts(outputs) == ["fine", "", "fine"]
        assert outputs[1].outputs[0].finish_reason == "error"
        assert outputs[1].error is not None and "not finite" in outputs[1].error


def test_chat(llm: LLM) -> None:
    hello: Any = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(hello, SamplingParams(max_tokens=5), use_tqdm=False)
    assert (output.prompt, output.outputs[0].text) == ("<user>hi<a>", "Hello")
    many = llm.chat([hello, [{"role": "user", "content": "ho"}]], SamplingParams(max_tokens=1))
    assert [output.prompt for output in many] == ["<user>hi<a>", "<user>ho<a>"]
    started: Any = [*hello, {"role": "assistant", "content": "Well"}]
    (output,) = llm.chat(started, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<user>hi<assistant>Well"
    (output,) = llm.chat(hello, chat_template="{{ messages[0].content }}{{ mood }}", chat_template_kwargs={"mood": "!"})
    assert output.prompt == "hi!"
    for wrong in ([], [[]], [{"content": "x"}], ["hi"], "hi", {"role": "user", "content": "x"}, None):
        with pytest.raises(ValueError, match="message"):
            llm.chat(wrong)  # type: ignore[arg-type]


def test_chat_without_a_template() -> None:
    with make(template=False) as llm, pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_defaults_come_from_the_model() -> None:
    with make(say("abcdef"), defaults={"max_tokens": 3, "temperature": 0.6}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.6)
        assert texts(llm.generate("x")) == ["abc"]
        assert texts(llm.generate("x", SamplingParams())) == ["abcdef"]


def test_beam_search(llm: LLM) -> None:
    outputs = llm.beam_search(["ab", [5, 6]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert [len(output.sequences) for output in outputs] == [2, 2]
    for prompt, output in zip(([*b"ab"], [5, 6]), outputs, strict=True):
        totals = [sequence.cum_logprob for sequence in output.sequences]
        assert totals == sorted(totals, reverse=True)
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 2
        for sequence in output.sequences:
            assert sequence.tokens[:2] == prompt and len(sequence.tokens) == 5
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            assert len(sequence.logprobs) == 3 and all(len(step) == 4 for step in sequence.logprobs)
            assert all(
                candidate.decoded_token == llm.get_tokenizer().token(token)
                for step in sequence.logprobs
                for token, candidate in step.items()
            )
            assert math.isfinite(sequence.cum_logprob) and sequence.finish_reason == "length"
    assert outputs == llm.beam_search(["ab", [5, 6]], BeamSearchParams(beam_width=2, max_tokens=3))
    wide = llm.beam_search("ab", BeamSearchParams(beam_width=12, max_tokens=2))[0]
    assert len(wide.sequences) == 12
    (long,) = llm.beam_search([1] * 126, BeamSearchParams(2, 50, ignore_eos=True))
    assert {len(sequence.tokens) for sequence in long.sequences} == {128}
    with pytest.raises(ValueError, match="128 tokens"):
        llm.beam_search([1] * 128, BeamSearchParams(2, 5))
    assert at_rest(llm)


def test_what_beams_share_is_decoded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = llm.get_tokenizer(), list[int]()
    token = tokenizer.token

    def counted(id: int) -> str:
        decoded.append(id)
        return token(id)

    monkeypatch.setattr(tokenizer, "token", counted)
    (output,) = llm.beam_search("ab", BeamSearchParams(beam_width=12, max_tokens=1))
    assert len(output.sequences) == 12 and sorted(decoded) == sorted(output.sequences[0].logprobs[0])


def test_metrics(llm: LLM) -> None:
    llm.generate(["abc", "defgh"], SamplingParams(max_tokens=4))
    found = {(m.name, m.labels.get("finished_reason")): m for m in llm.get_metrics()}
    success = found["vllm:request_success", "length"]
    assert isinstance(success, Counter) and success.value == 2
    tokens = found["vllm:generation_tokens", None]
    assert isinstance(tokens, Counter) and tokens.value == 8
    prompts = found["vllm:request_prompt_tokens", None]
    assert isinstance(prompts, Histogram) and (prompts.count, prompts.sum) == (2, 8.0)
    assert (prompts.buckets["2"], prompts.buckets["5"], prompts.buckets["+Inf"]) == (0, 2, 2)
    queue = found["vllm:request_queue_time_seconds", None]
    assert isinstance(queue, Histogram) and queue.count == 2 and queue.sum >= 0
    steps = found["vllm:iteration_tokens_total", None]
    assert isinstance(steps, Histogram) and steps.sum == 8 + 6, "the last token of an answer is never computed"
    preemptions = found["vllm:request_num_preemptions", None]
    assert isinstance(preemptions, Histogram) and (preemptions.count, preemptions.sum) == (2, 0.0)
    assert all(m.labels["model_name"] == "fake" for m in found.values())


def test_the_progress_bar_may_be_given(llm: LLM) -> None:
    seen: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            seen.append(options["total"])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            seen.append("end")

        def update(self, n: int) -> None:
            seen.append(n)

    llm.generate(["a", "b"], use_tqdm=Bar)
    assert seen == [2, 1, 1, "end"]


def test_priorities_and_adapters_are_checked(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1 priorities"):
        llm.generate(["a", "b"], priority=[1])
    with pytest.raises(ParameterError, match="LoRA adapters are not built yet"):
        llm.generate("a", lora_request=object())


def test_ctrl_c_leaves_the_engine_in_order() -> None:
    calls = []

    def press(request: Request, choice: int, out: list[int]) -> int:
        calls.append(len(out))
        if len(calls) == 10:
            signal.raise_signal(signal.SIGINT)
        return b"ab"[len(out) % 2]

    with make(press) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x", "y"], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        assert at_rest(llm)
        assert len(calls) < 20
        assert texts(llm.generate("x", SamplingParams(max_tokens=4))) == ["abab"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_llm_says_so() -> None:
    llm = make(say("abc"))
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("x"), lambda: llm.beam_search("x", BeamSearchParams(1, 1))):
        with pytest.raises(RuntimeError, match="closed"):
            call()  # type: ignore[no-untyped-call]


def test_threads_take_turns(llm: LLM) -> None:
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(texts(llm.generate("x", SamplingParams(max_tokens=5)))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["Hello"]] * 8


def test_import_is_light_and_names_are_right() -> None:
    assert octavo.__all__ == sorted(octavo.__all__)
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)
    with pytest.raises(AttributeError, match="PoolingParams"):
        _ = octavo.PoolingParams
    code = (
        "import sys, octavo; octavo.SamplingParams; octavo.RequestOutput;"
        "print([m for m in ('torch', 'numpy', 'transformers', 'fastapi', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(octavo.__file__).parents[1]
    )
    assert done.stdout.strip() == "[]"
