"""SmolLM2 in every weight format that Octavo reads: sizes, what the format loses, speeds.

    python -m benchmarks.formats [--formats A,B] [--only STAGES] [--missing] [--out FILE.json] [--markdown] [--list]

Three stages, each for all formats, can be run apart (`--only write,losses,speed`):

- write: files are written once, into `formats` in Octavo's cache or --folder, by rounding to the nearest values
  (`files`): that is a property of this table, calibrated files lose less. Formats whose files take long to write are
  left out until they are there, unless they are named.
- losses: KL divergence and top-1 agreement are over all positions of a fixed text, from the model in float32 with
  activations and KV cache in float32: once for the format with these too, which is what the format loses, and once with
  what Octavo takes by default. Memory is that of the weights as they are multiplied with.
- speed: of decoding alone, prompts are one token long; seconds to load, and what loading added to the process (KV cache
  not yet written). The formats take turns, and of the rounds the median counts.

Every figure is from a process of its own. A format that fails keeps its message under "failed" and the others go on;
the exit status is 1 then. With --out, what is in FILE is kept, each figure is written as soon as it is there, and
--missing measures only what is not in it: so a run can go on where another ended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.formats.apart import Figures, apart
from benchmarks.formats.files import WRITTEN, matrix_bits, path_of, place_of
from benchmarks.formats.table import markdown
from octavo.config import cache_dir
from octavo.quant.onload import RULES
from tests import realmodels

STAGES = ("write", "losses", "speed")


def on_load(rule: str) -> str:
    return f"--quantization {rule}"


def names() -> list[str]:
    """Of all formats."""
    return ["float32", *WRITTEN, *map(on_load, RULES)]


def model_of(name: str, folder: Path) -> tuple[Path, str | None]:
    """The files of a format, written first where they are not there, and what quantizes them while they are loaded."""
    path = path_of(WRITTEN[name], folder) if name in WRITTEN else realmodels.smollm2_hf()
    return path, next((rule for rule in RULES if on_load(rule) == name), None)


class Run:
    """Figures of the formats, and the stages that add to them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        out: Path | None = options.out
        self.found: dict[str, Figures] = json.loads(out.read_text()) if out and out.exists() else {}
        self.failed: list[str] = []

    def write(self) -> None:
        for name in self._wanted("write", "file_mib"):
            self._try(name, "write", lambda name=name: self._files(name))  # type: ignore[misc]

    def losses(self) -> None:
        wanted = self._wanted("losses", "kl")
        reference = self.options.folder / f"float32-{self.options.tokens}.npy"
        same = {"reference": str(reference), "count": self.options.tokens}
        if wanted:
            reference.unlink(missing_ok=True)
            apart("benchmarks.formats.losses", path=str(realmodels.smollm2_hf()), rule=None, **same)
        for name in wanted:
            self._try(name, "losses", lambda name=name: self._measured("losses", name, **same))  # type: ignore[misc]

    def speed(self) -> None:
        rounds: dict[str, list[Figures]] = {name: [] for name in self._wanted("speed", "speeds")}
        for number in range(self.options.rounds):
            for name, before in rounds.items():

                def once(name: str = name, before: list[Figures] = before) -> Figures:
                    before.append(self._measured("speeds", name, steps=self.options.steps))
                    return {"speeds": before}

                self._try(name, "speed", once)
            print(f"round {number + 1} of speeds; load of the machine {os.getloadavg()[0]:.1f}", flush=True)

    def rows(self) -> dict[str, Figures]:
        return {name: self.found[name] for name in names() if name in self.found}

    def _wanted(self, stage: str, key: str) -> list[str]:
        """Formats of this run, less those whose figures are there or whose files could not be written."""
        return [
            name
            for name in self.options.formats
            if not (self.options.missing and key in self.found.get(name, {}))
            and (stage == "write" or f"{name}: write" not in self.failed)
        ]

    def _files(self, name: str) -> Figures:
        path, _ = model_of(name, self.options.folder)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        by = WRITTEN[name].by if name in WRITTEN else "octavo"
        said = {"by": by, "file_mib": sum(f.stat().st_size for f in files) / 2**20}
        return {**said, "bits": matrix_bits(path)} if by != "octavo" or name == "float32" else said

    def _measured(self, module: str, name: str, **arguments: object) -> Figures:
        path, rule = model_of(name, self.options.folder)
        return apart(f"benchmarks.formats.{module}", path=str(path), rule=rule, **arguments)

    def _try(self, name: str, stage: str, work: Callable[[], Figures]) -> None:
        row = self.found.setdefault(name, {})
        failed = row.pop("failed", {})
        failed.pop(stage, None)
        try:
            new = work()
            row |= new
            print(f"{name}: {stage}: {', '.join(_said(new))}", flush=True)
        except Exception as error:  # a format that cannot be measured must not lose the others
            failed[stage] = f"{type(error).__name__}: {error}"
            self.failed.append(f"{name}: {stage}")
            print(f"{name}: {stage} FAILED: {failed[stage]}", flush=True)
        if failed:
            row["failed"] = failed
        if self.options.out:
            whole = self.options.out.with_name(self.options.out.name + ".part")
            whole.write_text(json.dumps(self.rows(), indent=1))
            whole.replace(self.options.out)


def _said(figures: Figures) -> Iterator[str]:
    last = figures["speeds"][-1] if "speeds" in figures else figures
    for key, value in last.items():
        yield f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--formats", help="some of --list, with commas between")
    parser.add_argument("--only", default=",".join(STAGES), help=f"some of {','.join(STAGES)} (all)")
    parser.add_argument("--missing", action="store_true", help="measure only what --out does not have")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    parser.add_argument("--markdown", action="store_true", help="print the table of all that --out holds")
    parser.add_argument("--list", action="store_true", help="print the names of the formats")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "formats", help="of the models that are written")
    parser.add_argument("--tokens", type=int, default=256, help="of the text")
    parser.add_argument("--rounds", type=int, default=3, help="of speeds")
    parser.add_argument("--steps", type=int, default=48, help="tokens of a stream")
    options = parser.parse_args(arguments)
    known = names()
    if options.list:
        print("\n".join(known))
        return 0
    stages = [stage.strip() for stage in options.only.split(",")]
    if options.formats is None:
        slow = {name for name, one in WRITTEN.items() if one.slow and not place_of(one, options.folder).exists()}
        options.formats = [name for name in known if name not in slow]
    else:
        options.formats = [name.strip() for name in options.formats.split(",")]
    for what, said, allowed in (("formats", options.formats, known), ("stages", stages, STAGES)):
        if unknown := set(said) - set(allowed):
            parser.error(f"unknown {what}: {', '.join(sorted(unknown))}; known are {', '.join(allowed)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    for stage in STAGES:
        if stage in stages:
            getattr(run, stage)()
    if options.markdown:
        print(markdown(run.rows()))
    if run.failed:
        print(f"failed: {'; '.join(dict.fromkeys(run.failed))}", file=sys.stderr)
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
