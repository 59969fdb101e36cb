"""Builds a node's engine from its configuration: model, pool memory, scheduler, runner. Blocks; run it in a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import kvferry
from kvferry.common.config import (
    BOTH_MAX_PROMPT_WAIT_MS,
    BOTH_MAX_STEP_MS,
    DECODE_MAX_STEP_MS,
    Config,
    EngineConfig,
)
from kvferry.common.core_board import CoreBoard
from kvferry.common.cores import available_cores, available_memory_bytes
from kvferry.common.errors import ConfigError
from kvferry.common.models import resolve_model
from kvferry.common.nodes import LayoutCard, Role
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.grammar import Grammars
from kvferry.services.engine.host_mirror import HostMirror
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.loader import is_batch_invariant, load_model, model_fingerprint, numerics_id
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.model_config import ModelConfig
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.warm_up import warm_up
from kvferry.services.transfer.segment import PoolSegment

log = logging.getLogger("kvferry.node")

CPU_KV_CACHE_BYTES = 512 * 2**20
DEFAULT_MAX_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
GPU_WORKSPACE_BYTES = 3 * 2**29
"""Of a GPU's share, what steps need for activations and logits, and captured ones once more."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    card: LayoutCard
    segment: PoolSegment
    model_config: ModelConfig
    max_model_len: int
    grammars: Grammars
    batch_invariant: bool
    core_board: CoreBoard | None


def build_engine(config: Config, role: Role, instance_id: str, on_report: Callable[[StepReport], None]) -> BuiltEngine:
    """Raises ModelLoadError or ConfigError with what to change."""
    num_threads = config.engine.num_threads or available_cores()
    torch.set_num_threads(num_threads)
    folder = resolve_model(config.cluster.model)
    log.info("loading %s", folder)
    device = _device(config.engine.device)
    dtype, kv_dtype = dtypes(config.engine, device)
    invariant = is_batch_invariant(device, dtype, config.engine.batch_invariant)
    if config.engine.batch_invariant and not invariant:
        raise ConfigError(f"batch_invariant: no kernel for {device.type} promises it here; is triton installed?")
    weight_format = config.engine.weight_format
    model = load_model(folder, dtype, device, config.engine.batch_invariant, weight_format)
    model.enforce_eager = config.engine.enforce_eager
    core_board = None
    if config.engine.core_board is not None and device.type == "cpu":
        core_board = CoreBoard(Path(config.engine.core_board), num_threads, available_cores())
        model.choose_threads = partial(_choose_threads, core_board)
    card = _card(folder, model.config, config.engine, device)
    num_blocks = _num_blocks(config.engine, card, device)
    max_model_len = _max_model_len(config.engine, model.config, num_blocks)
    segment = _segment(config, instance_id, num_blocks, card.block_bytes)
    host = torch.from_numpy(segment.buffer.reshape(-1)).view(kv_dtype)
    host = host.view(num_blocks, card.num_layers, 2, card.num_kv_heads, card.block_size, card.head_dim)
    kv_cache = host if device.type == "cpu" else torch.empty_like(host, device=device)
    mirror = None if kv_cache is host else HostMirror(kv_cache, host)
    if mirror is not None:
        warm_up(model, kv_cache, mirror, max_model_len)
    if device.type == "cuda" and not config.engine.enforce_eager:
        _capture_decodes(model, kv_cache, config.engine.max_num_seqs, max_model_len)
    eos = tuple(model.config.eos_token_ids)
    max_step_ms, max_prompt_wait_ms = _step_limits(config.engine, role)
    limits = SchedulerLimits(
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=(config.engine.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS[device.type]),
        max_num_waiting=config.engine.max_num_waiting,
        max_step_ms=max_step_ms,
        max_prompt_wait_ms=max_prompt_wait_ms,
        max_num_waiting_tokens=config.engine.max_num_waiting_tokens,
        policy=config.engine.scheduling_policy,
        long_prefill_token_threshold=config.engine.long_prefill_token_threshold,
        max_num_preemptions=config.engine.max_num_preemptions,
        max_model_len=max_model_len,
    )
    pool = BlockPool(num_blocks, config.engine.enable_prefix_caching)
    runner = TorchRunner(model, kv_cache, eos, mirror)
    engine = Engine(runner, Scheduler(pool, limits), eos, max_model_len, on_report)
    log.info(
        "%s, weights in %s, %d KV blocks of %d tokens in %s (%.0f MiB, %s), context %d, %d threads",
        device,
        weight_format,
        num_blocks,
        card.block_size,
        card.dtype,
        num_blocks * card.block_bytes / 2**20,
        "shared" if segment.path else "private",
        max_model_len,
        torch.get_num_threads(),
    )
    grammars = Grammars(folder, model.config.vocab_size, eos)
    log.info("batch invariance is %s, numerics %s", "in force" if invariant else "NOT in force", card.numerics_id)
    return BuiltEngine(engine, card, segment, model.config, max_model_len, grammars, invariant, core_board)


