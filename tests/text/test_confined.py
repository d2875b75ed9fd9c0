"""Templates of callers: the same results as in this process, and bounds that hold for whatever a template does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.text.confined import Confined
from octavo.text.template import ChatTemplate, TemplateError

USER = {"role": "user", "content": "héllo 🙂"}
DOUBLED = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)


@pytest.fixture
def confined() -> Iterator[Confined]:
    box = Confined(seconds=1)
    yield box
    box.close()


def test_renders_as_this_process_does(confined: Confined) -> None:
    source = "{% for m in messages %}{{ m.content | tojson }}{{ big }}{{ nothing is none }}{% endfor %}{{ bos_token }}"
    variables: dict[str, Any] = {"big": 10**30, "nothing": None}
    here = ChatTemplate(source, {"bos_token": "<s>"})
    there = ChatTemplate(source, {"bos_token": "<s>"}, sandbox=confined)
    for messages in (
        [USER],
        [USER, {**USER, "content": "x" * 200_000}],
        [{"role": "user", "content": [{"type": "text", "text": "é"}]}],
    ):
        assert there.render(messages, variables=variables) == here.render(messages, variables=variables)
    assert len(confined._idle) == 1, "one process has done it all"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "^Roles must alternate$"),
        ("{% if %}", "syntax error in line 1"),
        ("{" * 262_145, "at most 262144"),
        ("{{ x.y }}", "uses what is not there"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    ],
)
def test_mistakes_are_told_as_in_this_process(confined: Confined, source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source, sandbox=confined).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        DOUBLED + "{{ n.x == n.y }}",
        DOUBLED + "{{ n.x }}",
        DOUBLED + "{{ n.x | tojson }}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set a = (range(99999) | list) * 10 %}" + "{% set b = a | sort %}" * 3000,
        "{{ [] | slice(1000000000) | list }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{{ '\"' " + "| tojson" * 40 + " }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ '" + "a" * 100_000 + "' | replace('a', '" + "b" * 100_000 + "') }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
        "{{ 'x'.encode().ljust(10**10) }}",
        "{{ ([[1]] * 300000) | sum(start=[]) }}",
    ],
)
def test_nothing_runs_or_grows_without_end(confined: Confined, source: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateError, match="seconds or 1024 MiB of memory|too much memory"):
        ChatTemplate(source, sandbox=confined).render([USER])
    assert ChatTemplate("ok", sandbox=confined).render([USER]) == "ok"
    assert time.monotonic() - began < 30, "not merely at the end of the test's own time"


def test_one_that_hangs_keeps_nobody_else(confined: Confined) -> None:
    ended: list[str] = []

    def hang() -> None:
        with pytest.raises(TemplateError):
            ChatTemplate(DOUBLED + "{{ n.x == n.y }}", sandbox=confined).render([USER])
        ended.append("hung")

    thread = threading.Thread(target=hang)
    thread.start()
    for _ in range(3):
        assert ChatTemplate("{{ messages[0].content }}", sandbox=confined).render([USER]) == USER["content"]
        ended.append("served")
    thread.join(20)
    assert ended == ["served"] * 3 + ["hung"]


def test_a_child_that_died_idle_is_replaced(confined: Confined) -> None:
    assert ChatTemplate("a", sandbox=confined).render([USER]) == "a"
    process = confined._idle[0]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert ChatTemplate("b", sandbox=confined).render([USER]) == "b"


def test_children_end_with_close() -> None:
    box = Confined()
    assert ChatTemplate("a", sandbox=box).render([USER]) == "a"
    process = box._idle[0]._process
    box.close()
    assert process.poll() is not None and not box._idle


def test_close_ends_what_is_rendered() -> None:
    box = Confined(seconds=60)
    refused = threading.Event()

    def hang() -> None:
        with pytest.raises(TemplateError):
            ChatTemplate(DOUBLED + "{{ n.x == n.y }}", sandbox=box).render([USER])
        refused.set()

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    while not box._busy:
        time.sleep(0.01)
    box.close()
    assert refused.wait(20) and not box._busy and not box._idle
