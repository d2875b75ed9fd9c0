"""Who may import whom, read from the source of every module; and what a CPU process must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "octavo"
SHARED = {"types", "sampling_params", "buckets"}

ALLOWED: dict[str, set[str]] = {
    # part -> which other parts of octavo it may import
    "contract": set(),
    "types": {"sampling_params", "buckets"},
    "sampling_params": set(),
    "outputs": {"sampling_params"},
    "info": set(),
    "buckets": set(),
    "unbuilt": set(),
    "config": {"unbuilt"},
    "logs": {"config"},
    "wire": SHARED | {"info"},
    "engine": SHARED,
    "flight_recorder": set(),
    "recovery": set(),
    "client": SHARED | {"info", "config", "wire", "process", "engine", "flight_recorder", "recovery"},
    "text": SHARED,
    "checkpoint": {"contract", "quant"},
    "quant": {"contract"},
    "ops": {"contract", "quant"},
    "parallel": set(),
    "layers": {"contract", "quant", "parallel"},
    "models": SHARED | {"layers", "contract", "parallel"},
    "devices": {"contract", "ops", "quant", "_native"},
    "runtime": SHARED | {"models", "layers", "quant", "contract", "devices", "config"},
    "resolve": SHARED | {"config", "models", "contract", "quant"},
    "api": SHARED
    | {"logs", "text", "client", "config", "outputs", "info", "unbuilt", "build", "bench", "environment", "catalogue"}
    | {"inspection"},
    "catalogue": {"checkpoint", "quant"},
    "environment": {"config", "devices", "resolve"},
    "inspection": (
        {"build", "checkpoint", "config", "contract", "devices", "layers", "models", "parallel", "quant", "resolve"}
        | {"text"}
    ),
    "entrypoints": {"api"},
    "offline": SHARED | {"text", "outputs", "wire"},
    "bench": SHARED | {"checkpoint", "config", "contract", "llm", "outputs", "text"},
    "llm": SHARED | {"build", "config", "contract", "outputs", "info", "text", "offline", "wire"},
    "process": SHARED | {"logs", "build", "wire", "config", "info", "engine", "flight_recorder"},
}
BUILD_MAY_BE_IMPORTED_BY = {
    "inspection",
    "llm",
    "process",
    "api/cli.py",
    "api/serve.py",
    "api/run.py",
    "api/terminal.py",
}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    if path == ROOT / "ops" / "contract.py":
        return "contract"  # the one file of ops that everyone below the runtime may read
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Parts of octavo that a module imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "octavo"
                else [str(node.module)]
            )
        found |= {
            "contract" if name.startswith("octavo.ops.contract") else name.split(".")[1]
            for name in names
            if name.startswith("octavo.")
        }
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__", "build"):
        return
    assert part in ALLOWED, f"{path}: a new part of octavo needs its row in the table"
    extra = imports(path) - ALLOWED[part] - {part, "__version__"}
    assert not extra, f"{path.relative_to(ROOT)} may not import {sorted(extra)}"


def test_only_roots_import_build() -> None:
    for path in modules():
        if "build" in imports(path):
            name = str(path.relative_to(ROOT))
            assert part_of(path) in BUILD_MAY_BE_IMPORTED_BY or name in BUILD_MAY_BE_IMPORTED_BY, name


def test_no_cycles_between_parts() -> None:
    edges: dict[str, set[str]] = {}
    for path in modules():
        part = part_of(path)
        edges.setdefault(part, set()).update(imports(path) - {part})
    edges = {part: targets - {"__version__"} for part, targets in edges.items() if part != "__init__"}

    def visit(part: str, trail: tuple[str, ...]) -> None:
        assert part not in trail, f"import cycle: {' -> '.join((*trail[trail.index(part) :], part))}"
        for target in edges.get(part, ()):
            visit(target, (*trail, part))

    for part in edges:
        visit(part, ())


def test_engine_and_types_are_plain_python() -> None:
    for path in modules():
        if part_of(path) in ("engine", "types"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [str(node.module)]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                for name in names:
                    assert name.split(".")[0] not in ("numpy", "torch", "os"), f"{path}: imports {name}"


def test_environment_is_read_in_one_place() -> None:
    for path in modules():
        if path.name != "config.py" or path.parent != ROOT:
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_accelerator_code_lives_in_devices() -> None:
    for path in modules():
        if part_of(path) != "devices":
            for word in ("import torch", "from torch", "triton", "ctypes"):
                assert word not in path.read_text(), f"{path}: {word}"


def test_module_names_say_what_they_are() -> None:
    for path in modules():
        assert path.stem not in FORBIDDEN_NAMES, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not node.name.endswith(("Manager", "Handler", "Helper")), f"{path}: {node.name}"
            assert not isinstance(node, ast.Global), f"{path}: global"


@pytest.mark.parametrize(
    "what",
    [
        "octavo",
        "octavo.build",
        "octavo.api.cli",
        "octavo.process",
        "octavo.llm",
        "octavo.client",
    ],
)
def test_a_cpu_process_loads_neither_torch_nor_transformers(what: str) -> None:
    code = f"import sys, {what}; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert out.stdout.strip() == "[]"


def test_public_names_are_sorted_and_importable() -> None:
    code = (
        "import sys, octavo\n"
        "heavy = [m for m in ('numpy', 'fastapi', 'tokenizers', 'huggingface_hub') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert octavo.__all__ == sorted(octavo.__all__), octavo.__all__\n"
        "for name in octavo.__all__: getattr(octavo, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
