"""Downloads from the Hugging Face hub by its own library, which does cache, resume, login and the HF_* variables."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf_split import parts_of
from octavo.checkpoint.hub_headers import Source, write_headers

_TIMEOUT = 10
"""Seconds to wait for the hub's answer about a repository."""

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Configuration, tokenizer and chat template, in any of the usual forms."""

_QUANTS = ("Q4_K_M", "Q8_0", "Q5_K_M", "Q6_K", "Q4_K_S", "Q4_1", "Q4_0", "BF16", "F16")
"""Which file of a repository of GGUF files is taken when none is named, best first."""

_OFFLINE_HINT = "Without a network give a folder with a model, the path of a .gguf file, or the alias smollm2."

_NETWORK_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}


class Wanted(NamedTuple):
    """A repository, and which of its files."""

    repo: str
    revision: str | None = None
    quant: str | None = None
    file: str | None = None
    weights: bool = True


def download(wanted: Wanted, *, token: str | None, download_dir: Path | None, near: str = "") -> Path:
    """The folder of the repository's snapshot, or the .gguf file in it. Raises CheckpointError.

    Only what is needed is fetched: configuration, tokenizer, and safetensors (.bin files only where there are no
    safetensors; a single .gguf file where there are neither). When the hub cannot be reached, what an earlier
    download left in the cache is used. `near` is what to add when there is no such repository.
    """
    api = HfApi(token=token)
    with _explained(wanted, api, near):
        chosen = _chosen(api, wanted)
        return _cached(wanted, download_dir) if chosen is None else _fetched(wanted, chosen, token, download_dir)


def headers(wanted: Wanted, folder: Path, *, token: str | None, download_dir: Path | None, near: str = "") -> Path:
    """As `download`, but of safetensors and .gguf files only the headers, as `write_headers` leaves them in `folder`.
    (.bin files have none, and are downloaded.)"""
    api = HfApi(token=token)
    with _explained(wanted, api, near):
        chosen = _chosen(api, wanted)
        if chosen is None:
            return _cached(wanted, download_dir)
        names = [chosen] if isinstance(chosen, str) else chosen
        weights = [part for name in names if name.endswith((".gguf", ".safetensors")) for part in parts_of(name)]
        if not weights:
            return _fetched(wanted, chosen, token, download_dir)
        write_headers(Source(wanted.repo, wanted.revision, token), weights, folder)
        if isinstance(chosen, str):
            return folder / Path(chosen).name
        texts = _fetched(wanted, [name for name in chosen if name not in weights], token, download_dir)
        for file in texts.iterdir():
            if not (folder / file.name).exists() and file.suffix not in (".safetensors", ".gguf"):
                (folder / file.name).symlink_to(file.resolve())
        return folder


@contextlib.contextmanager
def _explained(wanted: Wanted, api: HfApi, near: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(_explain(e, wanted, api, near)) from e


def _chosen(api: HfApi, wanted: Wanted) -> str | list[str] | None:
    """As `_choose`; None where the hub cannot be reached."""
    try:
        files = _list_files(api, wanted)
    except Exception as e:
        if not _is_network(e):
            raise
        return None
    chosen = _choose(wanted, files)
    if isinstance(chosen, str) and (missing := [name for name in parts_of(chosen) if name not in files]):
        raise CheckpointError(f"{wanted.repo} lacks parts of the model: {', '.join(missing[:8])}.")
    return chosen


def _fetched(wanted: Wanted, chosen: str | list[str], token: str | None, download_dir: Path | None) -> Path:
    if isinstance(chosen, str):
        first, *_ = [
            hf_hub_download(wanted.repo, name, revision=wanted.revision, token=token, cache_dir=download_dir)
            for name in parts_of(chosen)
        ]
        return Path(first)
    return Path(
        snapshot_download(
            wanted.repo,
            revision=wanted.revision,
            token=token,
            cache_dir=download_dir,
            allow_patterns=[_literal(name) for name in chosen],
        )
    )


def _list_files(api: HfApi, wanted: Wanted) -> list[str]:
    info = api.model_info(wanted.repo, revision=wanted.revision, timeout=_TIMEOUT)
    return [sibling.rfilename for sibling in info.siblings or []]


def _choose(wanted: Wanted, files: list[str]) -> str | list[str]:
    """One .gguf file (of several parts the first), or the files of a Hugging Face folder."""
    if wanted.file is not None:
        if wanted.file in files:
            return parts_of(wanted.file)[0]
        raise CheckpointError(f"{wanted.repo} has no file {wanted.file!r}. {_said_ggufs(files)}")
    top = [name for name in files if "/" not in name]
    texts = [name for name in top if any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEXT_FILES)]
    if wanted.quant is None:
        if not wanted.weights:
            return texts
        for ending in (".safetensors", ".bin"):
            weights = [name for name in top if name.endswith(ending) and _is_model(name)]
            if weights:
                return texts + weights
    return _choose_gguf(wanted, files)


def _is_model(name: str) -> bool:
    """Not an optimizer's state, an adapter, or a second copy in another layout."""
    return name.startswith(("model", "pytorch_model"))


