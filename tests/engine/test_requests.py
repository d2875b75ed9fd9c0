"""What a request gets back, case by case."""

from __future__ import annotations

import msgspec
import pytest

from octavo.engine import Engine, build_engine
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.engine.sequence import Sequence
from octavo.sampling_params import RepetitionDetectionParams
from octavo.types import Request
from tests.engine.workload import Outcome, check, drive, request


def engine_of(model: FakeModel | None = None, executor: FakeExecutor | None = None, **changes: object) -> Engine:
    """16-token blocks, plenty of memory, steps that take no time."""
    executor = executor or FakeExecutor(model)
    sizes = {
        "groups": executor.model.groups,
        "blocks": (200,),
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 1024,
        "clock": lambda: 0.0,
        **changes,
    }
    return build_engine(executor, **sizes)  # type: ignore[arg-type]


def says(*tokens: int) -> FakeModel:
    """A model that answers with these tokens, then with 1, 2, 3, …"""
    return FakeModel(answer=lambda request, choice, out: tokens[len(out)] if len(out) < len(tokens) else len(out))


def one(engine: Engine, wanted: Request) -> Outcome:
    return drive(engine, [wanted])


def end_of(model: FakeModel, wanted: Request) -> tuple[list[int], str | None, int | None]:
    out = one(engine_of(model), wanted)
    end = out.finish[wanted.id, 0]
    return out.tokens[wanted.id, 0], end.finish, end.stop_reason


def test_the_end_of_a_sequence() -> None:
    prompt = range(10)
    assert end_of(says(8, 9, 2), request("a", prompt, 9, eos_ids=(2, 3))) == ([8, 9, 2], "stop", None)
    assert end_of(says(8, 9, 5), request("a", prompt, 9, stop_ids=(5,))) == ([8, 9, 5], "stop", 5)
    assert end_of(says(8, 9, 5), request("a", prompt, 2, stop_ids=(5,))) == ([8, 9], "length", None)
    assert end_of(says(8, 9, 5), request("a", prompt, 3, stop_ids=(5,))) == ([8, 9, 5], "stop", 5), "stop wins"
    assert end_of(says(8, 9, 5), request("a", prompt, 3, eos_ids=(5,), stop_ids=(5,))) == ([8, 9, 5], "stop", None)


def test_no_stop_before_min_tokens() -> None:
    wanted = request("a", range(10), 9, eos_ids=(2,), min_tokens=2)
    assert end_of(says(2, 2, 2, 2), wanted) == ([2, 2, 2], "stop", None)


def test_context_length_ends_a_sequence() -> None:
    engine = engine_of(max_model_len=12)
    out = one(engine, request("a", range(10), 9))
    assert len(out.tokens["a", 0]) == 2 and out.finish["a", 0].finish == "length"


def test_repetition_ends_a_sequence() -> None:
    rule = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)
    wanted = request("a", [4, 5, 4, 5], 20, repetition_detection=rule)
    assert end_of(says(9, 4, 5, 4, 5, 4, 5, 8), wanted) == ([9, 4, 5, 4, 5, 4, 5], "repetition", None)
    assert end_of(says(7, 7, 7, 7, 7, 7, 7), wanted)[0] == [7] * 6, "two copies of 7 are a pattern of size 2"


def test_patterns_that_cannot_repeat_in_the_output_are_not_looked_for() -> None:
    for size, longest in ((1, 10), (9, 2), (11, 0)):
        rule = RepetitionDetectionParams(max_pattern_size=1000, min_pattern_size=size, min_count=2)
        engine = engine_of()
        engine.add(request("a", [1], 20, repetition_detection=rule))
        engine.step()
        (seq,) = engine.scheduler.roster.running
        assert len(seq.repeats) == longest


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 512])
def test_scoring_without_output(chunk: int, depth: int) -> None:
    engine = engine_of(max_num_batched_tokens=chunk, depth=depth)
    wanted = request("a", range(40), 0, prompt_logprobs=3, read_prefix_cache=False)
    out = one(engine, wanted)
    end = out.finish["a", 0]
    assert end.finish == "length" and out.tokens["a", 0] == []
    assert end.prompt_logprobs is not None and len(end.prompt_logprobs) == 40 and end.prompt_logprobs[0] is None
    assert [entry.token for entry in end.prompt_logprobs[1:] if entry] == list(range(1, 40))
    assert all(len(entry.top) == 3 for entry in end.prompt_logprobs[1:] if entry)


