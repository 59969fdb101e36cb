"""Decode steps captured by batch size: the bits of steps that Python runs, at every number of sequences.

Without a GPU nothing is captured: the step itself runs again over the same memory, as a replay would.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.common.errors import ConfigError
from kvferry.kernels.triton import attention
from kvferry.kernels.triton.launch import Launch, recording
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs, DecodeRows, Step
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.node.engine_factory import _capture_decodes
from tests.engine.paging import PagedModel, PagedSequence
from tests.engine.test_model import prompt
from tests.tiny_model import TinyShape, write_tiny_model

SHAPE = TinyShape(hidden_size=20, intermediate_size=12, num_layers=1, num_heads=3, num_kv_heads=1)
MAX_NUM_SEQS = 5
LENGTHS = (1, 15, 31, 32, 70, 40)
"""Of prompts, before they decode: up to three splits of 32 keys."""

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
"""Of the interpreter, when spare rows attend to what nobody has written: NaN here."""


@pytest.fixture(autouse=True)
def _few_keys_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among two programs, or one where there are many rows."""
    monkeypatch.setattr(attention, "SPLIT_KEYS", 32)
    monkeypatch.setattr(attention, "GRAPH_PROGRAMS", 5)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest, on_gpu: torch.device, tmp_path: Path) -> LlamaModel:
    folder = write_tiny_model(tmp_path, architecture="Qwen3ForCausalLM", shape=SHAPE)
    return load_model(folder, request.param, on_gpu, batch_invariant=True)


def run_again(step: Step) -> Step:
    step()  # as CudaCapture does, before it captures
    return step


class Counted:
    """Captures where there is a GPU, and counts what is run of each graph."""

    def __init__(self, device: torch.device) -> None:
        self._capture: Capture = CudaCapture() if device.type == "cuda" else run_again
        self.num_runs: list[int] = []

    def __call__(self, step: Step) -> Step:
        again, number = self._capture(step), len(self.num_runs)
        self.num_runs.append(0)

        def counted() -> torch.Tensor:
            self.num_runs[number] += 1
            return again()

        return counted


