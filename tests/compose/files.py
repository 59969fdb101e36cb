"""compose/ as data: YAML with its knobs put in, and the stages of the Dockerfile. For tests."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"


def knobs() -> dict[str, str]:
    lines = (COMPOSE / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def used_knobs(name: str) -> set[str]:
    return set(re.findall(r"\$\{(\w+)\}", (COMPOSE / name).read_text()))


def load(name: str) -> dict[str, Any]:
    """A file of compose/ with every ${KNOB} replaced. Raises KeyError for one that .env does not have."""
    values = knobs()
    text = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], (COMPOSE / name).read_text())
    return dict(yaml.safe_load(text))


@dataclass(slots=True)
class Stage:
    """One stage of the Dockerfile, with what it inherits."""

    user: str = "root"
    has_health_check: bool = False
    entrypoint: str = ""
    environ: dict[str, str] = field(default_factory=dict)


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    stage = Stage()
    text = re.sub(r"^#.*\n", "", (COMPOSE / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            old = found.get(parent, Stage())
            stage = Stage(old.user, old.has_health_check, old.entrypoint, dict(old.environ))
            found[name] = stage
        elif word == "USER":
            stage.user = rest
        elif word == "HEALTHCHECK":
            stage.has_health_check = True
        elif word == "ENTRYPOINT":
            stage.entrypoint = rest
        elif word == "ENV":
            stage.environ.update(part.split("=", 1) for part in shlex.split(rest))
    return found
