"""The table of cases is complete and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).parents[2]

REQUIRED = {
    "STOP": (1, 2, 4, 5, 7, 8, 10, 12, 14, 15),
    "LOGP": (1, 2, 3, 4, 5, 8, 11, 13, 14),
    "SEED": (1, 3, 4, 6),
    "LEN": (1, 2, 4, 6, 7, 9),
    "CHAT": (1, 3, 5, 6, 7, 8, 9),
    "TOOL": (1, 2, 4, 6, 7),
    "STRUCT": (1, 3, 5, 7, 8, 9, 11, 12, 14, 15),
    "ABORT": (1, 3, 4, 5),
    "PREFIX": (1, 3, 4, 5, 6),
    "SCHED": (1, 3, 5, 7, 8),
    "SAMPLE": (1, 3, 4, 5, 7, 9, 10, 11, 13, 15, 17),
    "INPUT": (1, 3, 5),
    "USAGE": (1, 3),
    "HTTP": (1, 3, 5, 6, 7, 9, 10),
    "EMBED": (1, 3, 4),
    "GGUF": (1, 2, 3, 6, 7, 8),
    "QUANT": (1, 3, 4, 6, 8, 9),
    "CKPT": (2, 3, 4, 6, 7, 8, 10),
    "START": (1, 3, 4),
    "METRIC": (1,),
    "SHUT": (1, 3),
    "TP": (1, 3, 4),
    "CPU": (1, 3, 5),
    "LORA": (1,),
}
"""Area -> numbers; the numbers have gaps."""


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "table.toml").read_text())
    return found


def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file, those of classes as Class::name."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                found.add(inner.name if inner is node else f"{node.name}::{inner.name}")  # type: ignore[attr-defined]
    return found


def test_every_case_has_its_row(table: dict[str, dict[str, Any]]) -> None:
    required = {f"{area}-{number:02}" for area, numbers in REQUIRED.items() for number in numbers}
    assert sorted(required - set(table)) == [], "cases without a row"
    assert sorted(set(table) - required) == [], "rows of unknown cases"


def test_every_row_has_tests_or_a_reason(table: dict[str, dict[str, Any]]) -> None:
    for name, row in table.items():
        assert set(row) <= {"what", "tests", "not_yet"}, name
        assert isinstance(row.get("what"), str) and row["what"], f"{name} does not say what it is about"
        assert row.get("tests") or row.get("not_yet"), f"{name} has neither tests nor a reason"
        assert isinstance(row.get("tests", []), list) and isinstance(row.get("not_yet", ""), str), name
        assert len(set(row.get("tests", []))) == len(row.get("tests", [])), f"{name} names a test twice"
    reasons = sum("tests" not in row for row in table.values())
    print(f"{len(table)} cases: {len(table) - reasons} with tests, {reasons} not yet")


def test_every_named_test_exists(table: dict[str, dict[str, Any]]) -> None:
    known: dict[str, set[str]] = {}
    for name, row in table.items():
        for test in row.get("tests", []):
            file, _, function = test.partition("::")
            if file not in known:
                path = ROOT / file
                assert path.is_file(), f"{name} names {file}, which does not exist"
                known[file] = names_in(path)
            assert function in known[file], f"{name} names {test}, which does not exist"
