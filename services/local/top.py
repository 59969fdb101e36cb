"""`kvferry top`: the operations page for a terminal. A plain client: it knows `/cluster/live` and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import httpx

from kvferry.common.errors import KvferryError
from kvferry.services.local.access import Access, no_answer

POLL_S = 1.0
TIMEOUT_S = 5.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"  # no cursor, long lines are cut
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_RED, _YELLOW, _GREEN, _BLUE, _CYAN, _MAGENTA, _FAINT, _BOLD = 31, 33, 32, 34, 36, 35, 2, 1
_LEVELS = {"critical": _RED, "warning": _YELLOW, "notice": _CYAN}
_PHASES = (("queue_s", _YELLOW), ("prefill_s", _BLUE), ("transfer_s", _CYAN), ("first_step_s", _MAGENTA))
_ACCOUNTS = (("sequence", _BLUE, "█"), ("lease", _YELLOW, "█"), ("incoming", _CYAN, "█"), ("cached", _FAINT, "▒"))
_BAR_WIDTH = 24
_ID_WIDTH = 14

State = dict[str, Any]
Paint = Callable[[str, int], str]


def main(access: Access, *, once: bool = False, out: TextIO | None = None) -> int:
    """Shows the cluster until Ctrl-C; once where `out` is no terminal.

    Raises Unavailable when there is no gateway, NoAccess when it wants a key or a certificate.
    """
    out = out or sys.stdout
    with access.client(TIMEOUT_S) as client:
        state = _ask(client, access)
        if once or not out.isatty():
            out.write("\n".join(render(state, _paint(out))) + "\n")
            return 0
        with _screen(out), contextlib.suppress(KeyboardInterrupt):
            _watch(client, access, state, out)
    return 0


def _ask(client: httpx.Client, access: Access) -> State:
    try:
        state: State = client.get("/cluster/live").raise_for_status().json()
    except (httpx.HTTPError, ValueError) as exc:
        raise no_answer(access, exc) from exc
    return state


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    """The terminal's other screen, and back to what was there before, whatever happens."""
    out.write(_ENTER)
    try:
        yield
    finally:
        out.write(_LEAVE)
        out.flush()


def _watch(client: httpx.Client, access: Access, state: State, out: TextIO) -> None:
    before: State | None = None
    problem = ""
    while True:
        lines = [*([problem] if problem else []), *render(state, _paint(out), before)]
        shown = lines[: shutil.get_terminal_size().lines - 1]
        out.write(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in shown) + _END_OF_SCREEN)
        out.flush()
        time.sleep(POLL_S)
        try:
            before, state, problem = state, _ask(client, access), ""
        except KvferryError as exc:
            problem = _paint(out)(plain(exc.message), _RED)


def _paint(out: TextIO) -> Paint:
    coloured = out.isatty() and "NO_COLOR" not in os.environ
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m" if coloured and text else text


def render(state: State, paint: Paint, before: State | None = None) -> list[str]:
    """The lines. With the state of a moment before, links show their speed instead of their total."""
    return [
        *_head(state, paint),
        *_alerts(state, paint),
        "",
        *_nodes(state, paint, before),
        "",
        *_requests(state, paint),
    ]


def plain(text: object) -> str:
    """What others have named, without what a terminal would obey."""
    return "".join(char if char.isprintable() else "�" for char in str(text))


def _head(state: State, paint: Paint) -> Iterator[str]:
    stats, loads = state["stats"], [node["load"] for node in state["nodes"]]
    blocks = sum(load["num_blocks"] for load in loads)
    used = blocks - sum(load["accounts"]["free"] + load["accounts"]["cached"] for load in loads)
    hits = _percent(stats["cached_tokens"], stats["prompt_tokens"])
    yield f"{paint('kvferry', _BOLD)} {plain(state['model'])} {state['version']}   last {stats['window_s'] / 60:g} min"
    yield (
        f"in flight {state['num_requests']}   waiting {sum(load['num_waiting'] for load in loads)}   "
        f"output {stats['tokens_per_s']:.0f} tok/s   prefix hits {hits}   "
        f"KV {_percent(used, blocks)} of {blocks} blocks"
    )
    for name, key in (("first token   ", "first_token"), ("between tokens", "inter_token")):
        yield f"{name}  " + "   ".join(f"{p} {_seconds(stats[key][p]):>7}" for p in ("p50", "p95", "p99"))


def _alerts(state: State, paint: Paint) -> Iterator[str]:
    if not state["alerts"]:
        yield paint("all is well", _GREEN)
    for alert in state["alerts"]:
        level = paint(alert["level"].upper(), _LEVELS[alert["level"]])
        yield f"{level} {plain(alert['title'])}. {plain(alert['detail'])}"


