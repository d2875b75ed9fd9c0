"""report.html in a real browser: it opens without complaints, asks for nothing else, and shows its plots."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import report
from tests.bench.browser import Page, browser, page
from tests.bench.comparing import compared, scripted

NASTY = "<b>&\"'c"
"""A name that must not become markup."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of three servers, one of which dies; at two loads."""
    browser()
    folder = tmp_path_factory.mktemp("compare")
    compared(
        folder,
        start=(
            f"quick={scripted('--pause', '0.01')}",
            f"{NASTY}={scripted('--pause', '0.02')}",
            f"mortal={scripted('--pause', '0.005', '--die-at', '12')}",
        ),
        concurrency="1,3",
        num_prompts=5,
        num_warmups=2,
        max_tokens=50,
    )
    return folder


def look(folder: Path, steps: Callable[[Page], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with page() as opened:
            await opened.width(1200)
            await opened.open((folder / "report.html").as_uri())
            await steps(opened)
            assert opened.complaints == []
            assert [url for url in opened.asked if not url.startswith("data:")] == [(folder / "report.html").as_uri()]

    asyncio.run(run())


_PLOTS = """[...document.querySelectorAll('svg.plot')].map(svg => {
    const box = svg.getBoundingClientRect();
    const marks = svg.querySelectorAll('.bar, .curve, .point, .failed');
    const seen = [...marks].filter(mark => { const b = mark.getBoundingClientRect(); return b.width + b.height > 0; });
    return {kind: svg.dataset.plot, width: box.width, height: box.height, marks: seen.length,
            broken: /NaN|Infinity|undefined/.test(svg.outerHTML)};
})"""


def test_the_page_shows_all_its_plots(written: Path) -> None:
    async def steps(opened: Page) -> None:
        plots = await opened.value(_PLOTS)
        kinds = Counter(plot["kind"] for plot in plots)
        assert kinds == {
            "throughput": 2,
            "ttft distribution": 2,
            "itl distribution": 2,
            "e2el distribution": 2,
            "speed over concurrency": 3,
            "memory": 2,
            "timeline": 1,
            "resident memory over time": 1,
            "cpu over time": 1,
        }
        for plot in plots:
            assert plot["width"] > 250 and plot["height"] > 60 and plot["marks"] >= 2 and not plot["broken"], plot
        # a bar for each server that was measured, as wide as its figure says
        bars = await opened.value(
            "[...document.querySelectorAll('#throughput .card')].map(card => "
            "[...card.querySelectorAll('.bar')].map(bar => bar.getBoundingClientRect().width))"
        )
        summary = json.loads((written / "results.json").read_text())["summary"]
        for found, concurrency in zip(bars, (1, 3), strict=True):
            speeds = [r["output_tok_s"]["median"] for r in summary if r["concurrency"] == concurrency and r["rounds"]]
            assert [width / found[0] for width in found] == pytest.approx([s / speeds[0] for s in speeds], rel=0.02)

    look(written, steps)


def test_the_page_tells_of_the_server_that_died_and_shows_names_as_they_are(written: Path) -> None:
    async def steps(opened: Page) -> None:
        failure = await opened.value("document.querySelector('.failure').innerText")
        assert "mortal was ended by signal 9" in failure and "out of luck after 1" in failure
        assert await opened.value("document.querySelectorAll('#timeline .failed').length") == 1
        assert await opened.value("document.querySelector('h1').innerText") == f"quick, {NASTY} and mortal"
        assert await opened.value("document.querySelectorAll('main b').length") == 0
        text = await opened.value("document.body.innerText")
        for words in ("Do they answer alike?", "SHA-256", "tests.bench.scripted", "Read the figures with this in mind"):
            assert words in text

    look(written, steps)


def test_the_page_is_readable_in_light_and_dark_and_on_a_telephone(written: Path) -> None:
    async def steps(opened: Page) -> None:
        found = {}
        for scheme in ("light", "dark"):
            await opened.prefer(scheme)
            found[scheme] = await opened.value(_CONTRASTS)
            for what, contrast in found[scheme].items():
                # text needs 4.5; marks that are large need 3 (WCAG 2, AA)
                assert contrast >= (3 if what.startswith("mark") else 4.5), (scheme, what, contrast)
        assert found["light"] != found["dark"]
        for width in (1200, 390):
            await opened.width(width)
            assert await opened.value("document.documentElement.scrollWidth") <= width, (
                "the page is wider than a screen"
            )

    look(written, steps)


_CONTRASTS = """(() => {
    const light = colour => {
        const [r, g, b] = colour.match(/[0-9.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (one, two) => {
        const [high, low] = [light(one), light(two)].sort((a, b) => b - a);
        return (high + 0.05) / (low + 0.05);
    };
    const style = selector => getComputedStyle(document.querySelector(selector));
    const ground = style('body').backgroundColor, card = style('.card').backgroundColor;
    const found = {
        'text': contrast(style('h1').color, ground), 'soft text': contrast(style('p.soft').color, ground),
        'cell': contrast(style('td').color, card), 'tick': contrast(style('svg text.tick').fill, card),
        'warning': contrast(style('.warn li').color, style('.warn').backgroundColor),
        'warning title': contrast(style('.warn strong').color, style('.warn').backgroundColor),
        'failure title': contrast(style('.failure strong').color, style('.failure').backgroundColor),
    };
    for (const index of [0, 1, 2, 3, 4, 5]) {
        const swatch = document.createElement('span');
        swatch.className = `swatch s${index}`;
        document.querySelector('.card').append(swatch);
        found[`mark ${index}`] = contrast(getComputedStyle(swatch).backgroundColor, card);
        swatch.remove();
    }
    return found;
})()"""


def test_a_page_of_nothing_but_a_failure_opens(tmp_path: Path) -> None:
    browser()
    compared(tmp_path, start=("bad=sh -c 'exit 3' {port}",))

    async def steps(opened: Page) -> None:
        assert "bad ended with status 3 while it started" in await opened.value("document.body.innerText")
        assert not any(plot["broken"] for plot in await opened.value(_PLOTS))

    look(tmp_path, steps)


def test_the_page_can_be_made_again_from_the_raw_figures(written: Path) -> None:
    results = json.loads((written / "results.json").read_text())
    assert report.html(results) == (written / "report.html").read_text()
