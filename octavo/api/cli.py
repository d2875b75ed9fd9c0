"""The program `octavo`: serve, run, chat, complete, run-batch, bench.

Exit statuses: 0 ended as asked, 1 an error while running, 2 a wrong command line, 130 Ctrl-C, 143 SIGTERM.

What a command needs is loaded when it runs, so that --help and the client commands are quick to start.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import octavo
from octavo import logs
from octavo.api.bench import BENCHES
from octavo.api.flags import OPTIONS, Command, Flag, Positional, parse
from octavo.api.help import show
from octavo.api.terminal import Continuation, Conversation, Endpoint, Session, TalkError
from octavo.bench.options import BenchError
from octavo.config import ConfigError, EngineConfig, count, environment_api_key, size

if TYPE_CHECKING:
    from octavo.api.serve import Parts, Text

DEFAULT_URL = "http://localhost:8000/v1"
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; a wrong command line raises SystemExit(2), SIGTERM ends the program."""
    with _ended_by_sigterm():
        try:
            return _main(sys.argv[1:] if arguments is None else arguments)
        except (BenchError, ConfigError, TalkError) as error:
            return _fail(1, str(error))
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:  # whoever read our output has enough; the interpreter must not try to write the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def api_server(arguments: Sequence[str] | None = None) -> int:
    """`python -m octavo.entrypoints.openai.api_server`: `octavo serve` without the word."""
    return main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


def _main(arguments: Sequence[str]) -> int:
    word = arguments[0] if arguments else ""
    if word in ("-v", "-V", "--version"):
        print(f"octavo {octavo.__version__}")
        return 0
    if word in ("", "-h", "--help", "help"):
        print(_overview())
        return 0 if word else 2
    if any(name.startswith(f"{word} ") for name in COMMANDS):  # the first of two words
        if len(arguments) == 1 or arguments[1] in ("-h", "--help", "help"):
            print(_overview(f"{word} "))
            return 2 if len(arguments) == 1 else 0
        arguments = arguments[1:]
        word = f"{word} {arguments[0]}"
    if word not in COMMANDS:
        near = [] if word.startswith("-") else difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"Did you mean octavo {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}; see octavo --help."
        return _fail(2, f"there is no command {word}. {hint}")
    namespace = parse(COMMANDS[word], arguments[1:], show)
    return COMMANDS[word].run(namespace)


def _fail(status: int, sentence: str) -> int:
    print(f"octavo: error: {sentence}", file=sys.stderr)
    return status


def _overview(beginning: str = "") -> str:
    """The commands whose names have this beginning."""
    commands = [command for command in COMMANDS.values() if command.name.startswith(beginning)]
    return "\n".join(
        [
            "usage: octavo COMMAND [options]",
            "",
            "Serves and runs large language models.",
            "",
            *(f"  {command.name:16} {command.summary}" for command in commands),
            "",
            "octavo COMMAND --help tells more; octavo --version tells the version.",
        ]
    )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the program at once and quietly while it starts; as process 1 of a container it would be ignored
    otherwise. Later the server has a handler of its own, and a model that is loaded here `_closed_by_sigterm`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _closed_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as an exception, so that what it holds is closed."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- what commands do


def _serve(namespace: argparse.Namespace) -> int:
    config = configure(COMMANDS["serve"], namespace)
    from octavo.api.serve import serve

    return serve(config, _parts())


def _run(namespace: argparse.Namespace) -> int:
    prompt = namespace.prompt if namespace.prompt is not None else _input()
    kind = Continuation if namespace.raw else Conversation
    with _local(COMMANDS["run"], namespace) as endpoint:
        answer = _session(kind, endpoint, namespace).turn(prompt)
    return INTERRUPTED if answer.stopped else 0


def _chat(namespace: argparse.Namespace) -> int:
    return _talk(COMMANDS["chat"], Conversation, namespace)


def _complete(namespace: argparse.Namespace) -> int:
    return _talk(COMMANDS["complete"], Continuation, namespace)


def _talk(command: Command, kind: type[Session], namespace: argparse.Namespace) -> int:
    quick = _input() if namespace.quick == "-" else namespace.quick
    with _endpoint(command, namespace) as endpoint:
        session = _session(kind, endpoint, namespace)
        if quick is not None:
            return INTERRUPTED if session.turn(quick).stopped else 0
        session.run()
    return 0