def test_prompt_logprobs_do_not_depend_on_chunks_and_leave_a_cache() -> None:
    answers = []
    for chunk in (5, 16, 512):
        engine = engine_of(max_num_batched_tokens=chunk)
        wanted = request("a", range(50), 3, prompt_logprobs=2, read_prefix_cache=False, n=2)
        out = one(engine, wanted)
        answers.append(out.first["a", 0].prompt_logprobs)
        assert out.first["a", 1].prompt_logprobs is None
        again = one(engine, request("b", range(50), 3))
        assert again.first["b", 0].cached == 49, "it is published"
        scored = one(engine, request("c", range(50), 3, prompt_logprobs=2, read_prefix_cache=False))
        assert scored.first["c", 0].cached == 0, "but not read"
        assert scored.first["c", 0].prompt_logprobs == answers[0]
    assert answers[0] is not None and answers[0] == answers[1] == answers[2]


def test_start_and_logprobs() -> None:
    engine = engine_of()
    out = one(engine, request("a", range(10), 5, logprobs=2))
    assert [entry.token for entry in out.logprobs["a", 0]] == out.tokens["a", 0]
    assert one(engine, request("b", range(10), 5)).first["b", 0].logprobs is None


@pytest.mark.parametrize("resumed", [1, 3, 19])
def test_resume_goes_on_where_it_was(resumed: int) -> None:
    model = FakeModel()
    whole = request("a", range(30), 20, n=2)
    truth = [model.continuation(whole, choice) for choice in range(2)]
    wanted = request("a", range(30), 20, n=2, resume=(tuple(truth[0][:resumed]), ()))
    engine, out = engine_of(model), Outcome()
    engine.add(wanted)
    while not engine.idle:
        out.take(engine.step(), {("a", 0): resumed})
    assert out.tokens["a", 0] == truth[0][resumed:] and out.tokens["a", 1] == truth[1]


def test_resume_that_was_already_complete_ends_at_once() -> None:
    engine = engine_of()
    engine.add(request("a", range(30), 3, n=3, eos_ids=(2,), resume=((7, 2), (7, 8, 9), ())))
    deltas = {delta.choice: delta for delta in engine.step() if delta.choice < 2}
    assert (deltas[0].finish, deltas[0].start, deltas[0].tokens) == ("stop", 2, [])
    assert (deltas[1].finish, deltas[1].start, deltas[1].tokens) == ("length", 3, [])


def test_resume_scores_no_prompt_again() -> None:
    engine = engine_of()
    engine.add(request("a", range(30), 3, prompt_logprobs=1, resume=((7,),)))
    deltas = []
    while not engine.idle:
        deltas += engine.step()
    assert all(delta.prompt_logprobs is None for delta in deltas) and deltas[-1].finish == "length"


@pytest.mark.parametrize("length", [32, 35])
@pytest.mark.parametrize("apart", [False, True])
def test_choices_that_resume_find_their_prompt_in_the_cache_and_do_not_wait_for_each_other(
    length: int, apart: bool
) -> None:
    model, engine, out = FakeModel(), engine_of(), Outcome()
    asked = [request(name, range(length), 20, n=2, seed=seed) for seed, name in enumerate("ab")]
    truth = {(one.id, choice): model.continuation(one, choice) for one in asked for choice in range(2)}
    for one in asked:
        known = tuple(tuple(truth[one.id, choice][:5]) for choice in range(2))
        engine.add(msgspec.structs.replace(one, resume=known))
        if apart:
            engine.isolate(one.id, 1)
    for _ in range(25):
        out.take(engine.step(), dict.fromkeys(truth, 5))
        check(engine)
    assert engine.idle and out.tokens == {key: tokens[5:] for key, tokens in truth.items()}


# -- choices ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [500, 496, 497])
def test_choices_share_the_prompt(length: int, caching: bool) -> None:
    model = FakeModel()
    engine = engine_of(model, enable_prefix_caching=caching, depth=1)
    wanted = request("a", range(length), 6, n=16)
    engine.add(wanted)
    out = Outcome()
    out.take(engine.step())
    out.take(engine.step())
    stats = engine.stats()
    assert stats.running == 16
    shared = (length - 1) // 16
    assert stats.blocks_used <= shared + 16 + 1, "the prompt once, then a tail for each"
    assert stats.extra["computed_tokens"] == length + 15 + 1, "one prompt, its last token 15 times more, one decode"
    while not engine.idle:
        out.take(engine.step())
        check(engine)
    assert out.tokens == {("a", i): model.continuation(wanted, i) for i in range(16)}
    assert len({tuple(tokens) for tokens in out.tokens.values()}) == 16, "each choice draws with its own key"
    assert {delta.cached for delta in out.first.values()} == {0}, "siblings are no prefix cache"


