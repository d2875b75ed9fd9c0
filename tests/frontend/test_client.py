"""Both transports: right tokens, refusals, aborts, and a dead engine that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import octavo.client
from octavo.client import EngineUnavailable, InProcess, Process, RequestRejected
from octavo.config import EngineConfig
from octavo.engine.fake import FakeModel
from octavo.process import cause
from octavo.sampling_params import SamplingParams
from octavo.types import Delta, Request
from tests.frontend.fake_build import ScriptedEngine, expected, failing, fast, paged, slow

CONFIG = EngineConfig(model="scripted", max_model_len=4096)
FOREVER = 100_000

Client = InProcess | Process


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5, n: int = 1) -> Request:
    return Request(id=name, prompt=prompt, sampling=SamplingParams(n=n), seed=1, max_tokens=max_tokens, n=n)


async def deltas_of(client: Client, *asked: Request) -> AsyncIterator[Delta]:
    """What comes, one by one."""
    async with aclosing(client.generate(*asked)) as stream:  # type: ignore[type-var]
        async for deltas in stream:
            for delta in deltas:
                yield delta


async def tokens(client: Client, asked: Request, *others: Request) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {choice: [] for choice in range(asked.n)}
    async for delta in deltas_of(client, asked, *others):
        assert delta.start == len(found[delta.choice])
        found[delta.choice] += delta.tokens
    return found


async def ends(client: Client, asked: Request) -> list[Delta]:
    return [delta async for delta in deltas_of(client, asked) if delta.finish is not None]


async def until(done: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    """Wait for a condition; the test fails when it takes longer."""
    async with asyncio.timeout(seconds) if sys.version_info >= (3, 11) else _no_limit():
        while not await done():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def _no_limit() -> AsyncIterator[None]:
    yield


@pytest.fixture(autouse=True)
def builders_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[2]), str(Path(octavo.client.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def make(kind: str, builder: Callable[..., object], config: EngineConfig = CONFIG) -> Client:
    if kind == "thread":
        return InProcess(lambda: builder(config, lambda what, done, total: None))  # type: ignore[arg-type, return-value]
    return Process(config, f"tests.frontend.fake_build:{builder.__name__}")


@asynccontextmanager
async def started(kind: str, builder: Callable[..., object], **options: Any) -> AsyncIterator[Client]:
    client = make(kind, builder, replace(CONFIG, **options))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


both = pytest.mark.parametrize("kind", ["thread", "process"])


@both
def test_info_and_tokens(kind: str) -> None:
    async def main() -> None:
        client = make(kind, fast)
        assert client.status.state == "loading"
        with pytest.raises(EngineUnavailable, match="still loading"):
            await tokens(client, request("early"))
        info = await client.start()
        assert (info.model, info.max_model_len, info.vocab_size) == ("scripted", 4096, 1000)
        assert client.status.state == "ready"
        asked = request("a", n=3)
        assert await tokens(client, asked) == {choice: expected(asked, choice) for choice in range(3)}
        stats = await client.stats()
        assert (stats.running, stats.generation_tokens) == (0, 15)
        await client.close()
        await client.close()

    asyncio.run(main())


@both
def test_a_hundred_streams_at_once(kind: str) -> None:
    async def main() -> None:
        async with started(kind, fast) as client:
            asked = [request(f"r{i}", prompt=(i, i + 1), max_tokens=20 + i % 7) for i in range(100)]
            found = await asyncio.gather(*(tokens(client, one) for one in asked))
            assert found == [{0: expected(one)} for one in asked]

    asyncio.run(main())


@both
def test_the_real_engine_short_of_memory(kind: str) -> None:
    async def main() -> None:
        async with started(kind, paged) as client:
            asked = [
                request(f"r{i}", prompt=tuple(range(i % 5, 40 + i % 7)), max_tokens=20 + i % 9, n=1 + i % 3)
                for i in range(60)
            ]
            found = await asyncio.gather(*(tokens(client, one) for one in asked))
            for one, by_choice in zip(asked, found, strict=True):
                assert by_choice == {choice: FakeModel().continuation(one, choice) for choice in range(one.n)}
            with pytest.raises(RequestRejected):
                await tokens(client, request("long", prompt=(1,) * 200))
            stopped = deltas_of(client, request("stopped", max_tokens=80, n=2))
            await stopped.__anext__()
            await client.abort("stopped", 0)
            await client.abort("stopped")
            assert [d.choice async for d in stopped if d.finish not in ("abort", "length", None)] == []

            async def all_freed() -> bool:
                stats = await client.stats()
                counts = (stats.running, stats.waiting, stats.blocks_used, sum(stats.finished.values()))
                return counts == (0, 0, 0, sum(one.n for one in asked) + 2)

            await until(all_freed)

    asyncio.run(main())


@both
def test_rejected_requests_leave_others_alone(kind: str) -> None:
    async def main() -> None:
        async with started(kind, slow) as client:
            first = request("same", max_tokens=40)
            running = asyncio.create_task(tokens(client, first))
            await asyncio.sleep(0)
            with pytest.raises(RequestRejected, match="'same' is in use"):
                await tokens(client, request("same", prompt=(9,)))
            with pytest.raises(RequestRejected, match="longer than 100"):
                await tokens(client, request("long", prompt=(1,) * 101))
            assert await running == {0: expected(first)}
            assert await tokens(client, request("same")) == {0: expected(request("same"))}

    asyncio.run(main())


@both
def test_a_cancelled_iterator_aborts(kind: str) -> None:
    async def main() -> None:
        async with started(kind, slow) as client:
            task = asyncio.create_task(tokens(client, request("gone", max_tokens=FOREVER, n=4)))
            closed = deltas_of(client, request("closed", max_tokens=FOREVER))
            await closed.__anext__()
            assert (await client.stats()).running == 2
            task.cancel()
            await closed.aclose()  # type: ignore[attr-defined]
            with pytest.raises(asyncio.CancelledError):
                await task

            async def nothing_runs() -> bool:
                return (await client.stats()).running == 0

            await until(nothing_runs)
            again = request("gone")
            assert await tokens(client, again) == {0: expected(again)}

    asyncio.run(main())


@both
def test_an_aborted_id_may_be_used_again(kind: str) -> None:
    async def main() -> None:
        async with started(kind, slow) as client:
            for i in range(20):
                stream = deltas_of(client, request("same", max_tokens=FOREVER))
                await stream.__anext__()
                await stream.aclose()  # type: ignore[attr-defined]
                again = request("same", prompt=(i,), max_tokens=2)
                assert await tokens(client, again) == {0: expected(again)}

    asyncio.run(main())


@both
def test_abort_of_one_choice_and_of_all(kind: str) -> None:
    async def main() -> None:
        async with started(kind, slow) as client:
            stream = deltas_of(client, request("a", max_tokens=FOREVER, n=2))
            await stream.__anext__()
            await client.abort("a", 1)
            await client.abort("a", 1)
            await client.abort("unknown")
            seen = [await stream.__anext__() for _ in range(8)]
            assert [d.finish for d in seen if d.choice == 1][-1] == "abort"
            assert not any(d.finish for d in seen if d.choice == 0)
            await client.abort("a")
            rest = [delta async for delta in stream]
            assert (rest[-1].choice, rest[-1].finish) == (0, "abort")
            assert all(delta.choice == 0 for delta in rest)
            assert (await client.stats()).running == 0

    asyncio.run(main())


def test_a_failing_step_ends_every_request() -> None:
    async def main() -> None:
        async with started("thread", failing) as client:
            found = await asyncio.gather(*(ends(client, request(f"r{i}", max_tokens=FOREVER, n=2)) for i in range(3)))
            for deltas in found:
                assert sorted(d.choice for d in deltas) == [0, 1]
                assert all(d.finish == "error" and "the step went wrong" in (d.error or "") for d in deltas)
            assert client.status.state == "dead"
            assert "the step went wrong" in client.status.reason
            with pytest.raises(EngineUnavailable, match="the step went wrong"):
                await tokens(client, request("late"))
            with pytest.raises(EngineUnavailable):
                await client.stats()

    asyncio.run(main())


@both
def test_an_id_is_not_used_again_while_news_of_the_last_choice_are_on_their_way(kind: str) -> None:
    async def main() -> None:
        async with started(kind, fast) as client:
            for i in range(50):
                given_up = client.generate(request("same", prompt=(i,), max_tokens=FOREVER))
                await anext(given_up)
                await client.abort("same", 0)
                async for _ in given_up:
                    pass
                again = request("same", prompt=(i, i), max_tokens=20)
                assert await tokens(client, again) == {0: expected(again)}

    asyncio.run(main())


@both
def test_several_requests_in_one_stream(kind: str) -> None:
    async def main() -> None:
        async with started(kind, slow) as client:
            asked = [request(f"r{i}", prompt=(i,), max_tokens=3 + i, n=1 + i % 2) for i in range(6)]
            found: dict[tuple[str, int], list[int]] = {}
            async for delta in deltas_of(client, *asked):
                found.setdefault((delta.request, delta.choice), []).extend(delta.tokens)
            assert found == {(one.id, choice): expected(one, choice) for one in asked for choice in range(one.n)}
            twice = request("same", max_tokens=FOREVER)
            with pytest.raises(RequestRejected, match="in use"):
                await tokens(client, request("other", max_tokens=FOREVER), twice, twice)

            async def nothing_runs() -> bool:
                return (await client.stats()).running == 0

            await until(nothing_runs)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_close_aborts_what_runs(kind: str) -> None:
    async def main() -> None:
        async with started(kind, slow) as client:
            running = asyncio.create_task(ends(client, request("a", max_tokens=FOREVER)))
            await asyncio.sleep(0.05)
            await client.close()
            assert [d.finish for d in await running] == ["abort"]

    asyncio.run(main())


def test_a_model_that_cannot_load_says_why_in_one_line() -> None:
    async def main() -> None:
        client = Process(CONFIG, "tests.frontend.fake_build:broken")
        with pytest.raises(EngineUnavailable, match="^no such model: scripted$"):
            await client.start()
        assert client.status == ("dead", "no such model: scripted")

    asyncio.run(main())


def test_modules_of_the_current_folder_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("queue", "random", "argparse", "msgspec", "octavo"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with started("process", fast) as client:
            assert await tokens(client, request("a")) == {0: expected(request("a"))}

    asyncio.run(main())


def test_a_process_that_has_begun_before_the_event_loop_is_the_one_that_answers() -> None:
    before = set(psutil.Process().children())
    client = Process(CONFIG, "tests.frontend.fake_build:fast").begin()
    [child] = set(psutil.Process().children()) - before

    async def main() -> None:
        await client.start()
        assert client.pid == child.pid
        assert await tokens(client, request("a")) == {0: expected(request("a"))}
        await client.close()

    asyncio.run(main())
    assert not child.is_running()


def test_a_process_that_has_begun_ends_when_it_is_closed_without_a_start() -> None:
    before = set(psutil.Process().children())
    client = Process(CONFIG, "tests.frontend.fake_build:hanging").begin()
    [child] = set(psutil.Process().children()) - before
    asyncio.run(client.close())
    assert not child.is_running()


def test_a_cancelled_start_leaves_no_process() -> None:
    async def main() -> None:
        client = Process(CONFIG, "tests.frontend.fake_build:hanging")
        starting = asyncio.create_task(client.start())

        async def reads_weights() -> bool:
            return client.status.reason == "reading weights: 33 %"

        await until(reads_weights)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert client.status.state == "loading"
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    asyncio.run(main())


PARENT = """
import asyncio
import gc
from octavo.client import Process
from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams
from octavo.types import Request

