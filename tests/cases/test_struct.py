"""Structured output before it is built: every way to ask for it is refused by the field's name, before anything is
generated, and harms nobody. An answer that only looks as if it kept a constraint would be worse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Api
from tests.cases.neighbour import neighbour


def schema(value: object, **more: Any) -> list[dict[str, Any]]:
    """Every way to ask for JSON of a schema; `more` goes into each body."""
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}, **more},
        {"structured_outputs": {"json": value}, **more},
        {"guided_json": value, **more},
    ]


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SPACES = {str(token): 100 for token in (ord(" "), ord("\n"), ord("\t"))}
CASES: dict[str, list[dict[str, Any]]] = {
    "struct_01": [
        *schema({"type": "strng"}),
        *schema({"$ref": "#/nope"}),
        *schema("{no json"),
        {"structured_outputs": {"regex": "([a-z"}},
        {"guided_regex": "([a-z"},
        {"structured_outputs": {"grammar": "Root ::= ["}},
        {"guided_grammar": "Root ::= ["},
        {"structured_outputs": {"choice": []}},
        {"guided_choice": []},
    ],
    "struct_03": schema(record(a={"type": "integer"}), logit_bias=SPACES, max_tokens=64),
    "struct_05": schema(
        {
            **record(one={"$ref": "#/$defs/E"}, many={"type": "array", "items": {"$ref": "#/$defs/E"}}),
            "$defs": {"E": {"enum": ["A", "B"]}},
        }
    ),
    "struct_07": schema(record(größe={"enum": ["在线", "北京"]}, text={"type": "string"})),
    "struct_08": schema({"const": "http://example.com/path"}),
    "struct_09": [
        *schema(record(s={"type": "string"}), logit_bias={str(ord("\n")): 100}),
        *schema(record(s={"type": "string"}), logit_bias={str(ord("\\")): 100}),
    ],
    "struct_11": schema(record(name={"type": "string"}), stop_token_ids=[264], logit_bias={"264": 100}),
    "struct_12": [
        {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True, "max_tokens": 50},
        {"guided_choice": ["yes", "no"], "min_tokens": 20, "max_tokens": 50},
    ],
    "struct_14": [
        {"response_format": {"type": "json_object"}},
        *schema(record(a={"type": "integer"})),
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"guided_json_object": True},
        {"structural_tag": "{}"},
    ],
    "struct_15": schema(record(a={"type": "string"}, b={"type": "boolean"}), max_tokens=200),
}


def all_are_refused(api: Api, case: str) -> None:
    with neighbour(api):
        for body in CASES[case]:
            field = next(iter(body))
            for ask in (api.chat, api.completion):
                for stream in (False, True):
                    response = ask(stream=stream, **body)
                    assert response.status_code == 400, body
                    error = response.json()["error"]
                    assert error["param"] == field and field in error["message"]


def test_struct_01_invalid_constraints(api: Api) -> None:
    all_are_refused(api, "struct_01")


def test_struct_03_whitespace(api: Api) -> None:
    all_are_refused(api, "struct_03")


def test_struct_05_an_enum_behind_a_reference(api: Api) -> None:
    all_are_refused(api, "struct_05")


def test_struct_07_beyond_ascii(api: Api) -> None:
    all_are_refused(api, "struct_07")


def test_struct_08_a_slash(api: Api) -> None:
    all_are_refused(api, "struct_08")


def test_struct_09_strings_of_a_schema(api: Api) -> None:
    all_are_refused(api, "struct_09")


def test_struct_11_an_end_within_an_object(api: Api) -> None:
    all_are_refused(api, "struct_11")


def test_struct_12_a_finite_grammar(api: Api) -> None:
    all_are_refused(api, "struct_12")


def test_struct_14_every_spelling(api: Api) -> None:
    all_are_refused(api, "struct_14")


def test_struct_15_the_closing_brace(api: Api) -> None:
    all_are_refused(api, "struct_15")


@pytest.mark.parametrize("value", ["json_object", [], {"type": "json"}, {"type": None}, {}])
def test_struct_14_a_wrong_form_is_refused(api: Api, value: object) -> None:
    for response in (api.chat(response_format=value), api.completion(response_format=value)):
        assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"
    api.alive()
