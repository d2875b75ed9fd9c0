"""Text to token ids and back.

`Tokenizer` wraps a fast tokenizer of the `tokenizers` library and adds what serving needs: the exact bytes of every
token, text in which control tokens are plain text, and answers for ids outside the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from octavo.text import sentencepiece
from octavo.text.segments import MOST_BYTES, Part, SegmentCache, any_of, parts_of, safe_cuts

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LONG = 10_000
"""Characters from which it matters that encoding a text holds up the other threads."""
_REMEMBERED = 2_000
"""Characters from which a text is worth looking for in the cache."""
_AS_IT_IS, _LITERAL, _LITERAL_INSIDE = range(3)
"""Ways to encode a part of a text: with its control tokens, or as plain characters, at the start or further on."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A tokenizer cannot be read; the message names the file or key and the cause."""


def _byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


class Decoding(NamedTuple):
    """How the strings of a vocabulary become bytes."""

    kind: str
    """"bytes": one character per byte; "pieces": SentencePiece pieces; "other": only the backend can tell."""
    strip: bool = False
    """Whether one leading space of a whole text is not part of it."""


def _decoding(backend: tokenizers.Tokenizer) -> Decoding:
    if backend.decoder is None:
        return Decoding("other")
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return Decoding("bytes")
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} or not kinds & {"Replace", "Metaspace"}:
        return Decoding("other")
    strip = False
    for step in steps:
        if step["type"] == "Replace":
            if step["pattern"].get("String") != sentencepiece.SPACE or step["content"] != " ":
                return Decoding("other")
        elif step["type"] == "Strip":
            if step["content"] != " " or step["start"] != 1 or step["stop"] != 0:
                return Decoding("other")
            strip = True
        elif step["type"] == "Metaspace":
            if step["replacement"] != sentencepiece.SPACE:
                return Decoding("other")
            strip = step.get("prepend_scheme", "always") != "never"
    return Decoding("pieces", strip)


