"""The command line: `octavo serve`, `octavo run`, `octavo chat`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import octavo
from octavo.api.local import local_server
from octavo.api.serve import CannotServe, Parts, serve
from octavo.api.terminal import Conversation, Endpoint, TalkError, continue_text, say
from octavo.build import build_text
from octavo.client import Process
from octavo.config import EngineConfig, add_flags, environment_api_key

PARTS = Parts(engine=Process, text=build_text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program `octavo`; returns its exit status."""
    parser = _parser()
    namespace, unknown = parser.parse_known_args(arguments)
    if namespace.command is None:
        parser.print_help()
        return 2
    if unknown:
        _refuse(namespace.parser, unknown)
    try:
        status: int = namespace.run(namespace)
    except (CannotServe, TalkError) as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End the program because of an argument nobody knows; say which flag may have been meant."""
    flags = [flag for action in parser._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
    near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" See {parser.prog} --help."
    parser.error(f"unknown argument {unknown[0]}.{hint}")


def api_server(arguments: Sequence[str] | None = None) -> int:
    """`python -m octavo.entrypoints.openai.api_server`: `octavo serve` without the word."""
    return main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo", description="Serves and runs large language models.")
    parser.add_argument("-v", "--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serving = commands.add_parser(
        "serve",
        help="answer the OpenAI API over HTTP",
        usage="%(prog)s [MODEL] [options]",
        description="Serves a model over the OpenAI API.",
    )
    serving.add_argument("model_tag", nargs="?", metavar="MODEL", help="Repository name, folder, or GGUF file.")
    add_flags(serving)
    serving.set_defaults(run=_serve, parser=serving)

    running = commands.add_parser(
        "run",
        help="answer one prompt in the terminal",
        usage="%(prog)s MODEL [PROMPT] [options]",
        description="Prints a model's answer to one prompt as it comes.",
    )
    running.add_argument("model_tag", metavar="MODEL", help="Repository name, folder, or GGUF file.")
    running.add_argument("prompt", nargs="?", help="The prompt; read from standard input where it is left out.")
    running.add_argument("--raw", action="store_true", help="Continue the text itself, without the chat template.")
    _add_sampling(running)
    add_flags(running)
    running.set_defaults(run=_run, parser=running)

    chatting = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        usage="%(prog)s [MODEL | --url URL] [options]",
        description="A conversation with a model, loaded here or behind --url.",
    )
    chatting.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="Repository name, folder, or GGUF file; with --url the name of a served model.",
    )
    chatting.add_argument("--url", help="Talk to this server instead, such as http://localhost:8000.")
    _add_sampling(chatting)
    add_flags(chatting)
    chatting.set_defaults(run=_chat, parser=chatting)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument("--system", metavar="TEXT", help="System message.")
    group.add_argument("--max-tokens", type=int, metavar="N", help="Longest answer in tokens. Default: what fits.")
    group.add_argument("--temperature", type=float, metavar="T", help="0 always takes the most probable token.")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="Makes the answer repeatable.")


def _options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, as fields of a request."""
    fields = {
        "max_tokens": namespace.max_tokens,
        "temperature": namespace.temperature,
        "top_p": namespace.top_p,
        "top_k": namespace.top_k,
        "seed": namespace.sampling_seed,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _config(namespace: argparse.Namespace) -> EngineConfig:
    """The configuration, and logging as it says."""
    parser: argparse.ArgumentParser = namespace.parser
    if namespace.model_tag is not None:
        if namespace.model not in (None, namespace.model_tag):
            parser.error(f"two models are named: {namespace.model_tag} and --model {namespace.model}; name one.")
        namespace.model = namespace.model_tag
    config = EngineConfig.from_namespace(namespace, parser)
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(levelname)s %(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    return config


def _serve(namespace: argparse.Namespace) -> int:
    return serve(_config(namespace), PARTS)


def _run(namespace: argparse.Namespace) -> int:
    prompt = namespace.prompt if namespace.prompt is not None else sys.stdin.read()
    options = _options(namespace)
    with local_server(_quiet(namespace), PARTS) as endpoint:
        if namespace.raw:
            continue_text(endpoint, prompt, {"max_tokens": 256, **options}, sys.stdout)
            return 0
        system = [{"role": "system", "content": namespace.system}] if namespace.system else []
        say(endpoint, [*system, {"role": "user", "content": prompt}], options, sys.stdout)
    return 0


def _chat(namespace: argparse.Namespace) -> int:
    options = _options(namespace)
    with contextlib.ExitStack() as stack:
        if namespace.url:
            keys = namespace.api_key or environment_api_key()
            endpoint = Endpoint(namespace.url, keys[0] if keys else None, namespace.model_tag)
            endpoint.model = endpoint.model or endpoint.first_model()
        else:
            endpoint = stack.enter_context(local_server(_quiet(namespace), PARTS))
        Conversation(endpoint, options, namespace.system).run()
    return 0


def _quiet(namespace: argparse.Namespace) -> EngineConfig:
    """The configuration of a model that is talked to here: warnings only, unless the user says otherwise."""
    namespace.log_level = namespace.log_level or "warning"
    return _config(namespace)


if __name__ == "__main__":
    sys.exit(main())
