"""Options of the HTTP layer alone, beside those of `EngineConfig`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from octavo.config import count


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How much a client may send, and how far it is trusted."""

    max_request_bytes: int = 32 * 2**20
    """Largest request body."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own (a Jinja program that runs here, in a sandbox)."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Flags for `ServerSettings`."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--max-request-bytes",
        type=count,
        default=ServerSettings.max_request_bytes,
        metavar="N",
        help="Largest request body. Default: 32 MiB.",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Let requests bring their own chat template.",
    )


def settings_of(namespace: argparse.Namespace) -> ServerSettings:
    """The settings that were parsed."""
    return ServerSettings(
        max_request_bytes=namespace.max_request_bytes, trust_request_chat_template=namespace.trust_request_chat_template
    )
