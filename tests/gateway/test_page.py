"""The operations page: what a browser is told about it, and what a browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.common.nodes import BlockAccounts, Link, NodeLoad, NodeRecord, NodeState, Role
from kvferry.services.gateway.api_keys import new_key
from tests.gateway.browser import CHROMIUM, Tab, browser
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, gateway, run

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install chromium")
LOAD = NodeLoad(
    num_running=3,
    num_waiting=2,
    num_blocks=100,
    accounts=BlockAccounts(free=20, cached=30, sequence=40, lease=6, incoming=4),
)
MARKUP = '<img src=x onerror="document.title=1"><b>bold</b>'


class LinkedNode(FakeDecode):
    """Tells of links, and may be called what no operator would."""

    links: tuple[Link, ...] = ()

    def record(self) -> NodeRecord:
        return replace(super().record(), links=self.links)


def linked_nodes(prefill_name: str = "p0", decode_name: str = "d0") -> tuple[FakeDecode, LinkedNode]:
    prefill, decode = FakeDecode(node_id=prefill_name, role=Role.PREFILL), LinkedNode(node_id=decode_name)
    prefill.load = decode.load = LOAD
    decode.role = Role.DECODE
    return prefill, decode


def link(to: FakeDecode, decode: LinkedNode, num_bytes: int, reason: str = "first choice of both sides") -> None:
    decode.links = (Link(to.instance_id, to.address, "shm", reason, num_bytes // 10_000, num_bytes),)


def test_it_is_one_file_that_may_run_nothing_but_itself() -> None:
    async def scenario(setup: Setup) -> None:
        answer = await setup.client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
            assert policy[name] == "'none'"
        for tag in ("script", "style"):
            (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
        assert re.findall(r"""(?:src|href|action)=["']([^"']*)""", answer.text) == ["data:,"]
        assert set(re.findall(r"https?://[^\s\"'`]*", answer.text)) == {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=", answer.text)

    run(gateway(FakeDecode()), scenario)


def in_browser(
    tmp_path: Path, nodes: tuple[FakeDecode, ...], look: Callable[[Setup, Tab], Coroutine[None, None, None]]
) -> None:
    """The page of a gateway with these nodes, with nothing to complain about at the end."""

    async def scenario(setup: Setup) -> None:
        async with browser(tmp_path) as tab:
            await tab.show(str(setup.client.base_url))
            await tab.until("document.querySelector('#status')?.textContent.match(/well|alert/)")
            await look(setup, tab)
            assert tab.complaints == []

    run(gateway(*nodes, over_port=True), scenario)


@needs_browser
def test_it_shows_the_nodes_and_each_request_as_it_ends(tmp_path: Path) -> None:
    prefill, decode = linked_nodes()
    decode.behaviour = Behaviour(cached_tokens=2)

    async def look(setup: Setup, tab: Tab) -> None:
        text = await tab.evaluate("document.body.innerText")
        for shown in ("p0", "d0", "tiny", "1 prefill", "1 decode", "3 running", "2 waiting", "None has ended yet"):
            assert shown in text
        widths = "[...document.querySelectorAll('#right .node .bar i')].map((part) => part.style.width)"
        assert await tab.evaluate(widths) == ["40%", "6%", "4%", "30%"]
        await tab.evaluate("window.untouched = true")
        for number in (1, 2):
            await setup.client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3 + number},
                headers={"x-request-id": f"request-{number}"},
            )
            await tab.until(f"document.querySelectorAll('#requests details').length === {number}")
        rows = await tab.evaluate("[...document.querySelectorAll('#requests details')].map((row) => row.textContent)")
        assert [re.findall(r"request-\d", row) for row in rows] == [["request-2"], ["request-1"]]
        assert "3 (2 cached) → 5" in rows[0]
        assert await tab.evaluate("window.untouched")  # it was not loaded again

    in_browser(tmp_path, (prefill, decode), look)


@needs_browser
def test_ferries_move_while_blocks_do(tmp_path: Path) -> None:
    prefill, decode = linked_nodes()

    async def look(setup: Setup, tab: Tab) -> None:
        link(prefill, decode, 5_000_000)
        await tab.until("document.querySelector('#right .links')?.textContent.includes('5.0 MB')")
        assert await tab.evaluate("document.querySelectorAll('#map .ferry.moving').length") == 0
        link(prefill, decode, 45_000_000)
        await tab.until("document.querySelectorAll('#map .ferry.moving').length === 1")
        assert "from p0" in await tab.evaluate("document.querySelector('#right .links').innerText")
        await tab.until("document.querySelectorAll('#map .ferry.moving').length === 0")

    in_browser(tmp_path, (prefill, decode), look)


