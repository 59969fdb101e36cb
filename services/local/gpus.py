"""Which GPU each node of a local cluster gets, and how much of its memory: asked of the driver, without torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from kvferry.common.config import EngineConfig
from kvferry.common.cores import available_memory_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"


def num_gpus() -> int:
    """Those that a process started from here would find; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def shared_out(
    engine: EngineConfig, num_nodes: int, num_gpus: int, environ: Mapping[str, str] = os.environ
) -> list[tuple[EngineConfig, dict[str, str]]]:
    """For each node its settings and environment: GPUs in turn, and where nodes share one, equal parts of its memory.

    The mirrors of all pools are in this machine's memory: together they may take half of what is free.
    """
    if num_gpus == 0 or engine.device == "cpu":
        return [(engine, {})] * num_nodes
    names = environ[VISIBLE].split(",") if environ.get(VISIBLE) else [str(i) for i in range(num_gpus)]
    mirror = engine.kv_mirror_memory or available_memory_bytes() // 2 // num_nodes
    found = []
    for i in range(num_nodes):
        gpu = i % num_gpus
        num_sharing = len(range(gpu, num_nodes, num_gpus))
        update = {
            "gpu_memory_utilization": engine.gpu_memory_utilization / num_sharing,
            "kv_mirror_memory": mirror,
        }
        found.append((engine.model_copy(update=update), {VISIBLE: names[gpu].strip()}))
    return found
