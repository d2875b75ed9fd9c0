"""Thousands of random workloads must equal the sequential answer and leak nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.types import KVGroup
from tests.engine.workload import FULL, Case, run

WINDOWED = (FULL, KVGroup((1,), window=7))
TWO_WINDOWS = (KVGroup((0,), window=9), KVGroup((1,), window=2))
SETTINGS = {
    "plain": Case(0),
    "starved": Case(0, blocks=15),
    "starved, windowed": Case(0, blocks=15, groups=WINDOWED),
    "windowed": Case(0, groups=WINDOWED),
    "only windows": Case(0, groups=TWO_WINDOWS, blocks=12),
    "small steps": Case(0, budget=3),
    "aborts": Case(0, aborts=0.2, blocks=25),
    "drafts": Case(0, drafts=3),
    "starved drafts": Case(0, drafts=3, blocks=15, aborts=0.05),
    "windowed drafts": Case(0, drafts=3, groups=WINDOWED, blocks=30),
    "no cache": Case(0, caching=False, blocks=30),
    "whole prompts": Case(0, chunking=False, budget=40, blocks=20),
    "priority": Case(0, by_priority=True, blocks=20),
    "adapters": Case(0, adapters=3),
    "failing steps": Case(0, step_faults=0.05, blocks=30),
    "failing rows": Case(0, row_faults=0.2, blocks=30),
    "everything": Case(
        0, groups=WINDOWED, blocks=20, aborts=0.05, step_faults=0.02, row_faults=0.1, adapters=3, by_priority=True
    ),
    "everything with drafts": Case(
        0, groups=WINDOWED, blocks=20, aborts=0.05, step_faults=0.02, row_faults=0.1, drafts=2
    ),
}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_sequential_answer(name: str, depth: int) -> None:
    for seed in range(8):
        run(replace(SETTINGS[name], seed=seed, depth=depth))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    groups=st.sampled_from([(FULL,), WINDOWED, TWO_WINDOWS]),
    blocks=st.integers(14, 70),
    budget=st.integers(1, 40),
    slots=st.integers(1, 9),
    depth=st.integers(1, 3),
    drafts=st.integers(0, 4),
    caching=st.booleans(),
    aborts=st.sampled_from([0.0, 0.2]),
    step_faults=st.sampled_from([0.0, 0.05]),
    row_faults=st.sampled_from([0.0, 0.2]),
    by_priority=st.booleans(),
    requests=st.integers(1, 12),
)
def test_any_mixture(**fields: object) -> None:
    run(Case(**fields))  # type: ignore[arg-type]