def _run_batch(namespace: argparse.Namespace) -> int:
    parser: argparse.ArgumentParser = namespace.parser
    for flag, value in (("--input-file", namespace.input_file), ("--output-file", namespace.output_file)):
        if not value:
            parser.error(f"{flag} is missing: octavo run-batch -i requests.jsonl -o answers.jsonl --model MODEL")
    namespace.log_level = namespace.log_level or "warning"
    config = configure(COMMANDS["run-batch"], namespace)
    from octavo.api.batch.answers import BatchError
    from octavo.api.batch.run import Batch, run_batch

    folder = Path(namespace.output_tmp_dir) if namespace.output_tmp_dir else None
    try:
        return run_batch(config, _parts(), Batch(namespace.input_file, namespace.output_file, folder))
    except BatchError as error:
        return _fail(1, str(error))


def _models(namespace: argparse.Namespace) -> int:
    from octavo.catalogue import as_json, as_text, entries

    found = entries(namespace.word or "")
    print(as_json(found) if namespace.json else as_text(found))
    return 0 if found else 1


def _collect_env(namespace: argparse.Namespace) -> int:
    from octavo.api.sources import configuration
    from octavo.environment import as_json, as_text, collect

    try:
        config, complaints = configuration(COMMANDS["collect-env"], namespace)
    except ConfigError as error:  # a variable or a file that is wrong may be what the report is about
        config, complaints = EngineConfig(), [str(error)]
    found = collect(config)
    if complaints:
        found["choices at start-up"]["complaints"] = complaints
    if hasattr(sys.stdout, "reconfigure"):  # variables may hold what is no text, or what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    print(as_json(found) if namespace.json else as_text(found))
    return 0


def _inspect(namespace: argparse.Namespace) -> int:
    namespace.log_level = namespace.log_level or "warning"
    config = configure(COMMANDS["inspect"], namespace)
    import json

    from octavo.inspection import as_json, as_text, inspect

    try:
        found = inspect(config, namespace.gpu_memory, namespace.tensor_parallel_size or 1)
    except ConfigError:
        raise
    except ValueError as error:  # of the checkpoint, its config, its tensors: each says what is wrong
        return _fail(1, str(error))
    print(json.dumps(as_json(found), indent=2) if namespace.json else as_text(found))
    return 0


def _session(kind: type[Session], endpoint: Endpoint, namespace: argparse.Namespace) -> Session:
    options = _sampling(namespace)
    if kind is Continuation:  # a server would stop after 16 tokens
        options = {"max_tokens": 256, **options}
    for stream in (sys.stdin, sys.stdout):  # bytes that are no text, and terminals that cannot show all of it
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    return kind(endpoint, options, getattr(namespace, "system_prompt", None), stats=namespace.stats or False)


