"""Converted matrices that are kept: read back as they were made, and never believed when anything is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from octavo.build import build
from octavo.checkpoint import converted
from octavo.checkpoint.converted import TRAILER, Converted, identity
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from tests.models.tiny import make

LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def keep_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted, "LEAST", 1)


def _stored(seed: int, columns: bool = False) -> Stored:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (5 + seed, 3 * 34), np.uint8)
    return Stored("Q8_0", 5 + seed, 96, data, rng.permutation(96).astype(np.int32) if columns else None)


MADE = {"first": _stored(0), "second": _stored(1, columns=True), "third": _stored(2)}


def _wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "octavo-converted":
            thread.join()


def _pass(folder: Path, key: str = "key", limit: int = LIMIT) -> list[str]:
    """One start; returns the names of what was made."""
    made = []

    def maker(name: str) -> Stored:
        made.append(name)
        return MADE[name]

    with Converted(folder, key, limit) as kept:
        for name, stored in MADE.items():
            got = kept.matrix(name, lambda name=name: maker(name))
            assert got[:3] == stored[:3]
            assert np.array_equal(got.data, stored.data)
            assert (got.columns is None) == (stored.columns is None)
            assert stored.columns is None or np.array_equal(got.columns, stored.columns)
    _wait()
    return made


def test_what_was_made_is_found_at_the_next_start(tmp_path: Path) -> None:
    assert _pass(tmp_path / "new") == list(MADE)
    assert _pass(tmp_path / "new") == []
    assert _pass(tmp_path / "new", "another key") == list(MADE)
    assert sorted(file.suffix for file in (tmp_path / "new").iterdir()) == [".matrices"] * 2


def test_a_view_of_the_checkpoint_is_not_kept(tmp_path: Path) -> None:
    data = _stored(0).data
    data.flags.writeable = False
    for _ in range(2):
        with Converted(tmp_path, "key", LIMIT) as kept:
            kept.matrix("made", lambda: _stored(1))
            assert kept.matrix("view", lambda: Stored("Q8_0", 5, 96, data)).data is data
        _wait()


def _broken(whole: bytes) -> dict[str, bytes]:
    index = whole.rindex(b'{"first"')
    return {
        "empty": b"",
        "short": whole[:20],
        "truncated": whole[:-1],
        "half": whole[: len(whole) // 2],
        "longer": whole + b"\0",
        "foreign": b"GGUF" * 1000,
        "zeros": bytes(len(whole)),
        "index": whole[: index + 3] + b"?" + whole[index + 4 :],
        "trailer": whole[: -TRAILER.size] + bytes([whole[-TRAILER.size] ^ 64]) + whole[-TRAILER.size + 1 :],
    }


@pytest.mark.parametrize("how", sorted(_broken(b'  {"first"' + bytes(100))))
def test_a_broken_file_is_written_again(how: str, tmp_path: Path) -> None:
    _pass(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(_broken(whole)[how])
    assert _pass(tmp_path) == list(MADE)
    assert file.read_bytes() == whole
    assert _pass(tmp_path) == []


def test_an_index_that_points_outside_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted._Writer, "_put", lambda self, values: 1 << 40)
    with Converted(tmp_path, "key", LIMIT) as kept:
        kept.matrix("first", lambda: MADE["first"])
    _wait()
    monkeypatch.undo()
    monkeypatch.setattr(converted, "LEAST", 1)
    assert _pass(tmp_path) == list(MADE)
    assert _pass(tmp_path) == []


def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no more"), Converted(tmp_path, "key", LIMIT) as kept:
        kept.matrix("first", lambda: MADE["first"])
        raise RuntimeError("no more")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [100, 0])
def test_what_does_not_fit_is_made_every_time(limit: int, tmp_path: Path) -> None:
    for _ in range(2):
        assert _pass(tmp_path, limit=limit) == list(MADE)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert _pass(tmp_path / "file") == list(MADE)


def test_what_a_killed_process_left_is_removed_at_the_next_start_but_not_what_another_writes(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
import numpy as np
from octavo.checkpoint.converted import Converted
from octavo.ops.contract import Stored
with Converted(Path({str(tmp_path)!r}), "killed", {LIMIT}) as kept:
    kept.matrix("first", lambda: Stored("Q8_0", 5, 96, np.zeros((5, 3 * 34), np.uint8)))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    (left,) = tmp_path.iterdir()
    with Converted(tmp_path, "other", LIMIT) as writing:
        assert not left.exists()
        writing.matrix("first", lambda: MADE["first"])
        assert _pass(tmp_path) == list(MADE)
    _wait()
    assert {file.name for file in tmp_path.iterdir()} == {"key.matrices", "other.matrices"}


def test_a_file_that_cannot_be_marked_as_used_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _pass(tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    assert _pass(tmp_path) == []
    assert not caplog.records


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    for i, key in enumerate("abc"):
        _pass(tmp_path, key)
        os.utime(tmp_path / f"{key}.matrices", (i, i))
    size = (tmp_path / "a.matrices").stat().st_size
    assert _pass(tmp_path, "a") == []  # used again: now b is the oldest
    _pass(tmp_path, "d", limit=3 * size)
    assert {file.stem for file in tmp_path.glob("*.matrices")} == {"a", "c", "d"}


def test_the_key_follows_files_configuration_and_code(tmp_path: Path) -> None:
    file, code = tmp_path / "weights", tmp_path / "code.py"
    file.write_bytes(b"weights"), code.write_text("pass")
    keys = [identity([file], {"bits": 4}, [code])]
    assert keys == [identity([file], {"bits": 4}, [code])]
    keys.append(identity([file], {"bits": 8}, [code]))
    stat = file.stat()
    replaced = tmp_path / "replaced"
    replaced.write_bytes(b"WEIGHTS")
    os.utime(replaced, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    replaced.replace(file)  # of the same size, from the same moment
    keys.append(identity([file], {"bits": 4}, [code]))
    stat = file.stat()
    file.write_bytes(b"Weights")  # in its place, as cp -p writes
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    keys.append(identity([file], {"bits": 4}, [code]))
    code.write_text("...")
    keys.append(identity([file], {"bits": 4}, [code]))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("size", [LIMIT, 0])
def test_a_model_quantized_while_it_is_loaded(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start has the same weights without quantizing anything."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path = make("llama", tmp_path)[0]
    config = EngineConfig(model=str(path), quantization="int8", max_num_seqs=2, converted_cache_bytes=size)
    rounded = []
    original = converted._Writer.add
    monkeypatch.setattr(converted._Writer, "add", lambda self, *what: (rounded.append(what[0]), original(self, *what)))
    notes = []
    for _ in range(2):
        built = build(config)
        notes.append([note for note in built.info.notes if note.startswith("converted weights come from")])
        built.engine.close()
        _wait()
    if size == 0:
        assert not rounded and notes == [[], []] and not (tmp_path / "cache").exists()
    else:
        assert len(rounded) == len(set(rounded)) > 20
        assert [len(found) for found in notes] == [0, 1]
