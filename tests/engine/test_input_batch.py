"""A step's inputs: what they say of each token, and that steps may follow each other in the same memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.input_batch import ALIGNMENT, InputBatch
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.sampler import SampledToken
from kvferry.services.engine.schedule import Schedule, Scheduled
from kvferry.services.engine.sequence import Sequence
from tests.kernels.rows import threads
from tests.tiny_model import write_tiny_model

BLOCK = 8
CPU = torch.device("cpu")


def row(first_block: int, start: int, num_tokens: int, samples: bool = True, spare_blocks: int = 0) -> Scheduled:
    """Its blocks are scattered over 32 from `first_block` on; of those to spare it needs none yet."""
    num_blocks = -(-(start + num_tokens) // BLOCK) + spare_blocks
    tokens = [(7 * i + first_block) % 500 for i in range(start + num_tokens)]
    sampling = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True)
    seq = Sequence(f"of {first_block}", tokens, len(tokens), b"root", BLOCK, sampling)
    seq.block_table = array("q", (first_block + 5 * i % 32 for i in range(num_blocks)))
    return Scheduled(seq, start, num_tokens, samples)


def check(batch: Batch, rows: Rows[Scheduled]) -> None:
    tokens = [(i, position) for i, r in enumerate(rows) for position in range(r.start, r.start + r.num_tokens)]
    tables = [r.sequence.block_table.tolist() for r in rows]
    width = max(map(len, tables))
    assert batch.token_ids.tolist() == [rows[i].sequence.token_ids[position] for i, position in tokens]
    assert batch.positions.tolist() == [position for _, position in tokens]
    assert batch.slot_mapping.tolist() == [tables[i][p // BLOCK] * BLOCK + p % BLOCK for i, p in tokens]
    assert batch.block_tables.tolist() == [table + [0] * (width - len(table)) for table in tables]
    assert batch.context_lens == tuple(r.start for r in rows)
    starts = [sum(r.num_tokens for r in rows[:i]) for i in range(len(rows) + 1)]
    assert batch.query_starts == tuple(starts)
    assert batch.logit_rows.tolist() == [starts[i + 1] - 1 for i, r in enumerate(rows) if r.samples]


some_rows = st.lists(
    st.builds(
        row,
        first_block=st.integers(0, 1000),
        start=st.integers(0, 70),
        num_tokens=st.one_of(st.just(1), st.integers(1, 40)),
        samples=st.booleans(),
        spare_blocks=st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@given(steps=st.lists(some_rows, min_size=1, max_size=4))
def test_inputs_say_of_each_token_what_a_loop_would(steps: list[list[Scheduled]]) -> None:
    inputs = InputBatch(BLOCK, CPU)
    for rows in steps:
        check(inputs.fill(rows), rows)


def test_steps_share_memory_in_which_every_input_begins_aligned() -> None:
    inputs = InputBatch(BLOCK, CPU)
    inputs.fill([row(0, 60, 40)])
    memories = set()
    for rows in ([row(0, 3, 1)], [row(0, 3, 1), row(9, 30, 5)], [row(4, 0, 2, samples=False)]):
        batch = inputs.fill(rows)
        parts = batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows, batch.block_tables
        memories |= {part.untyped_storage().data_ptr() for part in parts}
        assert all(part.storage_offset() % ALIGNMENT == 0 for part in parts)
        assert all(part.is_contiguous() for part in parts)
    assert len(memories) == 1


def test_inputs_lie_on_the_pools_device() -> None:
    meta = InputBatch(BLOCK, torch.device("meta")).fill([row(0, 3, 1), row(9, 30, 5)])
    assert {part.device.type for part in (meta.token_ids, meta.block_tables, meta.logit_rows)} == {"meta"}
    assert meta.block_tables.shape == (2, 5)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_replayed_decodes_read_the_inputs_of_their_own_step(num_threads: int, tmp_path: Path) -> None:
    """A recording is made at the first step of so many sequences, and replayed where inputs lie elsewhere."""
    model = load_model(write_tiny_model(tmp_path), torch.float32)
    config = model.config
    dims = (200, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
    steps = [[row(0, 0, 20)], [row(50, 0, 7), row(100, 0, 150)]]
    for step in range(4):
        short, long, other = row(0, 20 + step, 1), row(100, 150 + step, 1), row(50, 7 + step, 1)
        work = [[short], [long, short], [other, long], [other], [long], [short, other, long]]
        steps += work[step:] + work[:step]

    def sampled(enforce_eager: bool) -> list[list[SampledToken]]:
        model.enforce_eager = enforce_eager
        runner = TorchRunner(model, torch.full(dims, torch.nan), ())
        return [runner.execute(Schedule(rows)) for rows in steps]

    with threads(num_threads):
        assert sampled(enforce_eager=False) == sampled(enforce_eager=True)
