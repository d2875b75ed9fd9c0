"""The bodies of requests, as pydantic models: OpenAI's fields and vLLM's extra ones.

Types are strict (`"2"` is no integer, NaN is no number) and `null` always means "not given". A field that is not known
is not an error: `ignored` lists such fields, and the answer says so. A field that is known but would change the answer
in a way that is not built is refused: an answer without it would look like one with it.
Ranges of sampling parameters are checked by `SamplingParams`, once for every way in; here they are only described.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from octavo.api.errors import bad_request, not_built

MOST_ITEMS = {"stop": 64, "stop_token_ids": 1024, "logit_bias": 4096}
"""What is looked at after every token may not be endless. (Bad words and asked-for logprobs: `SamplingParams`.)"""
MOST_WARNINGS = 20
"""Fields named in `warnings`; more are counted."""

_UNREAD = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "user",
    }
)
"""Fields of OpenAI and vLLM that do not concern the answer; taken without a word."""

Fields = Mapping[str, tuple[tuple[Any, ...], str]]
"""Known fields that are not honoured: values that ask for nothing, and what to say of any other one."""

_WITHOUT_EFFECT: Fields = {
    "beam_width": ((), "there is no beam search over HTTP"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "extra_body": (({},), "its fields belong at the top level of the body"),
    "include_reasoning": ((True,), "reasoning is not separated from the answer here"),
    "length_penalty": ((1,), "it belongs to beam search"),
    "media_io_kwargs": (({},), "the model takes text only"),
    "mm_processor_kwargs": (({},), "the model takes text only"),
    "parallel_tool_calls": ((True,), "calls are left in the text of the answer here"),
    "routed_experts_prompt_start": ((), "routed experts are not reported here"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "answers are not stored"),
    "stream_interval": ((1,), "each token is sent when it comes"),
    "verbosity": (("medium",), "models here have no such setting"),
}
"""Known fields that nothing reads, and why they have no effect."""

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
    "logits_processors": "Passing on of code",
    "mm_payload": "Media input",
    "prompt_embeds": "Embedding input",
    "return_prompt_text": "Returning the rendered prompt",
    "return_token_offsets": "Returning token offsets",
    "use_beam_search": "Beam search over HTTP",
    "vllm_xargs": "Passing on of extra arguments",
    "watermarking": "Watermarking",
    "web_search_options": "Web search",
}


class Ignored(NamedTuple):
    """A field of a request that has no effect on its answer."""

    field: str
    why: str
    """A sentence for the caller."""


def about(text: str, **schema: Any) -> Any:
    """What the description of the API says of a field; it checks nothing."""
    return Field(description=text, json_schema_extra=schema or None)


class Known(BaseModel):
    """An object of a request: fields that it does not declare are kept, to be told of."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    without_effect: ClassVar[Fields] = {}
    """Fields beside those declared that nothing reads, and why they have no effect."""
    not_built: ClassVar[Fields] = {}
    """Fields beside those declared that are refused, and what they ask for."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Fields beside those declared of which there is nothing to say."""

    def refuse_unbuilt(self, prefix: str = "") -> None:
        """Raise 400 for a field of `not_built` that asks for something. `prefix`: where this object is in the body."""
        for name, (calm, what) in self.not_built.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in calm:
                raise not_built(prefix + name, what)

    def _why_unread(self, name: str, value: Any) -> str | None:
        """Why `name` has no effect here; None for a field nobody knows, "" where there is nothing to say."""
        if name in self.without_effect:
            calm, why = self.without_effect[name]
            return "" if value in calm else why
        if name in self.unread or name in self.not_built:
            return ""  # concerns no answer; or asks for nothing, as it would have been refused
        return None


class Body(Known):
    """What all bodies have in common."""

    without_effect = _WITHOUT_EFFECT
    unread = _UNREAD | _NOT_BUILT.keys() | set(_CONSTRAINTS)

    model: Annotated[str | None, about("Name of the model. Default: the one that is served.")] = None

    def ignored(self) -> list[Ignored]:
        """The fields given (and not null) that nothing here reads, by name; `MOST_WARNINGS` at most are told apart."""
        found = _unread(self, "")
        for name in sorted(type(self).model_fields):
            value = getattr(self, name)
            if isinstance(value, Nested):
                found += _unread(value, f"{name}.")
        if len(found) > MOST_WARNINGS:
            more = len(found) - MOST_WARNINGS
            found = [*found[:MOST_WARNINGS], Ignored("…", f"{more} more fields were ignored.")]
        return found


