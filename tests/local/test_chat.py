from __future__ import annotations

import json

import httpx
import pytest

from kvferry.common.errors import Unavailable
from kvferry.services.local import chat
from kvferry.services.local.access import Access


def answer(*pieces: str) -> bytes:
    events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    events.append({"choices": [], "usage": {}})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


class Gateway:
    """Answers every chat request with the next of `answers` and keeps what was asked."""

    def __init__(self, monkeypatch, *answers, lines=()):
        self.asked = []
        answers, lines = iter(answers), iter(lines)

        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny"}]})
            self.asked.append(json.loads(request.content))
            reply = next(answers)
            return reply if isinstance(reply, httpx.Response) else httpx.Response(200, content=reply)

        def ask(prompt: str) -> str:
            try:
                line = next(lines)
            except StopIteration:
                raise EOFError from None
            if isinstance(line, BaseException):
                raise line
            return line

        client = httpx.Client
        monkeypatch.setattr(
            chat.httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(handle))
        )
        monkeypatch.setattr("builtins.input", ask)


def test_the_answer_streams_and_the_next_turn_carries_the_history(monkeypatch, capsys):
    gateway = Gateway(monkeypatch, answer("Hel", "lo."), answer("Bye."), lines=["hi", "", "and you?", "/exit", "never"])
    assert chat.main(Access("http://gateway"), None, system="be short", max_tokens=9) == 0
    shown = capsys.readouterr().out
    assert "tiny at http://gateway" in shown
    assert "Hello.\nBye.\n" in shown
    assert gateway.asked[1] == {
        "model": "tiny",
        "max_tokens": 9,
        "stream": True,
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "and you?"},
        ],
    }


def test_reset_forgets_all_but_the_system_message(monkeypatch):
    gateway = Gateway(monkeypatch, answer("a"), answer("b"), lines=["one", "/reset", "two"])
    chat.main(Access("http://gateway"), "tiny", system="s")
    assert [message["content"] for message in gateway.asked[1]["messages"]] == ["s", "two"]


def test_an_error_is_shown_and_its_question_forgotten(monkeypatch, capsys):
    busy = httpx.Response(429, json={"error": {"message": "too busy", "type": "overloaded_error"}})
    broken = b'data: {"choices": [{"delta": {"content": "par"}}]}\n\ndata: {"error": {"message": "node died"}}\n\n'
    gateway = Gateway(monkeypatch, busy, broken, answer("ok"), lines=["one", "two", "three"])
    chat.main(Access("http://gateway"), "tiny")
    shown = capsys.readouterr().out
    assert "(error: too busy)" in shown
    assert "par\n(error: node died)" in shown
    assert [message["content"] for message in gateway.asked[2]["messages"]] == ["two", "par", "three"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(monkeypatch, capsys):
    class Interrupted(httpx.SyncByteStream):
        closed = False

        def __iter__(self):
            yield b'data: {"choices": [{"delta": {"content": "so far"}}]}\n\n'
            raise KeyboardInterrupt

        def close(self):
            self.closed = True

    stream = Interrupted()
    gateway = Gateway(monkeypatch, httpx.Response(200, stream=stream), answer("ok"), lines=["one", "two"])
    chat.main(Access("http://gateway"), "tiny")
    assert "so far (stopped)" in capsys.readouterr().out
    assert stream.closed
    assert gateway.asked[1]["messages"][1]["content"] == "so far"


def test_ctrl_c_at_the_prompt_and_unknown_commands_do_not_leave(monkeypatch, capsys):
    gateway = Gateway(monkeypatch, answer("ok"), lines=[KeyboardInterrupt(), "/help", "hi"])
    assert chat.main(Access("http://gateway"), "tiny") == 0
    assert chat.HELP in capsys.readouterr().out
    assert len(gateway.asked) == 1


def test_no_gateway_is_said(capsys):
    with pytest.raises(Unavailable, match="kvferry up"):
        chat.main(Access("http://127.0.0.1:1"), None)
