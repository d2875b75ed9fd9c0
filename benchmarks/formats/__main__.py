"""SmolLM2 in every weight format that Octavo reads: sizes, what the format loses, speeds.

    python -m benchmarks.formats [--formats A,B] [--out FILE.json] [--markdown] [--list]

Files are written once, into `formats` in Octavo's cache or --folder, by rounding to the nearest values (`files`): that
is a property of this table, calibrated files lose less. Formats whose files take an hour to write are left out unless
they are named.

KL divergence and top-1 agreement are over all positions of a fixed text, from the model in float32 with activations and
KV cache in float32: once for the format with these too, which is what the format loses, and once with what Octavo takes
by default. Speeds are of decoding alone: prompts are one token long. Every figure is from a process of its own;
the formats take turns, and of the rounds the median counts. Memory is that of the weights as they are multiplied with,
and what loading added to the process (KV cache not yet written).

With --out, what is in FILE is kept, and the formats of this run are added or replaced: so a run can go on where another
ended.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.formats.files import WRITTEN, matrix_bits, path_of
from benchmarks.formats.measuring import STREAMS, Figures, Model, apart, losses, save_logits, speed
from octavo.config import cache_dir
from octavo.quant.onload import RULES
from tests import realmodels


def on_load(rule: str) -> str:
    return f"--quantization {rule}"


def names() -> list[str]:
    """Of all formats."""
    return ["float32", *WRITTEN, *map(on_load, RULES)]


def prepared(name: str, folder: Path) -> tuple[Model, Figures]:
    """The model in a format, and what its files say."""
    written = WRITTEN.get(name)
    path = path_of(written, folder) if written else realmodels.smollm2_hf()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    said = {"by": written.by if written else "octavo", "file_mib": sum(f.stat().st_size for f in files) / 2**20}
    if written or name == "float32":
        said["bits"] = matrix_bits(path)
    return Model(str(path), next((rule for rule in RULES if on_load(rule) == name), None)), said


def measure(options: argparse.Namespace, keep: Callable[[dict[str, Figures]], None]) -> dict[str, Figures]:
    """Figures by format; `keep` gets them after each step."""
    models: dict[str, Model] = {}
    found: dict[str, Figures] = {}
    reference = options.folder / f"float32-{options.tokens}.npy"
    options.folder.mkdir(parents=True, exist_ok=True)
    apart(save_logits, Model(str(realmodels.smollm2_hf())), options.tokens, str(reference))
    for name in options.formats:
        models[name], found[name] = prepared(name, options.folder)
        found[name] |= apart(losses, models[name], str(reference), options.tokens)
        print(f"{name}: KL {found[name]['kl']:.3g}, top-1 {found[name]['top1']:.1%}", flush=True)
        keep(found)
    rounds: dict[str, list[Figures]] = {name: [] for name in models}
    for number in range(options.rounds):
        for name, model in models.items():
            rounds[name].append(apart(speed, model, options.steps))
            found[name] |= {key: median(one[key] for one in rounds[name]) for key in rounds[name][0]}
        print(f"round {number + 1} of speeds; load of the machine {os.getloadavg()[0]:.1f}", flush=True)
        keep(found)
    return found


def number(row: Figures, key: str, form: str) -> str:
    return format(row[key], form) if key in row else "–"


def markdown(found: Mapping[str, Figures]) -> str:
    """The table, ready for the documentation."""
    rows = [
        "| format | written by | bits per weight | file, MiB | in memory, MiB | loading adds, MiB | KL, top-1: float32 "
        "activations | activations | KL, top-1: default | load, s | tok/s, 1 stream | 32 streams |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        title = f"`{name}`" if name.startswith("--") else name
        exact, by_default = (
            f"{number(row, a + 'kl', '.1e')}, {number(row, a + 'top1', '.1%')}" for a in ("", "default_")
        )
        cells = (
            title,
            row["by"],
            number(row, "bits", ".2f"),
            number(row, "file_mib", ".0f"),
            number(row, "memory_mib", ".0f"),
            number(row, "rss_mib", ".0f"),
            exact,
            row["activations"],
            by_default,
            number(row, "load_s", ".1f"),
            *(number(row, f"tok_s_{streams}", ".0f") for streams in STREAMS),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--formats", help="some of --list, with commas between")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    parser.add_argument("--markdown", action="store_true", help="print the table of all that --out holds")
    parser.add_argument("--list", action="store_true", help="print the names of the formats")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "formats", help="of the models that are written")
    parser.add_argument("--tokens", type=int, default=512, help="of the text")
    parser.add_argument("--rounds", type=int, default=3, help="of speeds; 0: none")
    parser.add_argument("--steps", type=int, default=48, help="tokens of a stream")
    options = parser.parse_args(arguments)
    known = names()
    if options.list:
        print("\n".join(known))
        return
    if options.formats is None:
        options.formats = [name for name in known if name not in WRITTEN or not WRITTEN[name].slow]
    else:
        options.formats = [name.strip() for name in options.formats.split(",")]
    if unknown := set(options.formats) - set(known):
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    before = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}

    def all_of(found: Mapping[str, Figures]) -> dict[str, Figures]:
        merged = {**before, **{name: {**before.get(name, {}), **row} for name, row in found.items()}}
        return {name: merged[name] for name in known if name in merged}

    def keep(found: Mapping[str, Figures]) -> None:
        if options.out:
            options.out.write_text(json.dumps(all_of(found), indent=1))

    found = all_of(measure(options, keep))
    keep(found)
    if options.markdown:
        print(markdown(found))


if __name__ == "__main__":
    main()