def _input() -> str:
    """All of standard input."""
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _sampling(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, as fields of a request."""
    fields = {
        "max_tokens": namespace.max_tokens,
        "temperature": namespace.temperature,
        "top_p": namespace.top_p,
        "top_k": namespace.top_k,
        "seed": namespace.sampling_seed,
    }
    return {name: value for name, value in fields.items() if value is not None}


@contextlib.contextmanager
def _endpoint(command: Command, namespace: argparse.Namespace) -> Iterator[Endpoint]:
    """The server that is named, or the model, or else the server that `octavo serve` starts on this machine."""
    parser: argparse.ArgumentParser = namespace.parser
    if namespace.url and namespace.uds:
        parser.error("--url and --uds name two servers; give one.")
    url = f"unix://{os.path.abspath(namespace.uds)}" if namespace.uds else namespace.url
    if url is None and (namespace.model_tag or namespace.model):
        with _local(command, namespace) as endpoint:
            yield endpoint
        return
    for name in ("config", *command.options):
        if name != "model" and getattr(namespace, name) is not None:
            flag = "--config" if name == "config" else OPTIONS[name].names[0]
            parser.error(f"{flag} is for a model that is loaded here: name a MODEL without --url, or leave {flag} out.")
    keys = (namespace.api_key,) if namespace.api_key else environment_api_key()
    endpoint = Endpoint(url or DEFAULT_URL, keys[0] if keys else None)
    try:
        endpoint.model = namespace.model_name or namespace.model_tag or namespace.model or endpoint.first_model()
    except TalkError as error:
        if url is not None:
            raise
        raise TalkError(f"{error}; start a server with `octavo serve`, or name one (--url) or a MODEL.") from None
    yield endpoint


@contextlib.contextmanager
def _local(command: Command, namespace: argparse.Namespace) -> Iterator[Endpoint]:
    """A model that is loaded here, for as long as the block runs; warnings only, unless the user says otherwise."""
    for name in ("url", "api_key", "model_name"):
        if getattr(namespace, name, None) is not None:
            flag = "--" + name.replace("_", "-")
            namespace.parser.error(f"{flag} is for a server; a model that is loaded here needs none.")
    namespace.log_level = namespace.log_level or "warning"
    config = configure(command, namespace)
    from octavo.api.local import local_server
    from octavo.api.serve import CannotServe

    try:
        with _closed_by_sigterm(), local_server(config, _parts()) as endpoint:
            yield endpoint
    except CannotServe as error:
        raise TalkError(str(error)) from None


def configure(command: Command, namespace: argparse.Namespace) -> EngineConfig:
    """The configuration, and logging as it says; a wrong one ends the program with exit status 2."""
    from octavo.api.sources import configuration

    parser: argparse.ArgumentParser = namespace.parser
    if namespace.model_tag is not None:
        if namespace.model not in (None, namespace.model_tag):
            parser.error(f"two models are named: {namespace.model_tag} and --model {namespace.model}; name one.")
        namespace.model = namespace.model_tag
    try:
        config, warnings = configuration(command, namespace)
    except ConfigError as error:
        parser.error(str(error))
    logs.configure(config)
    for sentence in warnings:
        logging.getLogger(__name__).warning("%s", sentence)
    return config


def _parts() -> Parts:
    """What a server of real models is made of: the engine's process begins first, then this one imports the rest."""
    from octavo.api.serve import Parts
    from octavo.client import Process

    def text(config: EngineConfig) -> Text:
        from octavo.build import build_text

        return build_text(config)

    return Parts(engine=lambda config: Process(config).begin(), text=text)


def _at_least_one(text: str) -> int:
    number = count(text)
    if number < 1:
        raise ConfigError(f"{text} is not 1 or more")
    return number


# -- the commands

_MODEL = Positional("model_tag", "MODEL", "Repository name, folder, or GGUF file.", False)
_ANSWERS = (
    Flag(("--system-prompt", "--system"), "answers", "System message.", value="TEXT"),
    Flag(("--max-tokens",), "answers", "Longest answer in tokens.", int, default="what fits"),
    Flag(("--temperature",), "answers", "0 always takes the most probable token.", float),
    Flag(("--top-p",), "answers", "Draw from the most probable tokens that make up this share.", float),
    Flag(("--top-k",), "answers", "Draw from this many of the most probable tokens.", int),
    Flag(("--sampling-seed",), "answers", "Makes the answer repeatable.", int),
    Flag(("--stats",), "answers", "Print the time to the first token, and tokens per second.", bool),
)
_SERVER = (
    Flag(("--url",), "answers", "Server to talk to; unix:///path is a unix socket.", default=DEFAULT_URL),
    Flag(("--uds",), "answers", "Unix socket of the server to talk to.", value="PATH"),
    Flag(("--model-name",), "answers", "Which of the served models.", default="the first"),
    Flag(("--api-key",), "answers", "Key to send to the server.", variable="OCTAVO_API_KEY"),
    Flag(("--quick", "-q"), "answers", "Ask this only and end; - reads it from standard input.", value="TEXT"),
)
_FILES = (
    Flag(("--input-file", "-i"), "answers", "The requests: a file or http(s) URL.", value="FILE"),
    Flag(("--output-file", "-o"), "answers", "Where the answers go: a file, or a URL that takes a PUT.", value="FILE"),
    Flag(
        ("--output-tmp-dir",),
        "answers",
        "Folder in which answers that go to a URL are kept until all are there, and an input from a URL.",
        default="batches in the cache",
    ),
)
_OF_A_MODEL = (
    *(name for name, flag in OPTIONS.items() if flag.group in ("model", "cache", "scheduler", "device")),
    "chat_template",
    "default_chat_template_kwargs",
    "log_level",
)
"""Options that matter to a model that is talked to here."""
_OF_A_BATCH = (
    *dict.fromkeys((*_OF_A_MODEL, *(name for name, flag in OPTIONS.items() if flag.group == "requests"))),
    "log_format",
    "watchdog_timeout",
)
"""Options that matter to a file of requests, whatever they ask for."""
_OF_CALLERS = frozenset({"max_num_queued_reqs", "max_num_reqs_per_key", "enable_force_include_usage"})
"""Limits of a server's callers, and what is only for streams."""
_ALWAYS_FITS = tuple(
    flag._replace(default="256") if flag.names[0] == "--max-tokens" else flag
    for flag in _ANSWERS
    if flag.names[0] != "--system-prompt"
)

COMMANDS = {
    command.name: command
    for command in (
        Command(
            "serve",
            "answer the OpenAI API over HTTP",
            "[MODEL] [options]",
            "Serves a model over the OpenAI API.",
            (_MODEL,),
            (),
            tuple(OPTIONS),
            _serve,
        ),
        Command(
            "run",
            "answer one prompt in the terminal",
            "MODEL [PROMPT] [options]",
            "Prints a model's answer to one prompt as it comes.",
            (
                _MODEL._replace(required=True),
                Positional("prompt", "PROMPT", "Read from standard input where it is left out.", False),
            ),
            (
                Flag(("--raw",), "answers", "Continue the text itself, without the chat template.", bool),
                *_ANSWERS,
            ),
            _OF_A_MODEL,
            _run,
        ),
        Command(
            "chat",
            "talk to a model, here or behind a URL",
            "[MODEL | --url URL] [options]",
            "A conversation with a model: one that is loaded here, or one of a server.",
            (_MODEL,),
            (*_SERVER, *_ANSWERS),
            _OF_A_MODEL,
            _chat,
        ),
        Command(
            "complete",
            "let a model continue texts, here or behind a URL",
            "[MODEL | --url URL] [options]",
            "Each line is a text that a model continues: one that is loaded here, or one of a server.",
            (_MODEL,),
            (*_SERVER, *_ALWAYS_FITS),
            _OF_A_MODEL,
            _complete,
        ),
        Command(
            "run-batch",
            "answer a file of requests",
            "-i FILE -o FILE --model MODEL [options]",
            "Answers a file of requests, a line each, in the form of OpenAI's batch API. A run that was ended goes on "
            "where it was when the same command is given again.",
            (_MODEL,),
            _FILES,
            tuple(name for name in _OF_A_BATCH if name not in _OF_CALLERS),
            _run_batch,
        ),
        Command(
            "models",
            "list the architectures that can be served",
            "[WORD] [--json]",
            "Lists the architectures that can be served, what each is made of, and the kinds of checkpoint it is "
            "tested with. With a word, those whose name, description or features hold it.",
            (Positional("word", "WORD", "Part of a name, or of a feature such as experts or ALiBi.", False),),
            (Flag(("--json",), "answers", "As JSON.", bool),),
            (),
            _models,
        ),
        Command(
            "inspect",
            "tell what a model is and what it takes",
            "MODEL [options]",
            "Tells what a model is, what memory it takes with these options, and what to look out for. No weights are "
            "read, and of a model on the hub none are fetched.",
            (_MODEL._replace(required=True),),
            (
                Flag(("--gpu-memory",), "answers", "Memory of a GPU: 80GiB.", size, default="this machine"),
                Flag(
                    ("--tensor-parallel-size", "-tp"),
                    "answers",
                    "GPUs among which each matrix is divided.",
                    _at_least_one,
                    default="1",
                ),
                Flag(("--json",), "answers", "As JSON; sizes are bytes.", bool),
            ),
            _OF_A_MODEL,
            _inspect,
        ),
        Command(
            "collect-env",
            "tell of this machine, for a bug report",
            "[--json]",
            "Tells what a bug report needs to know of this machine; keys, tokens and passwords are left out.",
            (),
            (Flag(("--json",), "answers", "As JSON.", bool),),
            ("device", "threads", "cpu_activations", "dtype"),
            _collect_env,
        ),
        *BENCHES,
    )
}


if __name__ == "__main__":
    sys.exit(main())
