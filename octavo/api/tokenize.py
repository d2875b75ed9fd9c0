"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.api.body import parse
from octavo.api.call import warning_headers
from octavo.api.errors import bad_request
from octavo.api.frontend import Frontend, service_of
from octavo.api.messages import checked_messages
from octavo.api.models import json_response
from octavo.api.prompts import beside, encode_chat, encode_text
from octavo.api.schemas import Body, DetokenizeBody, TokenizeBody

MAX_CHARACTERS = 1_000_000
"""Of a text that no context of the model could hold; tokenizing takes about 90 bytes of memory per character."""


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages as the chat endpoint would render them."""
    service = service_of(request)
    front = service.ready()
    body = await parse(request, TokenizeBody, service.config.max_request_bytes)
    front.check_model(body.model)
    ids = await _ids(front, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": front.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [front.tokenizer.token_text(token) for token in ids]
    return _answered(body, answer)


def _answered(body: Body, answer: dict[str, Any]) -> Response:
    """`answer`, with what was ignored of the body."""
    ignored = body.ignored()
    if ignored:
        answer["warnings"] = [why for _, why in ignored]
    return json_response(answer, warning_headers(ignored))


async def _ids(front: Frontend, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt")
    if body.prompt is not None:
        most = max(MAX_CHARACTERS, front.factory.most_characters)
        if len(body.prompt) > most:
            raise bad_request(
                f"prompt has {len(body.prompt)} characters; at most {most} are tokenized at once. Send it in parts.",
                "prompt",
            )
        return await encode_text(front, body.prompt, body.add_special_tokens is not False)
    return await encode_chat(front, body, checked_messages(body.messages or []))


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    front = service.ready()
    body = await parse(request, DetokenizeBody, service.config.max_request_bytes)
    front.check_model(body.model)
    outside = [token for token in body.tokens if not 0 <= token < front.info.vocab_size]
    if outside:
        raise bad_request(
            f"tokens {outside[:8]} are not in the vocabulary: ids are 0 to {front.info.vocab_size - 1}.", "tokens"
        )
    text = await beside(len(body.tokens), front.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return _answered(body, {"prompt": text})