@needs_browser
def test_what_goes_wrong_is_said_and_so_is_that_it_is_well_again(tmp_path: Path) -> None:
    prefill, decode = linked_nodes()

    async def look(setup: Setup, tab: Tab) -> None:
        assert await tab.evaluate("document.querySelector('#alerts').hidden")
        prefill.state = NodeState.STALLED
        await tab.until("document.querySelector('#alerts')?.textContent.includes('p0 is stalled')")
        await tab.until("document.title === '(1) kvferry'")
        assert await tab.evaluate("document.querySelector('#alerts').offsetHeight") > 0
        prefill.state = NodeState.READY
        await tab.until("document.querySelector('#status').textContent === 'all is well'")
        assert await tab.evaluate("document.querySelector('#alerts').hidden")

    in_browser(tmp_path, (prefill, decode), look)


@needs_browser
def test_names_are_text_whatever_they_say(tmp_path: Path) -> None:
    prefill, decode = linked_nodes(prefill_name=f"p{MARKUP}", decode_name=f"d{MARKUP}")

    async def look(setup: Setup, tab: Tab) -> None:
        link(prefill, decode, 10**6, reason=f"shm: failed: {MARKUP}")
        await setup.client.post(
            "/v1/completions",
            json={"model": MARKUP, "prompt": "x", "max_tokens": 1},
            headers={"x-request-id": MARKUP.replace(" ", "/")},
        )
        await tab.until("document.querySelectorAll('#requests details').length === 1")
        await tab.until("document.querySelectorAll('#right .links li').length === 1")
        await tab.until("document.querySelectorAll('.alert').length > 0")
        assert await tab.evaluate("document.querySelectorAll('img').length") == 0
        text = await tab.evaluate("document.documentElement.textContent")
        for named in (f"p{MARKUP}", f"d{MARKUP}", f"{MARKUP} · ", f"failed: {MARKUP}", MARKUP.replace(" ", "/")):
            assert named in text

    async def scenario(setup: Setup) -> None:
        async with browser(tmp_path) as tab:
            await tab.show(str(setup.client.base_url))
            await look(setup, tab)
            assert tab.complaints == []

    prefill.model = decode.model = MARKUP
    run(gateway(prefill, decode, over_port=True, served_model_name=MARKUP), scenario)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_keeps_to_the_colours_that_are_asked_for(tmp_path: Path, dark: bool) -> None:
    nodes = linked_nodes(
        prefill_name="a-prefill-node-with-a-long-name-7d9f", decode_name="a-decode-node-with-another-0"
    )

    async def look(setup: Setup, tab: Tab) -> None:
        await setup.complete("x", max_tokens=1)
        await tab.show(str(setup.client.base_url), width=390, height=844, dark=dark)
        await tab.until("document.querySelectorAll('#requests details').length === 1")
        assert await tab.evaluate("document.documentElement.scrollWidth") == 390
        red, green, blue = map(
            int, re.findall(r"\d+", await tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        )
        assert (red + green + blue < 150) == dark

    in_browser(tmp_path, nodes, look)


@needs_browser
def test_it_asks_for_a_key_where_one_is_due_and_keeps_it_in_its_tab(tmp_path: Path) -> None:
    key, line = new_key("operator")

    async def enter(tab: Tab, given: str) -> None:
        await tab.evaluate(f"document.querySelector('#key').value = '{given}'")
        await tab.evaluate("document.querySelector('#key-form button').click()")

    async def scenario(setup: Setup) -> None:
        async with browser(tmp_path) as tab:
            await tab.show(str(setup.client.base_url))
            await tab.until("document.querySelector('#key-says')?.textContent.includes('asks for an API key')")
            assert await tab.evaluate("document.querySelector('#no-access').offsetHeight") > 0
            assert await tab.evaluate("document.querySelector('#status').textContent") == "no access"
            await enter(tab, "kvf-wrong")
            await tab.until("document.querySelector('#key-says').textContent.includes('does not know')")
            await enter(tab, key)
            await tab.until("document.querySelector('#status').textContent === 'all is well'")
            assert await tab.evaluate("document.querySelector('#no-access').hidden")
            assert await tab.evaluate("[localStorage.length, document.cookie, location.href.includes('kvf-')]") == [
                0,
                "",
                False,
            ]
            await tab.show(str(setup.client.base_url))
            await tab.until("document.querySelector('#status')?.textContent === 'all is well'")
            refusals = [said for said in tab.complaints if "401" in said]
            assert len(refusals) == 2  # one question per key, not one a second
            assert tab.complaints == refusals

    run(gateway(FakeDecode(), over_port=True, api_keys=line), scenario)


@needs_browser
def test_a_gateway_that_is_gone_is_not_shown_as_well(tmp_path: Path) -> None:
    async def scenario(setup: Setup) -> None:
        async with browser(tmp_path) as tab:
            await tab.show(str(setup.client.base_url))
            await tab.until("document.querySelector('#status')?.textContent === 'all is well'")
            assert setup.server is not None
            setup.server.should_exit = True
            await tab.until("document.body.classList.contains('stale')")
            assert "no answer" in await tab.evaluate("document.querySelector('#status').textContent")

    run(gateway(FakeDecode(), over_port=True), scenario)
