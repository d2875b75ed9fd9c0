"""Prompts in all their spellings."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.offline.inputs import Prompt, read_prompts


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("hi", [Prompt("hi", None)]),
        ([1, 2], [Prompt(None, (1, 2))]),
        ({"prompt": "hi", "cache_salt": "s"}, [Prompt("hi", None, "s")]),
        ({"prompt_token_ids": [3], "prompt": "hi"}, [Prompt("hi", (3,))]),
        (["a", [1], {"prompt": "b"}], [Prompt("a", None), Prompt(None, (1,)), Prompt("b", None)]),
        ([[1, 2], [3]], [Prompt(None, (1, 2)), Prompt(None, (3,))]),
        (("a", "b"), [Prompt("a", None), Prompt("b", None)]),
        ([], []),
        ("", [Prompt("", None)]),
    ],
)
def test_spellings(given: Any, found: list[Prompt]) -> None:
    assert read_prompts(given) == found


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([[]], "cannot be empty: prompt 0"),
        ({"prompt_token_ids": []}, "cannot be empty"),
        ([1, "a"], "token ids"),
        ([[1.5]], "prompt 0 must be"),
        ([[True]], "prompt 0 must be"),
        ([None], "prompt 0 must be"),
        (7, "prompts must be"),
        (None, "prompts must be"),
        ({"text": "a"}, "text: a prompt is made of"),
        ({"prompt": "a", "multi_modal_data": {}}, "not built yet"),
        ({"cache_salt": "a"}, "must have text"),
        ({"prompt": "a", "cache_salt": "s" * 129}, "at most 128"),
    ],
)
def test_what_is_no_prompt(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_prompts(given)
