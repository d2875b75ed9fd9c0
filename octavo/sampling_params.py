"""How tokens are chosen, and when to stop: what a caller may ask of one request.

Names, defaults and ranges are those of vLLM's `SamplingParams`, so that scripts move over unchanged. Every value is
checked when the object is made; a wrong one raises `ParameterError`, which names the parameter.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

MAX_CHOICES = 16384
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_JSON_DEPTH = 64
MAX_PATTERN = 1024
"""Tokens of a repeated pattern; each size that may be one is looked at after every token."""
MOST_FACTOR = 1e20
"""Logits stay finite numbers of 32 bits when they are multiplied or divided by this, or it is added to them."""
GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy decoding."""

_T = TypeVar("_T")

_REMOVED = {
    "best_of": "ask for `n` choices with logprobs and keep the best",
    "use_beam_search": "call LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
    "length_penalty": "it belongs to BeamSearchParams(length_penalty=...)",
    "early_stopping": "call LLM.beam_search; a search ends when no unfinished beam is left",
    "beam_width": "it belongs to BeamSearchParams(beam_width=...)",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "truncate_prompt_tokens": "cut prompt_token_ids before the call",
    "prompt_adapter_request": "pass the adapter as lora_request to LLM.generate",
}
"""Arguments that vLLM once had, and today's way."""


