"""Command-line flags made from the configuration tree: one `--kebab-name` for every field of the sections asked for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from kvferry.common.config import SECTION_OF, SECTIONS, Config, nearest
from kvferry.common.errors import ConfigError

ALIASES = {"num_prefill": "--prefill", "num_decode": "--decode", "num_both": "--both"}
"""Second names of flags, for what one types most."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print and exit; abbreviations are unknown options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but an unknown option is answered with the nearest known one."""
        known, rest = self.parse_known_args(argv)
        if rest:
            scope: argparse.ArgumentParser = getattr(known, "parser", self)
            names = [name for action in scope._actions for name in action.option_strings]
            given = rest[0].partition("=")[0]
            kind = "option" if given.startswith("-") else "argument"
            raise ConfigError(f"unknown {kind} {given}{nearest(given, names)}")
        return known


def add_config_flags(parser: argparse.ArgumentParser, sections: Iterable[str], fields: Iterable[str] = ()) -> None:
    """Flags for whole sections and single fields of others. Those that are not given leave no trace.

    Values stay strings; `load_config` parses them by the field's type.
    """
    parser.add_argument("--config", metavar="FILE", default=None, help="TOML or YAML file with the sections below")
    for section in sections:
        group = parser.add_argument_group(f"{section} options")
        for field, info in SECTIONS[section].model_fields.items():
            _add_flag(group, field, info)
    for field in fields:
        _add_flag(parser, field, SECTIONS[SECTION_OF[field]].model_fields[field])


def _add_flag(group: argparse._ActionsContainer, field: str, info: FieldInfo) -> None:
    names = [f"--{field.replace('_', '-')}"]
    if field in ALIASES:
        names.insert(0, ALIASES[field])
    text = _help(info).replace("%", "%%")
    if info.annotation is bool:
        group.add_argument(
            *names, dest=field, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    metavar = "|".join(choices) if choices else field.rsplit("_", 1)[-1].upper()
    group.add_argument(*names, dest=field, metavar=metavar, default=argparse.SUPPRESS, help=text)


def _help(info: FieldInfo) -> str:
    described = info.description or ""
    if info.default is None:
        return described
    default = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
    return f"{described} (default: {default})".strip()


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Field name -> what was given for it on the command line."""
    fields = {field for section in SECTIONS.values() for field in section.model_fields}
    return {name: value for name, value in vars(args).items() if name in fields}


def config_environ(config: Config, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which `load_config` gives this very tree, whatever `base` (default: ours) says.

    Passed to children rather than flags, because everyone on the machine can read a command line, a password in it too.
    """
    base = os.environ if base is None else base
    environ = {k: v for k, v in base.items() if not (k.startswith("KVFERRY_") and "__" in k) and k != "KVFERRY_CONFIG"}
    for section, cls in SECTIONS.items():
        for field, info in cls.model_fields.items():
            value = getattr(getattr(config, section), field)
            if value != info.default:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                environ[f"KVFERRY_{section}__{field}".upper()] = text
    return environ
