"""The bodies of requests, as pydantic models: OpenAI's fields and vLLM's extra ones.

Types are strict (`"2"` is no integer, NaN is no number) and `null` always means "not given". A field that is not known
is not an error: `unknown` lists such fields, and the answer says that they were ignored. A field that is known but
would change the answer in a way that is not built is refused: an answer without it would look like one with it.
Ranges of sampling parameters are checked by `SamplingParams`, once for every way in.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from octavo.api.errors import bad_request, not_built

MAX_STOP_STRINGS = 64
"""Each one is looked for after every token."""

_WITHOUT_EFFECT = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields of OpenAI and vLLM that do not concern the text of an answer here; taken without a word."""

_CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "structural_tag",
)
_NOT_BUILT = {
    "audio": "Audio output",
    "ec_transfer_params": "Encoder transfer",
    "function_call": "Calling of functions",
    "functions": "Calling of functions",
    "kv_transfer_params": "KV transfer",
    "mm_payload": "Media input",
    "prompt_embeds": "Embedding input",
    "use_beam_search": "Beam search over HTTP",
    "vllm_xargs": "Passing on of extra arguments",
    "web_search_options": "Web search",
}


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None

    def unknown(self) -> list[str]:
        """Names of the fields given (and not null) that nothing here reads."""
        extra = self.model_extra or {}
        return sorted(name for name, value in extra.items() if value is not None and name not in _WITHOUT_EFFECT)


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """The fields that both ways of generating text share."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128)
    response_format: dict[str, Any] | None = None

    @field_validator("repetition_detection")
    @classmethod
    def _empty_is_absent(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return value or None

    def refuse(self) -> None:
        """Raise 400 for what would silently change the answer if it were ignored."""
        given = self.model_extra or {}
        for field in _CONSTRAINTS:
            if given.get(field) is not None:
                raise not_built(field, "Constrained (structured) output")
        if self.response_format is not None and self.response_format.get("type") != "text":
            kind = self.response_format.get("type")
            if kind not in ("json_object", "json_schema", "structural_tag"):
                raise bad_request(
                    f"response_format.type must be text, json_object or json_schema, got {kind!r}.", "response_format"
                )
            raise not_built("response_format", "Constrained (structured) output")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise bad_request(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}.", "stop")
        for field, what in _NOT_BUILT.items():
            if given.get(field):
                raise not_built(field, what)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed when stream is true.", "stream_options")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def refuse(self) -> None:
        super().refuse()
        if self.suffix:
            raise not_built("suffix", "Filling in the middle")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise bad_request(
                "best_of is not supported: ask for `n` choices with logprobs and keep the best one (best_of may only "
                "equal n).",
                "best_of",
            )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse(self) -> None:
        super().refuse()
        if self.modalities is not None and self.modalities != ["text"]:
            raise not_built("modalities", "Output other than text")
        for field in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, field) is not None and not self.logprobs:
                raise bad_request(f"{field} needs logprobs: true.", field)
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message"
            )
        self._refuse_tools()

    def _refuse_tools(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if isinstance(choice, str) and choice != "required":
            raise bad_request(
                f"tool_choice must be none, auto, required or a named function, got {choice!r}.", "tool_choice"
            )
        if not self.tools:
            raise bad_request("tool_choice needs tools.", "tool_choice")
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            names = [tool["function"].get("name") for tool in self.tools if isinstance(tool.get("function"), dict)]
            if name not in names:
                raise bad_request(f"tool_choice names the function {name!r}, which is not among tools.", "tool_choice")
        raise not_built("tool_choice", "Forcing a tool call (constrained output)")


class TokenizeBody(Body):
    """POST /tokenize: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]
