"""Every command of every page is run, or says why it is not."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import realmodels
from tests.docs.blocks import COMMANDS, NOT_RUN, ROOT, Block, Unreadable, blocks_of, name_of, pages
from tests.docs.page import address_of, matches

PAGES = {name_of(page): page for page in pages()}
BLOCKS = [(name, block) for name, page in PAGES.items() for block in blocks_of(page.read_text())]
RUN = sorted({name for name, block in BLOCKS if block.kind in ("run", "serves")})

COMMAND_LINE = re.compile(r"^(\$ )?(octavo|pip|python3?|curl|docker|kubectl|scripts/\w+|sudo) ", re.MULTILINE)


NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
"""Starts a program in a network namespace of its own."""


def where(name: str, block: Block) -> str:
    return f"{name}, line {block.line}"


@pytest.mark.parametrize("name", RUN)
def test_a_page_can_be_followed(name: str) -> None:
    """In a network of its own: pages may use the same ports, and none needs anything from outside."""
    realmodels.smollm2_gguf()  # fetched here, where there is a network
    done = subprocess.run(
        [*NETWORK, sys.executable, "-m", "tests.docs.page", str(PAGES[name])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr


def test_every_command_is_run_or_says_why_not() -> None:
    for name, block in BLOCKS:
        if block.language in COMMANDS:
            assert block.kind in ("run", "serves", "not run"), f"{where(name, block)}: the block has no marker"
        elif block.kind != "output":
            assert not COMMAND_LINE.search(block.text) or block.language, f"{where(name, block)}: which language?"


def test_reasons_are_known_and_fit_their_commands() -> None:
    for name, block in BLOCKS:
        if block.kind == "not run":
            assert block.value in NOT_RUN, f"{where(name, block)}: {block.value!r} is no reason"
            others = set(block.commands) - NOT_RUN[block.value]
            assert not others, f"{where(name, block)}: {sorted(others)} can run"


def test_most_commands_are_run() -> None:
    kinds = [block.kind for _, block in BLOCKS]
    assert kinds.count("run") + kinds.count("serves") > 2 * kinds.count("not run") > 0


def test_outputs_follow_a_block_that_ran() -> None:
    before: dict[str, str] = {}
    for name, block in BLOCKS:
        if block.kind == "output":
            assert before.get(name) == "run", where(name, block)
            assert re.search(r"\w", block.text.replace("...", "")), f"{where(name, block)}: matches anything"
        before[name] = block.kind


def test_what_stands_for_a_script_is_its_last_command() -> None:
    for name, block in BLOCKS:
        if block.kind == "serves" and block.value:
            last = (ROOT / block.text.strip()).read_text().strip().splitlines()[-1]
            assert last == f'exec {block.value} "$@"', where(name, block)


def test_parts_of_files_are_what_the_files_say() -> None:
    for name, block in BLOCKS:
        if block.kind == "from":
            assert block.text in (ROOT / block.value).read_text(), f"{where(name, block)}: not in {block.value}"


def test_commands_that_are_not_run_name_files_that_exist() -> None:
    for name, block in BLOCKS:
        if block.kind == "not run":
            words = shlex.split(block.text, comments=True)
            for word in words:
                if word.startswith(("deploy/", "docs/", "scripts/")):
                    assert (ROOT / word).exists(), f"{where(name, block)}: there is no {word}"


# -- the runner itself


def test_a_page_that_does_not_hold_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text, error in (
        ("<!-- run -->\n```bash\nfalse\n```\n", "line 2: status 1"),
        ("<!-- run -->\n```bash\necho one\n```\n<!-- output -->\n```text\ntwo\n```\n", "line 6: .*something else"),
        ("<!-- serves -->\n```bash\noctavo serve nothing-there\n```\n", "line 2: the server ended with status 1"),
        ("<!-- run -->\n```python\nimport socket\nsocket.create_connection(('192.0.2.1', 80), 1)\n```\n", "line 2"),
    ):
        page.write_text(text)
        done = subprocess.run(
            [
                *NETWORK,
                sys.executable,
                "-m",
                "tests.docs.page",
                str(page),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and re.search(error, done.stderr, re.DOTALL), done.stderr


def test_blocks_are_read_with_their_markers() -> None:
    command = "```bash\n# a comment\nkubectl get \\\n  pods\n```\n"
    text = f"Text.\n\n<!-- not run: needs a cluster -->\n{command}\n```yaml\na: 1\n```\n"
    first, second = blocks_of(text)
    assert (first.line, first.language, first.kind, first.value) == (4, "bash", "not run", "needs a cluster")
    assert first.commands == ["kubectl"]
    assert (second.language, second.text, second.kind) == ("yaml", "a: 1\n", "")
    for broken in ("```bash\nls\n", "<!-- run -->\n\n```bash\n```\n", "<!-- file -->\n```\n```\n", "<!-- run -->\n"):
        with pytest.raises(Unreadable):
            blocks_of(broken)


def test_outputs_are_compared_in_full() -> None:
    assert matches("a ... b\n", "a 1\n2 b") and matches("x.y", "x.y\n")
    assert not matches("a", "ab") and not matches("x.y", "xzy")
    assert matches("a\n...\nb\n...", "a\nb") and matches("a\n...\nb\n...", "a\n1\n2\nb\n3")
    assert not matches("a\n...", "ab") and not matches("a\n...\nb", "a\nxb")


def test_addresses_of_servers() -> None:
    assert address_of("octavo serve smollm2") == "http://localhost:8000"
    assert address_of("octavo serve --port 8001 --ssl-certfile c") == "https://localhost:8001"
    assert address_of("octavo serve --uds /tmp/a") == "/tmp/a"


def test_tools_that_pages_use_are_here() -> None:
    for tool in ("curl", "unshare", "bash"):
        assert shutil.which(tool), f"{tool} is missing: apt install {tool}"
