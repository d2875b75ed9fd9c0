"""Finding a model: paths, aliases, and names on a hub that runs beside the test.

The hub's library reads its environment when it is imported, so each call is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import CheckpointError
from octavo.checkpoint.hub import locate
from tests.checkpoint.fake_hub import CONFIG, SHARD, FakeHub, running_hub
from tests.realmodels import smollm2_gguf

PROGRAM = """
import json, sys
from pathlib import Path
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.hub import locate
for model, options in json.loads(sys.argv[1]):
    if "download_dir" in options:
        options["download_dir"] = Path(options["download_dir"])
    try:
        found = locate(model, cache_dir=Path(sys.argv[2]), **options)
    except CheckpointError as e:
        print(json.dumps({"error": str(e)}))
    else:
        files = [p for p in found.rglob("*") if p.is_file()] if found.is_dir() else [found]
        names = sorted(str(p.relative_to(found)) if found.is_dir() else p.name for p in files)
        print(json.dumps({"path": str(found), "files": names}))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _well(hub: FakeHub) -> Iterator[None]:
    hub.status = 200
    hub.requests.clear()
    hub.tokens.clear()
    yield


def _locate(home: Path, endpoint: str, *calls: tuple[str, dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """What `locate` gives for each (model, options)."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls), str(home / "cache")],
        capture_output=True,
        text=True,
        cwd=home,
        timeout=60,
        check=True,
        env={
            **kept,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **environment,
        },
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_what_is_needed_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    found = _locate(
        tmp_path,
        hub.url,
        ("org/plain", {}),
        ("org/old", {}),
        ("https://huggingface.co/org/plain", {}),
        ("org/plain", {"weights": False, "download_dir": str(tmp_path / "elsewhere")}),
    )
    texts = ["chat_template.jinja", "config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert found[0]["files"] == sorted([*texts, "model-00001-of-00001.safetensors"])
    assert found[1]["files"] == ["config.json", "pytorch_model.bin", "tokenizer.model"]
    assert found[2] == found[0]
    assert found[3]["files"] == texts and found[3]["path"].startswith(str(tmp_path / "elsewhere"))
    folder = Path(found[0]["path"])
    assert (folder / "config.json").read_bytes() == CONFIG
    assert (folder / "model-00001-of-00001.safetensors").read_bytes() == SHARD
    assert folder.is_relative_to(tmp_path / "hf")


def test_gguf_repositories(hub: FakeHub, tmp_path: Path) -> None:
    repo = "org/several-gguf"
    found = _locate(
        tmp_path,
        hub.url,
        (repo, {}),
        (f"{repo}:q8_0", {}),
        (f"{repo}:Q4_K_S", {}),
        (f"{repo}/sub/m-BF16.gguf", {}),
        (f"{repo}:Q2_K", {}),
        (f"{repo}/other.gguf", {}),
        ("org/odd-gguf", {}),
        ("org/nothing", {}),
        ("org/plain/m.gguf", {}),
    )
    assert [Path(f["path"]).read_bytes() for f in found[:4]] == [b"four", b"eight", b"small", b"sixteen"]
    assert [f["files"] for f in found[:2]] == [["m-Q4_K_M.gguf"], ["m-Q8_0.gguf"]]
    names = "Name one of its files as org/name/FILE: m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-Q8_0.gguf, sub/m-BF16.gguf."
    assert found[4]["error"] == f"{repo} has no GGUF file of the kind Q2_K. {names}"
    assert found[5]["error"] == f"{repo} has no file 'other.gguf'. {names}"
    assert found[6]["error"] == (
        "org/odd-gguf has several GGUF files. Name one of its files as org/name/FILE: a-IQ2_XS.gguf, b-IQ3_S.gguf."
    )
    assert found[7]["error"].startswith("org/nothing has no safetensors, .bin or .gguf weights.")
    assert "It has no .gguf files at all" in found[8]["error"]


def test_all_parts_of_a_gguf_model_are_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    repo, second = "org/parts-gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf"
    for i, model in enumerate((repo, f"{repo}:Q4_K_M", f"{repo}/{second}")):
        home = tmp_path / str(i)
        home.mkdir()
        (found,) = _locate(home, hub.url, (model, {}))
        first = Path(found["path"])
        assert (first.name, first.read_bytes()) == ("m-Q4_K_M-00001-of-00002.gguf", b"first")
        assert (first.parent / second.split("/")[1]).read_bytes() == b"second"
    (found,) = _locate(tmp_path, hub.url, (f"{repo}:Q8_0", {}))
    assert found["error"] == f"{repo} lacks parts of the model: m-Q8_0-00002-of-00002.gguf."


def test_errors_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "plane").mkdir()
    absent, revision, gated, accepted = _locate(
        tmp_path,
        hub.url,
        ("org/plain2", {}),
        ("org/plain", {"revision": "v9"}),
        ("org/gated", {}),
        ("org/gated", {"hf_token": "accepted"}),
    )
    assert absent["error"] == (
        f"{hub.url} has no model 'org/plain2' that you may see, and there is no such path (near: org/plane). Similar "
        f"names: org/plain. Check the name; for a private model set HF_TOKEN."
    )
    assert revision["error"].startswith("org/plain has no revision 'v9'. See ")
    assert gated["error"] == (
        f"org/gated is gated: accept its licence at {hub.url}/org/gated, then set HF_TOKEN (or "
        f"--hf-token) to a token of that account."
    )
    assert accepted["files"] == ["config.json", "model.safetensors"]
    assert "Bearer accepted" in hub.tokens


def test_token_of_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    assert _locate(tmp_path, hub.url, ("org/gated", {}), HF_TOKEN="accepted")[0]["files"][0] == "config.json"


def test_downloaded_models_need_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    calls = (("org/plain", {}), ("org/several-gguf:Q8_0", {}), ("org/several-gguf/m-Q4_K_S.gguf", {}))
    online = _locate(tmp_path, hub.url, *calls)
    asked = len(hub.requests)
    assert _locate(tmp_path, hub.url, *calls, HF_HUB_OFFLINE="1") == online
    assert len(hub.requests) == asked
    assert _locate(tmp_path, "http://127.0.0.1:9", *calls) == online
    hub.status = 503
    assert _locate(tmp_path, hub.url, *calls[:1]) == online[:1]


def test_unreachable_hub(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    (unreachable,) = _locate(tmp_path, nowhere, ("org/plain", {}))
    hint = "Without a network give a folder with a model, the path of a .gguf file, or the alias smollm2."
    assert unreachable["error"] == f"org/plain is not on this machine and {nowhere} could not be reached. {hint}"
    (offline,) = _locate(tmp_path, nowhere, ("org/plain", {}), HF_HUB_OFFLINE="1")
    assert offline["error"] == f"org/plain is not on this machine and HF_HUB_OFFLINE is set. {hint}"


def test_refusals_say_the_status(hub: FakeHub, tmp_path: Path) -> None:
    hub.status = 429
    (refused,) = _locate(tmp_path, hub.url, ("org/plain", {}))
    assert "refused org/plain with status 429" in refused["error"]


# -- without a hub ----------------------------------------------------------------------------------------------


def test_paths_and_alias(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert locate(str(tmp_path), cache_dir=tmp_path) == tmp_path
    assert locate(str(tmp_path / "m.gguf"), cache_dir=tmp_path) == tmp_path / "m.gguf"
    file = smollm2_gguf()
    assert locate("smollm2", cache_dir=file.parent) == file


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{}/smol-hg", "no file or folder '{}/smol-hg' (near: {}/smol-hf)"),
        ("{}/absent/m.gguf", "no file or folder '{}/absent/m.gguf' ({}/absent does not exist either)"),
        ("./org/name", "no file or folder './org/name'"),
        ("m.gguf", "no file or folder 'm.gguf'"),
        ("dir/m.gguf", "no file or folder 'dir/m.gguf'"),
        ("a/b/c", "no file or folder 'a/b/c'"),
        (
            "smolm2",
            "not an alias (smollm2), and not a Hugging Face name, which reads org/name (near: the alias smollm2)",
        ),
        ("", "'' is not a file or folder here"),
        ("./" + "x" * 5000, "cannot be looked up: File name too long"),
        ("~nobody-of-that-name/m", "cannot be looked up: Could not determine home directory"),
    ],
)
def test_what_is_not_there(tmp_path: Path, model: str, message: str) -> None:
    (tmp_path / "smol-hf").mkdir()
    with pytest.raises(CheckpointError) as caught:
        locate(model.replace("{}", str(tmp_path)), cache_dir=tmp_path)
    assert message.replace("{}", str(tmp_path)) in str(caught.value)


def test_the_hub_library_is_not_imported_without_need(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import octavo.checkpoint; from octavo.checkpoint.hub import locate; "
        f"locate({str(tmp_path)!r}, cache_dir=Path()); "
        "print([m for m in ('huggingface_hub', 'torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "[]"
