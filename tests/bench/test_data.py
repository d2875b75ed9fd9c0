"""The prompts of a benchmark: exact lengths, shared beginnings, conversations, files."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.client import Ask
from octavo.bench.data import WORDS, Writer, asks_of
from octavo.bench.options import BenchError, DataOptions, ServeOptions
from tests.api.harness import make_tokenizer

WORD = re.compile(r" [a-z]+|.")


def words(text: str) -> int:
    """A tokenizer with a token per word, one per other character, and one before all of them."""
    return 1 + len(WORD.findall(text))


def syllables(text: str) -> int:
    """A tokenizer with a token per three letters."""
    return sum(-(-len(piece) // 3) for piece in WORD.findall(text))


BYTES = make_tokenizer()


def every_byte(text: str) -> int:
    return len(BYTES.encode(text))


def asks(count: Any = words, **options: Any) -> list[Ask]:
    return asks_of(DataOptions(**options), count)


def test_the_words_are_plain_and_differ() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400
    assert all(re.fullmatch(" [a-z]+", word) for word in WORDS)


@pytest.mark.parametrize("count", [words, syllables, every_byte])
@given(length=st.integers(2, 300), seed=st.integers(0, 5))
def test_random_texts_have_the_length_that_is_asked_for(count: Any, length: int, seed: int) -> None:
    made = Writer(random.Random(seed), count).text(length)
    assert made.prompt_tokens == count(str(made.prompt)) == length


def test_a_tokenizer_that_cannot_make_the_length_gets_the_nearest() -> None:
    made = Writer(random.Random(0), lambda text: 2 * words(text)).text(41)
    assert made.prompt_tokens == 2 * words(str(made.prompt)) and abs(made.prompt_tokens - 41) <= 2


def test_each_text_is_counted_few_times() -> None:
    calls: list[str] = []
    made = asks(lambda text: calls.append(text) or words(text), num_prompts=20, random_input_len=50)
    assert {ask.prompt_tokens for ask in made} == {50}
    assert len(calls) <= 22


def test_random_prompts_are_repeatable_and_differ() -> None:
    options = {"num_prompts": 6, "random_input_len": 20, "random_output_len": 7}
    first = asks(**options)
    assert first == asks(**options)
    assert len({ask.prompt for ask in first}) == 6 and {ask.max_tokens for ask in first} == {7}
    assert not {ask.prompt for ask in asks(**options, seed=1)} & {ask.prompt for ask in first}


def test_lengths_are_drawn_from_the_range() -> None:
    made = asks(num_prompts=200, random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    lengths = [ask.prompt_tokens for ask in made]
    assert min(lengths) >= 50 and max(lengths) <= 150 and min(lengths) < 60 and max(lengths) > 140
    assert {ask.max_tokens for ask in made} == set(range(5, 16))


def test_a_prefix_is_shared_by_all() -> None:
    made = asks(num_prompts=4, random_prefix_len=30, random_input_len=10)
    prefix = Writer(random.Random("random/0"), words).text(30)
    assert prefix.prompt_tokens == 30
    assert all(str(ask.prompt).startswith(str(prefix.prompt)) and ask.prompt_tokens == 40 for ask in made)
    assert len({ask.prompt for ask in made}) == 4


def test_a_burst_is_one_prompt() -> None:
    made = asks(dataset_name="burst", num_prompts=5, random_input_len=12, random_range_ratio=0.5)
    assert len(made) == 5 and {ask.prompt for ask in made} == {made[0].prompt} and made[0].prompt_tokens == 12


def test_few_beginnings_shared_by_many() -> None:
    made = asks(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=9,
    )
    assert {(ask.prompt_tokens, ask.max_tokens) for ask in made} == {(25, 9)}
    heads = [" ".join(str(ask.prompt).split()[:19]) for ask in made]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({ask.prompt for ask in made}) == 12


def test_conversations_of_random_turns() -> None:
    made = asks(dataset_name="multi-turn", num_prompts=8, multi_turn_num_turns=3, random_input_len=6)
    assert [ask.after for ask in made] == [None, 0, 1, None, 3, 4, None, 6]
    assert {ask.prompt_tokens for ask in made} == {6} and len({ask.prompt for ask in made}) == 8


def sharegpt(folder: Path, *conversations: list[str]) -> str:
    rows = [
        {"conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]}
        for texts in conversations
    ]
    file = folder / "sharegpt.json"
    file.write_text(json.dumps(rows))
    return str(file)


def many(word: str, count: int) -> str:
    """A text of so many tokens."""
    return f" {word}" * (count - 1)


def test_sharegpt_takes_first_messages_of_usual_lengths(tmp_path: Path) -> None:
    path = sharegpt(
        tmp_path,
        [many("good", 20), many("answer", 30), "more", "more"],
        [many("short", 3), many("answer", 30)],
        [many("long", 1025), many("answer", 30)],
        [many("curt", 20), many("answer", 3)],
        [many("both", 1000), many("answer", 1049)],
        [many("alone", 20)],
        [many("fine", 4), many("answer", 2044)],
    )
    made = asks(dataset_name="sharegpt", dataset_path=path, num_prompts=9, no_oversample=True, disable_shuffle=True)
    assert [(ask.prompt, ask.prompt_tokens, ask.max_tokens) for ask in made] == [
        (many("good", 20), 20, 30),
        (many("fine", 4), 4, 2044),
    ]
    repeated = asks(dataset_name="sharegpt", dataset_path=path, num_prompts=5, sharegpt_output_len=8)
    assert len(repeated) == 5 and {ask.max_tokens for ask in repeated} == {8}
    assert {ask.prompt_tokens for ask in repeated} == {20, 4, 1000}  # 1000 and 8 fit together


def test_conversations_from_a_file(tmp_path: Path) -> None:
    path = sharegpt(tmp_path, ["a", "A", "b", "B", "c"], [], ["d", "D"])
    options = {"dataset_name": "multi-turn", "dataset_path": path, "disable_shuffle": True, "random_output_len": 3}
    made = asks(**options, num_prompts=6, multi_turn_num_turns=2)
    assert [(ask.prompt, ask.after) for ask in made] == [
        *(("a", None), ("b", 0), ("d", None), ("a", None), ("b", 3), ("d", None)),
    ]
    assert {ask.max_tokens for ask in made} == {3}
    assert len(asks(**options, num_prompts=6, no_oversample=True)) == 4


def test_custom_lines(tmp_path: Path) -> None:
    file = tmp_path / "custom.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a", "output_tokens": 3}, {"messages": messages}, {"prompt": [1, 2]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    options = {"dataset_name": "custom", "dataset_path": str(file), "custom_output_len": 5}
    made = asks(**options, num_prompts=4, disable_shuffle=True)
    assert [(ask.prompt, ask.max_tokens) for ask in made] == [("a", 3), (messages, 5), ([1, 2], 5), ("a", 3)]
    shuffled = [ask.prompt for seed in range(9) for ask in asks(**options, num_prompts=1, seed=seed)]
    assert "a" in shuffled and messages in shuffled


@pytest.mark.parametrize(
    "line, error",
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 must be an object with a prompt or messages"),
        ('{"text": "x"}', "line 2 must be an object with a prompt or messages"),
        ('{"prompt": ""}', "line 2 must be an object with a prompt or messages"),
        ('{"prompt": "x", "output_tokens": 0}', "line 2: output_tokens must be a whole number of at least 1, got 0"),
        ('{"prompt": "x", "output_tokens": "9"}', "output_tokens must be a whole number of at least 1, got '9'"),
    ],
)
def test_custom_lines_that_are_none(tmp_path: Path, line: str, error: str) -> None:
    file = tmp_path / "custom.jsonl"
    file.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(BenchError, match=re.escape(error)):
        asks(dataset_name="custom", dataset_path=str(file))


@pytest.mark.parametrize("name", ["custom", "sharegpt", "multi-turn"])
def test_files_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    with pytest.raises(BenchError, match="cannot read"):
        asks(dataset_name=name, dataset_path=str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BenchError, match="cannot read"):
        asks(dataset_name=name, dataset_path=str(file))
    file.write_text("" if name == "custom" else "[]")
    with pytest.raises(BenchError, match="holds no prompt|nobody asks"):
        asks(dataset_name=name, dataset_path=str(file))
    if name != "custom":
        file.write_text('[{"conversation": 1}]')
        with pytest.raises(BenchError, match="must be a JSON list of"):
            asks(dataset_name=name, dataset_path=str(file))


# -- options


@pytest.mark.parametrize(
    "options, error",
    [
        ({"num_prompts": 0}, "--num-prompts must be at least 1, got 0."),
        ({"random_range_ratio": 1.0}, "--random-range-ratio must be below 1, got 1.0."),
        ({"random_range_ratio": float("nan")}, "--random-range-ratio must be at least 0, got nan."),
        ({"dataset_name": "custom"}, "--dataset-name custom reads a file: name it with --dataset-path."),
        ({"request_rate": 0.0}, "--request-rate must be above 0."),
        ({"burstiness": -1.0}, "--burstiness must be at least 0, got -1.0."),
        ({"ramp_up_strategy": "linear"}, "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together."),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 3.0},
            "--request-rate and --ramp-up-strategy both say when requests are sent; give one.",
        ),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": float("inf")},
            "the rates of a ramp must be finite.",
        ),
        ({"goodput": ("itl:3",)}, "--goodput takes limits such as ttft:500 tpot:50 e2el:9000, got itl:3."),
        ({"goodput": ("ttft:fast",)}, "--goodput ttft:fast: 'fast' is no number."),
        ({"percentile_metrics": "ttft,e2e"}, "--percentile-metrics takes any of ttft,tpot,itl,e2el, got 'e2e'."),
        ({"metric_percentiles": "50,101"}, "--metric-percentiles are from 0 to 100, got 50,101."),
        ({"header": ("X",)}, "--header takes NAME=VALUE, got 'X'."),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: str) -> None:
    with pytest.raises(BenchError) as caught:
        ServeOptions(**options)
    assert str(caught.value) == error


def test_what_options_mean() -> None:
    options = ServeOptions(
        goodput=("ttft:500", "e2el:9e3"),
        metric_percentiles="25, 99.9",
        timeline_itl_thresholds="50,25",
        header=("A=b=c",),
        host="::1",
        ignore_eos=True,
        top_k=0,
    )
    assert options.limits == {"ttft": 500, "e2el": 9000} and options.percentiles == (25, 99.9)
    assert options.thresholds == (25, 50) and options.headers == {"A": "b=c"} and options.url == "http://[::1]:8000"
    assert options.sampling == {"temperature": 0.0, "top_k": 0, "ignore_eos": True}
