"""What `kvferry tune` measures: a start from nothing, and the real engine on chunks of several sizes and a sample."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvferry.common.config import Config
from kvferry.common.cores import NODE_ENVIRON
from kvferry.common.errors import StartupError
from kvferry.common.hashing import root_name
from kvferry.common.nodes import Role
from kvferry.common.requests import SamplingParams
from kvferry.services.local import plan
from kvferry.services.local.flags import config_environ

if TYPE_CHECKING:
    from kvferry.services.engine.outputs import FirstToken, StepReport
    from kvferry.services.node.engine_factory import BuiltEngine

COLD_START_LIMIT_S = 1800.0
BUDGETS = {"cpu": (32, 64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096, 8192)}
NUM_STREAMS = 4  # that decode beside the swept prompt
STREAM_PROMPT_TOKENS = 32
MAX_SAMPLE = 32


@dataclass(frozen=True, slots=True)
class ChunkSpeed:
    """One prompt in chunks of at most `budget` tokens, beside streams. `step_ms`: the longest step they waited for."""

    budget: int
    tokens_per_s: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class PrefixGain:
    """A sample of prompts, computed in order: with the cache, and each as if it were the first."""

    num_prompts: int
    num_tokens: int
    num_cached: int
    with_s: float
    without_s: float


async def cold_start_s(config: Config) -> float:
    """Seconds from starting a node's process until it is ready. Raises StartupError when it ends instead."""
    (port,) = plan.free_ports("127.0.0.1", 1)
    node = config.node.model_copy(update={"node_host": "127.0.0.1", "node_port": port, "metrics_port": 0})
    cluster = config.cluster.model_copy(update={"redis_url": "memory://", "log_level": "error"})
    environ = NODE_ENVIRON | config_environ(config.model_copy(update={"node": node, "cluster": cluster}))
    is_ready = plan.serving(plan.join("127.0.0.1", port), plan.dial(config))
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(*plan.CLI, "both", env=environ)
    try:
        while not await is_ready():
            if process.returncode is not None:
                raise StartupError(f"the node that was to be measured ended with status {process.returncode}")
            if time.monotonic() - begun > COLD_START_LIMIT_S:
                raise StartupError(f"the node that was to be measured was not ready within {COLD_START_LIMIT_S:g} s")
            await asyncio.sleep(0.05)
        return time.monotonic() - begun
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


class Bench:
    """The engine that a node would run, stepped by hand. `close` it: it has a pool in shared memory."""

    def __init__(self, config: Config) -> None:
        from kvferry.services.node.engine_factory import build_engine

        self._reports: list[StepReport] = []
        self.built: BuiltEngine = build_engine(config, Role.BOTH, f"tune-{os.getpid()}", self._reports.append)
        self._dice = random.Random(0)
        self._number = 0

    def close(self) -> None:
        self.built.segment.close()

    def sweep(self, budgets: Iterable[int]) -> list[ChunkSpeed]:
        """The better of two runs each: what else the machine does makes them slower, never faster."""
        return [max((self._speed(n) for _ in range(2)), key=lambda speed: speed.tokens_per_s) for n in budgets]

    def gain(self, prompts: Sequence[Sequence[int]]) -> PrefixGain:
        sample = [tuple(prompt[: self.built.max_model_len - 2]) for prompt in prompts[:MAX_SAMPLE] if len(prompt)]
        salted, shared = iter(range(len(sample))), "tune-sample"
        without_s = sum(self._compute(prompt, f"tune-{next(salted)}")[0] for prompt in sample)
        runs = [self._compute(prompt, shared) for prompt in sample]
        cached = sum(first.cached_tokens for _, first in runs)
        with_s = sum(seconds for seconds, _ in runs)
        return PrefixGain(len(sample), sum(map(len, sample)), cached, with_s, without_s)

    # ---- inside

    def _speed(self, budget: int) -> ChunkSpeed:
        engine = self.built.engine
        engine.scheduler.limits = replace(engine.scheduler.limits, max_num_batched_tokens=budget)
        longest = self.built.max_model_len
        length = max(min(2 * budget, 1024, longest // 2), 16)
        streams = [self._submit(self._random(STREAM_PROMPT_TOKENS), longest // 2) for _ in range(NUM_STREAMS)]
        self._until(lambda: all(key in self._firsts() for key in streams))
        prompt = self._submit(self._random(length), 1)
        begun, worst_s = time.monotonic(), 0.0
        while prompt not in self._firsts():
            before = time.monotonic()
            engine.step()
            worst_s = max(worst_s, time.monotonic() - before)
        took_s = time.monotonic() - begun
        for key in streams:
            engine.close(key)
        return ChunkSpeed(budget, length / took_s, worst_s * 1e3)

    def _compute(self, prompt: Sequence[int], salt: str) -> tuple[float, FirstToken]:
        begun = time.monotonic()
        key = self._submit(prompt, 1, salt)
        self._until(lambda: key in self._firsts())
        return time.monotonic() - begun, self._firsts()[key]

    def _submit(self, prompt: Sequence[int], max_tokens: int, salt: str = "tune") -> str:
        from kvferry.services.engine.sequence import Sequence as EngineSequence

        self._number += 1
        key, card = f"tune-{self._number}", self.built.card
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        root = root_name(card.model_fingerprint, card.numerics_id, salt)
        self.built.engine.submit(EngineSequence(key, list(prompt), len(prompt), root, card.block_size, params))
        return key

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.built.engine.step()

    def _firsts(self) -> dict[str, FirstToken]:
        tokens = (token for report in self._reports for token in report.tokens)
        return {token.key: token.first for token in tokens if token.first is not None}

    def _random(self, length: int) -> list[int]:
        return [self._dice.randrange(3, self.built.model_config.vocab_size) for _ in range(length)]
