"""Other APIs that people's programs speak, one module each: a translation of bodies to those of `octavo.api.schemas`,
and of what is generated to what the API's own clients read. Requests take the same path as OpenAI's."""

from __future__ import annotations

from octavo.api.doors import anthropic, llamacpp, ollama, responses, tgi
from octavo.api.openapi import Operation

DOORS: tuple[Operation, ...] = (
    *responses.OPERATIONS,
    *anthropic.OPERATIONS,
    *tgi.OPERATIONS,
    *ollama.OPERATIONS,
    *llamacpp.OPERATIONS,
)
"""Their routes."""
ABSENT = (("/api/", ollama.DIALECT, ollama.ABSENT),)
"""Beginnings of paths that are an API's of which not every route is here: how it writes errors, and what to say."""
