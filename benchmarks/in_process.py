"""The engine without services around it, for benchmarks that compare computing alone."""

from __future__ import annotations

from pathlib import Path

import torch

from kvferry.common.cores import available_cores
from kvferry.common.hashing import root_name
from kvferry.common.requests import SamplingParams
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence

BLOCK = 16


class InProcessEngine:
    """A model and a pool; `submit` greedy requests, `run` until all are done."""

    def __init__(
        self, model: LlamaModel, num_blocks: int, *, max_num_seqs: int, prefix_caching: bool = True, chunk: int = 256
    ) -> None:
        config = model.config
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
        self._reports: list[StepReport] = []
        limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=chunk, max_num_waiting=10_000)
        scheduler = Scheduler(BlockPool(num_blocks, prefix_caching), limits)
        eos = tuple(config.eos_token_ids)
        runner = TorchRunner(model, torch.zeros(shape), eos)
        self.engine = Engine(runner, scheduler, eos, num_blocks * BLOCK, self._reports.append)
        self._number = 0

    def submit(self, prompt: tuple[int, ...], num_tokens: int) -> str:
        self._number += 1
        key = str(self._number)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        root = root_name("bench", "bench")
        self.engine.submit(Sequence(key, list(prompt), len(prompt), root, BLOCK, params))
        return key

    def run(self) -> dict[str, list[int]]:
        """Token ids by key."""
        self._reports.clear()
        while self.engine.step():
            pass
        found: dict[str, list[int]] = {}
        for report in self._reports:
            for token in report.tokens:
                found.setdefault(token.key, []).append(token.token_id)
        return found


def load(folder: Path) -> LlamaModel:
    torch.set_num_threads(available_cores())
    return load_model(folder, torch.float32, torch.device("cpu"))