def test_choices_share_though_the_first_ends_at_once() -> None:
    engine = engine_of(enable_prefix_caching=False)
    out = drive(engine, [request("a", range(100), 1, n=4)])
    assert [out.finish["a", i].finish for i in range(4)] == ["length"] * 4
    assert engine.stats().extra["computed_tokens"] == 103


def test_another_choice_leads_when_the_first_is_aborted() -> None:
    model = FakeModel()
    engine = engine_of(model, max_num_batched_tokens=16)
    wanted = request("a", range(100), 5, n=3)
    engine.add(wanted)
    engine.step()
    engine.abort("a", 0)
    out = Outcome()
    while not engine.idle:
        out.take(engine.step())
        check(engine)
    assert out.finish["a", 0].finish == "abort"
    assert [out.tokens["a", i] for i in (1, 2)] == [model.continuation(wanted, i) for i in (1, 2)]


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_what_can_never_fit_is_refused_and_the_rest_completes() -> None:
    engine = engine_of(blocks=(8,))
    with pytest.raises(ValueError, match=r"210 tokens, which need 14 KV blocks of 16 tokens.*only 8 blocks \(128"):
        engine.add(request("long", range(200), 11))
    with pytest.raises(ValueError, match="need 9 KV blocks"):
        engine.add(request("grows", range(100), 30))
    out = drive(engine, [request("just fits", range(100), 29), request("short", range(20), 5)])
    assert len(out.tokens["just fits", 0]) == 29 and len(out.tokens["short", 0]) == 5


def test_a_prompt_longer_than_a_step_needs_chunks() -> None:
    whole = engine_of(max_num_batched_tokens=64, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="100 tokens, but a step takes at most 64"):
        whole.add(request("a", range(100), 3))
    assert whole.idle
    drive(whole, [request("b", range(64), 3), request("c", range(1, 64), 3)])
    assert len(drive(engine_of(max_num_batched_tokens=64), [request("a", range(100), 3)]).tokens["a", 0]) == 3


def test_prompts_are_planned_whole_without_chunking() -> None:
    executor = FakeExecutor()
    seen: list[int] = []
    executor.step_fault = lambda members: seen.extend(member.work.n for member in members) or None  # type: ignore[func-returns-value]
    engine = engine_of(executor=executor, max_num_batched_tokens=64, enable_chunked_prefill=False)
    drive(engine, [request(f"r{i}", range(i, i + 40), 4) for i in range(5)])
    assert sorted(n for n in seen if n > 1) == [40] * 5


def test_an_id_in_use_is_refused_until_its_request_ends() -> None:
    engine = engine_of()
    engine.add(request("id", range(10), 3))
    with pytest.raises(ValueError, match="'id' is still running"):
        engine.add(request("id", range(5), 3))
    while not engine.idle:
        engine.step()
    drive(engine, [request("id", range(5), 3)])
    assert engine.stats().finished == {"length": 2}


