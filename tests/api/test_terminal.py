"""`octavo chat` and `octavo run`, apart from the terminal."""

from __future__ import annotations

import io

import pytest

from octavo.api.local import local_server
from octavo.api.serve import CannotServe, Parts
from octavo.api.terminal import Conversation, Endpoint, TalkError, continue_text, say
from octavo.config import EngineConfig
from tests.api.conftest import Api
from tests.api.harness import MODEL, SAID, ScriptEngine, make_tokenizer, parts_of, until

OPTIONS = {"temperature": 0, "max_tokens": 200}


def test_say_prints_what_it_returns(api: Api) -> None:
    out = io.StringIO()
    answer = say(Endpoint(api.url), [{"role": "user", "content": "hi"}], OPTIONS, out)
    assert answer == SAID and out.getvalue() == SAID + "\n"
    assert continue_text(Endpoint(f"{api.url}/v1"), "hi", OPTIONS, io.StringIO()) == SAID


def test_a_conversation_remembers_until_reset(api: Api) -> None:
    out = io.StringIO()
    lines = io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    Conversation(Endpoint(api.url, model=MODEL), OPTIONS, "be nice", lines, out).run()
    prompts = [make_tokenizer().decode(request.prompt) for request in api.engine.seen]
    start = "system\nbe nice\nuser\n"
    assert prompts == [
        f"{start}one\nassistant\n",
        f"{start}one\nassistant\n{SAID}\nuser\ntwo\nassistant\n",
        f"{start}three\nassistant\n",
    ]
    assert out.getvalue().count(SAID) == 3


def test_a_conversation_outlives_an_error(api: Api) -> None:
    out = io.StringIO()
    Conversation(Endpoint(api.url), OPTIONS, None, io.StringIO("x" * 2000 + "\nshort\n"), out).run()
    assert "error: " in out.getvalue() and SAID in out.getvalue()
    assert "x" * 10 not in make_tokenizer().decode(api.engine.seen[-1].prompt)


class Impatient(io.StringIO):
    """Somebody who presses Ctrl-C at the third piece of an answer."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 3:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_what_came(api: Api) -> None:
    api.engine.pause = 0.005
    out = Impatient()
    answer = say(Endpoint(api.url), [{"role": "user", "content": "hi"}], {**OPTIONS, "ignore_eos": True}, out)
    assert out.getvalue() == answer + "\n" and SAID.startswith(answer)
    until(lambda: not api.engine.live)
    assert len(api.engine.aborts) == 1


def test_errors_are_one_line(api: Api) -> None:
    with pytest.raises(TalkError, match="does not exist"):
        list(Endpoint(api.url, model="other").stream("/completions", {"prompt": "a"}))
    api.engine.fail_after = 1
    with pytest.raises(TalkError, match="not finite"):
        list(Endpoint(api.url).stream("/completions", {"prompt": "a"}))
    with pytest.raises(TalkError, match="127.0.0.1:1"):
        Endpoint("http://127.0.0.1:1").first_model()


def test_a_local_server_lives_as_long_as_its_block() -> None:
    with local_server(EngineConfig(model=MODEL), parts_of(ScriptEngine())) as endpoint:
        assert endpoint.first_model() == MODEL
        assert say(endpoint, [{"role": "user", "content": "hi"}], OPTIONS, io.StringIO()) == SAID
        with pytest.raises(TalkError, match="API key"):
            Endpoint(endpoint.url).first_model()
    with pytest.raises(TalkError):
        endpoint.first_model()


def test_a_local_server_that_cannot_load() -> None:
    def broken(config: EngineConfig) -> object:
        raise ValueError("no tokenizer in /there")

    parts = Parts(parts_of(ScriptEngine()).engine, broken)  # type: ignore[arg-type]
    with pytest.raises(CannotServe, match="no tokenizer in /there"), local_server(EngineConfig(model=MODEL), parts):
        pass