def decoded(paged: PagedModel, sizes: list[int]) -> torch.Tensor:
    """Logits of decode steps with so many sequences each, drawn at random out of six behind prompts of random KV."""
    rng = random.Random(0)
    seqs = [PagedSequence(prompt(length, seed=length), length, paged.take_blocks(length)) for length in LENGTHS]
    rows = []
    for step, size in enumerate(sizes):
        active = rng.sample(seqs, size)
        for seq in active:
            seq.token_ids.append(3 + (7 * step + len(seq.token_ids)) % 500)
        rows.append(paged.step([(seq, 1) for seq in active]))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("sizes", "num_runs"),  # of the graphs for 5, 4, 2 and 1; six sequences are more than any has room for
    [([4, 1, 6, 3, 5, 2], [1, 2, 1, 1]), pytest.param([5, 1, 4], [1, 1, 0, 1], id="no scratch memory for splits")],
)
def test_a_captured_step_has_the_bits_of_an_eager_one_at_every_batch_size(
    model: LlamaModel, sizes: list[int], num_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(sizes) == 3:
        monkeypatch.setattr(attention, "MAX_SCRATCH_BYTES", 0)
    eager = PagedModel(model, 40)
    expected = decoded(eager, sizes)

    paged, counted = PagedModel(model, 40), Counted(model.device)
    assert model.capture_decodes(paged.kv_cache, MAX_NUM_SEQS, 100, counted)
    assert paged.kv_cache.isnan().all(), "capturing wrote into the pool"
    assert torch.equal(decoded(paged, sizes), expected)
    assert counted.num_runs == num_runs
    assert torch.equal(paged.kv_cache.nan_to_num(7.0), eager.kv_cache.nan_to_num(7.0)), "spare rows were written"


def test_chunks_other_pools_and_contexts_beyond_the_limit_are_not_taken(model: LlamaModel) -> None:
    paged, counted = PagedModel(model, 40), Counted(model.device)
    model.capture_decodes(paged.kv_cache, 2, 48, counted)
    seqs = [PagedSequence(prompt(n + 3), n, paged.take_blocks(n)) for n in (45, 9)]
    paged.step([(seqs[0], 2), (seqs[1], 1)])
    PagedModel(model, 4).step([(PagedSequence([4]), 1)])
    assert counted.num_runs == [0, 0]
    paged.step([(seqs[0], 1), (seqs[1], 1)])  # position 47, the last one
    assert counted.num_runs == [1, 0]
    seqs[0].token_ids.append(5)
    paged.step([(seqs[0], 1), (seqs[1], 1)])
    assert counted.num_runs == [1, 0]
    seqs[1].token_ids.append(5)
    paged.step([(seqs[1], 1)])
    assert counted.num_runs == [1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which can")
def test_a_node_that_cannot_capture_ends_and_says_what_to_set(model: LlamaModel) -> None:
    with pytest.raises(ConfigError, match=r"cannot be captured as CUDA graphs, set enforce_eager: \w+"):
        _capture_decodes(model, PagedModel(model, 4).kv_cache, 2, 48)


def summary(launches: list[Launch]) -> list[tuple[Any, ...]]:
    """All that a graph keeps of a launch, but for addresses."""

    def kept(argument: Any) -> Any:
        return (argument.shape, argument.dtype) if isinstance(argument, torch.Tensor) else argument

    return [
        (one.kernel.__name__, one.grid, [kept(argument) for argument in one.arguments], one.constants, one.options)
        for one in launches
    ]


def test_launches_depend_on_the_number_of_rows_alone(model: LlamaModel) -> None:
    paged = PagedModel(model, 40)
    rows = DecodeRows.spare(3, 7, model.device)
    found = []
    for positions in ((0, 0, 0), (3, 31, 64), (99, 99, 99)):
        rows.positions.copy_(torch.tensor(positions))
        with recording() as launches:
            model._decode(rows, paged.kv_cache)
        found.append(summary(launches))
    assert found[0] == found[1] == found[2]
    assert {name for name, *_ in found[0]} >= {"paged_attention", "merge_splits", "matmul", "rotary_and_write_kv"}


class Ops(TorchDispatchMode):
    """Names of what torch itself is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_captured_step_brings_nothing_from_the_host_and_asks_nothing_of_the_device(model: LlamaModel) -> None:
    """Either would end a capture: values read, sizes that depend on them, tensors made of Python's numbers."""
    paged = PagedModel(model, 40)
    rows = DecodeRows.spare(3, 7, model.device)
    with Ops() as ops:
        model._decode(rows, paged.kv_cache)
    assert ops.names & {"embedding", "stack"}
    waiting = {"_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "equal", "is_nonzero", "unique"}
    assert not ops.names & waiting


def test_rows_of_an_earlier_step_become_spare(on_gpu: torch.device) -> None:
    rows = DecodeRows.spare(3, 4, on_gpu)
    for starts in ((0, 1, 2, 3), (0, 1)):
        ones = torch.ones(len(starts) - 1, dtype=torch.int64, device=on_gpu)
        rows.fill(Batch(5 * ones, 6 * ones, 7 * ones, ones[:, None], starts, (6,) * len(ones), ones))
    assert rows.positions.tolist() == [6, 0, 0]
    assert rows.slot_mapping.tolist() == [7, -1, -1]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (2, [2, 1]), (6, [6, 4, 2, 1]), (128, [128, 64, 32, 16, 8, 4, 2, 1])]
)
def test_the_largest_step_is_captured_first_and_each_half_after_it(max_num_seqs: int, sizes: list[int]) -> None:
    captured: list[int] = []

    def decode(rows: DecodeRows, kv_cache: torch.Tensor) -> torch.Tensor:
        captured.append(len(rows.token_ids))
        assert rows.block_tables.shape == (len(rows.token_ids), 7)
        return rows.positions

    DecodeGraphs(decode, torch.zeros(4, 1, 2, 1, 16, 8), max_num_seqs, 100, run_again)
    assert captured == sizes
