"""How long a node's steps take: a fit of measured steps, and by how much each of them differed from it.

    python -m benchmarks step_times --out FILE     measures one; those in `profiles/` came from there

Knows nothing of how the router estimates.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError

DEFAULT = "smollm2-cpu"


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Of one thread. `*_ms`: of a step as such, per prompt token, per million positions that prompt tokens attend to,
    per sequence that decodes, per thousand positions that those attend to. `noise`: measured over fitted, of each
    measured step. `lent`: the same with two threads, for nodes that are lent an idle core."""

    name: str
    step_ms: float
    prompt_token_ms: float
    prompt_million_positions_ms: float
    sequence_ms: float
    sequence_thousand_positions_ms: float
    kv_bytes_per_token: int
    max_num_batched_tokens: int
    noise: tuple[float, ...] = (1.0,)
    lent: NodeProfile | None = None

    def expected_ms(self, prompt_tokens: int, prompt_positions: int, sequences: int, positions: int) -> float:
        """Of one step without noise."""
        return (
            self.step_ms
            + self.prompt_token_ms * prompt_tokens
            + self.prompt_million_positions_ms * prompt_positions / 1e6
            + self.sequence_ms * sequences
            + self.sequence_thousand_positions_ms * positions / 1e3
        )

    def lent_speed(self, prompt_tokens: int, prompt_positions: int, sequences: int, positions: int) -> float:
        """How many times faster a step is with a second core."""
        if self.lent is None:
            return 1.0
        work = (prompt_tokens, prompt_positions, sequences, positions)
        return max(self.expected_ms(*work) / self.lent.expected_ms(*work), 1.0)

    def faster(self, times: float, chunk: int | None = None) -> NodeProfile:
        """The same curve on a machine that is so many times faster; `chunk` prompt tokens per step."""
        terms = {name: getattr(self, name) / times for name in _TERMS}
        lent = self.lent.faster(times, chunk) if self.lent is not None else None
        return replace(self, **terms, lent=lent, max_num_batched_tokens=chunk or self.max_num_batched_tokens)

    def draw_noise(self, rng: random.Random) -> float:
        return rng.choice(self.noise)

    def noise_of(self, number: int, position: int) -> float:
        """That of a request's chunk at `position`: the same whatever the policy, so that only choices tell them apart
        (common random numbers)."""
        return self.noise[zlib.crc32(b"%d/%d" % (number, position)) % len(self.noise)]


_TERMS = (
    "step_ms",
    "prompt_token_ms",
    "prompt_million_positions_ms",
    "sequence_ms",
    "sequence_thousand_positions_ms",
)


def load_profile(name: str = DEFAULT) -> NodeProfile:
    """One that comes along, by its name, or a file. Raises ConfigError."""
    known = resources.files("kvferry.services.local.simulate") / "profiles"
    own = known / f"{name}.json"
    try:
        return _parsed(json.loads(own.read_text() if own.is_file() else Path(name).read_text()))
    except OSError as exc:
        names = sorted(path.name.removesuffix(".json") for path in known.iterdir())
        raise ConfigError(f"no profile {name!r}: there are {', '.join(names)}, or give a file") from exc
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"profile {name!r} does not parse: {exc}") from exc


def _parsed(raw: dict[str, Any]) -> NodeProfile:
    fields = {name: raw[name] for name in NodeProfile.__dataclass_fields__ if name in raw}
    lent = _parsed(raw["lent"]) if raw.get("lent") else None
    return NodeProfile(**fields | {"noise": tuple(raw["noise"]), "lent": lent})
