"""Headers of models on a hub: what they say is what the whole files say, and little more than they is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import Checkpoint, CheckpointError, hub_headers, open_checkpoint
from octavo.checkpoint.hub_headers import Source, write_headers
from tests import realmodels
from tests.checkpoint.fake_hub import FakeHub, running_hub
from tests.fuzz.quantized import checkpoints
from tests.fuzz.targets import TARGETS, gguf_parts
from tests.models.tiny import VARIANTS, make

ROOT = Path(__file__).parents[2]


class Files(Source):
    """Those of a folder, without a hub between."""

    def __new__(cls, folder: Path) -> Files:
        made = super().__new__(cls, str(folder), None, None)
        made.asked = []
        return made

    asked: list[tuple[str, int, int]]

    def part(self, name: str, start: int, length: int) -> tuple[bytes, int]:
        content = (Path(self.repo) / name).read_bytes()
        self.asked.append((name, start, length))
        return content[start : start + length], len(content)


def said(checkpoint: Checkpoint) -> dict[str, Any]:
    names = checkpoint.names()
    tensors = {n: (checkpoint.kind(n), checkpoint.shape(n), checkpoint.bytes_of(n)) for n in names}
    return {"config": checkpoint.config, "tensors": tensors}


@pytest.mark.parametrize("number", range(len(checkpoints())))
def test_every_quantization_method_says_the_same(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_headers, "_FIRST", 64)
    monkeypatch.setattr(hub_headers, "_GAP", 0)
    config, _, tensors = checkpoints()[number].partition(b"\0")
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    for folder in (whole, empty):
        folder.mkdir()
        (folder / "config.json").write_bytes(config)
    (whole / "model.safetensors").write_bytes(tensors)
    files = Files(whole)
    write_headers(files, ["model.safetensors"], empty)
    with open_checkpoint(whole) as want, open_checkpoint(empty) as got:
        assert said(got) == said(want)
        assert got.vector("model.norm.weight").tolist() == [0.0] * 64 != want.vector("model.norm.weight").tolist()
    header = 8 + int.from_bytes(tensors[:8], "little")
    assert files.asked[:2] == [("model.safetensors", 0, 64), ("model.safetensors", 64, header - 64)]
    # The order of act-order's columns is a tenth of so small a model.
    assert sum(length for _, _, length in files.asked[2:]) < (len(tensors) - header) / 8


def test_gguf_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_headers, "_FIRST", 64)
    (whole := tmp_path / "whole").mkdir()
    (empty := tmp_path / "empty").mkdir()
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    both = TARGETS["gguf-parts"].corpus()[0]
    size = int.from_bytes(both[:4], "little")
    for name, content in zip(names, (both[4 : 4 + size], both[4 + size :]), strict=True):
        (whole / name).write_bytes(content)
    files = Files(whole)
    write_headers(files, names, empty)
    with open_checkpoint(whole / names[0]) as want, open_checkpoint(empty / names[0]) as got:
        assert said(got) == said(want) and len(got.names()) == len(gguf_parts("llama")[1])
    assert {name for name, _, _ in files.asked} == set(names)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 500, b"no model" * 1000])
@pytest.mark.parametrize("name", ["m.gguf", "model.safetensors"])
def test_what_is_no_model_is_said_when_it_is_opened(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_headers, "_FIRST", 64)
    monkeypatch.setattr(hub_headers, "_MAX_HEADER", 2000)
    (whole := tmp_path / "whole").mkdir()
    (empty := tmp_path / "empty").mkdir()
    (whole / name).write_bytes(content)
    (empty / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=name):
        write_headers(Files(whole), [name], empty)
        open_checkpoint(empty / name if name.endswith("gguf") else empty)


# -- the command, and a hub that counts


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub() as hub:
        yield hub


def inspect(hub: FakeHub, home: Path, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    options = ["--json", "--kv-cache-memory-bytes", "16MiB", "--max-model-len", "64", "--threads", "1"]
    return subprocess.run(
        [sys.executable, "-m", "octavo", "inspect", model, *options],
        cwd=ROOT,
        env={**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {key: value for key, value in found.items() if key not in ("model", "path")}


def test_a_gguf_file_of_94_mib_is_told_from_its_header(hub: FakeHub, tmp_path: Path) -> None:
    path = realmodels.smollm2_gguf()
    hub.repositories["org/smol-GGUF"] = {"smol.Q4_1.gguf": path.read_bytes()}
    done = inspect(hub, tmp_path, "org/smol-GGUF:Q4_1")
    assert told(done) == told(inspect(hub, tmp_path, str(path)))
    assert json.loads(done.stdout)["path"] == "org/smol-GGUF:Q4_1"
    assert path.stat().st_size > 90 << 20 and hub.sent < 4 << 20
    assert not list(tmp_path.rglob("*.gguf")), "it was stored"


def test_a_folder_in_shards(hub: FakeHub, tmp_path: Path) -> None:
    path, model = make(next(name for name in VARIANTS if name.startswith("llama")), tmp_path / "whole")
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    hub.repositories["org/gated"] = {file.name: file.read_bytes() for file in path.iterdir()}
    without = inspect(hub, tmp_path / "first", "org/gated", HF_TOKEN="accepted")
    assert "no tokenizer in org/gated: it has neither" in told(without)["warnings"][0]
    for file in realmodels.smollm2_hf().glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
        hub.repositories["org/gated"][file.name] = file.read_bytes()
    found = told(inspect(hub, tmp_path / "home", "org/gated", HF_TOKEN="accepted"))
    assert found == told(inspect(hub, tmp_path / "home", str(path))) and found["text"]["vocabulary"] == 49152
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    refused = inspect(hub, tmp_path / "other", "org/gated")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "org/gated is gated" in refused.stderr and "set HF_TOKEN" in refused.stderr


def test_what_a_hub_may_answer(hub: FakeHub, tmp_path: Path) -> None:
    path, _ = make(next(name for name in VARIANTS if name.startswith("llama")), tmp_path / "whole")
    hub.repositories["org/tiny"] = {file.name: file.read_bytes() for file in path.iterdir()}
    hub.knows_ranges = False
    done = inspect(hub, tmp_path, "org/tiny")
    assert done.returncode == 1 and "does not send parts of model.safetensors" in done.stderr
    assert "no model 'org/absent'" in inspect(hub, tmp_path, "org/absent").stderr
    hub.status = 503
    assert "could not be reached" in inspect(hub, tmp_path / "empty", "org/tiny").stderr
