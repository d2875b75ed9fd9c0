"""The dashboard and the alert rules ask for metrics that a server really has, and docs name all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.types import BlockUse, EngineStats
from tests.api.conftest import Api

DOCS = Path(__file__).parents[2] / "docs"
METRIC = re.compile(r"\b(?:vllm:|octavo:|octavo_engine_|http_|process_|python_)[a-z0-9_]+")
OF_A_PROCESS = "octavo_engine_process_"
"""Only there where the engine has a process of its own, which the engine of these tests has not."""


def boards() -> Iterator[dict[str, Any]]:
    for path in sorted((DOCS / "grafana").glob("*.json")):
        yield json.loads(path.read_text())


def expressions() -> dict[str, str]:
    """Every PromQL expression, by where it stands."""
    found = {}
    for board in boards():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found[f"{board['title']}/{panel['title']}/{target['refId']}"] = target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found[f"{board['title']}/${variable['name']}"] = variable["query"]["query"]
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]:
        found |= {f"alerts/{rule['alert']}": rule["expr"] for rule in group["rules"]}
    return found


@pytest.fixture
def page(api: Api, monkeypatch: pytest.MonkeyPatch) -> str:
    """/metrics of a server that has answered something."""
    numbers: EngineStats = api.engine.numbers
    monkeypatch.setattr(numbers, "groups", [BlockUse(10, 2, 3)])
    api.completion(max_tokens=3)
    api.completion(max_tokens=3, prompt=5)
    return api.http.get("/metrics").text


def series_of(page: str) -> set[str]:
    found = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    own = {name for name in found if name.startswith("process_")}
    return found | {f"octavo_engine_{name}" for name in own}


def test_every_metric_asked_for_is_on_the_page(page: str) -> None:
    have = series_of(page)
    asked = expressions()
    assert len(asked) > 50
    for place, expression in asked.items():
        names = METRIC.findall(expression)
        assert names, f"{place} names no metric"
        assert set(names) <= have, f"{place}: {sorted(set(names) - have)}"


def test_labels_asked_for_exist(page: str) -> None:
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    for place, expression in expressions().items():
        for name, chosen in re.findall(r"([a-z_]+:?[a-z0-9_]+)\{([^}]*)\}", expression):
            if name.startswith(OF_A_PROCESS):
                continue
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen))
            assert used <= labels[name], f"{place}: {name} has no label {used - labels[name]}"


def test_parentheses_of_expressions_match() -> None:
    for place, expression in expressions().items():
        depth = 0
        for character in expression:
            depth += {"(": 1, ")": -1}.get(character, 0)
            assert depth >= 0, place
        assert depth == 0 and expression.count("{") == expression.count("}"), place


def test_panels_do_not_overlap() -> None:
    for board in boards():
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24
            cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
            assert taken.isdisjoint(cells), panel["title"]
            taken |= cells


def test_alerts_say_what_to_do() -> None:
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


def test_every_metric_is_documented(page: str) -> None:
    text = (DOCS / "observability.md").read_text()
    for family in text_string_to_metric_families(page):
        if not family.name.startswith("python_") and not family.name.endswith("_created"):
            assert f"`{family.name}" in text, f"{family.name} is not in docs/observability.md"
    documented = {name for name in METRIC.findall(text) if not name.startswith("python_")}
    names = {family.name for family in text_string_to_metric_families(page)} | series_of(page)
    assert documented <= names, sorted(documented - names)
