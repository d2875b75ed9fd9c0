"""Options from a config file and from the environment, and the configuration they make with the command line.

What the command line says wins over the file, and the file over the environment.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from octavo.api.flags import OPTIONS, Command, no_effect
from octavo.config import ConfigError, EngineConfig, environment_api_key, environment_options, read_option
from octavo.unbuilt import NO_MEANING, UNBUILT, refuse

_FIELDS = {
    alias.removeprefix("--").replace("-", "_"): name
    for name, flag in OPTIONS.items()
    for alias in flag.names
    if alias.startswith("--")
}
"""The field of `EngineConfig` that a name stands for."""
_UNBUILT = {row.keyword: row for row in UNBUILT}
_NO_MEANING = {row.keyword: row for row in NO_MEANING}


class Said(NamedTuple):
    """What one source says: values of fields of `EngineConfig`, and sentences about what has no effect."""

    values: dict[str, Any]
    warnings: list[str]


def configuration(command: Command, namespace: argparse.Namespace) -> tuple[EngineConfig, list[str]]:
    """The configuration that `command` runs with, and what to warn of. What the file or the environment say of options
    that the command does not take is left out: they may be shared with a server.

    Raises:
        ConfigError: a wrong value, an unknown key; the text names the file or the variable.
    """
    variables = environment_options()
    path = namespace.config or variables.pop("config", None)
    environment = from_environment(variables)
    file = from_file(Path(path)) if path else Said({}, [])
    line = {name: value for name in OPTIONS if (value := getattr(namespace, name, None)) is not None}
    values = {"api_key": environment_api_key(), **environment.values, **file.values, **line}
    config = EngineConfig(**{name: value for name, value in values.items() if name in command.options})
    return config, [*namespace.warnings, *environment.warnings, *file.warnings]


def from_environment(variables: dict[str, str]) -> Said:
    """`variables` are those of Octavo by what follows OCTAVO_, in small letters; lists are JSON, or comma-separated.
    One that names no option is no error: another program may have set it.

    Raises:
        ConfigError: a value is wrong, or one whose effect is not built.
    """
    said = Said({}, [])
    for name, text in variables.items():
        variable = f"OCTAVO_{name.upper()}"
        value: Any = text
        if name in _FIELDS and OPTIONS[_FIELDS[name]].several and not text.lstrip().startswith("["):
            value = [item.strip() for item in text.split(",")]
        if not _settle(said, name, value, variable, "environment variable "):
            near = difflib.get_close_matches(name, [*_FIELDS, "config", "cache"], n=1)
            hint = f" Did you mean OCTAVO_{near[0].upper()}?" if near else " See octavo serve --help."
            said.warnings.append(f"The environment variable {variable} names no option.{hint}")
    return said


def from_file(path: Path) -> Said:
    """The options in a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, or does not say what it should; the text names file and key.
    """
    said = Said({}, [])
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if _FIELDS.get(name) in said.values:
            raise ConfigError(f"{path}: {key} is there twice; keep one.")
        if not _settle(said, name, value, key, f"{path}: "):
            raise ConfigError(f"{path}: there is no option {key}.{_hint(name, value)}")
    return said


def _hint(name: str, value: Any) -> str:
    positive = name.removeprefix("no_")
    if positive != name and positive in _FIELDS and isinstance(value, bool):
        return f" Write {positive.replace('_', '-')}: {str(not value).lower()}"
    near = difflib.get_close_matches(name, [*_FIELDS, *_UNBUILT, *_NO_MEANING], n=2)
    words = " or ".join(word.replace("_", "-") for word in near)
    return f" Did you mean {words}?" if near else " See octavo serve --help."


def _settle(said: Said, name: str, value: Any, written: str, place: str) -> bool:
    """Add what the option `name` is said to be; False where nobody knows it. `written` is how the user wrote the name,
    and `place` where."""
    if value is None:  # `key:` without a value, as in a file where it is to be filled in
        return name in _FIELDS or name in _UNBUILT or name in _NO_MEANING
    if name in _FIELDS:
        try:
            said.values[_FIELDS[name]] = read_option(_FIELDS[name], value)
        except ConfigError as error:
            fault = str(error).removeprefix(_FIELDS[name])
            quotes = " Put it in quotes." if "must be text" in fault and not isinstance(value, list | dict) else ""
            raise ConfigError(f"{place}{written}{fault}{quotes}") from None
        return True
    if name in _UNBUILT:
        row = _UNBUILT[name]
        if sentence := refuse(row, _plain(row.kind, value)):
            raise ConfigError(f"{place}{written}{sentence.removeprefix(name)}")
        return True
    if name in _NO_MEANING:
        said.warnings.append(f"{place}{no_effect(_NO_MEANING[name], written)}")
        return True
    return False


def _plain(kind: Any, value: Any) -> Any:
    """The value of an option that is not built: text of a variable is read, so that "1" and "false" ask for nothing."""
    if not isinstance(value, str):
        return value
    if kind is bool:
        return value.strip().lower() not in ("false", "0", "no", "off")
    try:
        return kind(value)
    except ValueError:
        return value


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a file; an empty YAML file has none of it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}.") from None
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text; --config names a YAML or JSON file of options.") from None
    is_json = path.suffix == ".json"
    try:
        content = json.loads(text, object_pairs_hook=_once) if is_json else yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_one_line(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {'JSON' if is_json else 'YAML'}: {error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold a mapping, such as max-model-len: 4k, but holds a {type(content).__name__}."
        )
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key!r} is not text; keys are names of flags.")
    return content


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`; raises ConfigError where a key is there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key} is there twice; keep one.")
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    """YAML in which no key may be there twice, as the second would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ConfigError(f"{key.value} is there twice (line {key.start_mark.line + 1}); keep one.")
                seen.add(key.value)
        return super().construct_mapping(node, deep)
