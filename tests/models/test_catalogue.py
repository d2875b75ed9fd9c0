"""The catalogue of architectures tells what the tests tell."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.catalogue import document, entries
from octavo.models.registry import MODULES, architecture
from tests.models import catalogue


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return catalogue.collect(tmp_path_factory.mktemp("catalogue"))


def test_the_catalogue_and_its_page_are_what_the_variants_say(collected: dict[str, object]) -> None:
    """`python -m tests.models.catalogue` writes both."""
    assert catalogue.PATH.read_text() == document(collected)
    assert catalogue.PAGE.read_text() == catalogue.page(collected)


def test_every_architecture_has_variants_or_is_another_name_of_one_that_has(collected: dict[str, object]) -> None:
    tested = {MODULES[name] for name in collected}
    assert set(MODULES.values()) == tested


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_and_has_what_the_registry_needs(name: str) -> None:
    found = architecture(name)
    assert callable(found.make) and found.name == name
    module = importlib.import_module(f"octavo.models.{MODULES[name]}")
    lines = Path(module.__file__ or "").read_text().count("\n")
    assert lines <= 145, "an architecture is data: what is long belongs to a layer"


def test_the_command_lists_filters_and_says_when_nothing_fits() -> None:
    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "octavo", "models", *words], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout

    status, text = run()
    assert status == 0 and f"{len(entries())} architectures" in text and "LlamaForCausalLM" in text
    weights = text.splitlines()[-1]
    assert "Weights: F32 F16 BF16; in GGUF files " in weights and "gptq" in weights and "Q4_K" in weights
    assert "_CODES" not in weights and "INT4_128" not in weights, "only what a checkpoint can hold"
    assert "\n1 architecture. " in run("mixtral")[1]
    status, text = run("mixtral", "--json")
    assert status == 0 and [e["name"] for e in json.loads(text)] == ["MixtralForCausalLM"]
    assert "mixture of experts" in json.loads(text)[0]["features"]
    status, text = run("no such thing")
    assert status == 1 and "lists all" in text
