"""Files of a batch that lie behind a URL: fetched with GET, sent with PUT, each tried a few times."""

from __future__ import annotations

import base64
import http.client
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from octavo.api.batch.answers import BatchError

_T = TypeVar("_T")
TIMEOUT = 60.0
"""Seconds without a byte after which a try is given up."""
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between tries."""


def is_url(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def shown(name: str) -> str:
    """A path or URL for messages: without its query, which may hold a signature, and without a password."""
    if not is_url(name):
        return name
    scheme, _, rest = name.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def fetch(url: str, into: BinaryIO) -> None:
    """Write what is at `url` to an empty file.

    Raises:
        BatchError: it could not be had.
    """

    def once() -> None:
        into.seek(0)
        into.truncate()
        with urllib.request.urlopen(_request(url), timeout=TIMEOUT) as response:
            shutil.copyfileobj(response, into)
            announced = response.headers.get("Content-Length")
        if announced is not None and into.tell() != int(announced):
            raise http.client.IncompleteRead(b"", int(announced) - into.tell())

    _tried(once, f"cannot fetch {shown(url)}")


def send(file: BinaryIO, size: int, url: str) -> None:
    """Put `size` bytes of `file`, from its beginning, to `url`.

    Raises:
        BatchError: it was not taken.
    """

    def once() -> None:
        file.seek(0)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        request = _request(url, data=file, headers=headers, method="PUT")
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            pass

    _tried(once, f"cannot send the answers to {shown(url)}")


def _request(url: str, **about: Any) -> urllib.request.Request:
    """A request of `url`, whose user and password go into a header, as they do in other clients."""
    parts = urllib.parse.urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host)), **about)
    if at:
        encoded = base64.b64encode(urllib.parse.unquote_to_bytes(login)).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return request


def _tried(once: Callable[[], _T], failed: str) -> _T:
    """`once()`, again where it failed in a way that may pass. Raises BatchError with `failed` and the reason."""
    for pause in (*PAUSES, None):
        try:
            return once()
        except urllib.error.HTTPError as error:
            reason, passing = f"HTTP {error.code} {error.reason}", error.code >= 500 or error.code in (408, 429)
            error.close()
        except urllib.error.URLError as error:
            reason, passing = str(error.reason), True
        except (OSError, http.client.HTTPException) as error:
            reason, passing = str(error) or type(error).__name__, True
        except ValueError as error:
            reason, passing = str(error), False
        if pause is None or not passing:
            break
        time.sleep(pause)
    raise BatchError(f"{failed}: {reason}.")
