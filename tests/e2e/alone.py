"""The reference for sampling through a cluster: one sequence, computed alone in this process, without any scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from kvferry.common.requests import SamplingParams, TokenLogprobs
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.sample_rows import SampleRow
from kvferry.services.engine.sampler import SampledToken
from kvferry.services.engine.top_tokens import token_logprobs
from tests.engine.paging import PagedModel
from tests.engine.sampling import sample


@dataclass
class Alone:
    """`generate` is what any cluster must return for the same prompt and parameters, bit for bit."""

    model: LlamaModel
    kv_dtype: torch.dtype = torch.float32

    @classmethod
    def load(cls, folder: Path, kv_dtype: torch.dtype = torch.float32) -> Self:
        return cls(load_model(folder, torch.float32), kv_dtype)

    def generate(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[SampledToken]:
        paged, eos = PagedModel(self.model, kv_dtype=self.kv_dtype), tuple(self.model.config.eos_token_ids)
        seq, logits = paged.prefill(prompt, chunk=64)
        logits, out = logits[-1:], list[SampledToken]()
        while True:
            tokens = [token.token_id for token in out]
            row = SampleRow(params, len(prompt) + len(out), index, prompt, tokens, eos)
            out.append(sample(logits, [row])[0])
            last = out[-1].token_id
            ended = last in params.stop_token_ids or (last in eos and not params.ignore_eos)
            if ended or len(out) == params.max_tokens:
                return out
            seq.token_ids.append(last)
            logits = paged.step([(seq, 1)])

    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        _, logits = PagedModel(self.model, kv_dtype=self.kv_dtype).prefill(prompt, chunk=50)
        return token_logprobs(logits[:-1], prompt[1:], num_top)
