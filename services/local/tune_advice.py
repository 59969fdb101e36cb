"""From what was found to what should be set: pure functions, so that every rule can be tested without a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.services.local.tune_measure import ChunkSpeed, PrefixGain

Goal = Literal["throughput", "latency"]
PROBE_PERIOD_S = 5
COLD_START_MARGIN = 3.0  # a busy disk, a first compilation of the kernels, a slower machine of the same pool
LEAST_START_BUDGET_S = 60.0
POOL_MARGIN = 1.1
NEAR_BEST = 0.95  # of the best throughput, for the smallest chunk that is good enough
OPEN_FILES = 4096
ABOUT_SHORTEST = 1.25
WORTHWHILE_HITS = 0.05


@dataclass(frozen=True, slots=True)
class Advice:
    """One option: `now` and what it should be. `section` is that of a config file; "startupProbe": Kubernetes'."""

    section: str
    option: str
    now: Any
    then: Any
    why: str

    @property
    def changes(self) -> bool:
        return bool(self.now != self.then)


@dataclass(frozen=True, slots=True)
class Check:
    """`cure` is "" where nothing needs to be done."""

    name: str
    found: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    shm_free_bytes: int
    memory_bytes: int  # available
    open_files: int
    locked_bytes: int | None  # None: no limit
    num_gpus: int
    has_ucx: bool
    on_gpu: bool


def probe(cold_start_s: float) -> list[Advice]:
    """A start that takes `COLD_START_MARGIN` times as long is still waited for."""
    delay_s = math.floor(cold_start_s / 2)
    budget_s = max(cold_start_s * COLD_START_MARGIN, LEAST_START_BUDGET_S)
    threshold = math.ceil((budget_s - delay_s) / PROBE_PERIOD_S)
    why = f"a start took {cold_start_s:.1f} s here; {delay_s} + {threshold} x {PROBE_PERIOD_S} s clear it"
    return [
        Advice("startupProbe", "initialDelaySeconds", None, delay_s, f"{why}; nothing can be ready before"),
        Advice("startupProbe", "failureThreshold", None, threshold, f"{why} {COLD_START_MARGIN:g} times"),
    ]


def capacity(
    *, num_blocks: int, block_bytes: int, block_size: int, tokens: int, concurrency: int, now: int, room_bytes: int
) -> list[Advice]:
    """Sizes `max_num_seqs`, and the pool where it is what limits. `tokens`: prompt and answer of one request."""
    per_request = math.ceil(tokens / block_size)
    fits = num_blocks // per_request
    wanted_bytes = math.ceil(concurrency * per_request * POOL_MARGIN) * block_bytes
    advice = []
    if fits < concurrency:
        affordable = min(wanted_bytes, room_bytes)
        now_bytes = num_blocks * block_bytes
        if affordable > now_bytes:
            why = f"{concurrency} requests of {tokens} tokens take {wanted_bytes >> 20} MiB"
            why += f"; a pool may take {room_bytes >> 20} MiB here"
            advice.append(Advice("engine", "kv_cache_memory", now_bytes, affordable, why))
            fits = affordable // block_bytes // per_request
    seqs = max(min(concurrency, fits), 1)
    short = "" if seqs == concurrency else f", {concurrency} were expected: more nodes or memory for the rest"
    why = f"the pool holds {fits} requests of {tokens} tokens at once{short}; more would be preempted"
    return [*advice, Advice("engine", "max_num_seqs", now, seqs, why)]


def budget(speeds: Sequence[ChunkSpeed], goal: Goal, max_step_ms: float, now: int) -> Advice:
    best = max(speeds, key=lambda speed: speed.tokens_per_s)
    if goal == "throughput":
        chosen = min((s for s in speeds if s.tokens_per_s >= NEAR_BEST * best.tokens_per_s), key=lambda s: s.budget)
        why = f"the smallest within 5 % of the best, {best.tokens_per_s:.0f} tokens/s at {best.budget}"
    else:
        fast = [speed for speed in speeds if speed.step_ms <= max_step_ms]
        why = f"the fastest whose steps stay under {max_step_ms:g} ms"
        if not fast:
            shortest_ms = min(speed.step_ms for speed in speeds)
            fast = [speed for speed in speeds if speed.step_ms <= ABOUT_SHORTEST * shortest_ms]
            why = f"no step is under {max_step_ms:g} ms; the fastest of those about as short as they get"
        chosen = max(fast, key=lambda s: s.tokens_per_s)
    why += f": {chosen.tokens_per_s:.0f} tokens/s, and streams wait {chosen.step_ms:.0f} ms at most"
    return Advice("engine", "max_num_batched_tokens", now, chosen.budget, why)


def caching(gain: PrefixGain, now: bool) -> Advice:
    hits = gain.num_cached / max(gain.num_tokens, 1)
    why = (
        f"{gain.num_prompts} prompts of the sample: {hits:.0%} of {gain.num_tokens} tokens were cached, "
        f"{gain.without_s:.1f} s of computing became {gain.with_s:.1f} s"
    )
    if hits < WORTHWHILE_HITS:
        why += "; little gain, and no cost that would justify switching it off"
    return Advice("engine", "enable_prefix_caching", now, True, why)


def checks(machine: Machine, pool_bytes: int, transports: Sequence[str], num_threads: int) -> list[Check]:
    """The rest of the list: what the machine must give, and what to do where it does not."""
    found = [_cores(machine, num_threads), _shared_memory(machine, pool_bytes, transports)]
    cure = "" if machine.open_files >= OPEN_FILES else f"ulimit -n {OPEN_FILES}: each client and peer is a file"
    found.append(Check("open files", str(machine.open_files), cure))
    return [*found, *_transports(machine, pool_bytes, transports)]


def _cores(machine: Machine, num_threads: int) -> Check:
    if not machine.on_gpu:
        cure = "" if num_threads <= machine.cores else f"--num-threads {machine.cores}: more threads than cores"
        return Check("cores", f"{machine.cores}, of which one node computes with {num_threads}", cure)
    need = 2 + machine.num_gpus
    cure = "" if machine.cores >= need else f"{need} cores for {machine.num_gpus} GPUs (2 + N): the loop feeds the GPU"
    return Check("cores", f"{machine.cores} for {machine.num_gpus} GPUs", cure)


def _shared_memory(machine: Machine, pool_bytes: int, transports: Sequence[str]) -> Check:
    short = "shm" in transports and machine.shm_free_bytes < pool_bytes
    need = f"{math.ceil(pool_bytes * POOL_MARGIN) >> 20} MiB"
    cure = f"docker --shm-size, emptyDir sizeLimit: {need}, else blocks travel by the next transport" if short else ""
    return Check("/dev/shm", f"{machine.shm_free_bytes >> 20} MiB free, the pool takes {pool_bytes >> 20} MiB", cure)


def _transports(machine: Machine, pool_bytes: int, transports: Sequence[str]) -> list[Check]:
    usable = [name for name in transports if name != "ucx" or machine.has_ucx]
    cure = "" if usable == list(transports) else "ucx is asked for and not installed: pip install 'kvferry[ucx]'"
    if not cure and not machine.has_ucx and machine.on_gpu:
        cure = "between machines with RDMA: pip install 'kvferry[ucx]', --transports shm,ucx,grpc"
    found = [Check("transports", ", ".join(usable), cure)]
    if "ucx" in usable:
        locked = machine.locked_bytes
        lacks = locked is not None and locked < pool_bytes
        shown = "no limit" if locked is None else f"{locked >> 10} KiB"
        found.append(Check("locked memory", shown, "ulimit -l unlimited: RDMA registers the pool" if lacks else ""))
    return found