async def main():
    client = Process(EngineConfig(model="m"), "tests.frontend.fake_build:slow")
    await client.start()
    request = Request(id="a", prompt=(1,), sampling=SamplingParams(), seed=1, max_tokens=100_000)
    async for _ in client.generate(request):
        print(client.pid, flush=True)

asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, alive = psutil.wait_procs([engine], timeout=10)
    assert gone and not alive


def test_the_thread_closes_its_engine() -> None:
    engine = ScriptedEngine()

    async def main() -> None:
        built = fast(CONFIG, lambda what, done, total: None)
        built.engine = engine
        client = InProcess(lambda: built)
        await client.start()
        assert await tokens(client, request("a")) == {0: expected(request("a"))}
        await client.close()

    asyncio.run(main())
    assert engine.closed
    assert engine.steps == 5


def test_an_idle_engine_is_left_alone() -> None:
    looks = 0

    class Watched(ScriptedEngine):
        @property
        def idle(self) -> bool:
            nonlocal looks
            looks += 1
            return super().idle

    async def main() -> None:
        built = fast(CONFIG, lambda what, done, total: None)
        built.engine = Watched()
        client = InProcess(lambda: built)
        await client.start()
        await tokens(client, request("a"))
        await client.stats()
        await asyncio.sleep(0.02)
        before = looks
        await asyncio.sleep(0.1)
        assert looks == before
        await client.close()

    asyncio.run(main())


def test_a_launch_that_fails_leaves_no_process_and_no_future() -> None:
    class Broken(Process):
        async def _launch(self) -> None:
            await super()._launch()
            raise OverflowError("cannot be sent")

    complaints: list[dict[str, object]] = []

    async def run() -> int | None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        client = Broken(CONFIG, "tests.frontend.fake_build:slow")
        with pytest.raises(OverflowError, match="cannot be sent"):
            await client.start()
        return client.pid

    pid = asyncio.run(run())
    gc.collect()
    assert pid is not None and not psutil.pid_exists(pid)
    assert complaints == []


def test_too_little_memory_is_told_in_one_line() -> None:
    assert re.fullmatch("there is not enough memory: lower --max-num-batched-tokens.*", cause(MemoryError("bad_alloc")))
