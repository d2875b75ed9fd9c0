"""Embeddings before they are built: whoever asks learns that there is no such route and which ones there are."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.conftest import Api
from tests.api.harness import MODEL
from tests.cases.neighbour import neighbour


def refused(api: Api, **body: Any) -> None:
    response = api.http.post("/v1/embeddings", json={"model": MODEL, **body})
    assert response.status_code == 404
    error = response.json()["error"]
    assert "/v1/embeddings" in error["message"] and "/v1/completions" in error["message"]


def test_embed_01_encodings(api: Api) -> None:
    with neighbour(api):
        for encoding in ("base64", "float", None, "xyz"):
            refused(api, input="a", encoding_format=encoding)
        with (
            openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.NotFoundError, match="/v1/embeddings"),
        ):
            client.embeddings.create(model=MODEL, input="a")


def test_embed_03_inputs_that_are_too_long(api: Api) -> None:
    with neighbour(api):
        refused(api, input="x" * 1024)
        refused(api, input="x" * 1024, truncate_prompt_tokens=-1)


def test_embed_04_several_inputs(api: Api) -> None:
    with neighbour(api):
        for value in (["a", "bb ccc dddd", "e"], [0], [[1, 2], [3]]):
            refused(api, input=value)
