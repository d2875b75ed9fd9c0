from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.sampling_params import ParameterError, SamplingParams
from octavo.text.request import ContextLengthError, RequestFactory
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request
from tests.text import small

BYTES = small.byte_level()
EOS = 256 + len(small.WORDS) + 1
VOCAB = BYTES.vocab_size + 64  # models round their vocabulary up


def factory(tokenizer: Tokenizer = BYTES, length: int = 64, **options: Any) -> RequestFactory:
    options = {"vocab_size": VOCAB, "eos_ids": (EOS,)} | options
    return RequestFactory(tokenizer, None, length, **options)


def make(prompt: Any, sampling: SamplingParams | None = None, length: int = 64, **options: Any) -> Request:
    return factory(length=length).make("r", prompt, sampling or SamplingParams(max_tokens=None), **options)


def ids(count: int) -> list[int]:
    return [65] * count


@pytest.mark.parametrize(("prompt", "expected"), [(8, 56), (63, 1)])
def test_output_fills_the_context(prompt: int, expected: int) -> None:
    assert make(ids(prompt)).max_tokens == expected


def test_too_long_errors_name_the_numbers() -> None:
    message = r"64 tokens.*68 tokens \(8 in the prompt, 60 in the completion"
    with pytest.raises(ContextLengthError, match=message) as error:
        make(ids(8), SamplingParams(max_tokens=60))
    assert error.value.parameter == "max_tokens"
    for count in (64, 65, 200):
        with pytest.raises(ContextLengthError, match=f"64 tokens.*{count} tokens") as error:
            make(ids(count))
        assert error.value.parameter == "prompt"
    assert make(ids(8), SamplingParams(max_tokens=60), cut_max_tokens=True).max_tokens == 56
    assert make(ids(8), SamplingParams(max_tokens=5), cut_max_tokens=True).max_tokens == 5
    with pytest.raises(ContextLengthError, match="min_tokens is 60"):
        make(ids(8), SamplingParams(max_tokens=None, min_tokens=60))


def test_hopeless_texts_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = factory()
    monkeypatch.setattr(BYTES, "encode", lambda *args: pytest.fail("was tokenized"))
    with pytest.raises(ContextLengthError, match="20000000 characters"):
        makes.make("r", "a" * 20_000_000, SamplingParams())


def test_truncation_keeps_the_last_tokens() -> None:
    assert make(list(range(65, 85)), length=32, truncate_prompt_tokens=5).prompt == (80, 81, 82, 83, 84)
    assert make("abcdef", truncate_prompt_tokens=2).prompt == tuple(b"ef")
    assert make(ids(3), truncate_prompt_tokens=9).prompt == (65, 65, 65)
    last = make(ids(20), length=16, truncate_prompt_tokens=-1)
    assert len(last.prompt) == 15 and last.max_tokens == 1
    for asked, count in ((16, 16), (17, 17)):
        with pytest.raises(ContextLengthError, match=f"{count}.*16|16.*{count}"):
            make(ids(20), length=16, truncate_prompt_tokens=asked)
    with pytest.raises(ParameterError, match="truncate_prompt_tokens"):
        make(ids(20), truncate_prompt_tokens=-2)
    with pytest.raises(ParameterError, match="empty"):
        make(ids(20), truncate_prompt_tokens=0)


def test_truncated_texts_keep_bos() -> None:
    tokenizer = small.pieces()
    whole = tokenizer.encode("Hello world a Hello")
    request = factory(tokenizer, vocab_size=tokenizer.vocab_size).make(
        "r", "Hello world a Hello", SamplingParams(), truncate_prompt_tokens=3
    )
    assert request.prompt == (1, *whole[-2:])


@pytest.mark.parametrize("bad", [[200000], [-1], [65, VOCAB]])
def test_ids_outside_the_vocabulary(bad: list[int]) -> None:
    with pytest.raises(ParameterError, match=f"out of vocabulary: ids are 0 to {VOCAB - 1}") as error:
        make(bad)
    assert error.value.parameter == "prompt"


def test_ids_the_tokenizer_does_not_know_are_legal() -> None:
    assert make([VOCAB - 1]).prompt == (VOCAB - 1,)
    assert make(np.array([65, 66])).prompt == (65, 66)
    for bad in ([1.5], ["a"], [True], [None]):
        with pytest.raises(ParameterError, match="must be integers"):
            make(bad)


def test_empty_prompts(gemma: Tokenizer, smollm: Tokenizer) -> None:
    for prompt in ("", []):
        with pytest.raises(ParameterError, match="empty") as error:
            factory(smollm).make("r", prompt, SamplingParams())
        assert error.value.parameter == "prompt"
    assert factory(gemma, vocab_size=gemma.vocab_size).make("r", "", SamplingParams()).prompt == (2,)


