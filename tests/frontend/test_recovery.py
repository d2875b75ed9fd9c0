"""What the death of an engine costs: nothing but time, except for the request that causes it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from octavo import client as client_module
from octavo import recovery
from octavo.client import EngineUnavailable, Process
from octavo.engine.fake import FakeModel
from octavo.flight_recorder import FlightRecorder
from octavo.recovery import Death, History
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo.wire import Abort
from tests.frontend.fake_build import POISON, aborting, crowded, sticking, unhurried
from tests.frontend.test_client import (  # noqa: F401
    CONFIG,
    builders_are_importable,
    deltas_of,
    ends,
    request,
    started,
    until,
)

MODEL = FakeModel()


def many(count: int) -> list[Request]:
    """Prompts of all lengths; every third with two choices, every other with logprobs."""
    return [
        Request(
            id=f"r{i}",
            prompt=tuple(range(i, i + 3 + i % 40)),
            sampling=SamplingParams(logprobs=2 if i % 2 else None, n=1 + (i % 3 == 0)),
            seed=i,
            max_tokens=25 + i % 11,
            n=1 + (i % 3 == 0),
            arrival=i,
        )
        for i in range(count)
    ]


async def answers(client: Process, asked: Request) -> dict[int, tuple[list[int], list[object]]]:
    """Tokens and logprobs by choice; a token that comes twice or is left out fails."""
    found: dict[int, tuple[list[int], list[object]]] = {choice: ([], []) for choice in range(asked.n)}
    async for delta in deltas_of(client, asked):
        tokens, scores = found[delta.choice]
        assert delta.finish in (None, "length"), delta.error
        assert delta.start == len(tokens) or not delta.tokens
        tokens += delta.tokens
        scores += delta.logprobs or []
    return found


async def undisturbed(asked: list[Request]) -> list[dict[int, tuple[list[int], list[object]]]]:
    async with started("process", unhurried) as client:
        assert isinstance(client, Process)
        return list(await asyncio.gather(*(answers(client, one) for one in asked)))


def running(client: Process, at_least: int) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        if client.status.state != "ready":
            return False
        try:
            return (await client.stats()).generation_tokens >= at_least
        except EngineUnavailable:
            return False

    return check


def test_kills_cost_no_request_anything() -> None:
    asked = many(40)

    async def main() -> None:
        right = await undisturbed(asked)
        assert [{c: tokens for c, (tokens, _) in one.items()} for one in right] == [
            {c: MODEL.continuation(one, c) for c in range(one.n)} for one in asked
        ]
        async with started("process", unhurried) as client:
            assert isinstance(client, Process) and client.pid is not None
            streams = [asyncio.create_task(answers(client, one)) for one in asked]
            for tokens in (60, 1, 30):  # the second time in the middle of the replay
                await until(running(client, tokens))
                os.kill(client.pid, signal.SIGKILL)
                await until(lambda: _is(client.status.state == "restarting"))
            found = await asyncio.gather(*streams)
            assert found == right
            assert client.restarts == 3
            stats = await client.stats()
            assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
            assert not client._records

    asyncio.run(main())


async def _is(value: bool) -> bool:
    return value


@pytest.mark.parametrize("builder", [aborting, sticking])
def test_a_request_that_ends_the_process_ends_alone(builder: Callable[..., object]) -> None:
    neighbours = many(20)

    async def main() -> None:
        async with started("process", builder, watchdog_timeout=0.5) as client:
            assert isinstance(client, Process)
            streams = [asyncio.create_task(answers(client, one)) for one in neighbours]
            poisoned = [request(f"bad{i}", prompt=(1, POISON, i), max_tokens=20) for i in range(2)]
            (one,), (two,) = await asyncio.gather(*(ends(client, bad) for bad in poisoned))
            for end in (one, two):
                assert end.finish == "error" and "stopped twice while it computed this request" in (end.error or "")
            found = await asyncio.gather(*streams)
            for asked, by_choice in zip(neighbours, found, strict=True):
                assert {c: tokens for c, (tokens, _) in by_choice.items()} == {
                    c: MODEL.continuation(asked, c) for c in range(asked.n)
                }
            assert client.restarts == 3 and client.status.state == "ready"

    asyncio.run(main())


def test_an_engine_that_hangs_while_it_is_idle_is_replaced() -> None:
    async def main() -> None:
        async with started("process", unhurried, watchdog_timeout=0.4) as client:
            assert isinstance(client, Process) and client.pid is not None
            asked = request("before")
            assert await answers(client, asked) == {0: (MODEL.continuation(asked), [])}
            os.kill(client.pid, signal.SIGSTOP)
            asked = request("after")
            assert await asyncio.wait_for(answers(client, asked), 20) == {0: (MODEL.continuation(asked), [])}
            assert client.restarts == 1

    asyncio.run(main())


def test_an_idle_engine_that_is_told_what_needs_no_answer_lives_on() -> None:
    async def main() -> None:
        async with started("process", unhurried, watchdog_timeout=0.4) as client:
            assert isinstance(client, Process)
            client._post(Abort("nobody", 0))
            await asyncio.sleep(1.2)
            assert (client.status.state, client.restarts) == ("ready", 0)
            asked = request("after")
            assert await answers(client, asked) == {0: (MODEL.continuation(asked), [])}

    asyncio.run(main())


def test_an_engine_that_cannot_read_a_message_is_replaced() -> None:
    async def main() -> None:
        async with started("process", unhurried) as client:
            assert isinstance(client, Process) and client._life is not None
            client._life.post("no message")
            asked = request("a")
            assert await asyncio.wait_for(answers(client, asked), 20) == {0: (MODEL.continuation(asked), [])}
            assert client.restarts == 1

    asyncio.run(main())


def test_nobody_waits_where_the_engine_cannot_be_started_again_for_a_reason_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("no thread can be started")

    async def main() -> None:
        async with started("process", unhurried) as client:
            assert isinstance(client, Process) and client.pid is not None
            waiting = asyncio.create_task(ends(client, request("a", max_tokens=100)))
            await until(running(client, 1))
            monkeypatch.setattr(client_module._Life, "start", fail)
            os.kill(client.pid, signal.SIGKILL)
            (end,) = await asyncio.wait_for(waiting, 20)
            assert end.finish == "error" and "no thread can be started" in (end.error or "")
            assert client.status.state == "dead"

    asyncio.run(main())


def test_a_fault_that_only_shows_in_company_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SECOND_DELAY", 0.01)
    neighbours = many(6)

    async def main() -> None:
        async with started("process", crowded) as client:
            assert isinstance(client, Process)
            bad = request("bad", prompt=(1, POISON, 2), max_tokens=60)
            streams = [asyncio.create_task(answers(client, one)) for one in neighbours]
            found, (end,) = await asyncio.gather(asyncio.gather(*streams), ends(client, bad))
            assert end.finish == "length", "alone it does no harm, and the second time it runs alone for long enough"
            for asked, by_choice in zip(neighbours, found, strict=True):
                assert by_choice[0][0] == MODEL.continuation(asked, 0)

    asyncio.run(main())


def test_new_requests_wait_while_the_engine_restarts_and_aborts_count() -> None:
    async def main() -> None:
        async with started("process", unhurried) as client:
            assert isinstance(client, Process) and client.pid is not None
            old = many(3)
            streams = [asyncio.create_task(answers(client, one)) for one in old]
            given_up = asyncio.create_task(ends(client, request("given up", max_tokens=100)))
            await until(running(client, 10))
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: _is(client.status.state == "restarting"))
            with pytest.raises(EngineUnavailable, match="started again.*SIGKILL"):
                await client.stats()
            late = request("late", max_tokens=7)
            waiting = asyncio.create_task(answers(client, late))
            await client.abort("given up")
            assert [end.finish for end in await given_up] == ["abort"]
            assert await waiting == {0: (MODEL.continuation(late), [])}
            for asked, by_choice in zip(old, await asyncio.gather(*streams), strict=True):
                assert by_choice[0][0] == MODEL.continuation(asked)
            stats = await client.stats()
            assert stats.finished.get("abort", 0) == 0, "what was given up meanwhile is not replayed"

    asyncio.run(main())


def test_an_engine_that_keeps_dying_backs_off_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SECOND_DELAY", 0.001)

    async def main() -> None:
        async with started("process", unhurried) as client:
            assert isinstance(client, Process) and client.pid is not None
            client._builder = "tests.frontend.fake_build:broken"
            waiting = asyncio.create_task(ends(client, request("a", max_tokens=100)))
            await until(running(client, 1))
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: _is(client.status.state == "failing"), 30)
            assert "no such model: scripted (5 times in a row)" in client.status.reason
            with pytest.raises(EngineUnavailable, match="keeps stopping.*no such model"):
                await ends(client, request("b"))
            (end,) = await waiting
            assert end.finish == "error" and "keeps stopping" in (end.error or "")
            client._builder = "tests.frontend.fake_build:unhurried"
            await until(lambda: _is(client.status.state == "ready"), 30)
            asked = request("c")
            assert await answers(client, asked) == {0: (MODEL.continuation(asked), [])}

    asyncio.run(main())


class TestHistory:
    def history(self) -> History:
        self.now = 0.0
        history = History(lambda: self.now)
        history.ready()
        return history

    def test_one_that_is_there_twice_and_alone_is_to_blame(self) -> None:
        history = self.history()
        everyone = {"a", "b", "c"}
        assert history.died(Death("x", ["a", "b"]), everyone) == []
        assert [history.alone(name) for name in "abc"] == [1, 1, 0]
        assert history.died(Death("x", ["a"]), everyone) == ["a"]
        assert history.died(Death("x", ["c"]), everyone) == [], "the first time"

    def test_company_is_no_proof_but_lengthens_the_time_alone(self) -> None:
        history = self.history()
        for count in range(1, recovery.MOST_STRIKES):
            assert history.died(Death("x", ["a", "b"]), {"a", "b"}) == []
            assert history.alone("a") == 16 ** (count - 1)
        assert history.died(Death("x", ["a", "b"]), {"a", "b"}) == ["a", "b"]

    def test_kills_from_outside_are_pardoned_twice(self) -> None:
        history = self.history()
        for _ in range(2):
            assert history.died(Death("killed", ["a"], killed=True), {"a"}) == []
            assert history.alone("a") == 0
        assert history.died(Death("killed", ["a"], killed=True), {"a"}) == []
        assert history.alone("a") == 1
        assert history.died(Death("killed", ["a"], killed=True), {"a"}) == ["a"]

    def test_an_id_used_again_starts_clean(self) -> None:
        history = self.history()
        history.died(Death("x", ["a"]), {"a"})
        history.died(Death("x", []), set())
        assert history.died(Death("x", ["a"]), {"a"}) == []

    def test_delays_grow_and_a_long_life_ends_the_row(self) -> None:
        history = self.history()
        delays = []
        for _ in range(9):
            history.died(Death("x"), ())
            delays.append(history.delay)
        assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
        assert history.failing and not history.hopeless
        history.died(Death("x"), ())
        assert history.hopeless
        history.ready()
        self.now += recovery.STABLE_SECONDS
        history.died(Death("x"), ())
        assert history.delay == 0 and not history.failing


class TestFlightRecorder:
    def test_what_one_process_writes_another_reads(self) -> None:
        fd = FlightRecorder.file(4)
        writer, reader = FlightRecorder(os.dup(fd)), FlightRecorder(fd)
        assert reader.ids() == [] and reader.seconds() == 0.0
        writer.note(["a", "é\n", "b" * 300])
        assert reader.ids() == ["a", "é\n", "b" * 300]
        assert 0.0 < reader.seconds() < 60.0
        writer.note([])
        assert reader.ids() == [] and reader.seconds() == 0.0

    def test_what_does_not_fit_is_left_out(self) -> None:
        recorder = FlightRecorder(FlightRecorder.file(1))
        recorder.note([f"request {i}" for i in range(100)])
        ids = recorder.ids()
        assert ids == [f"request {i}" for i in range(len(ids))] and len(ids) > 10
        recorder.close()