class Nested(Known):
    """An object inside a body."""


def _unread(part: Known, prefix: str) -> list[Ignored]:
    """The fields of one object that nothing reads."""
    found = []
    for name, value in sorted((part.model_extra or {}).items()):
        why = part._why_unread(name, value)
        if value is None or why == "":
            continue
        shown = prefix + name[:80]
        if why:
            found.append(Ignored(shown, f"The field `{shown}` has no effect: {why}."))
        elif len(found) <= MOST_WARNINGS:
            near = difflib.get_close_matches(name[:80], list(type(part).model_fields), n=1)
            hint = f" Did you mean `{prefix}{near[0]}`?" if near else ""
            found.append(Ignored(shown, f"The field `{shown}` is not known here and was ignored.{hint}"))
        else:
            found.append(Ignored(shown, ""))
    return found


class StreamOptions(Nested):
    """What a stream tells beside the text."""

    include_usage: Annotated[bool | None, about("End with a chunk that holds the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, about("Usage in every chunk; needs include_usage.")] = None


class RepetitionDetection(Nested):
    """Ends a choice (finish reason "repetition") whose last tokens are copies of one pattern."""

    max_pattern_size: Annotated[int | None, about("Most tokens of the pattern.", minimum=1, maximum=1024)] = None
    min_pattern_size: Annotated[int | None, about("Fewest tokens of the pattern. Default: 1.", minimum=1)] = None
    min_count: Annotated[int | None, about("How many copies there must be. Default: 2.", minimum=2)] = None


_Tokens = {"type": "integer", "minimum": 0}

PresencePenalty = Annotated[
    float | None, about("Taken from the logits of tokens in the output.", minimum=-2, maximum=2)
]
FrequencyPenalty = Annotated[
    float | None, about("Taken once per time a token is in the output.", minimum=-2, maximum=2)
]
RepeatPenalty = Annotated[float | None, about("Divides the logits of tokens in prompt and output.", exclusiveMinimum=0)]
"""The `repetition_penalty` of Ollama and llama.cpp."""


class SamplingBody(Body):
    """The fields that all ways of generating text share, those of other APIs too."""

    min_tokens: Annotated[int | None, about("Tokens before which nothing ends a choice.", minimum=0)] = None
    temperature: Annotated[float | None, about("0 always takes the most probable token.", minimum=0, maximum=2)] = None
    top_p: Annotated[float | None, about("Draw from this share of the probability.", exclusiveMinimum=0, maximum=1)] = (
        None
    )
    top_k: Annotated[int | None, about("Draw from so many tokens; 0 or -1: from all.", minimum=-1)] = None
    min_p: Annotated[
        float | None, about("Least probability, as a share of the most probable token's.", minimum=0, maximum=1)
    ] = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    repetition_penalty: Annotated[
        float | None, about("Divides the logits of tokens in prompt and output; 1: off.", exclusiveMinimum=0)
    ] = None
    seed: Annotated[int | None, about("The same seed draws the same tokens. Default, and -1: another each time.")] = (
        None
    )
    stop_token_ids: Annotated[
        list[int] | None, about("Tokens that end a choice.", maxItems=MOST_ITEMS["stop_token_ids"])
    ] = None
    include_stop_str_in_output: Annotated[bool | None, about("Leave the stop text in the answer.")] = None
    ignore_eos: Annotated[bool | None, about("Go on after the model's end token.")] = None
    skip_special_tokens: Annotated[bool | None, about("Leave special tokens out of the text. Default: true.")] = None
    spaces_between_special_tokens: Annotated[bool | None, about("As in vLLM: no effect on fast tokenizers.")] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        about(
            "Added to the logits, by token id; cut to [-100, 100].",
            maxProperties=MOST_ITEMS["logit_bias"],
            propertyNames={"pattern": "^[0-9]+$"},
        ),
    ] = None
    allowed_token_ids: Annotated[list[int] | None, about("Draw from these tokens only.", minItems=1)] = None
    bad_words: Annotated[list[str] | None, about("Texts that must not come.", maxItems=128)] = None
    repetition_detection: Annotated[RepetitionDetection | None, about("End an answer that goes in circles.")] = None
    stream: Annotated[bool | None, about("Send the answer in parts, as server-sent events.")] = None
    request_id: Annotated[str | None, about("Becomes part of the answer's id, as the X-Request-Id header does.")] = None
    priority: Annotated[
        int | None,
        about(
            "Lower runs first, where the server was started with --scheduling-policy priority.",
            minimum=-(2**63),
            maximum=2**63 - 1,
        ),
    ] = None
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Requests with different salts share no KV cache.",
    )
    timeout: Annotated[
        float | None, about("Seconds the answer may take; then it ends with an error 408.", exclusiveMinimum=0)
    ] = None

    @field_validator("repetition_detection", mode="before")
    @classmethod
    def _empty_is_absent(cls, value: Any) -> Any:
        return None if value == {} else value

    def shared(self) -> dict[str, Any]:
        """The values of these fields, for the body of another API."""
        return {name: getattr(self, name) for name in SamplingBody.model_fields}

    def refuse(self) -> None:
        """Raise 400 for what would silently change the answer if it were ignored, and for what is too much."""
        given = self.model_extra or {}
        for field in _CONSTRAINTS:
            if given.get(field) is not None:
                raise not_built(field, "Constrained (structured) output")
        for field, what in _NOT_BUILT.items():
            if given.get(field):
                raise not_built(field, what)
        for field, most in MOST_ITEMS.items():
            value = getattr(self, field, None)
            if isinstance(value, (list, dict)) and len(value) > most:
                raise bad_request(f"{field} may hold at most {most} entries, got {len(value)}.", field)
        if self.timeout is not None and self.timeout <= 0:
            raise bad_request(f"timeout must be more than 0 seconds, got {self.timeout}.", "timeout")