def test_other_nonsense_is_refused() -> None:
    engine = engine_of()
    for bad, match in (
        (request("a", [], 3), "empty"),
        (request("a", range(1024), 3), "no room"),
        (request("a", range(3), 3, n=0), "n must be at least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.add(bad)
    assert engine.idle
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "depth"):
        with pytest.raises(ValueError, match=name):
            engine_of(**{name: 0})
    with pytest.raises(ValueError, match="lifo"):
        engine_of(policy="lifo")
    with pytest.raises(ValueError, match="block counts"):
        engine_of(blocks=(3, 4))


# -- aborts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_frees_everything(depth: int) -> None:
    engine = engine_of(depth=depth)
    engine.add(request("a", range(100), 500, n=4))
    for _ in range(5):
        engine.step()
    assert engine.stats().running == 4
    engine.abort("a")
    assert engine.stats().running == 0 and engine.stats().blocks_used == 0
    made = engine.stats().generation_tokens
    ended = []
    while not engine.idle:
        ended += [delta for delta in engine.step() if delta.finish]
    assert sorted((delta.choice, delta.finish) for delta in ended) == [(i, "abort") for i in range(4)]
    assert engine.stats().generation_tokens == made and engine.stats().finished == {"abort": 4}


def test_abort_of_one_choice() -> None:
    model = FakeModel()
    engine = engine_of(model)
    wanted = request("a", range(20), 10, n=2)
    engine.add(wanted)
    out = Outcome()
    out.take(engine.step())
    engine.abort("a", 1)
    while not engine.idle:
        out.take(engine.step())
    assert out.finish["a", 1].finish == "abort" and out.tokens["a", 0] == model.continuation(wanted)


def test_abort_of_the_unknown_the_waiting_and_the_finished() -> None:
    engine = engine_of(max_num_seqs=1)
    engine.abort("nobody")
    engine.add(request("a", range(10), 3))
    engine.add(request("b", range(10), 3))
    out = Outcome()
    out.take(engine.step())
    assert engine.stats().waiting == 1
    engine.abort("b")
    engine.abort("b")
    assert engine.stats().waiting == 0
    while not engine.idle:
        out.take(engine.step())
    assert out.finish["b", 0].finish == "abort" and out.finish["a", 0].finish == "length"
    engine.abort("a")
    assert engine.idle and engine.step() == []


def test_abort_in_prefill_leaves_a_right_cache() -> None:
    model = FakeModel()
    engine = engine_of(model, max_num_batched_tokens=32, depth=2)
    engine.add(request("a", range(500), 5))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    again = request("b", range(500), 5)
    out = Outcome()
    engine.add(again)
    while not engine.idle:
        out.take([delta for delta in engine.step() if delta.request == "b"])
    assert out.tokens["b", 0] == model.continuation(again)
    assert out.first["b", 0].cached >= 128


# -- faults -----------------------------------------------------------------------------------------------------------
def doomed(name: str) -> FakeExecutor:
    def fault(members: list[Member]) -> Exception | None:
        bad = any(m.request.id == name and m.work.start + m.work.n > 22 for m in members)
        return RuntimeError("boom") if bad else None

    return FakeExecutor(step_fault=fault)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_costs_only_the_culprit(depth: int) -> None:
    executor = doomed("r3")
    engine = engine_of(executor=executor, depth=depth)
    wanted = [request(f"r{i}", range(20), 10, seed=i) for i in range(8)]
    out = drive(engine, wanted)
    for each in wanted:
        end, want = out.finish[each.id, 0], executor.model.continuation(each)
        if each.id == "r3":
            assert end.finish == "error" and end.error == "RuntimeError: boom"
            assert out.tokens[each.id, 0] == want[:3], "what was told before stays"
        else:
            assert end.finish == "length" and out.tokens[each.id, 0] == want
    assert engine.stats().failed_steps == 4, "8 sequences, then 4, 2, 1"


def test_one_bad_moment_costs_nobody_anything() -> None:
    moments = iter([False] * 4 + [True] + [False] * 100)
    executor = FakeExecutor(step_fault=lambda members: RuntimeError("hiccup") if next(moments) else None)
    engine = engine_of(executor=executor)
    wanted = [request(f"r{i}", range(20), 10, seed=i) for i in range(3)]
    out = drive(engine, wanted)
    assert [out.tokens[each.id, 0] for each in wanted] == [executor.model.continuation(each) for each in wanted]
    assert engine.stats().failed_steps == 1


def test_a_dead_executor_ends_everything() -> None:
    engine = engine_of(executor=FakeExecutor(step_fault=lambda members: RuntimeError("dead")))
    out = drive(engine, [request(f"r{i}", range(20), 10, n=2) for i in range(5)])
    assert {end.finish for end in out.finish.values()} == {"error"} and len(out.finish) == 10


def test_submit_that_raises_is_a_failed_step() -> None:
    executor = FakeExecutor()
    submit, calls = executor.submit, iter([True] + [False] * 100)

    def flaky(plan):  # type: ignore[no-untyped-def]
        if next(calls):
            raise OSError("pipe")
        return submit(plan)

    executor.submit = flaky  # type: ignore[method-assign]
    out = drive(engine_of(executor=executor), [request("a", range(20), 4), request("b", range(20), 4)])
    assert {end.finish for end in out.finish.values()} == {"length"}


def test_a_failed_row_costs_only_its_choice() -> None:
    executor = FakeExecutor(row_fault=lambda m: "not finite" if (m.request.id, m.choice) == ("a", 1) else None)
    engine = engine_of(executor=executor)
    wanted = [request("a", range(40), 6, n=3), request("b", range(40), 6)]
    out = drive(engine, wanted)
    assert out.finish["a", 1].finish == "error" and out.finish["a", 1].error == "not finite"
    for name, choice in (("a", 0), ("a", 2), ("b", 0)):
        assert out.tokens[name, choice] == executor.model.continuation(wanted[name == "b"], choice)


def test_blocks_of_a_failed_row_are_not_cached() -> None:
    executor = FakeExecutor(row_fault=lambda m: "bad" if m.request.id == "a" else None)
    engine = engine_of(executor=executor, max_num_batched_tokens=32)
    wanted = request("b", range(100), 6)
    out = drive(engine, [request("a", range(100), 6)])
    assert out.finish["a", 0].finish == "error"
    out = drive(engine, [wanted])
    assert out.first["b", 0].cached == 0 and out.tokens["b", 0] == executor.model.continuation(wanted)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_reads_blocks_of_a_failed_row_starts_again(depth: int) -> None:
    """All are in one step, and the later ones read what the first writes."""
    executor = FakeExecutor(row_fault=lambda m: "bad" if m.request.id == "a" else None)
    engine = engine_of(executor=executor, depth=depth)
    wanted = [request(name, range(65), 6) for name in "abc"]
    out = drive(engine, wanted)
    assert out.finish["a", 0].finish == "error"
    for each in wanted[1:]:
        assert out.tokens[each.id, 0] == executor.model.continuation(each)
    assert engine.stats().finished == {"error": 1, "length": 2}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_computed_past_the_end(depth: int) -> None:
    """The last token drawn is never computed, so a pool of exactly the size needed is enough at any depth."""
    for blocks in (2, 9):
        engine = engine_of(depth=depth, blocks=(blocks,))
        drive(engine, [request("a", range(20), 13)])
        assert engine.stats().extra["computed_tokens"] == 32


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_preempted_with_a_token_on_its_way(depth: int, drafts: int) -> None:
    model = FakeModel()

    def half_right(seq: Sequence) -> list[int]:
        truth = model.continuation(seq.request)[seq.outputs : seq.outputs + drafts]
        return [*truth[:1], *(token + 1 for token in truth[1:])]

    engine = engine_of(model, depth=depth, drafter=half_right if drafts else None, max_num_batched_tokens=24)
    wanted = [request(name, range(20 + i), 20) for i, name in enumerate("abc")]
    for each in wanted:
        engine.add(each)
    out, steps = Outcome(), 0
    while not engine.idle:
        out.take(engine.step())
        check(engine)
        running = [seq for seq in engine.scheduler.roster.running if seq.in_flight]
        if steps % 3 == 1 and running:
            engine.scheduler.roster.preempt(running[-1])
        steps += 1
    assert engine.stats().preemptions >= 2 and engine.stats().failed_steps == 0
    for each in wanted:
        assert out.tokens[each.id, 0] == model.continuation(each)


def test_the_first_prompt_position_to_score() -> None:
    def scores(start: int | None) -> list[int | None]:
        wanted = request("a", range(4, 10), 1, prompt_logprobs=1, prompt_logprob_start=start)
        found = one(engine_of(), wanted).first["a", 0].prompt_logprobs or []
        return [entry.token if entry else None for entry in found]

    assert scores(None) == scores(0) == scores(1) == [None, 5, 6, 7, 8, 9]
    assert scores(3) == [None, None, None, 7, 8, 9]
    assert scores(6) == [None] * 6


def test_a_row_without_a_token_is_that_row_s_error() -> None:
    model = FakeModel()
    executor = FakeExecutor(model)
    run = executor._read
    executor._read = lambda work: run(work)._replace(tokens=()) if work.adapter == 3 else run(work)  # type: ignore[method-assign]
    engine = engine_of(executor=executor)
    good = request("good", range(20), 5)
    out = drive(engine, [request("bad", range(20), 5, adapter=3), good])
    assert out.finish["bad", 0].finish == "error" and "0 tokens" in (out.finish["bad", 0].error or "")
    assert out.tokens["good", 0] == model.continuation(good)


def test_close_waits_for_what_is_in_flight() -> None:
    executor = FakeExecutor(eager=False)
    engine = engine_of(executor=executor, depth=2)
    engine.add(request("a", range(20), 9))
    engine.step()
    engine.close()
    assert executor.closed and not executor._queue