def _nodes(state: State, paint: Paint, before: State | None) -> Iterator[str]:
    names = {node["instance_id"]: plain(node["node_id"]) for node in state["nodes"]}
    width = max([4, *map(len, names.values())])
    yield paint(f"{'NODE':<{width}}  ROLE     STATE     RUN  WAIT  KV {'':<{_BAR_WIDTH + 5}}STEP", _FAINT)
    for node in sorted(state["nodes"], key=lambda node: (node["role"] != "prefill", node["node_id"])):
        load = node["load"]
        mood = node["state"] if node["live"] else "silent"
        colour = _GREEN if mood == "ready" else _CYAN if mood in ("draining", "loading") else _RED
        used = load["num_blocks"] - load["accounts"]["free"] - load["accounts"]["cached"]
        yield (
            f"{plain(node['node_id']):<{width}}  {node['role']:<7}  {paint(f'{mood:<8}', colour)}  "
            f"{load['num_running']:>3}  {load['num_waiting']:>4}  {_memory(load, paint)} "
            f"{_percent(used, load['num_blocks']):>5}  {load['step_ms']:.1f} ms"
        )
        for link in node["links"]:
            peer = names.get(link["instance_id"], plain(link["address"]))
            yield paint(
                f"{'':<{width}}  from {peer} over {link['transport']}: {_moved(node, link, state, before)}", _FAINT
            )


def _memory(load: State, paint: Paint) -> str:
    blocks, bar, length = load["num_blocks"], "", 0
    for account, colour, char in _ACCOUNTS:
        count = round(_BAR_WIDTH * load["accounts"][account] / blocks) if blocks else 0
        count = min(count, _BAR_WIDTH - length)
        bar, length = bar + paint(char * count, colour), length + count
    return bar + paint("·" * (_BAR_WIDTH - length), _FAINT)


def _moved(node: State, link: State, state: State, before: State | None) -> str:
    total: float = link["num_bytes"]
    if before is not None and (elapsed_s := state["now"] - before["now"]) > 0:
        old = {(n["instance_id"], k["instance_id"]): k["num_bytes"] for n in before["nodes"] for k in n["links"]}
        last = old.get((node["instance_id"], link["instance_id"]), total)
        return f"{_bytes(max(total - last, 0.0) / elapsed_s)}/s"
    return _bytes(total)


def _requests(state: State, paint: Paint) -> Iterator[str]:
    requests = state["requests"]
    if not requests:
        yield paint("no request has ended yet", _FAINT)
        return
    longest = max(request["total_s"] for request in requests)
    routes = [plain(" → ".join(filter(None, (r["prefill"], r["decode"]))) or "not placed") for r in requests]
    width = max([5, *map(len, routes)])
    legend = " ".join(paint("█", colour) + f" {key.removesuffix('_s').replace('_', ' ')}" for key, colour in _PHASES)
    yield paint(f"ENDED     {'REQUEST':<{_ID_WIDTH}}  {'ROUTE':<{width}}  {'TOKENS':>18}    TOTAL  END", _FAINT) + (
        f"   {paint('█', _FAINT)} gateway {legend} {paint('█', _GREEN)} decode"
    )
    for request, route in zip(requests, routes, strict=True):
        cached = f" ({request['cached_tokens']})" if request["cached_tokens"] else ""
        tokens = f"{request['prompt_tokens']}{cached} → {request['output_tokens']}"
        end = paint(f"{plain(request['ended']):<7}", _RED if request["is_error"] else 0)
        yield (
            f"{time.strftime('%H:%M:%S', time.localtime(request['ended_at']))}  "
            f"{plain(request['request_id'])[:_ID_WIDTH]:<{_ID_WIDTH}}  {route:<{width}}  {tokens:>18}  "
            f"{_seconds(request['total_s']):>7}  {end}  {_waterfall(request, longest, paint)}"
        )


def _waterfall(request: State, longest: float, paint: Paint) -> str:
    """The phases as one bar, of which `longest` seconds would fill all."""
    first = request["total_s"] if request["first_token_s"] is None else request["first_token_s"]
    told = [(request["times"][key], colour) for key, colour in _PHASES]
    other = max(first - sum(seconds for seconds, _ in told), 0.0)
    bar, at, end = "", 0, 0.0
    for seconds, colour in ((other, _FAINT), *told, (request["total_s"] - first, _GREEN)):
        end += max(seconds, 0.0)
        until = min(round(_BAR_WIDTH * end / longest), _BAR_WIDTH) if longest else 0
        bar, at = bar + paint("█" * max(until - at, 0), colour), max(until, at)
    return bar


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s" if seconds < 999 else f"{seconds:.0f} s"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _bytes(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} {units[0]}" if count >= 99.5 or units[0] == "B" else f"{count:.3g} {units[0]}"
