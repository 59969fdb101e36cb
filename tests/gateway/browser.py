"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

ANSWER_TIMEOUT_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page. `complaints` are its console's errors and warnings, exceptions, refused resources and failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._open[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer

    async def listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if (waiting := self._open.pop(data.get("id"), None)) is not None:
                if "error" in data:
                    waiting.set_exception(RuntimeError(str(data["error"])))
                else:
                    waiting.set_result(data["result"])
            else:
                self._hear(data["method"], data["params"])

    def _hear(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown" or event == "Network.loadingFailed":
            self.complaints.append(json.dumps(params))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))

    async def evaluate(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until the expression holds, looked at with every change of the page."""
        watched = (
            f"new Promise((done) => {{ const look = () => {{ if ({condition}) {{ eye.disconnect(); done(true); }} }};"
            "const eye = new MutationObserver(look);"
            "eye.observe(document, {subtree: true, childList: true, characterData: true, attributes: true}); look(); })"
        )
        assert await self.evaluate(watched)

    async def screenshot(self) -> bytes:
        """A PNG of what is in view."""
        return base64.b64decode((await self.send("Page.captureScreenshot"))["data"])

    async def show(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.send("Page.navigate", url=url)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """Chromium with one tab; everything it writes goes into `folder`."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run", "--disable-extensions"]
    flags += ["--disable-background-networking", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "Chromium ended at once"
        port = line.decode().split("//", 1)[1].split("/")[0]
        drained = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{port}/json/list") as reply:
                (page,) = [target for target in await reply.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.send(f"{domain}.enable")
                yield tab
                await socket.close()
                await listening
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    await drained
