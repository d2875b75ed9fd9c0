"""The description of the API: what it says, that it is true, and the page made of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from octavo.api import answers
from octavo.api.app import ROUTES
from octavo.api.schemas import ChatBody, CompletionBody
from tests.api.conftest import Api
from tests.api.harness import MODEL, ScriptEngine, parts_of, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def described(url: str, **headers: str) -> dict[str, Any]:
    response = httpx.get(f"{url}/openapi.json", headers=headers)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def test_openapi_has_every_route_and_every_field(api: Api) -> None:
    document = described(api.url)
    assert document["openapi"].startswith("3.1") and document["servers"] == [{"url": "/"}]
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert routes == {(op.method.lower(), op.path.replace(":path", "")) for op in ROUTES}
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    schemas = document["components"]["schemas"]
    for body in (CompletionBody, ChatBody):
        properties = schemas[body.__name__]["properties"]
        assert set(properties) == set(body.model_fields)
        assert all(field.get("description") for name, field in properties.items())
    assert schemas["CompletionBody"]["required"] == ["prompt"] and schemas["ChatBody"]["required"] == ["messages"]
    assert schemas["CompletionBody"]["properties"]["temperature"]["maximum"] == 2


def test_the_page_of_the_documentation_has_every_route_and_error(api: Api) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    paths = described(api.url)["paths"]
    for path, methods in paths.items():
        assert path in page
        for status in {status for operation in methods.values() for status in operation["responses"]} - {"200"}:
            assert f"| {status} |" in page


def test_openapi_responses(api: Api) -> None:
    paths = described(api.url)["paths"]
    create = paths[CHAT]["post"]
    assert set(create["responses"]) == {"200", "400", "404", "408", "413", "500", "503"}
    assert set(create["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    error = create["responses"]["400"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/Error"}
    assert "Retry-After" in create["responses"]["503"]["headers"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert "security" not in create


def test_openapi_of_a_server_with_keys() -> None:
    options = {"api_key": ("k",), "max_num_reqs_per_key": 3}
    with running(parts_of(ScriptEngine()), **options) as url:
        for path in ("/openapi.json", "/docs"):
            assert httpx.get(url + path).status_code == 401
        document = described(url, Authorization="Bearer k")
    schemes = document["components"]["securitySchemes"]
    generating = {(op.method.lower(), op.path) for op in ROUTES if op.event}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            is_open = path in ("/health", "/ping", "/version")
            assert ("401" in operation["responses"]) == (not is_open)
            assert {name for one in operation.get("security", []) for name in one} == (
                set() if is_open else set(schemes)
            )
            assert ("429" in operation["responses"]) == ((method, path) in generating)


def test_openapi_under_a_root_path() -> None:
    with running(parts_of(ScriptEngine()), root_path="/llm/", api_key=("k",)) as url:
        key = {"Authorization": "Bearer k"}
        for prefix in ("", "/llm"):  # a proxy may cut its prefix off, or leave it
            assert httpx.get(f"{url}{prefix}/health").status_code == 200
            assert httpx.get(f"{url}{prefix}/v1/models").status_code == 401
            assert httpx.get(f"{url}{prefix}/v1/models/{MODEL}", headers=key).json()["id"] == MODEL
            assert described(f"{url}{prefix}", **key)["servers"] == [{"url": "/llm"}]
            assert httpx.get(f"{url}{prefix}/docs", headers=key).status_code == 200
        assert httpx.get(f"{url}/llm/nothing", headers=key).status_code == 404


def test_openapi_can_be_left_out() -> None:
    with running(parts_of(ScriptEngine()), disable_fastapi_docs=True) as url:
        for path in ("/openapi.json", "/docs"):
            assert httpx.get(url + path).status_code == 404


def test_docs_is_one_page_that_loads_nothing(api: Api) -> None:
    response = api.http.get("/docs")
    page = response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"""(src|href)=["'](?!openapi\.json)|@import|url\(|https?://""", page)
    shown = re.search(r'<script type="application/json" id="description">(.*?)</script>', page, re.S)
    assert shown and json.loads(shown[1]) == described(api.url)


EXTRAS: dict[str, Any] = {
    "plain": {},
    "cut": {"max_tokens": 2},
    "choices": {"n": 2, "temperature": 1, "seed": 1},
    "stopped": {"stop": [" gamma"]},
    "everything": {"return_token_ids": True, "prompt_logprobs": 1, "echo": True, "tempratur": 1},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    "path, body, whole, event",
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": 2}, answers.Completion, answers.Completion),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
            answers.ChatCompletion,
            answers.ChatCompletionChunk,
        ),
    ],
    ids=["completions", "chat"],
)
def test_answers_are_as_described(
    api: Api,
    path: str,
    body: dict[str, Any],
    whole: type[BaseModel],
    event: type[BaseModel],
    extra: dict[str, Any],
    measured: bool,
) -> None:
    api.engine.script = lambda request, choice: [256, 257, 258, 259]
    parts = parts_of(api.engine)
    with running(parts, enable_per_request_metrics=measured) as url, httpx.Client(base_url=url) as http:
        request = {"temperature": 0, **body, **extra}
        streamed = http.post(path, json={**request, "stream": True})
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
        assert streamed.status_code == 200 and events.pop() == "[DONE]" and len(events) > 1
        for data in events:
            event.model_validate_json(data)
        assert ["metrics" in json.loads(data) for data in events] == [False] * (len(events) - 1) + [measured]
        request.pop("stream_options", None)
        answer = http.post(path, json=request)
        assert answer.status_code == 200
        whole.model_validate_json(answer.text)
        assert ("metrics" in answer.json()) == measured


def test_other_answers_are_as_described(api: Api) -> None:
    for path, form in (
        ("/health", answers.Health),
        ("/ping", answers.Health),
        ("/load", answers.Load),
        ("/version", answers.Version),
        ("/v1/models", answers.ModelList),
        (f"/v1/models/{MODEL}", answers.ModelCard),
        ("/nothing", answers.Error),
    ):
        form.model_validate_json(api.http.get(path).text)
    tokens = api.http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True, "promt": 1})
    answers.Tokens.model_validate_json(tokens.text)
    assert "Did you mean `prompt`?" in tokens.json()["warnings"][0]
    assert tokens.headers["x-octavo-warnings"] == "ignored: promt"
    answers.Text.model_validate_json(api.http.post("/detokenize", json={"tokens": [97]}).text)


@pytest.mark.parametrize(
    "options", [{}, {"api_key": ("k",), "root_path": "/llm", "max_num_reqs_per_key": 8}], ids=["open", "closed"]
)
def test_schemathesis_finds_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    """It makes requests of the description, right and wrong ones; one that is right by it may still be refused, since
    not all rules fit in there (a token must be in the vocabulary)."""
    with running(parts_of(ScriptEngine()), **options) as url:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}{options.get('root_path', '')}/openapi.json"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "30"),
            *("--continue-on-failure", "--generation-deterministic", "--no-color", "--warnings", "off"),
            *("--header", "Authorization: Bearer k"),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Tested: {len(ROUTES)}" in done.stdout