class Tokenizer:
    """A vocabulary with its rules.

    Attributes:
        vocab_size: one more than the highest id that has a token.
        bos_id, eos_id: ids of the begin- and end-of-sequence tokens, None where there is none.
        eos_ids: every id the files declare to end a turn or text, `eos_id` first.
        special_ids: control tokens; decoding leaves them out unless told otherwise.
        special_tokens: text of the named special tokens, "bos_token" and so on, as chat templates want them.
        chat_templates: the templates that came with the tokenizer, by name ("default" is the usual one).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        extra_eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`add_bos` and `add_eos`: whether plain text gets the token; None leaves it to the backend's
        post-processor."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        eos = ([] if self.eos_id is None else [self.eos_id]) + [i for i in extra_eos_ids if 0 <= i < self.vocab_size]
        self.eos_ids = tuple(dict.fromkeys(eos))
        self._own_ends = add_bos is not None or add_eos is not None
        self._prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        self._suffix = [self.eos_id] if add_eos and self.eos_id is not None else []
        self.decoding = _decoding(backend)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._literal = self._without_control_tokens(at_start=True)
        self._cache = SegmentCache(self._encode_parts, self.vocab_size, MOST_BYTES)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder in Hugging Face's layout, or of the folder a single file lies in.

        Reads tokenizer.json, else tokenizer.model (SentencePiece); tokenizer_config.json, special_tokens_map.json,
        added_tokens.json and the chat templates beside them. TokenizerError when there is none or it is broken.
        """
        return _read_folder(Path(path))

    @property
    def chat_template(self) -> str | None:
        """The usual chat template, if the files have one."""
        return self.chat_templates.get("default")

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than n times as many has more than n tokens."""
        return max((len(text) for text in self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: put BOS and EOS where the model wants them on plain text.
            parse_special: False makes control tokens spelled out in the text ("<|im_start|>") ordinary characters.
        """
        by_backend = add_special_tokens and not self._own_ends
        if parse_special and len(text) >= _REMEMBERED and (ends := self._backend_ends if by_backend else ([], [])):
            ids = ends[0] + self._cache.ids(parts_of(text, self._cuts, _AS_IT_IS)) + ends[1]
        else:
            ids = _encode(self.backend if parse_special else self._literal, text, by_backend)
        return self._with_ends(ids, add_special_tokens)

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of `text`, in which control tokens with `mark` inside stand for ordinary characters; no special
        tokens are added. `mark` itself has no ids, wherever it stands."""
        parts: list[Part] = []
        at = 0
        for match in [*self.control_cuts.finditer(text), None]:
            plain = text[at : match.start() if match else len(text)].replace(mark, "")
            if plain:
                parts.append((_LITERAL_INSIDE if at else _LITERAL, plain))
            if match:
                parts.append((_AS_IT_IS, match[0]))
                at = match.end()
        return self._cache.ids(parts)

    def encode_literally(self, text: str, at_start: bool = True) -> list[int]:
        """Token ids of a stretch of text without special tokens of any kind; `at_start` False where other text is
        before it."""
        return _encode(self._literal if at_start else self._literal_inside, text, False)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` of several texts, in parallel."""
        backend = self.backend if parse_special else self._literal
        encodings = backend.encode_batch(
            [_clean(text) for text in texts], add_special_tokens=add_special_tokens and not self._own_ends
        )
        return [self._with_ends(encoding.ids, add_special_tokens) for encoding in encodings]

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `ids`. Ids without a token have no text; bytes that are not UTF-8 become U+FFFD.

        `spaces_between_special_tokens` is accepted as in vLLM; as there, fast tokenizers never insert such spaces.
        """
        if self.decoding.kind == "other":
            known = [id for id in ids if 0 <= id < self.vocab_size]
            return self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        data = b"".join(self.token_bytes(id) for id in ids if not (skip_special_tokens and id in self.special_ids))
        if self.decoding.strip and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token(self, id: int) -> str:
        """The text of one token as it stands inside a text; U+FFFD where it holds part of a character."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes one token adds to a text, spaces included; empty for an id without a token."""
        if not 0 <= id < self.vocab_size:
            return b""
        known = self._bytes[id]
        if known is None:
            known = self._bytes[id] = self._compute_bytes(id)
        return known

    def token_text(self, id: int) -> str:
        """One token as the vocabulary spells it; "" for an id without a token."""
        return self.backend.id_to_token(id) or ""

    def id_of(self, token: str) -> int | None:
        """The id of a token written as in the vocabulary."""
        return self.backend.token_to_id(token)

    def _encode_parts(self, parts: list[Part]) -> list[list[int]]:
        backends = (self.backend, self._literal, self._literal_inside)
        if sum(len(text) for _, text in parts) < _LONG:
            return [_encode(backends[kind], text, False) for kind, text in parts]
        found: list[list[int]] = [[]] * len(parts)
        for wanted, backend in enumerate(backends):
            places = [i for i, (kind, _) in enumerate(parts) if kind == wanted]
            texts = [_clean(parts[i][1]) for i in places]
            for i, encoding in zip(places, backend.encode_batch(texts, add_special_tokens=False), strict=True):
                found[i] = list(encoding.ids)
        return found

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        """Finds the control tokens before which a text may be cut."""
        added = [] if self.backend.encode_special_tokens else self.backend.get_added_tokens_decoder().values()
        return re.compile(any_of(safe_cuts(list(added))))

    @cached_property
    def _backend_ends(self) -> tuple[list[int], list[int]] | None:
        """What the backend's own rules put before and after any text; None where that cannot be told."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1 if bare else 0):
            if whole[start : start + len(bare)] == bare:
                return list(whole[:start]), list(whole[start + len(bare) :])
        return None

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _with_ends(self, ids: list[int], wanted: bool) -> list[int]:
        return self._prefix + ids + self._suffix if wanted and self._own_ends else ids

    def _compute_bytes(self, id: int) -> bytes:
        if id in self._added and (self.decoding.kind != "pieces" or id in self.special_ids):
            return self._added[id].encode("utf-8", "replace")
        piece = self.backend.id_to_token(id)
        if piece is None:
            return b""
        if self.decoding.kind == "bytes":
            if all(character in BYTE_CHARACTERS for character in piece):
                return bytes(BYTE_CHARACTERS[character] for character in piece)
            return piece.encode("utf-8", "replace")
        if self.decoding.kind == "pieces":
            byte = _BYTE_PIECE.fullmatch(piece)
            if byte:
                return bytes([int(byte[1], 16)])
            return piece.replace(sentencepiece.SPACE, " ").encode("utf-8", "replace")
        return self.backend.decode([id], skip_special_tokens=False).encode("utf-8", "replace")

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Finds control tokens spelled out in a text."""
        return re.compile(any_of(token.content for token in self._control_tokens()))

    @cached_property
    def control_cuts(self) -> re.Pattern[str]:
        """Finds control tokens together with the space they swallow."""
        if not any(token.lstrip or token.rstrip for token in self._control_tokens()):
            return self.control_pattern
        cuts = (
            (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
            for token in self._control_tokens()
        )
        return re.compile("|".join(cuts) or r"(?!)")

    @cached_property
    def _literal_inside(self) -> tokenizers.Tokenizer:
        return self._without_control_tokens(at_start=False)

    def _control_tokens(self) -> list[AddedToken]:
        """Longest first, as the longest one that fits is meant."""
        tokens = [token for token in self.backend.get_added_tokens_decoder().values() if token.special]
        return sorted((token for token in tokens if token.content), key=lambda token: len(token.content), reverse=True)

    def _without_control_tokens(self, at_start: bool) -> tokenizers.Tokenizer:
        """The same rules over the same (shared) model, with control tokens as plain text. Some rules put a space
        before the start of a text: not so with `at_start` False."""
        literal = tokenizers.Tokenizer(self.backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            value = getattr(self.backend, part)
            if value is not None:
                setattr(literal, part, value)
        words = json.loads(self.backend.pre_tokenizer.__getstate__()) if self.backend.pre_tokenizer is not None else {}
        if not at_start and words.get("type") == "Metaspace" and words.get("prepend_scheme") == "first":
            literal.pre_tokenizer = pre_tokenizers.Metaspace(
                replacement=words["replacement"], prepend_scheme="never", split=words["split"]
            )
        ordinary = [token for token in self.backend.get_added_tokens_decoder().values() if not token.special]
        literal.add_tokens(ordinary)
        return literal


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids. A long text goes as a batch of one: only then do other threads run meanwhile."""
    text = _clean(text)
    if len(text) < _LONG:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)


def _clean(text: str) -> str:
    """Lone surrogates, which JSON can spell but UTF-8 cannot, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def _text_of(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_added(value: Any, special: bool) -> AddedToken | None:
    content = _text_of(value)
    if content is None:
        return None
    options = value if isinstance(value, dict) else {}
    special = bool(options.get("special", special))
    flags = {name: bool(options.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    return AddedToken(content, special=special, normalized=bool(options.get("normalized", not special)), **flags)


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        entries = [item for item in listed if isinstance(item, dict) and {"name", "template"} <= item.keys()]
        found.update({item["name"]: item["template"] for item in entries})
    elif isinstance(listed, dict):
        found.update({str(name): str(text) for name, text in listed.items()})
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text("utf-8")
    return found


def _complete(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Add the tokens that the files beside the vocabulary declare and it lacks."""
    wanted: dict[str, AddedToken] = {}
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, value in sorted(listed.items(), key=lambda item: int(item[0])):
        token = _as_added(value, special=False)
        if token is not None and (token.content not in present or present[token.content].special != token.special):
            wanted[token.content] = token
    plain = _read_json(folder / "added_tokens.json")
    for text in sorted(plain, key=lambda text: int(plain[text])):
        if text not in present and text not in wanted:
            wanted[text] = AddedToken(text, special=False, normalized=True)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    for value in [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]:
        token = _as_added(value, special=True)
        if token is not None and token.content not in present and token.content not in wanted:
            wanted[token.content] = AddedToken(
                token.content, special=True, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip
            )
    for token in wanted.values():
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _read_folder(path: Path) -> Tokenizer:
    folder = path.parent if path.is_file() else path
    fast, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    config = _read_json(folder / "tokenizer_config.json")
    named: dict[str, Any] = {}
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if fast.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(fast))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{fast} cannot be read: {error}") from error
    elif pieces.is_file():
        try:
            model = sentencepiece.read_model(pieces)
            backend = sentencepiece.build(model)
        except ValueError as error:
            raise TokenizerError(str(error) if str(pieces) in str(error) else f"{pieces}: {error}") from error
        ids = (model.unk_id, model.bos_id, model.eos_id, model.pad_id)
        names = ("unk_token", "bos_token", "eos_token", "pad_token")
        named.update({name: model.pieces[i] for name, i in zip(names, ids, strict=True) if 0 <= i < len(model.pieces)})
        add_bos = "bos_token" in named if add_bos is None else add_bos
    else:
        raise TokenizerError(
            f"no tokenizer in {folder}: it has neither tokenizer.json nor tokenizer.model. "
            "Copy the model's tokenizer files there or name another folder with --tokenizer."
        )
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        named.update({name: source[name] for name in _NAMED if source.get(name) is not None})
    _complete(backend, folder, config, named)
    texts = {name: text for name, value in named.items() if (text := _text_of(value)) is not None}
    return Tokenizer(
        backend,
        special_tokens=texts,
        add_bos=None if add_bos is None and add_eos is None else bool(add_bos),
        add_eos=None if add_bos is None and add_eos is None else bool(add_eos),
        chat_templates=_read_templates(folder, config),
    )