class ParameterError(ValueError):
    """A parameter of a request is wrong: `parameter` is its name, `value` what was given."""

    def __init__(self, message: str, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class RequestOutputKind(IntEnum):
    """What each output of a stream holds: all the text so far, only what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A constraint on the form of the output; exactly one of the first six."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ParameterError(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{', '.join(given)}.",
                "structured_outputs",
            )
        if not given:
            raise ParameterError(
                f"You must use one kind of structured outputs constraint: {', '.join(kinds)}.", "structured_outputs"
            )
        if self.choice is not None and not self.choice:
            raise ParameterError("Choice of structured outputs cannot be an empty list.", "structured_outputs", [])
        if self.regex is not None and "\0" in self.regex:
            raise ParameterError("regex cannot contain a NUL character.", "structured_outputs", self.regex)
        if self.json is not None:
            _check_depth(self.json, "json", MAX_JSON_DEPTH)
        if self.structural_tag is not None:
            _check_depth(self.structural_tag, "structural_tag", MAX_JSON_DEPTH + 16)


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Ends a choice (finish reason "repetition") whose last tokens are `min_count` copies of one pattern of
    `min_pattern_size` to `max_pattern_size` tokens."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        _whole("min_pattern_size", self.min_pattern_size, least=1)
        _whole("max_pattern_size", self.max_pattern_size, least=self.min_pattern_size)
        _whole("min_count", self.min_count, least=2)
        if self.max_pattern_size > MAX_PATTERN:
            raise ParameterError(
                f"max_pattern_size must be at most {MAX_PATTERN}, got {self.max_pattern_size}.",
                "repetition_detection",
                self.max_pattern_size,
            )


class _Keywords(msgspec.StructMeta):
    """Answers an argument that is not there with the name of one that is."""

    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        fields: tuple[str, ...] = cls.__struct_fields__  # type: ignore[attr-defined]
        for name in kwargs:
            if name in fields:
                continue
            if name in _REMOVED:
                raise TypeError(f"{cls.__name__} has no argument {name!r} any more: {_REMOVED[name]}.")
            near = difflib.get_close_matches(name, fields, n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint}")
        return super().__call__(*args, **kwargs)  # type: ignore[misc, no-any-return]


class SamplingParams(msgspec.Struct, metaclass=_Keywords, kw_only=True, omit_defaults=True):
    """Parameters of one request. All are keywords; all have defaults.

    Raises:
        ParameterError: a value is outside its range; `.parameter` names it.
        TypeError: an argument that does not exist.
    """

    n: int = 1
    """Choices to return."""
    presence_penalty: float = 0.0
    """[-2, 2]: subtracted from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """[-2, 2]: subtracted once per time the token is in the output."""
    repetition_penalty: float = 1.0
    """[1e-20, 1e20]: divides (or multiplies, where negative) the logit of each token of prompt and output."""
    temperature: float = 1.0
    """[0, 2]; below 1e-5 is greedy and turns top_p, top_k and min_p off."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    """[0, 1]: least probability, as a share of the most probable token's."""
    seed: int | None = None
    """None or -1: another one for each request."""
    stop: str | list[str] | None = None
    """Strings that end the text; a list after construction."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the context length allows."""
    min_tokens: int = 0
    """EOS and stop tokens are not drawn before this many tokens."""
    logprobs: int | None = None
    """How many of the most probable tokens to report with each token; 0: the token alone; -1: the vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; the prefix cache is then not read."""
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Per prompt token the ids whose logprobs to report in place of the most probable ones; -1 pads a row."""
    prompt_logprob_start: int | None = None
    """First prompt token to score; those before it have None."""
    logprob_token_ids: list[int] | None = None
    """Ids whose logprobs to report with each token, in place of the most probable ones."""
    flat_logprobs: bool = False
    """A memory layout of vLLM's; outputs read the same with and without."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Tokens per streamed output."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; cut to [-1e20, 1e20]."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_temperature(self)
        _check_lengths(self)
        _check_logprobs(self)
        _check_strings(self)
        _check_ids(self)
        _refuse_unbuilt(self)
        if self.greedy and self.n > 1:
            raise ParameterError(f"n must be 1 when using greedy sampling, got {self.n}.", "n", self.n)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """As the constructor, but None means "the default", and `logit_bias` may have string keys (as JSON does) and
        is cut to [-100, 100]. `max_tokens=None` keeps its meaning."""
        given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        bias = given.get("logit_bias")
        if bias is not None:
            given["logit_bias"] = _bias_of_json(bias)
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def verify(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check against a model: every token id is in [0, vocab_size), logprobs are at most `max_logprobs` (-1: no
        cap).

        Raises:
            ParameterError: one is not.
        """
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is None or max_logprobs == -1 or (name == "logprobs" and self.logprob_token_ids):
                continue
            count = vocab_size if asked == -1 else asked
            if count > max_logprobs:
                kind = "sample" if name == "logprobs" else "prompt"
                raise ParameterError(
                    f"Requested {kind} logprobs of {count}, which is greater than max allowed: {max_logprobs}. "
                    "Ask for fewer, or start with a larger --max-logprobs.",
                    name,
                    asked,
                )
        asked_of_prompt = [id for row in self.prompt_logprob_token_ids or () for id in row]
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
            ("logprob_token_ids", self.logprob_token_ids),
            ("prompt_logprob_token_ids", asked_of_prompt),
        ):
            outside = [token for token in ids or () if not 0 <= token < vocab_size]
            if outside:
                raise ParameterError(
                    f"token_id(s) {outside[:8]} in {name} are out of vocabulary: ids are 0 to {vocab_size - 1}.",
                    name,
                    outside,
                )


class BeamSearchParams(msgspec.Struct, metaclass=_Keywords, omit_defaults=True):
    """A beam search: the `beam_width` sequences whose cumulative logprob, divided by length ** `length_penalty`, is
    largest."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Kept for vLLM's sake: candidates are ranked by the model's own logprobs."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("beam_width", self.beam_width, least=1)
        if self.beam_width > MAX_CHOICES:
            raise ParameterError(
                f"beam_width must be at most {MAX_CHOICES}, got {self.beam_width}.", "beam_width", self.beam_width
            )
        _whole("max_tokens", self.max_tokens, least=1)
        self.temperature = _number("temperature", self.temperature, 0, 2)
        self.length_penalty = _number("length_penalty", self.length_penalty, -32, 32)
        if self.structured_outputs is not None:
            raise _unbuilt("structured_outputs", "structured outputs")


def _check_numbers(p: SamplingParams) -> None:
    _whole("n", p.n, least=1)
    if p.n > MAX_CHOICES:
        raise ParameterError(f"n must be at most {MAX_CHOICES}, got {p.n}.", "n", p.n)
    p.presence_penalty = _number("presence_penalty", p.presence_penalty, -2, 2)
    p.frequency_penalty = _number("frequency_penalty", p.frequency_penalty, -2, 2)
    p.repetition_penalty = _number("repetition_penalty", p.repetition_penalty)
    if p.repetition_penalty <= 0:
        raise ParameterError(
            f"repetition_penalty must be greater than zero, got {p.repetition_penalty}.",
            "repetition_penalty",
            p.repetition_penalty,
        )
    _number("repetition_penalty", p.repetition_penalty, 1 / MOST_FACTOR, MOST_FACTOR)
    p.top_p = _number("top_p", p.top_p)
    if not 0 < p.top_p <= 1:
        raise ParameterError(f"top_p must be in (0, 1], got {p.top_p}.", "top_p", p.top_p)
    p.min_p = _number("min_p", p.min_p, 0, 1)
    _integer("top_k", p.top_k)
    if p.top_k < -1:
        raise ParameterError(f"top_k must be 0 (disable), or at least 1, got {p.top_k}.", "top_k", p.top_k)
    p.top_k = max(p.top_k, 0)
    if p.seed is not None:
        _integer("seed", p.seed)
        if p.seed == -1:
            p.seed = None
    for name in (
        "ignore_eos",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    ):
        if not isinstance(getattr(p, name), bool):
            raise ParameterError(f"{name} must be true or false, got {getattr(p, name)!r}.", name, getattr(p, name))


def _check_temperature(p: SamplingParams) -> None:
    p.temperature = _number("temperature", p.temperature, 0, 2)
    if p.temperature < GREEDY_BELOW:
        p.temperature, p.top_p, p.top_k, p.min_p = 0.0, 1.0, 0, 0.0


def _check_lengths(p: SamplingParams) -> None:
    if p.max_tokens is not None:
        _whole("max_tokens", p.max_tokens, least=1)
    _whole("min_tokens", p.min_tokens, least=0)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ParameterError(
            f"min_tokens must be less than or equal to max_tokens={p.max_tokens}, got {p.min_tokens}.",
            "min_tokens",
            p.min_tokens,
        )
    if p.stream_interval is not None:
        _whole("stream_interval", p.stream_interval, least=1)
    try:
        p.output_kind = RequestOutputKind(p.output_kind)
    except ValueError:
        raise ParameterError(
            f"output_kind must be a RequestOutputKind, got {p.output_kind!r}.", "output_kind", p.output_kind
        ) from None


def _check_logprobs(p: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and value != -1:
            _whole(name, value, least=0, note=" or -1 for the whole vocabulary")
    if p.logprob_token_ids is not None:
        p.logprob_token_ids = _ids("logprob_token_ids", p.logprob_token_ids)
        if len(p.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise ParameterError(
                f"logprob_token_ids may hold at most {MAX_LOGPROB_TOKEN_IDS} ids, got {len(p.logprob_token_ids)}.",
                "logprob_token_ids",
                len(p.logprob_token_ids),
            )
        if p.logprobs is not None and p.logprobs != len(p.logprob_token_ids):
            raise ParameterError(
                f"logprobs must be the number of logprob_token_ids ({len(p.logprob_token_ids)}) "
                f"when both are given, got {p.logprobs}.",
                "logprobs",
                p.logprobs,
            )
        p.logprobs = len(p.logprob_token_ids)
    if p.prompt_logprob_start is not None:
        _whole("prompt_logprob_start", p.prompt_logprob_start, least=0)
    if p.prompt_logprob_token_ids is not None:
        if not isinstance(p.prompt_logprob_token_ids, (list, tuple)):
            raise ParameterError(
                "prompt_logprob_token_ids must be a list of lists of token ids, one per prompt token, "
                f"got {p.prompt_logprob_token_ids!r}.",
                "prompt_logprob_token_ids",
            )
        p.prompt_logprob_token_ids = [
            [id for id in _ids("prompt_logprob_token_ids", row) if id != -1] for row in p.prompt_logprob_token_ids
        ]
        p.prompt_logprobs = p.prompt_logprobs or 0
    if p.prompt_logprobs is not None and p.skip_reading_prefix_cache is None:
        p.skip_reading_prefix_cache = True


def _check_strings(p: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        value = getattr(p, name)
        if value is None:
            continue
        if isinstance(value, str) and name == "stop":
            value = [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            raise ParameterError(f"{name} must be a list of strings, got {value!r}.", name, value)
        if not all(value):
            raise ParameterError(f"{name} cannot contain an empty string.", name, value)
        setattr(p, name, list(value))
    if p.stop and not p.detokenize:
        raise ParameterError(
            "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.", "stop", p.stop
        )
    if p.bad_words and len(p.bad_words) > MAX_BAD_WORDS:
        raise ParameterError(
            f"bad_words may hold at most {MAX_BAD_WORDS} words, got {len(p.bad_words)}.", "bad_words", len(p.bad_words)
        )


def _check_ids(p: SamplingParams) -> None:
    if p.stop_token_ids is not None:
        p.stop_token_ids = _ids("stop_token_ids", p.stop_token_ids)
    if p.allowed_token_ids is not None:
        p.allowed_token_ids = _ids("allowed_token_ids", p.allowed_token_ids)
        if not p.allowed_token_ids:
            raise ParameterError("allowed_token_ids is not None and empty!", "allowed_token_ids", [])
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, dict):
            raise ParameterError(
                f"logit_bias must map token ids to numbers, got {p.logit_bias!r}.", "logit_bias", p.logit_bias
            )
        _ids("logit_bias", list(p.logit_bias))
        p.logit_bias = {
            token: min(MOST_FACTOR, max(-MOST_FACTOR, _number("logit_bias", bias)))
            for token, bias in p.logit_bias.items()
        }


def _refuse_unbuilt(p: SamplingParams) -> None:
    """What is known but would have no effect is refused: an answer without the constraint would look like one with."""
    if p.structured_outputs is not None:
        if not isinstance(p.structured_outputs, StructuredOutputsParams):
            raise ParameterError(
                f"structured_outputs must be a StructuredOutputsParams, got {p.structured_outputs!r}.",
                "structured_outputs",
                p.structured_outputs,
            )
        raise _unbuilt("structured_outputs", "structured outputs")
    if p.thinking_token_budget is not None:
        _integer("thinking_token_budget", p.thinking_token_budget)
        if p.thinking_token_budget < -1:
            raise ParameterError(
                f"thinking_token_budget must be at least 0, or -1 for no limit, got {p.thinking_token_budget}.",
                "thinking_token_budget",
                p.thinking_token_budget,
            )
        if p.thinking_token_budget >= 0:
            raise _unbuilt("thinking_token_budget", "thinking budgets")
    if p.extra_args:
        raise _unbuilt("extra_args", "extra_args")
    if p.repetition_detection is not None and not isinstance(p.repetition_detection, RepetitionDetectionParams):
        raise ParameterError(
            f"repetition_detection must be a RepetitionDetectionParams, got {p.repetition_detection!r}.",
            "repetition_detection",
            p.repetition_detection,
        )


def _unbuilt(parameter: str, what: str) -> ParameterError:
    verb = "is" if what == parameter else "are"
    return ParameterError(
        f"{what} {verb} not built yet in Octavo, so {parameter} would have no effect. Leave it out.", parameter
    )


def _number(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """`value` as a finite float in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(f"{name} must be a number, got {value!r}.", name, value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ParameterError(f"{name} must be finite, got {value}.", name, value)
    if low is not None and high is not None and not low <= number <= high:
        raise ParameterError(f"{name} must be in [{low}, {high}], got {value}.", name, value)
    return number


def _integer(name: str, value: Any) -> None:
    """Refuse what is no integer, and what cannot cross to another process."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).", name, value)
    if not -(1 << 63) <= value < 1 << 64:
        raise ParameterError(f"{name} must fit in 64 bits, got one of {value.bit_length()} bits.", name, value)


def _whole(name: str, value: Any, least: int, note: str = "") -> None:
    _integer(name, value)
    if value < least:
        raise ParameterError(f"{name} must be at least {least}{note}, got {value}.", name, value)


def _ids(name: str, value: Any) -> list[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple, set, frozenset)):
        raise ParameterError(f"{name} must be a list of integers, got {value!r}.", name, value)
    ids = sorted(value) if isinstance(value, (set, frozenset)) else list(value)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ParameterError(f"{name} must contain only integers, got {value!r}.", name, value)
    return ids


def _bias_of_json(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise ParameterError(f"logit_bias must map token ids to numbers, got {bias!r}.", "logit_bias", bias)
    try:
        return {int(token): min(100.0, max(-100.0, _number("logit_bias", value))) for token, value in bias.items()}
    except (TypeError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"logit_bias must have integer token ids as keys: {error}.", "logit_bias", bias) from None


def _check_depth(value: str | dict[str, Any], name: str, limit: int) -> None:
    """Refuse JSON nested deeper than `limit`, without recursion."""
    parsed: Any = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                f"{name} of structured outputs is not JSON: {error}.", "structured_outputs", value
            ) from None
    level, depth = [parsed], 0
    while level:
        depth += 1
        if depth > limit:
            raise ParameterError(
                f"{name} of structured outputs is nested deeper than {limit} levels.", "structured_outputs"
            )
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
