"""The bodies of answers, as pydantic models: what /openapi.json says of them.

Answers are made as plain dictionaries; nothing here runs when one is sent. The tests hold real answers against these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "repetition"]


class Answer(BaseModel):
    """What all answers have in common: no field that is not described."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ErrorDetail(Answer):
    message: Annotated[str, Field(description="What is wrong, and what to do.")]
    type: str
    param: Annotated[str | None, Field(description="The field to blame.")]
    code: Annotated[str | int | None, Field(description="A word for programs, or else the HTTP status.")]


class Error(Answer):
    """Every error, of whatever status, and the last event of a stream that failed."""

    error: ErrorDetail


class Health(Answer):
    status: Literal["ok"]


class Load(Answer):
    server_load: Annotated[int, Field(description="Requests being answered with generated text.", ge=0)]


class Version(Answer):
    version: str


class Permission(Answer):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="Seconds since 1970.")]
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Annotated[int, Field(description="Context length: prompt and answer together, in tokens.")]
    permission: list[Permission]


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Warned(Answer):
    warnings: Annotated[list[str], Field(description="What of the request had no effect.")] = []


class Tokens(Warned):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Text(Warned):
    prompt: str


class PromptTokensDetails(Answer):
    cached_tokens: Annotated[int, Field(description="Prompt tokens that did not have to be computed again.")]


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: Annotated[int, Field(description="Of all choices, those left out by best_of included.")]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Times(Answer):
    """With --enable-per-request-metrics."""

    queue_time_ms: Annotated[float, Field(description="How long the engine let the request wait.")]
    time_to_first_token_ms: float | None
    generation_time_ms: Annotated[float | None, Field(description="From the first token to the last.")]
    mean_itl_ms: Annotated[float | None, Field(description="Mean time between two tokens of a choice.")]
    tokens_per_second: Annotated[float | None, Field(description="Tokens of all choices, since the request came.")]


PromptLogprobs = Annotated[
    list[dict[str, Any] | None],
    Field(description="Per prompt token null or {token id: {logprob, rank, decoded_token}}."),
]


class Envelope(Warned):
    id: str
    created: Annotated[int, Field(description="Seconds since 1970.")]
    model: str
    metrics: Times | None = None


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: Annotated[str | int | None, Field(description="The stop text or token that ended the choice.")]
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Envelope):
    """The answer; streamed, each event is of this form, with the part of a choice that is new."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenWithRivals(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    content: list[ChatTokenWithRivals]


class ChatMessage(Answer):
    role: str
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: Annotated[str | int | None, Field(description="The stop text or token that ended the choice.")]
    token_ids: list[int] = []


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(Answer):
    role: str = ""
    content: str = ""


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] = []


class ChatCompletionChunk(Envelope):
    """One event of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None
