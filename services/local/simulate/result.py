"""What a simulation showed: latencies, hits, balance; as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.common.nodes import Role
from kvferry.services.local.simulate.cluster import Fleet, Simulation


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds; `hit_rate` of prompt blocks; `imbalance`: busiest node's computing time over the mean, of the role
    that computes prompts. `tokens_per_s` of output, from the first arrival to the last end."""

    policy: str
    fleet: str
    rate: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p99_ms: float
    hit_rate: float
    imbalance: float
    prefill_busy: float
    decode_busy: float
    tokens_per_s: float


def measure(sim: Simulation, policy: str, fleet: Fleet, rate: float) -> Result:
    ttft = sorted(1e3 * served.ttft_s for served in sim.served)
    gaps = sorted(gap for node in sim.nodes.values() for gap in node.gaps)
    num_gaps = sum(count for _, count in gaps)
    blocks = sum(len(served.request.blocks) for served in sim.served)
    begun_s, ended_s = sim.served[0].request.at_s, max(served.ended_at_s for served in sim.served)
    computing = [n.busy_s for n in sim.nodes.values() if n.record.role is not Role.DECODE]
    decoding = [n.busy_s for n in sim.nodes.values() if n.record.role is not Role.PREFILL]
    computing = computing or decoding
    return Result(
        policy=policy,
        fleet=str(fleet),
        rate=rate,
        ttft_mean_ms=sum(ttft) / len(ttft),
        ttft_p50_ms=ttft[len(ttft) // 2],
        ttft_p99_ms=ttft[min(int(0.99 * len(ttft)), len(ttft) - 1)],
        itl_mean_ms=1e3 * sum(gap * count for gap, count in gaps) / max(num_gaps, 1),
        itl_p99_ms=1e3 * _weighted_quantile(gaps, 0.99 * num_gaps),
        hit_rate=sum(served.cached_blocks for served in sim.served) / max(blocks, 1),
        imbalance=max(computing) / max(sum(computing) / len(computing), 1e-9),
        prefill_busy=sum(computing) / len(computing) / (ended_s - begun_s),
        decode_busy=sum(decoding) / max(len(decoding), 1) / (ended_s - begun_s),
        tokens_per_s=sum(served.request.num_output for served in sim.served) / (ended_s - begun_s),
    )


def mean_of(results: Sequence[Result]) -> Result:
    """Of several runs of one policy on one fleet, each figure's mean."""
    figures = [name for name in Result.__dataclass_fields__ if name not in ("policy", "fleet")]
    return replace(results[0], **{name: sum(getattr(r, name) for r in results) / len(results) for name in figures})


def _weighted_quantile(gaps: Sequence[tuple[float, int]], rank: float) -> float:
    passed = 0
    for gap, count in gaps:
        passed += count
        if passed >= rank:
            return gap
    return 0.0


_COLUMNS = (
    ("TTFT mean ms", "ttft_mean_ms", ".0f"),
    ("p99", "ttft_p99_ms", ".0f"),
    ("ITL mean ms", "itl_mean_ms", ".1f"),
    ("p99", "itl_p99_ms", ".1f"),
    ("hits", "hit_rate", ".0%"),
    ("imbalance", "imbalance", ".2f"),
    ("busy prefill", "prefill_busy", ".0%"),
    ("decode", "decode_busy", ".0%"),
    ("tok/s", "tokens_per_s", ".0f"),
)


def table(results: Iterable[Result]) -> str:
    """In Markdown, which reads well in a terminal too."""
    lines = [
        f"| {'nodes':>9} | {'req/s':>7} | {'policy':<12} | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
        "|---:|---:|---|" + "---:|" * len(_COLUMNS),
    ]
    for r in results:
        cells = [format(getattr(r, name), form).rjust(len(title)) for title, name, form in _COLUMNS]
        lines.append(f"| {r.fleet:>9} | {r.rate:>7.2f} | {r.policy:<12} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_COLOURS = ("#8d99ae", "#b07d62", "#e09f3e", "#4f772d", "#1d4ed8", "#9d4edd")
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 70, 40


def plot(title: str, x_names: Sequence[str], lines: Mapping[str, Sequence[float]], unit: str) -> str:
    """Lines over named points, as SVG with a logarithmic axis."""
    import math

    values = [value for line in lines.values() for value in line if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    wide, high = _WIDTH - _LEFT - 130, max(high, low + 1)
    tall = _HEIGHT - _TOP - 40

    def x(index: int) -> float:
        return _LEFT + wide * index / max(len(x_names) - 1, 1)

    def y(value: float) -> float:
        return _TOP + tall * (high - math.log10(max(value, 10**low))) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    parts += [
        f'<text x="{x(i):.1f}" y="{_TOP + tall + 20}" text-anchor="middle">{name}</text>'
        for i, name in enumerate(x_names)
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = _TOP + 16 * number + 10
        parts.append(f'<text x="{_LEFT + wide + 16}" y="{at}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
