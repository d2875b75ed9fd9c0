"""Runs the blocks of one page in order, as a reader would: `python -m tests.docs.page PAGE`.

Made to be started in a network namespace of its own, where every port is free and nothing outside can be reached
(`unshare --net`). All blocks share a temporary folder. Servers that a block starts run until a later block starts one
at the same place, or until the page ends; each must then end in order.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.checkpoint.packaged import SMOLLM2
from octavo.config import cache_dir
from tests.docs.blocks import ROOT, Block, blocks_of

SECONDS = 180
"""The longest that a block may run, and that a server may take to answer."""
END_SECONDS = 30


class Failed(Exception):
    """A block did not do what the page says."""


def loopback_up() -> None:
    """Switch the loopback interface on: in a new network namespace it is off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, 0x8913, request))[1]  # SIOCGIFFLAGS
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP


class Page:
    """A page that is being followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, tuple[subprocess.Popen[str], Path]] = {}
        """Running servers, by their address."""
        self._printed = ""
        """Standard output of the last block."""
        bin_folder = str(Path(sys.executable).parent)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "OPENAI_"))},
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "OCTAVO_CACHE": str(cache_dir()),
            "OPENAI_API_KEY": "none",
            "PYTHONUNBUFFERED": "1",
            # Little memory for each server; a flag or a file in a page wins.
            "OCTAVO_KV_CACHE_MEMORY_BYTES": "128MiB",
        }

    def follow(self, block: Block) -> None:
        """Do what the marker of a block says. Raises Failed."""
        if block.kind == "run":
            self._run(block)
        elif block.kind == "serves":
            self._serve(block)
        elif block.kind == "output":
            self._compare(block)
        elif block.kind == "file":
            path = self._folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)

    def _command(self, block: Block) -> list[str]:
        if block.language in ("python", "py"):
            return [sys.executable, "-c", block.text]
        return ["bash", "-euo", "pipefail", "-c", block.text]

    def _run(self, block: Block) -> None:
        try:
            done = subprocess.run(
                self._command(block),
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"it took more than {error.timeout} seconds") from None
        if done.returncode:
            raise Failed(f"status {done.returncode}\n{done.stdout}{done.stderr}{self._logs()}")
        self._printed = done.stdout

    def _serve(self, block: Block) -> None:
        command = block.value or block.text
        address = address_of(command)
        if address in self._servers:
            self._end(address)
        log = self._folder / f".log-{len(self._servers)}-{block.line}"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-euc", command],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        self._servers[address] = process, log
        deadline = time.monotonic() + SECONDS
        while not answers(address, self._folder):
            if process.poll() is not None:
                raise Failed(f"the server ended with status {process.returncode}\n{log.read_text()}")
            if time.monotonic() > deadline:
                raise Failed(f"the server does not answer at {address}\n{log.read_text()}")
            time.sleep(0.1)

    def _compare(self, block: Block) -> None:
        if not matches(block.text, self._printed):
            raise Failed(f"the block before printed something else:\n{self._printed}")

    def _end(self, address: str) -> None:
        process, log = self._servers.pop(address)
        process.terminate()
        try:
            status = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Failed(f"the server at {address} does not end") from None
        if status:
            raise Failed(f"the server at {address} ended with status {status}\n{log.read_text()}")

    def end(self) -> None:
        """End the servers. Raises Failed for one that does not end in order."""
        for address in list(self._servers):
            self._end(address)

    def kill(self) -> None:
        for process, _ in self._servers.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _logs(self) -> str:
        return "".join(f"\n-- server at {at}:\n{log.read_text()[-3000:]}" for at, (_, log) in self._servers.items())


def address_of(command: str) -> str:
    """Where the server that a command starts listens: a URL, or the path of a Unix socket."""
    if found := re.search(r"--uds[ =](\S+)", command):
        return found[1]
    port = re.search(r"--port[ =](\d+)", command) or re.search(r"OCTAVO_PORT=(\d+)", command)
    return f"http{'s' if '--ssl-certfile' in command else ''}://localhost:{port[1] if port else 8000}"


def answers(address: str, folder: Path) -> bool:
    """Whether a server answers requests there. Of one with TLS or a Unix socket the log tells nothing and curl does."""
    place = [address] if "://" in address else ["--unix-socket", str(folder / address), "http://localhost"]
    place[-1] += "/health"
    if address.startswith("http://"):
        try:
            with urllib.request.urlopen(place[0], timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False
    done = subprocess.run(["curl", "--silent", "--fail", "--insecure", "--output", "/dev/null", *place])
    return done.returncode == 0


def matches(expected: str, printed: str) -> bool:
    """Whether a text is the expected one, in which ... stands for anything; alone in a line, for no lines too."""
    pattern = re.sub(r"\\\n\\\.\\\.\\\.(?=\\\n|$)", r"(?:\\n.*)?", re.escape(expected.strip()))
    pattern = pattern.replace(r"\.\.\.", ".*").replace("…", ".*")
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder as a reader may have it: with a model file, and the files of this repository that pages speak of."""
    with tempfile.TemporaryDirectory(prefix="page-") as name:
        folder = Path(name)
        (folder / SMOLLM2.file).symlink_to(cache_dir() / SMOLLM2.file)
        for part in ("deploy", "docs"):
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part)
        yield folder


def main(path: Path) -> int:
    loopback_up()
    with _folder() as folder:
        page = Page(folder)
        line = 0
        try:
            for block in blocks_of(path.read_text()):
                line = block.line
                page.follow(block)
            page.end()
        except Failed as failure:
            print(f"{path.name}, line {line}: {failure}", file=sys.stderr)
            return 1
        finally:
            page.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
