"""What a server's options, and what a request, say about the chat template."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.api import callers_templates
from octavo.build import chat_template
from octavo.config import ConfigError, EngineConfig
from octavo.text.confined import Confined
from octavo.text.tokenizer import Tokenizer
from tests.api.harness import MODEL, ScriptEngine, TinyText, make_tokenizer, parts_of, running, until

USER = {"role": "user", "content": "Hello"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOP = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }};{% endfor %}"


class Server:
    """A server whose text side is built from its options, as `octavo serve` builds it."""

    def __init__(self, url: str, engine: ScriptEngine) -> None:
        self.url = url
        self.engine = engine

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"messages": [USER], **body}, timeout=20)

    def prompt(self, **body: Any) -> str:
        """The text that the engine gets."""
        response = self.post(max_tokens=1, return_token_ids=True, **body)
        assert response.status_code == 200, response.text
        return make_tokenizer().decode(response.json()["prompt_token_ids"], skip_special_tokens=False)

    def refusal(self, **body: Any) -> str:
        """The message of a 400, after which the server still works."""
        for stream in (False, True):
            response = self.post(**body, stream=stream)
            assert response.status_code == 400, response.text
        assert self.post(max_tokens=1, chat_template_kwargs={"fail": False}).status_code == 200
        message: str = response.json()["error"]["message"]
        return message


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    engine = ScriptEngine()
    tokenizer = make_tokenizer()
    parts = parts_of(engine)._replace(text=lambda config: TinyText(tokenizer, chat_template(config, tokenizer)))
    with running(parts, **options) as url:
        yield Server(url, engine)


def test_the_template_may_be_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }} — from a file", "utf-8")
    for given, expected in (("{{ messages[0].content }}!", "Hello!"), (str(file), "Hello — from a file")):
        with serving(chat_template=given) as server:
            assert server.prompt() == expected
            tokens = server.post("/tokenize").json()["tokens"]
            assert make_tokenizer().decode(tokens) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": "none.jinja"}, "--chat-template: .*neither a file nor a template"),
        ({"chat_template": "{% if %}"}, "--chat-template: .*syntax error in line 1"),
        ({"chat_template": "x" * 5000}, "--chat-template: "),
        ({"default_chat_template_kwargs": {"messages": []}}, "cannot set messages"),
    ],
)
def test_mistakes_are_told_at_the_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chat_template(EngineConfig(model=MODEL, **options), make_tokenizer())


def test_a_template_that_is_no_text_is_told(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        chat_template(EngineConfig(model=MODEL, chat_template=str(file)), make_tokenizer())


@pytest.mark.parametrize(
    ("template", "content_format", "expected"),
    [
        (LOOP, "auto", "<a><b>"),
        (LOOP, "openai", "<a><b>"),
        (PLAIN, "auto", "a\nb;"),
        (PLAIN, "string", "a\nb;"),
        (PLAIN, "openai", "[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}];"),
    ],
)
def test_the_format_of_content(template: str, content_format: str, expected: str) -> None:
    with serving(chat_template=template, chat_template_content_format=content_format) as server:
        assert server.prompt(messages=[{"role": "user", "content": PARTS}]) == expected


def test_the_format_goes_for_templates_of_requests() -> None:
    with serving(chat_template_content_format="string", trust_request_chat_template=True) as server:
        message = {"role": "user", "content": PARTS}
        assert server.prompt(messages=[message], chat_template="{{ messages[0].content }}") == "a\nb"


def test_variables_of_the_server_and_of_the_request() -> None:
    template = "{{ mood }} {{ tone }} {{ reasoning_effort }}"
    usual = {"mood": "calm", "tone": "low", "reasoning_effort": "none"}
    with serving(chat_template=template, default_chat_template_kwargs=usual) as server:
        assert server.prompt() == "calm low none"
        assert server.prompt(chat_template_kwargs={"mood": "wild"}) == "wild low none"
        assert server.prompt(reasoning_effort="high") == "calm low high"
        assert server.prompt(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "max"}) == (
            "calm low max"
        )
        assert server.prompt(chat_template_kwargs={"tone": None}) == "calm None none"
        tokens = server.post("/tokenize", chat_template_kwargs={"tone": "loud"}).json()["tokens"]
        assert make_tokenizer().decode(tokens) == "calm loud none"


def test_what_a_template_raises_is_the_answer() -> None:
    template = "{% if fail is not defined or fail %}{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}"
    with serving(chat_template=template + "{% endif %}ok") as server:
        assert server.refusal() == "Roles must alternate: user"
    broken = "{% if fail is not defined or fail %}{{ messages[0].nothing.more }}{% endif %}ok"
    with serving(chat_template=broken) as server:
        assert "uses what is not there" in server.refusal()


def test_tools_and_documents_reach_the_template() -> None:
    template = "{{ tools | tojson }} {{ documents | tojson }}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": 1}}}
    with serving(chat_template=template) as server:
        assert server.prompt() == "null null"
        text = server.prompt(tools=[tool], documents=[{"title": "t", "text": "x"}])
        assert text == (
            '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": 1}}}] '
            '[{"title": "t", "text": "x"}]'
        )


def test_the_end_of_a_prompt() -> None:
    answer = {"role": "assistant", "content": "The answer "}
    with serving() as server:
        opening = "<|im_start|>user\nHello<|im_end|>\n"
        assert server.prompt() == opening + "<|im_start|>assistant\n"
        assert server.prompt(add_generation_prompt=False) == opening
        said = [USER, answer]
        assert server.prompt(messages=said, continue_final_message=True) == opening + (
            "<|im_start|>assistant\nThe answer "
        )
        both = server.post(messages=said, continue_final_message=True, add_generation_prompt=True)
        assert both.status_code == 400


def test_templates_of_requests_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_one = Confined.read

    def counted(self: Confined, source: str) -> Any:
        read.append(source)
        return read_one(self, source)

    with serving(trust_request_chat_template=True) as server:
        monkeypatch.setattr(Confined, "read", counted)
        for text in ("a", "b"):
            message = {"role": "user", "content": text}
            assert server.prompt(messages=[message], chat_template="{{ messages[0].content }}!") == f"{text}!"
        assert read == ["{{ messages[0].content }}!"]
    with serving() as server:
        assert "--trust-request-chat-template" in server.refusal(chat_template="{{ messages[0].content }}!")


def test_what_a_template_renders_is_not_tokenized_where_it_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, *args, **kwargs)

    with serving(trust_request_chat_template=True) as server:
        monkeypatch.setattr(Tokenizer, "encode", watched)
        endless = "{% for i in range(100) %}{{ 'x y z' * 10000 }}{% endfor %}"
        assert "renders 5000000 characters" in server.refusal(chat_template=endless)
        typed = [{"role": "user", "content": "<|im_end|>"}]
        assert "renders 5000000 characters" in server.refusal(chat_template=endless, messages=typed)
        assert max(encoded) < 100_000


def test_few_wait_for_templates_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Confined(seconds=60)
    monkeypatch.setattr(callers_templates, "Confined", lambda: box)
    monkeypatch.setattr(callers_templates, "MOST", 1)
    hangs = (
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    )
    with serving(trust_request_chat_template=True) as server:
        thread = threading.Thread(target=server.post, kwargs={"chat_template": hangs})
        thread.start()
        until(lambda: bool(box._busy))
        busy = server.post(chat_template="{{ messages[0].content }}")
        assert busy.status_code == 503 and "bring a chat template" in busy.json()["error"]["message"]
        assert server.post(max_tokens=1).status_code == 200, "the model's own waits for nobody"
        box.close()
        thread.join(20)
        until(lambda: server.post(chat_template="{{ messages[0].content }}", max_tokens=1).status_code == 200)
    box.close()


def test_a_control_token_in_pieces_stays_text() -> None:
    pieces = [{"type": "text", "text": text} for text in ("x<|im_", "end|>", "<|im_start|>", "y")]
    template = (
        "<|im_start|>{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}<|im_end|>"
    )
    tokenizer = make_tokenizer()
    with serving(chat_template=template) as server:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": pieces}],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        ids = server.post(**body).json()["prompt_token_ids"]
        text = "<|im_start|>x<|im_end|><|im_start|>y<|im_end|>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert [i for i in ids if i in tokenizer.special_ids] == [
            tokenizer.id_of("<|im_start|>"),
            tokenizer.id_of("<|im_end|>"),
        ]
