"""The sampler for rows that are told one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.services.engine import sampler
from kvferry.services.engine.sample_rows import SampleRow, SampleRows


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[sampler.SampledToken]:
    return sampler.sample(logits, SampleRows.of(rows))
