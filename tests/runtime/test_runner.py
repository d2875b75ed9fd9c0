"""The runner on its own: sampler rows, drafts, prompt scores, and errors that stay in their row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.ops.contract import BatchLimits, Drawn
from octavo.runtime.runner import Runner
from octavo.sampling_params import SamplingParams
from octavo.types import Enter, Request, StepPlan, Work
from tests.models.tiny import make
from tests.runtime.rig import Rig, ids, request

VOCAB = 50


class Script:
    """A `CompiledModel` that draws what a script says and keeps what it was given."""

    def __init__(self, *tokens: int):
        self.tokens = list(tokens)
        self.batches: list = []
        self.samplings: list = []
        self.bad: set[int] = set()

    def run(self, batch, sampling) -> Drawn:
        self.batches.append(batch)
        self.samplings.append(sampling)
        rows = batch.rows.size
        tokens = [self.tokens.pop(0) if t < 0 else int(t) for t in sampling.target]
        ok = np.ones(rows, np.uint8)
        ok[[r for r in range(rows) if int(batch.rows[r]) in self.bad]] = 0
        width = max(int(sampling.logprobs.max(initial=0)), 0)
        return Drawn(
            np.array(tokens, np.int32),
            np.full(rows, -1.0, np.float32),
            np.ones(rows, np.int32),
            np.zeros((rows, width), np.int32),
            np.zeros((rows, width), np.float32),
            ok,
            np.arange(sampling.report_ids.size, dtype=np.float32),
        )

    def copy_blocks(self, group, pairs) -> None:
        self.batches.append((group, pairs.tolist()))


def make_runner(model) -> Runner:
    return Runner(model, BatchLimits(64, 8, 64, 128), 1, 16, VOCAB)


def entering(slot: int = 0, known=(5, 6, 7), prompt=(5, 6, 7), min_tokens=0, masked=(), bad=(), **sampling) -> Enter:
    p = SamplingParams(min_tokens=min_tokens, **{"temperature": 0.0, **sampling})
    r = Request(id="r", prompt=tuple(prompt), sampling=p, seed=3, max_tokens=16, masked_ids=masked, bad_words=bad)
    return Enter(slot, r, 0, tuple(known))


def bias_of(sampling, row: int = 0) -> dict[int, float]:
    a, b = sampling.bias_ptr[row], sampling.bias_ptr[row + 1]
    return dict(zip(sampling.bias_ids[a:b].tolist(), sampling.bias_values[a:b].tolist(), strict=True))


def seen_of(sampling, row: int = 0) -> dict[int, int]:
    a, b = sampling.seen_ptr[row], sampling.seen_ptr[row + 1]
    return dict(zip(sampling.seen_ids[a:b].tolist(), sampling.seen_counts[a:b].tolist(), strict=True))


def test_a_prompt_then_decodes_whose_token_only_the_runner_knows() -> None:
    model = Script(11, 12)
    runner = make_runner(model)
    first = runner.run(StepPlan((Work(0, 0, 3, (5, 6, 7), ((0, (4,)),), sample=True),), (entering(),)))
    second = runner.run(StepPlan((Work(0, 3, 1, (), sample=True),)))
    assert [r.rows[0].tokens for r in (first, second)] == [(11,), (12,)]
    assert model.batches[1].tokens.tolist() == [11]
    assert model.batches[1].positions.tolist() == [3]
    assert model.batches[1].tables[0][0, 0] == 4
    assert model.samplings[1].position.tolist() == [4]


def test_copies_come_before_the_step_and_by_group() -> None:
    model = Script(1)
    work = Work(0, 0, 3, (5, 6, 7), copies=((0, 2, 9), (0, 3, 1)), sample=True)
    make_runner(model).run(StepPlan((work,), (entering(),)))
    assert model.batches[0] == (0, [[2, 9], [3, 1]])


def test_drafts_are_accepted_as_far_as_they_are_what_the_draw_says() -> None:
    for drawn, want in (((8, 9, 4, 1), (8, 9, 4, 1)), ((8, 2, 4, 1), (8, 2)), ((3, 9, 4, 1), (3,))):
        model = Script(*drawn)
        plan = StepPlan((Work(0, 0, 6, (5, 6, 7, 8, 9, 4), sample=True, drafts=3),), (entering(),))
        assert make_runner(model).run(plan).rows[0].tokens == want
        assert model.batches[0].rows.tolist() == [2, 3, 4, 5]
        assert model.samplings[0].position.tolist() == [3, 4, 5, 6]


def test_penalties_count_output_only_and_see_drafts() -> None:
    model = Script(8, 9, 1, 2)
    enter = entering(known=(5, 6, 5, 9), prompt=(5, 6, 5), presence_penalty=0.5)
    runner = make_runner(model)
    runner.run(StepPlan((Work(0, 0, 6, (5, 6, 5, 9, 8, 9), sample=True, drafts=2),), (enter,)))
    assert seen_of(model.samplings[0], 0) == {5: 0, 6: 0, 9: 1}
    assert seen_of(model.samplings[0], 2) == {5: 0, 6: 0, 9: 2, 8: 1}
    runner.run(StepPlan((Work(0, 7, 1, (), sample=True),)))
    assert seen_of(model.samplings[1]) == {5: 0, 6: 0, 9: 2, 8: 1, 1: 1}


def test_min_tokens_masks_every_end_until_enough_are_out() -> None:
    model = Script(8, 9, 1)
    runner = make_runner(model)
    runner.run(StepPlan((Work(0, 0, 3, (5, 6, 7), sample=True),), (entering(min_tokens=2, masked=(2, 4)),)))
    for start in (3, 4):
        runner.run(StepPlan((Work(0, start, 1, (), sample=True),)))
    assert [set(bias_of(s)) for s in model.samplings] == [{2, 4}, {2, 4}, set()]


def test_bad_words_ban_the_last_token_of_a_started_word() -> None:
    model = Script(8, 9, 1)
    runner = make_runner(model)
    runner.run(StepPlan((Work(0, 0, 3, (5, 6, 7), sample=True),), (entering(bad=((30,), (7, 8), (8, 9, 10))),)))
    for start in (3, 4):
        runner.run(StepPlan((Work(0, start, 1, (), sample=True),)))
    assert [set(bias_of(s)) for s in model.samplings] == [{30, 8}, {30}, {30, 10}]
    assert bias_of(model.samplings[0])[8] == -np.inf


def test_bad_word_of_any_length_is_seen() -> None:
    long = tuple(i % 40 for i in range(50))
    model = Script(8)
    enter = entering(known=long[:-1], prompt=long[:-1], bad=(long, (1, 2)))
    make_runner(model).run(StepPlan((Work(0, 0, 49, long[:-1], sample=True),), (enter,)))
    assert set(bias_of(model.samplings[0])) == {long[-1]}


def test_a_slot_forgets_its_last_request() -> None:
    model = Script(8, 9)
    runner = make_runner(model)
    runner.run(StepPlan((Work(0, 0, 3, (5, 6, 7), sample=True),), (entering(logit_bias={3: 5.0}),)))
    runner.run(StepPlan((Work(0, 0, 3, (5, 6, 7), sample=True),), (entering(),), (0,)))
    assert bias_of(model.samplings[0]) == {3: 5.0}
    assert bias_of(model.samplings[1]) == {}


def test_row_that_is_not_finite_fails_alone() -> None:
    model = Script(8, 9)
    model.bad = {2}
    runner = make_runner(model)
    work = (Work(0, 0, 3, (5, 6, 7), sample=True), Work(1, 0, 3, (5, 6, 7), sample=True))
    rows = runner.run(StepPlan(work, (entering(0), entering(1)))).rows
    assert "not finite" in rows[0].error and rows[0].tokens == ()
    assert rows[1].error is None and rows[1].tokens == (9,)


def test_asked_ids_are_reported_with_the_token() -> None:
    model = Script(8)
    enter = entering(logprob_token_ids=[4, 9], logprobs=2)
    row = make_runner(model).run(StepPlan((Work(0, 0, 3, (5, 6, 7), sample=True),), (enter,))).rows[0]
    assert row.logprobs[0].top == ((4, 0.0), (9, 1.0))


def test_work_that_leaves_out_two_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at most one may be left out"):
        make_runner(Script(8)).run(StepPlan((Work(0, 0, 3, (5,), sample=True),), (entering(),)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("runner"))[0]


def test_logp_11_prompt_logprobs_chunked_equal_whole(llama: Path) -> None:
    prompt = ids(1, 100)
    asked = request("a", prompt, max_tokens=1, prompt_logprobs=1)
    out = []
    for tokens in (512, 32):
        rig = Rig(llama, max_num_batched_tokens=tokens, max_num_seqs=4)
        out.append(rig.generate([asked])[("a", 0)][0].prompt_logprobs)
        rig.close()
    assert out[0] == out[1]
    assert len(out[0]) == 100 and out[0][0] is None and None not in out[0][1:]
    assert [entry.token for entry in out[0][1:]] == prompt[1:]
    assert all(len(entry.top) == 1 and entry.top[0][1] >= entry.logprob for entry in out[0][1:])


def test_ids_asked_of_the_prompt_and_a_later_start(llama: Path) -> None:
    prompt = ids(1, 6)
    rig = Rig(llama)
    plain = rig.generate(
        [request("a", prompt, max_tokens=1, prompt_logprobs=199)],
    )[("a", 0)][0].prompt_logprobs
    every = [dict(entry.top) for entry in plain[1:]]
    asked = request(
        "b", prompt, max_tokens=1, prompt_logprob_token_ids=[[], [4, 9], [7, -1], [], [1]], prompt_logprob_start=2
    )
    got = rig.generate([asked])[("b", 0)][0].prompt_logprobs
    rig.close()
    assert got[:2] == [None, None]
    assert [entry.token for entry in got[2:]] == prompt[2:]
    assert [entry.top for entry in got[2:]] == [((7, every[1][7]),), (), ((1, every[3][1]),), ()]


def test_ids_asked_of_the_output_equal_the_full_distribution(llama: Path) -> None:
    rig = Rig(llama)
    full = rig.generate([request("a", ids(1, 6), max_tokens=3, logprobs=199)])[("a", 0)]
    some = rig.generate([request("b", ids(1, 6), max_tokens=3, logprob_token_ids=[8, 150])])[("b", 0)]
    rig.close()
    assert len(full) == len(some) == 3
    for a, b in zip(full, some, strict=True):
        every = dict(a.logprobs[0].top)
        assert b.logprobs[0].top == ((8, every[8]), (150, every[150]))
