"""`kvferry up`: a whole cluster on this machine, from preparing the model to leaving nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvferry.common.config import Config
from kvferry.common.errors import ConfigError, ModelLoadError, StartupError
from kvferry.common.models import ALIASES, resolve_model
from kvferry.common.stop_signals import stop_signals
from kvferry.services.local import plan
from kvferry.services.local.access import KEY_VARIABLE
from kvferry.services.local.console import Console
from kvferry.services.local.prepare import is_prepared
from kvferry.services.local.redis_server import find_redis_server, make_folder, redis_url
from kvferry.services.local.supervisor import Fleet

INTERRUPTED_EXIT = 130
REDIS_TIMEOUT_S = 3.0
STATUS_EVERY_S = 0.5
PLAIN_STATUS_EVERY_S = 10.0


def main(config: Config) -> int:
    """Runs until Ctrl-C or SIGTERM: 0 after a drain, 130 when a second Ctrl-C cut it short.

    Raises StartupError for what the operator must change. However it ends, no process and no file of ours is left.
    """
    return asyncio.run(_Up(config, Console()).run())


class _Up:
    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._console = console
        self._fleet = Fleet(console)
        self._stop = asyncio.Event()
        self._num_signals = 0

    async def run(self) -> int:
        async with AsyncExitStack() as stack:
            stack.enter_context(stop_signals(self._on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            stack.callback(_sweep_shared_memory, self._config.node.shm_dir)
            folder = Path(stack.enter_context(make_folder()))
            stack.push_async_callback(self._fleet.drain)
            await self._unless_stopped(self._start(folder))
            if not self._stop.is_set():
                print(how_to_use(self._config), flush=True)
            await self._unless_stopped(asyncio.Event().wait())
        return INTERRUPTED_EXIT if self._num_signals > 1 else 0

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals == 1:
            self._console.say("draining: no new requests, running ones finish (Ctrl-C again: end now)")
        else:
            self._console.say("ending now")
            self._fleet.kill()

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> None:
        """Returns when `work` is done or we are told to stop; raises its error, or a child's that cannot go on."""
        task = asyncio.create_task(work)
        others = [asyncio.create_task(event.wait()) for event in (self._stop, self._fleet.failed)]
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        for pending in (task, *others):
            pending.cancel()
        await asyncio.wait([task, *others])
        if self._fleet.failure is not None:
            raise self._fleet.failure
        if not task.cancelled():
            task.result()

    async def _start(self, folder: Path) -> None:
        local = self._config.local
        if local.num_decode + local.num_both == 0:
            raise ConfigError("a cluster needs a node that decodes: give --decode 1 or --both 1")
        self._config = plan.claim_gateway_port(self._config)
        await self._provide_redis(folder)
        await self._provide_model()
        nodes = plan.node_programs(self._config, folder / "cores")
        self._fleet.start(nodes)
        self._fleet.start([plan.gateway_program(self._config)])
        self._console.say(f"starting {', '.join(program.name for program in nodes)} and the gateway")
        await self._all_ready()

    async def _provide_redis(self, folder: Path) -> None:
        cluster = self._config.cluster
        if cluster.redis_url:
            if problem := await plan.redis_problem(cluster.redis_url, cluster.namespace, REDIS_TIMEOUT_S):
                raise ConfigError(f"{problem} (--redis-url; without it, `kvferry up` brings its own)")
            return
        self._fleet.start([plan.redis_program(find_redis_server(), folder)])
        await self._all_ready()
        self._config = self._config.model_copy(
            update={"cluster": cluster.model_copy(update={"redis_url": redis_url(folder)})}
        )

    async def _provide_model(self) -> None:
        model = self._config.cluster.model
        if _is_here(model):
            resolve_model(model)
            return
        # In a process of its own: converting takes memory that this one would keep, and can be interrupted there.
        process = await asyncio.create_subprocess_exec(
            *(*plan.CLI, "model", "prepare", model), stdout=asyncio.subprocess.DEVNULL
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if status:
            raise ModelLoadError(f"model {model!r} is not available (see above)")

    async def _all_ready(self) -> None:
        """Waits for every child started so far, and shows for which."""
        timeout_s = self._config.local.ready_timeout
        begun = said = time.monotonic()
        ready = asyncio.create_task(self._fleet.wait_ready())
        try:
            while not ready.done():
                elapsed_s, waiting = time.monotonic() - begun, ", ".join(self._fleet.not_ready())
                if elapsed_s > timeout_s:
                    raise StartupError(f"not ready within {timeout_s:g} s (--ready-timeout): {waiting}")
                self._console.status(f"waiting for {waiting} ({elapsed_s:.0f} s)")
                if not self._console.is_terminal and time.monotonic() - said > PLAIN_STATUS_EVERY_S:
                    said = time.monotonic()
                    self._console.say(f"waiting for {waiting} ({elapsed_s:.0f} s)")
                await asyncio.wait([ready], timeout=min(STATUS_EVERY_S, timeout_s - elapsed_s))
        finally:
            self._console.status("")
            ready.cancel()


def _is_here(model: str) -> bool:
    return is_prepared(model) if model in ALIASES else Path(model).expanduser().exists()


def how_to_use(config: Config) -> str:
    """The address and a command line that can be pasted as it stands, with the key in a variable where one is due."""
    url, model = plan.gateway_url(config), config.served_model
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True,
    }
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    gateway = config.gateway
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if gateway.asks_for_key else ""
    shows = " --cert CLIENT.pem --key CLIENT-KEY.pem" if gateway.ssl_ca_certs else ""
    return (
        f"\nkvferry serves {model} at {url}\n\n"
        f"curl -N{shows} {url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n  -d '{quoted}'\n"
    )


def _sweep_shared_memory(shm_dir: str) -> None:
    """Removes what nodes that were killed have left; files of living owners stay."""
    from kvferry.services.transfer.segment import PoolSegment

    PoolSegment.sweep(shm_dir)
