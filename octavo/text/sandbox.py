"""Jinja for chat templates: what the templates of published models expect, and bounds on what one may cost.

Templates are programs that come with a model or, where the server allows it, with a request. They run in Jinja's
sandbox; besides, the number of loop turns, the size of any string made on the way and the size of the result are
limited, so that none can run or grow without end.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE = 1 << 18
"""Characters of a template: reading one takes ten microseconds a character, those of models have some thousand."""
MAX_TURNS = 2_000_000
"""Loop turns and calls of one rendering, nested ones included."""
MAX_SECONDS = 10
"""Time for one rendering."""
MAX_CHARACTERS = 16 << 20
"""Characters of the rendered text, and of any text a template computes."""
MAX_WIDTH = 10_000
"""Characters to which a text may be padded."""
_LONG_NUMBER = re.compile(r"\d{5}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
_BUDGET = "octavo loop budget"  # not an identifier: no template and no keyword argument can name it
_ABSENT = object()
_DATA = frozenset({str, int, float, bool, list, dict, type(None)})
"""Types of values that nothing can be called on without asking the sandbox again."""
_DICT_METHODS = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))


class TemplateError(ValueError):
    """Messages cannot be rendered; the text is the template's own where it raised one."""


class TemplateLimit(Exception):
    """A rendering went over a limit."""


class Budget:
    """Loop turns, calls and seconds left for one rendering."""

    def __init__(self) -> None:
        self.turns = MAX_TURNS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        """Take one turn of a loop, or one call. TemplateLimit when there is none left."""
        self.turns -= 1
        if self.turns < 0:
            raise TemplateLimit(f"the chat template loops more than {MAX_TURNS} times")
        if not self.turns % 16 and time.monotonic() > self.deadline:
            raise TemplateLimit(f"the chat template takes more than {MAX_SECONDS} seconds")


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model said, for training; rendering ignores the mark."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    spend = context.parent[_BUDGET].spend
    for item in items:
        spend()
        yield item


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateLimit(f"the chat template makes a text of more than {MAX_CHARACTERS} characters")


def _sized(value: Any) -> Any:
    if isinstance(value, str):
        _check_size(len(value))
    return value


def _check_width(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise TemplateLimit(f"the chat template pads a text to more than {MAX_WIDTH} characters")


def _check_format(text: str) -> None:
    """Refuse widths of five digits and widths that come from arguments."""
    if _LONG_NUMBER.search(text):
        raise TemplateLimit(f"the chat template formats a text with a width that may exceed {MAX_WIDTH}")


def _check_text_call(text: str, method: str, args: tuple[Any, ...]) -> None:
    """Refuse calls of string methods whose result could be of any size."""
    if method in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_width(args)
    elif method == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif method == "join" and args and isinstance(args[0], list | tuple):
        _check_size(sum(len(text) + len(item) for item in args[0] if isinstance(item, str)))


def _narrow(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its numbers bounded."""

    @functools.wraps(filter)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        _check_width((*args, *kwargs.values()))
        return filter(*args, **kwargs)

    return narrow


def _checked_format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    return str(value) % (kwargs or args)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    items = list(value)
    _check_size(sum(len(d) + len(item) for item in items if isinstance(item, str)))
    return filters.sync_do_join(context, items, d, attribute)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as prompts want it: no escapes of HTML, none of non-ASCII characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Templates go in with `read` and are rendered with `run`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["counted loop"] = _counted
        self.filters["sized text"] = _sized
        for name in ("center", "indent", "wordwrap"):
            self.filters[name] = _narrow(self.filters[name])
        self.filters["format"] = _checked_format
        self.filters["join"] = _join
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "counted loop", tree)
        for joined in list(tree.find_all(nodes.Concat)):
            whole = nodes.Concat(joined.nodes, lineno=joined.lineno, environment=self)
            joined.nodes = [_filtered(whole, "sized text", tree)]
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What templates do most, fields of messages, numbers of loops and methods of texts, at once and with the same
        result as in the sandbox, which does the rest."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_METHODS and (value := obj.get(attribute, _ABSENT)) is not _ABSENT:
                return value
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, _ABSENT)
            if type(value) in _DATA:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.parent[_BUDGET].spend()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_text_call(owner, function.__name__, args)
            if type(function) is BuiltinMethodType:  # needs nothing of the context
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                return _sized(function(*args, **kwargs))
        return _sized(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__)
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            _check_size(len(left) + len(right))
            return left + right
        if operator == "*":
            text, times = (left, right) if isinstance(left, str | list | tuple) else (right, left)
            if isinstance(text, str | list | tuple) and isinstance(times, int):
                _check_size(len(text) * times)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise TemplateLimit("the chat template raises a number to a power above 64")
        return _sized(super().call_binop(context, operator, left, right))

    def read(self, source: str) -> jinja2.Template:
        """The template, ready to run.

        Raises:
            TemplateError: it is too long, or no template.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are read.")
        try:
            return self.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise TemplateError("the chat template is nested too deeply") from error

    def run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The rendered text.

        Raises:
            TemplateError: the template exceeds a limit, fails, or refuses the variables.
        """
        try:
            return self._render(template, variables)
        except TemplateLimit as error:
            raise TemplateError(str(error)) from error
        except jinja2.UndefinedError as error:
            raise TemplateError(f"the chat template uses what is not there: {error.message}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template refused the messages") from error
        except RecursionError as error:
            raise TemplateError("the chat template calls itself without end") from error
        except MemoryError as error:
            raise TemplateError("the chat template takes too much memory") from error
        except Exception as error:  # a template can make any operation fail
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        values = {**variables, _BUDGET: Budget()}
        parts: list[str] = []
        size = 0
        for part in template.generate(values):
            size += len(part)
            if size > MAX_CHARACTERS:
                raise TemplateLimit(f"the chat template renders more than {MAX_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)


def _filtered(node: nodes.Node, name: str, tree: nodes.Template) -> nodes.Filter:
    """`node | name`, as a node of `tree`."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=tree.environment)
