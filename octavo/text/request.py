"""From a prompt and sampling parameters to a `Request` that says everything in numbers.

All that depends on the model is resolved and checked here, in the front end, so that a bad request never reaches the
engine and a request can be run again anywhere with the same result.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from octavo.sampling_params import ParameterError, SamplingParams
from octavo.text.output import RequestOutputBuilder
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request

_SHRINK = 4
"""Characters that normalisation may make one of, at most."""


class ContextLengthError(ParameterError):
    """Prompt and output do not fit in the context length."""


class RequestFactory:
    """Makes the requests of one model.

    Raises:
        ParameterError: `default_sampling` has a value that no request may have.

    Args:
        template: the chat template; kept for callers that hold the factory only.
        max_model_len: context length: prompt and output tokens together.
        vocab_size: size of the model's output, at least the tokenizer's.
        eos_ids: ids the checkpoint declares as ends; the tokenizer's own are added.
        default_sampling: keywords of `SamplingParams` in place of its own defaults.
        max_logprobs: most logprobs per token that may be asked for; -1 for no cap.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: int,
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        default_sampling: Mapping[str, Any] | None = None,
        max_logprobs: int = 20,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_ids = tuple(id for id in dict.fromkeys((*eos_ids, *tokenizer.eos_ids)) if 0 <= id < vocab_size)
        self.default_sampling = dict(default_sampling or {})
        self.max_logprobs = max_logprobs
        self._check_defaults()

    def _check_defaults(self) -> None:
        """Whoever set the defaults hears of a mistake in them, and not every caller of the model."""
        try:
            self.defaults()
        except ParameterError as error:
            raise ParameterError(
                f"The model's default sampling parameters are wrong: {error} Set others with "
                "--override-generation-config, or leave them out with --generation-config vllm.",
                error.parameter,
                error.value,
            ) from None

    def defaults(self) -> SamplingParams:
        """The sampling parameters of a request that names none."""
        return SamplingParams(**self.default_sampling)

    def output(self, request: Request) -> RequestOutputBuilder:
        """What turns the engine's news of `request` into text."""
        return RequestOutputBuilder(request, self.tokenizer)

    @cached_property
    def most_characters(self) -> int:
        """A text with more characters than this cannot fit in the context length."""
        return self.max_model_len * self.tokenizer.longest_token * _SHRINK

    def make(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        known: bool = False,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        cut_max_tokens: bool = False,
        seed: int | None = None,
        arrival: int = 0,
        priority: int = 0,
        salt: str = "",
        adapter: int = 0,
    ) -> Request:
        """A request for the engine.

        Args:
            prompt: plain text, or token ids, which are taken as they are.
            known: the ids are the tokenizer's own, so that they need not be looked at one by one.
            add_special_tokens: whether a text gets BOS and EOS where the model wants them; False for rendered chats.
            truncate_prompt_tokens: keep at most this many tokens, the last ones; -1 as many as leave room for one
                more.
            cut_max_tokens: lower `max_tokens` to what fits instead of refusing; for a `max_tokens` nobody asked for.
            seed: used when `sampling` has none, in place of a random one.

        Raises:
            ContextLengthError: the prompt, or prompt and `max_tokens` together, exceed the context length.
            ParameterError: an id outside the vocabulary, an empty prompt, or a parameter that does not fit the model.
        """
        sampling.verify(self.vocab_size, self.max_logprobs)
        if type(priority) is not int or not -(1 << 63) <= priority < 1 << 63:
            raise ParameterError("priority must be an integer that fits in 64 bits.", "priority", priority)
        ids = self.encode(prompt, add_special_tokens, truncate_prompt_tokens, known)
        max_tokens = self._max_tokens(len(ids), sampling, cut_max_tokens)
        stop_ids = tuple(sampling.stop_token_ids or ())
        masked = tuple(dict.fromkeys((*self.eos_ids, *stop_ids)))
        allowed = sampling.allowed_token_ids
        if sampling.min_tokens and allowed and set(allowed) <= set(masked):
            raise ParameterError(
                "allowed_token_ids holds end tokens only, none of which may come before min_tokens tokens are out.",
                "allowed_token_ids",
                allowed,
            )
        if sampling.seed is not None:
            seed = sampling.seed
        return Request(
            id=request_id,
            prompt=ids,
            sampling=sampling,
            seed=secrets.randbits(63) if seed is None else seed % (1 << 64),
            max_tokens=max_tokens,
            eos_ids=() if sampling.ignore_eos else self.eos_ids,
            stop_ids=stop_ids,
            masked_ids=masked,
            bad_words=self._bad_words(sampling.bad_words or ()),
            n=sampling.n,
            arrival=arrival,
            priority=priority,
            salt=salt,
            adapter=adapter,
            read_prefix_cache=sampling.prompt_logprobs is None and not sampling.skip_reading_prefix_cache,
        )

    def encode(
        self,
        prompt: str | Sequence[int],
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        known: bool = False,
    ) -> tuple[int, ...]:
        """The checked token ids of a prompt: not empty, in the vocabulary, shorter than the context length.

        Raises as `make` does.
        """
        limit = self._truncation(truncate_prompt_tokens)
        ids: Sequence[int]
        if isinstance(prompt, str):
            if limit is None and len(prompt) > self.most_characters:
                raise ContextLengthError(
                    f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                    f"{len(prompt)} characters, more than can fit. Please shorten the prompt.",
                    "prompt",
                    len(prompt),
                )
            ids = self._encode_text(prompt, add_special_tokens, limit)
            known = True
        else:
            ids = prompt if known else [_token_id(id) for id in prompt]
            ids = ids if limit is None else ids[max(len(ids) - limit, 0) :]
        if not ids:
            raise ParameterError("The prompt is empty: it has no tokens. Send at least one.", "prompt", prompt)
        if not known or self.tokenizer.vocab_size > self.vocab_size:
            self._check_range(ids)
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{len(ids)} tokens, which leaves no room for output. Please shorten the prompt to at most "
                f"{self.max_model_len - 1} tokens.",
                "prompt",
                len(ids),
            )
        return tuple(ids)

    def _check_range(self, ids: Sequence[int]) -> None:
        if min(ids) >= 0 and max(ids) < self.vocab_size:
            return
        outside = next(id for id in ids if not 0 <= id < self.vocab_size)
        raise ParameterError(
            f"Token id {outside} in the prompt is out of vocabulary: ids are 0 to {self.vocab_size - 1}.",
            "prompt",
            outside,
        )

    def _encode_text(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens)
        if limit is None or len(ids) <= limit:
            return ids
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        extra = len(ids) - len(plain)
        start = next((at for at in range(extra + 1) if ids[at : at + len(plain)] == plain), 0)
        before, after = ids[:start], ids[start + len(plain) :]  # BOS and EOS stay
        room = limit - len(before) - len(after)
        return before + plain[len(plain) - room :] + after if room > 0 else ids[len(ids) - limit :]

    def _truncation(self, asked: int | None) -> int | None:
        if asked is None:
            return None
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < -1:
            raise ParameterError(
                f"truncate_prompt_tokens must be an integer of at least -1, got {asked!r}.",
                "truncate_prompt_tokens",
                asked,
            )
        if asked > self.max_model_len:
            raise ContextLengthError(
                f"truncate_prompt_tokens is {asked}, greater than the model's maximum context length of "
                f"{self.max_model_len} tokens. Please ask for fewer.",
                "truncate_prompt_tokens",
                asked,
            )
        return self.max_model_len - 1 if asked == -1 else asked

    def _max_tokens(self, prompt: int, sampling: SamplingParams, cut: bool) -> int:
        room = self.max_model_len - prompt
        asked = sampling.max_tokens
        if asked is not None and asked > room and not cut:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{prompt + asked} tokens ({prompt} in the prompt, {asked} in the completion). Please shorten the "
                f"prompt or ask for at most max_tokens={room}.",
                "max_tokens",
                asked,
            )
        if sampling.min_tokens > room:
            raise ContextLengthError(
                f"min_tokens is {sampling.min_tokens}, but this model's maximum context length of "
                f"{self.max_model_len} tokens leaves room for {room} after the {prompt} tokens of the prompt.",
                "min_tokens",
                sampling.min_tokens,
            )
        return room if asked is None else min(asked, room)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, as it stands at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.strip(" ")
            forms = [form for form in (self._inside(bare), self._inside(" " + bare)) if form] if bare else []
            if not forms:
                raise ParameterError(
                    f"The bad word {word!r} has no tokens of its own. Leave it out.", "bad_words", word
                )
            found.update(dict.fromkeys(forms))
        return tuple(found)

    def _inside(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as it stands inside a longer text: without the space some tokenizers put in front."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        if self.tokenizer.decoding.strip:
            line = self.tokenizer.encode("\n", add_special_tokens=False)
            after = self.tokenizer.encode("\n" + text, add_special_tokens=False, parse_special=False)
            if after[: len(line)] == line:
                ids = after[len(line) :]
        return tuple(ids)


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ParameterError(f"Token ids must be integers, got {value!r}.", "prompt", value)
    return operator.index(value)
