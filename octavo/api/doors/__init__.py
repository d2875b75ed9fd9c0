"""Other APIs that people's programs speak, one module each: a translation of bodies to those of `octavo.api.schemas`,
and of what is generated to what the API's own clients read. Requests take the same path as OpenAI's."""

from __future__ import annotations

from octavo.api.doors import anthropic, responses
from octavo.api.openapi import Operation

DOORS: tuple[Operation, ...] = (*responses.OPERATIONS, *anthropic.OPERATIONS)
"""Their routes."""
