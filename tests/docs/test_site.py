"""The site that is built of docs/: without a warning, without a dead link, without anything from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.docs.blocks import ROOT, name_of, pages

LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("form", "action"),
}
"""Attributes whose addresses a browser asks by itself; those of <link> too, but for the ones that only name."""
NAMES_ONLY = {"canonical", "prev", "next", "license", "alternate", "edit"}


def build(site: Path, conf: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(conf), "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class _Addresses(HTMLParser):
    """What a page loads, and where its links go."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") not in NAMES_ONLY:
            self.loaded.append(values["href"] or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        self.loaded += [values[name] or "" for place, name in LOADED if place == tag and name in values]


def addresses_of(page: Path) -> _Addresses:
    found = _Addresses()
    found.feed(page.read_text())
    return found


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = addresses_of(page).loaded
        assert any(address.endswith(".css") for address in loaded)
        outside = [address for address in loaded if urlsplit(address).netloc]
        assert not outside, f"{page.name} loads {outside}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


def test_files_that_pages_load_are_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for address in addresses_of(page).loaded:
            base = site if address.startswith("/") else page.parent
            path = base / urlsplit(address).path.lstrip("/")
            assert path.exists(), f"{page.relative_to(site)} loads {address}"


def test_external_links_are_addresses(site: Path) -> None:
    found = {link for page in site.rglob("*.html") for link in addresses_of(page).links if ":" in link.split("/")[0]}
    assert found
    for link in found:
        parts = urlsplit(link)
        assert parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link


def test_every_page_is_in_the_navigation_and_can_be_searched(site: Path) -> None:
    nav = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    index = (site / "search" / "search_index.json").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert f"{name}\n" in nav, f"{name} is not in the navigation of mkdocs.yml"
        assert f'"location":"{name.removesuffix(".md")}.html' in index, name


def test_files_to_deploy_are_in_the_site(site: Path) -> None:
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            copied = site / "deploy" / path.relative_to(ROOT / "deploy")
            assert copied.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "text", ["[gone](gone.md)", "[gone](serve.md#gone)", "[gone](../deploy/gone.yaml)", "[gone](#gone)"]
)
def test_a_dead_link_fails_the_build(text: str, tmp_path: Path) -> None:
    for part in ("docs", "deploy"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n{text}\n")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1 and "gone" in done.stderr, done.stderr


def test_links_of_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert "docs/getting-started.md" in links
    for link in links:
        assert urlsplit(link).scheme == "https" or (ROOT / link).exists(), link


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![*-])")
OF_OTHERS = {
    *("--model-id", "--hostname", "--max-total-tokens", "--max-input-tokens", "--max-concurrent-requests"),
    *("--max-batch-size", "--max-batch-prefill-tokens", "--quantize", "--max-best-of", "--max-top-n-tokens"),
    *("--num-shard", "--sharded", "--json-output", "--otlp-endpoint", "--huggingface-hub-cache"),  # of TGI's launcher
    *("--cpus", "--memory", "--read-only", "--tmpfs", "--profile"),  # of docker
    *("--cpuset-cpus", "--cap-add", "--cpunodebind", "--membind", "--interleave"),  # of docker and numactl
    "--help",
}
COMMANDS = (
    *("serve", "run", "chat", "complete", "run-batch", "models", "inspect", "collect-env"),
    *("bench serve", "bench throughput", "bench latency", "bench startup", "bench compare"),
)
MODULES = ("benchmarks.formats", "benchmarks.peers")


def test_flags_that_pages_speak_of_exist() -> None:
    """In the help of a command, or in docs/options.md among vLLM's; those of other programs are in a list."""
    known = set(OF_OTHERS)
    for command in (*(f"octavo {command}" for command in COMMANDS), *MODULES):
        asked = [sys.executable, "-m", *command.split(), "--help"]
        text = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        known |= {f"--no-{name}" for name in re.findall(r"--\[no-\]([\w-]+)", text)}
        known |= set(FLAG.findall(text.replace("[no-]", "")))
    known |= set(FLAG.findall((ROOT / "docs" / "options.md").read_text()))
    wrong = []
    for page in pages():
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for code in re.findall(r"`([^`]+)`", line):
                wrong += [f"{name_of(page)}:{number} {flag}" for flag in FLAG.findall(code) if flag not in known]
    assert not wrong, wrong