class GenerationBody(SamplingBody):
    """The fields that both of OpenAI's older ways of generating text share."""

    n: Annotated[int | None, about("Choices per prompt. Default: 1; greedy: 1 only.", minimum=1, maximum=16384)] = None
    max_tokens: Annotated[int | None, about("Most tokens of a choice.", minimum=0)] = None
    stop: Annotated[str | list[str] | None, about(f"Texts that end a choice, {MOST_ITEMS['stop']} at most.")] = None
    prompt_logprobs: Annotated[
        int | None, about("Score the prompt; so many of the most probable tokens with each.", minimum=-1)
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None, about("Tokens whose logprobs to report, instead of the most probable ones.", maxItems=128)
    ] = None
    thinking_token_budget: Annotated[int | None, about("Not built: -1 (no limit) only.", minimum=-1)] = None
    stream_options: Annotated[StreamOptions | None, about("With stream only.")] = None
    echo: Annotated[bool | None, about("Begin with the prompt (chat: with the message to continue).")] = None
    return_token_ids: Annotated[bool | None, about("Add the token ids of prompt and answer.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, about("Write tokens in logprobs as token_id:N.")] = None
    truncate_prompt_tokens: Annotated[
        int | None, about("Keep so many tokens of the prompt, the last ones; -1: what fits.", minimum=-1)
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, about("Where to cut: left only, so far.")] = None
    response_format: Annotated[dict[str, Any] | None, about('{"type": "text"} only, so far.')] = None

    def refuse(self) -> None:
        super().refuse()
        self._refuse_format()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
        if self.truncation_side == "right":
            raise not_built("truncation_side", "Cutting a prompt at its end")

    def _refuse_format(self) -> None:
        if self.response_format is None or self.response_format.get("type") == "text":
            return
        kind = self.response_format.get("type")
        if kind not in ("json_object", "json_schema", "structural_tag"):
            raise bad_request(
                f"response_format.type must be text, json_object or json_schema, got {kind!r}.", "response_format"
            )
        raise not_built("response_format", "Constrained (structured) output")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "description": "A text, a list of texts, a list of token ids, or a list of such lists; 1024 at most.",
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "maxItems": 1024, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": _Tokens},
                    {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 1024,
                        "items": {"type": "array", "minItems": 1, "items": _Tokens},
                    },
                ],
            }
        ),
    ]
    suffix: Annotated[str | None, about("Text after the answer: not built, so empty only.", maxLength=0)] = None
    best_of: Annotated[
        int | None,
        about("Generate so many choices per prompt; the n with the best cumulative logprob are returned.", minimum=1),
    ] = None
    logprobs: Annotated[
        int | None, about("Logprobs of each token, with so many of the most probable others.", minimum=-1)
    ] = None
    add_special_tokens: Annotated[bool | None, about("Begin a text with the model's BOS. Default: true.")] = None

    def refuse(self) -> None:
        super().refuse()
        if self.suffix:
            raise not_built("suffix", "Filling in the middle")
        if self.best_of is None:
            return
        n = 1 if self.n is None else self.n
        if self.best_of < n:
            raise bad_request(f"best_of must be at least n, got best_of={self.best_of} and n={n}.", "best_of")
        if self.best_of > 1 and self.stream:
            raise bad_request(
                "best_of cannot be streamed: which choices are best is known at the end. Leave out stream or best_of.",
                "best_of",
            )


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: Any) -> dict[str, Any]:
    """A schema of an object that must have these."""
    return {"type": "object", "required": [*properties], "properties": properties}