def _choose_gguf(wanted: Wanted, files: list[str]) -> str:
    ggufs = _ggufs(files)
    if not ggufs:
        what = f"no GGUF file of the kind {wanted.quant}" if wanted.quant else "no safetensors, .bin or .gguf weights"
        raise CheckpointError(f"{wanted.repo} has {what}. Choose another repository.")
    for quant in (wanted.quant,) if wanted.quant else _QUANTS:
        pattern = re.compile(rf"(^|[-._/]){re.escape(quant)}(?=[-._/])", re.IGNORECASE)
        if found := [name for name in ggufs if pattern.search(name)]:
            return min(found, key=len)
    if wanted.quant is None and len(ggufs) == 1:
        return ggufs[0]
    missing = f"no GGUF file of the kind {wanted.quant}" if wanted.quant else "several GGUF files"
    raise CheckpointError(f"{wanted.repo} has {missing}. {_said_ggufs(files)}")


def _ggufs(files: list[str]) -> list[str]:
    """The .gguf files that are language models, not their image parts; of a model in several files the first."""
    return sorted({parts_of(name)[0] for name in files if name.endswith(".gguf") and "mmproj" not in name.lower()})


def _said_ggufs(files: list[str]) -> str:
    names = _ggufs(files)
    if not names:
        return "It has no .gguf files at all; leave the file out to take its safetensors."
    return f"Name one of its files as org/name/FILE: {', '.join(names[:20])}{' …' if len(names) > 20 else ''}."


def _cached(wanted: Wanted, download_dir: Path | None) -> Path:
    """What an earlier download left, for when the hub cannot be reached."""
    try:
        folder = Path(
            snapshot_download(wanted.repo, revision=wanted.revision, cache_dir=download_dir, local_files_only=True)
        )
    except LocalEntryNotFoundError as e:
        # A snapshot is "incomplete" without the files that were never wanted, too: the weight reader knows better.
        incomplete = getattr(e, "snapshot_path", None)
        if incomplete is None:
            raise
        folder = Path(incomplete)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if wanted.file is None and wanted.quant is None and "config.json" in files:
        return folder
    chosen = _choose(wanted, files)
    return folder / chosen if isinstance(chosen, str) else folder


def _is_network(error: BaseException) -> bool:
    """Whether the hub could not be asked at all, or is down."""
    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    return isinstance(error, OfflineModeIsEnabled | ConnectionError | TimeoutError) or (
        type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES
    )


def _explain(error: Exception, wanted: Wanted, api: HfApi, near: str) -> str:
    """What went wrong and what to do, for every way a download is known to fail."""
    repo, site = wanted.repo, constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its licence at {site}/{repo}, then set HF_TOKEN (or --hf-token) to a token "
            f"of that account."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{site} has no model {repo!r} that you may see, and there is no such path{near}."
            f"{_similar(api, repo)} Check the name; for a private model set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {wanted.revision!r}. See {site}/{repo}/tree/main for its branches and tags."
    if isinstance(error, HFValidationError):
        return f"{repo!r} is not a Hugging Face name: {error}."
    if isinstance(error, LocalEntryNotFoundError) or _is_network(error):
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{site} could not be reached"
        return f"{repo} is not on this machine{near} and {why}. {_OFFLINE_HINT}"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return (
            f"{site} refused {repo} with status {error.response.status_code}. Check the token in HF_TOKEN, or try "
            f"again later."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full: {repo} could not be stored. Free some space or choose another --download-dir."
    return f"{repo} could not be downloaded: {type(error).__name__}: {error}. Try again."


def _similar(api: HfApi, repo: str) -> str:
    """Names on the hub like this one; nothing when it does not say."""
    try:
        names = [model.id for model in api.list_models(search=repo.partition("/")[2], limit=3)]
    except Exception:  # only a hint: whatever fails here must not hide the error itself
        return ""
    return f" Similar names: {', '.join(names)}." if names else ""


def _literal(name: str) -> str:
    """A pattern that matches this file name only."""
    return re.sub(r"([\[*?])", r"[\1]", name)
