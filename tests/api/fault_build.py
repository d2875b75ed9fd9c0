"""Engines with faults, for a server's engine process: the real scheduler over a make-believe model."""

from __future__ import annotations

import os
import time

from octavo.config import EngineConfig
from octavo.engine import build_engine
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.types import KVGroup
from tests.api.harness import Served, make_info, make_tokenizer

NAN, RAISES, ABORTS, HANGS = 200, 201, 202, 203
"""Prompt tokens that make a request go wrong once it has three output tokens."""
GROUPS = (KVGroup((0,)),)


def _goes_wrong(member: Member, token: int) -> bool:
    return token in member.request.prompt and member.work.start + member.work.n >= len(member.request.prompt) + 3


def _row_fault(member: Member) -> str | None:
    return "the logits are not finite" if _goes_wrong(member, NAN) else None


def _step_fault(members: list[Member]) -> Exception | None:
    if any(_goes_wrong(member, ABORTS) for member in members):
        os.abort()
    while any(_goes_wrong(member, HANGS) for member in members):
        time.sleep(1)
    if any(_goes_wrong(member, RAISES) for member in members):
        return RuntimeError("this row cannot be sampled")
    return None


def build_faulty(config: EngineConfig, on_progress: object) -> Served:
    """Steps of 4 ms; 100 sequences at once; prompts with the tokens above are poison."""
    info = make_info(make_tokenizer())
    model = FakeModel(GROUPS, vocab_size=200)
    engine = build_engine(
        FakeExecutor(model, step_seconds=0.004, row_fault=_row_fault, step_fault=_step_fault),
        groups=GROUPS,
        blocks=(1000,),
        max_num_seqs=100,
        max_num_batched_tokens=512,
        max_model_len=info.max_model_len,
    )
    return Served(engine, info)
