"""What a client sees of a request: the engine's tokens turned into text, stop strings applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.text.stream import Detokenizer, StopStrings
from octavo.text.tokenizer import Tokenizer
from octavo.types import Delta, FinishReason, Request, TokenLogprobs


@dataclass(slots=True)
class Piece:
    """News of one choice. All pieces of a choice, joined, are its whole answer: streamed or not, it is the same."""

    choice: int
    text: str = ""
    """Text that is now certain."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens that came, those of a stop string or an EOS included."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `token_ids`, when asked for; a token's entry comes with the token, whether or not its text is
    still held back."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice; None for EOS."""
    cached: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    stopped: bool = False
    """A stop string ended the choice here, in the text: the engine does not know and must be told to abort it."""


class _Choice:
    """The text state of one choice."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stops: StopStrings) -> None:
        self.detokenizer = Detokenizer(tokenizer, request.prompt, request.sampling.skip_special_tokens)
        self.stops = stops
        self.count = 0
        """Tokens taken."""
        self.ended = False


class RequestOutputBuilder:
    """Turns the `Delta`s of one request into `Piece`s.

    Text is computed token by token, so that it does not depend on how tokens were grouped in deltas. A token that
    ends the choice (EOS or a stop id) has no text unless `include_stop_str_in_output`. Stop strings count from
    `min_tokens` tokens on: one completed earlier is plain text.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
        stops = StopStrings(stop, sampling.include_stop_str_in_output)
        self._request = request
        self._choices = [_Choice(request, tokenizer, stops.fresh()) for _ in range(request.n)]

    def push(self, delta: Delta) -> Piece:
        """The piece `delta` makes; an empty one for a choice that has ended and for tokens already seen."""
        choice = self._choices[delta.choice]
        piece = Piece(delta.choice, cached=delta.cached, prompt_logprobs=delta.prompt_logprobs)
        if choice.ended:
            return piece
        seen = max(choice.count - delta.start, 0)
        tokens = delta.tokens[seen:]
        scores = None if delta.logprobs is None else delta.logprobs[seen:]
        taken, found = self._take(choice, tokens, delta, piece)
        piece.token_ids = tokens[:taken]
        piece.logprobs = None if scores is None else scores[:taken]
        if found is None and delta.finish is None:
            return piece
        choice.ended = True
        if found is None:
            found = self._end(choice, piece)
        if found is not None:
            piece.finish_reason, piece.stop_reason = "stop", found
            piece.stopped = delta.finish is None
        else:
            piece.finish_reason, piece.stop_reason, piece.error = delta.finish, delta.stop_reason, delta.error
        return piece

    def _take(self, choice: _Choice, tokens: list[int], delta: Delta, piece: Piece) -> tuple[int, str | None]:
        """Add the text of `tokens` to `piece` up to a stop string; (tokens taken, stop string found)."""
        sampling = self._request.sampling
        silent = delta.finish == "stop" and not sampling.include_stop_str_in_output
        for at, token in enumerate(tokens):
            choice.count += 1
            if not sampling.detokenize or (silent and at == len(tokens) - 1):
                continue
            text, found = choice.stops.push(choice.detokenizer.push((token,)), choice.count >= sampling.min_tokens)
            piece.text += text
            if found is not None:
                return at + 1, found
        return len(tokens), None

    def _end(self, choice: _Choice, piece: Piece) -> str | None:
        """Add what was held back; a stop string may be complete only now."""
        if not self._request.sampling.detokenize:
            return None
        rest, found = choice.stops.push(choice.detokenizer.finish(), choice.count >= self._request.sampling.min_tokens)
        piece.text += rest + ("" if found else choice.stops.flush())
        return found