_TEXT = {"type": "string"}
_PART = {
    "anyOf": [
        _TEXT,
        _object(type={"enum": ["text", "input_text", "output_text"]}, text=_TEXT),
        _object(type={"const": "refusal"}, refusal=_TEXT),
    ]
}
_MESSAGE = _object(role={"type": "string", "minLength": 1})
_MESSAGE["properties"] |= {
    "content": _or_null({"anyOf": [_TEXT, {"type": "array", "items": _PART}]}),
    "name": _or_null(_TEXT),
    "tool_calls": _or_null({"type": "array", "items": _object(function=_object(name=_TEXT))}),
    "tool_call_id": _or_null(_TEXT),
}
_Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]
_Messages = Annotated[
    list[_Message], about("The conversation; other keys of a message reach the template.", minItems=1)
]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: _Messages
    max_completion_tokens: Annotated[int | None, about("Wins over max_tokens.", minimum=1)] = None
    logprobs: Annotated[bool | None, about("Logprobs of each token.")] = None
    top_logprobs: Annotated[int | None, about("So many of the most probable others with each.", minimum=-1)] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions, for the chat template.")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, about("none or auto; forcing a call is not built.")] = None
    documents: Annotated[list[dict[str, Any]] | None, about("Documents, for the chat template.")] = None
    modalities: Annotated[list[str] | None, about('["text"] only.')] = None
    reasoning_effort: Annotated[str | None, about("A variable of the chat template.")] = None
    add_generation_prompt: Annotated[bool | None, about("Open the answer's turn. Default: true.")] = None
    continue_final_message: Annotated[bool | None, about("Go on in the last message.")] = None
    add_special_tokens: Annotated[bool | None, about("False only: the template writes the special tokens.")] = None
    chat_template: Annotated[str | None, about("A template of your own, where the server allows it.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None

    def refuse(self) -> None:
        super().refuse()
        given = self.model_extra or {}
        if self.modalities is not None and self.modalities != ["text"]:
            raise not_built("modalities", "Output other than text")
        if given.get("best_of") not in (None, 1):
            raise bad_request("best_of belongs to /v1/completions; ask for n choices here.", "best_of")
        if self.add_special_tokens:
            raise bad_request(
                "add_special_tokens cannot be true: the chat template writes the special tokens. Leave it out.",
                "add_special_tokens",
            )
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

    prompt: Annotated[str | None, about("A text; or else messages.")] = None
    messages: Annotated[list[_Message] | None, about("A conversation; or else prompt.")] = None
    add_special_tokens: Annotated[bool | None, about("Begin a text with the model's BOS. Default: true.")] = None
    return_token_strs: Annotated[bool | None, about("Add each token's text.")] = None
    add_generation_prompt: Annotated[bool | None, about("Open the answer's turn. Default: true.")] = None
    continue_final_message: Annotated[bool | None, about("Go on in the last message.")] = None
    chat_template: Annotated[str | None, about("A template of your own, where the server allows it.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions, for the chat template.")] = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[int], about("Token ids.")]