def _choose_threads(core_board: CoreBoard) -> None:
    if (num_threads := core_board.begin()) != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def dtypes(engine: EngineConfig, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """What is computed in, and what KV blocks are kept as."""
    kept = engine.kv_cache_dtype
    if device.type == "cpu":
        return torch.float32, torch.float32 if kept == "auto" else getattr(torch, kept)
    if engine.quantization is not None:
        raise ConfigError(
            f"weights are kept as {engine.quantization} on CPU only, and this node computes on {device.type}"
        )
    if kept not in ("auto", engine.dtype):
        raise ConfigError(
            f"kv_cache_dtype {kept}: on {device.type} KV blocks are kept as the model computes, in {engine.dtype} "
            f"(dtype): use auto, or the same for both"
        )
    dtype = getattr(torch, engine.dtype)
    return dtype, dtype


def _capture_decodes(model: LlamaModel, kv_cache: torch.Tensor, max_num_seqs: int, max_model_len: int) -> None:
    try:
        if not model.capture_decodes(kv_cache, max_num_seqs, max_model_len):
            log.warning("no CUDA graphs for decode steps: they need triton's kernels")
    except RuntimeError as exc:
        raise ConfigError(f"decode steps cannot be captured as CUDA graphs, set enforce_eager: {exc}") from exc


def _card(folder: Path, model: ModelConfig, engine: EngineConfig, device: torch.device) -> LayoutCard:
    dtype, kv_dtype = dtypes(engine, device)
    return LayoutCard(
        model_fingerprint=model_fingerprint(folder, dtype, engine.weight_format, kv_dtype),
        numerics_id=numerics_id(device, dtype, engine.batch_invariant, engine.weight_format, kv_dtype),
        dtype=str(kv_dtype).removeprefix("torch."),
        block_size=engine.block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        version=kvferry.__version__,
        weights=engine.weight_format,
    )


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda and f"is built for CUDA {torch.version.cuda} but finds no GPU{_why_no_gpu()}"
        raise ConfigError(f"device cuda: torch {torch.__version__} {built or 'is a build for CPUs'}; use --device cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _why_no_gpu() -> str:
    """What torch itself says: no driver, one too old for its build, no device visible."""
    try:
        torch.cuda.init()
    except Exception as exc:  # torch's own kinds of it
        return f" ({' '.join(str(exc).split())})"
    return ""


def _step_limits(engine: EngineConfig, role: Role) -> tuple[float | None, float | None]:
    """`max_step_ms`, and `max_prompt_wait_ms`, which only a default has: what the operator asks for is kept."""
    if engine.max_step_ms is not None:
        return engine.max_step_ms, None
    if role is Role.BOTH:
        return BOTH_MAX_STEP_MS, BOTH_MAX_PROMPT_WAIT_MS
    return (DECODE_MAX_STEP_MS if role is Role.DECODE else None), None


def _num_blocks(engine: EngineConfig, card: LayoutCard, device: torch.device) -> int:
    """As many as the pool's memory holds. Called when the weights are in memory already."""
    if engine.num_blocks_override is not None:
        return engine.num_blocks_override
    memory = engine.kv_cache_memory or CPU_KV_CACHE_BYTES
    if engine.kv_cache_memory is None and device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left over is counted as ours, else
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        memory = gpu_kv_cache_bytes(free, total, own, engine.gpu_memory_utilization)
        memory = _within_host_memory(memory, engine.kv_mirror_memory or available_memory_bytes() // 2)
    if memory < card.block_bytes:
        raise ConfigError(f"kv_cache_memory {memory} is less than one block of {card.block_bytes} bytes")
    return memory // card.block_bytes


def gpu_kv_cache_bytes(free: int, total: int, own: int, utilization: float) -> int:
    """What is left for KV of this node's share of a GPU once its weights (`own`) are loaded, and is there.

    Counted from the share, not from what is free: nodes that start together on one GPU would all count the same bytes.
    Raises ConfigError where nothing is left.
    """
    memory = min(int(total * utilization) - own, free) - GPU_WORKSPACE_BYTES
    if memory <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g} of {total / 2**30:.1f} GiB leaves nothing for KV blocks: "
            f"this node's weights take {own / 2**30:.1f} GiB, {(total - free) / 2**30:.1f} GiB are in use, "
            f"and {GPU_WORKSPACE_BYTES / 2**30:.1f} GiB are kept for steps"
        )
    return memory


def _within_host_memory(memory: int, mirror_memory: int) -> int:
    """The pool's mirror is as large as the pool, and comes to be used to the last block."""
    if memory > mirror_memory:
        log.warning(
            "KV pool limited to %.1f GiB by host memory for its mirror (kv_mirror_memory); the GPU has room for %.1f",
            mirror_memory / 2**30,
            memory / 2**30,
        )
    return min(memory, mirror_memory)


def _max_model_len(engine: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The context limit: the model's or the configured one, and never more than the pool holds."""
    longest = model.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > longest:
        raise ConfigError(f"max_model_len {engine.max_model_len} exceeds the model's own limit of {longest}")
    wanted = engine.max_model_len or longest
    if (fits := num_blocks * engine.block_size) < wanted:
        log.warning("context limited to %d tokens: the KV pool holds no more (wanted %d)", fits, wanted)
    return min(wanted, fits)


def _segment(config: Config, instance_id: str, num_blocks: int, block_bytes: int) -> PoolSegment:
    """Shared memory where it is offered and there is room; else private memory, and the next transport serves."""
    PoolSegment.sweep(config.node.shm_dir)
    if "shm" in config.node.transports:
        try:
            return PoolSegment.create(config.node.shm_dir, instance_id, num_blocks, block_bytes)
        except ConfigError as exc:
            log.warning("transport shm is off: %s", exc.message)
    return PoolSegment.anonymous(num_blocks, block_bytes)