def test_ids_are_taken_as_they_are() -> None:
    tokenizer = small.pieces()
    makes = factory(tokenizer, vocab_size=tokenizer.vocab_size)
    text = makes.make("r", "Hello world", SamplingParams()).prompt
    assert text[0] == 1 and makes.make("r", text, SamplingParams()).prompt == text
    assert makes.make("r", "Hello world", SamplingParams(), add_special_tokens=False).prompt == text[1:]


def test_every_declared_end_counts() -> None:
    makes = RequestFactory(BYTES, None, 64, VOCAB, eos_ids=(7, 9))
    assert makes.make("r", ids(1), SamplingParams()).eos_ids == (7, 9, EOS)
    limited = makes.make("r", ids(1), SamplingParams(stop_token_ids=[11], min_tokens=5))
    assert limited.masked_ids == (7, 9, EOS, 11) and limited.stop_ids == (11,)
    ignoring = makes.make("r", ids(1), SamplingParams(ignore_eos=True, min_tokens=5))
    assert ignoring.eos_ids == () and ignoring.masked_ids == (7, 9, EOS)
    assert RequestFactory(BYTES, None, 64, VOCAB, eos_ids=(10**9,)).eos_ids == (EOS,)


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {191222: -100.0}), ("allowed_token_ids", [VOCAB]), ("stop_token_ids", [191222])],
)
def test_parameters_with_ids_outside_the_vocabulary(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match="vocabulary") as error:
        make(ids(1), SamplingParams(**{name: value}))
    assert error.value.parameter == name


@pytest.mark.parametrize("asked", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"logprobs": 1000}])
def test_logprobs_are_capped(asked: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match="20") as error:
        make(ids(1), SamplingParams(**asked))
    assert error.value.parameter in asked
    assert factory(max_logprobs=-1).make("r", ids(1), SamplingParams(**asked)).id == "r"


def test_only_end_tokens_cannot_wait() -> None:
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        make(ids(1), SamplingParams(allowed_token_ids=[EOS], min_tokens=2))


def test_seeds() -> None:
    assert make(ids(1), SamplingParams(seed=42)).seed == 42
    assert make(ids(1), SamplingParams(seed=-5)).seed == 2**64 - 5
    assert make(ids(1), seed=7).seed == 7
    drawn = {make(ids(1)).seed for _ in range(8)}
    assert len(drawn) == 8 and all(0 <= seed < 2**63 for seed in drawn)


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    assert make(ids(1)).read_prefix_cache
    assert not make(ids(1), SamplingParams(prompt_logprobs=1)).read_prefix_cache


def test_bad_words_with_and_without_space(smollm: Tokenizer) -> None:
    makes = factory(smollm, vocab_size=49152)
    found = makes.make("r", "x", SamplingParams(bad_words=[" Paris", "unbelievable"])).bad_words
    for word in ("Paris", " Paris", "unbelievable", " unbelievable"):
        assert tuple(smollm.encode(word)) in found
    assert len(found) == 4


@pytest.mark.parametrize("prefix", [True, False])
def test_bad_words_of_pieces_have_no_bos(prefix: bool) -> None:
    tokenizer = small.pieces(add_space_prefix=prefix)
    found = factory(tokenizer, vocab_size=tokenizer.vocab_size).make("r", "a", SamplingParams(bad_words=["world"]))
    spelled = {tuple(map(tokenizer.token_text, word)) for word in found.bad_words}
    assert ("▁world",) in spelled and all("<s>" not in word for word in spelled)
    inside = {"".join(word) for word in spelled}
    assert inside == {"world", "▁world"}


def test_bad_words_without_tokens() -> None:
    with pytest.raises(ParameterError, match="bad word ' '"):
        make(ids(1), SamplingParams(bad_words=[" "]))
    assert make(ids(1), SamplingParams(bad_words=["\x01"])).bad_words == ((1,), (32, 1))


def test_defaults() -> None:
    makes = factory(default_sampling={"temperature": 0.6, "top_p": 0.9})
    assert (makes.defaults().temperature, makes.defaults().top_p) == (0.6, 0.9)
    request = makes.make("r", ids(1), makes.defaults(), priority=3, arrival=9, salt="s", adapter=2)
    assert (request.priority, request.arrival, request.salt, request.adapter) == (3, 9, "s", 2)
    assert makes.output(request) is not None


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7.0}, {"stop": [""]}])
def test_wrong_defaults_are_refused_before_any_request(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(ParameterError, match=f"default sampling parameters are wrong: {name}.*--override-generation"):
        factory(default_sampling=wrong)


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 1.5, "1", None])
def test_priorities_that_no_engine_can_hold_are_refused(priority: Any) -> None:
    with pytest.raises(ParameterError, match="64 bits") as error:
        make(ids(3), priority=priority)
    assert error.value.parameter == "priority"
    assert make(ids(3), priority=-(2**63)).priority == -(2**63)
