"""Commands reach gateways with API keys and HTTPS, and say what is missing where they do not."""

from __future__ import annotations

import asyncio
import builtins
from pathlib import Path

import pytest
import trustme

from kvferry.common.errors import ConfigError
from kvferry.services.gateway.api_keys import new_key
from kvferry.services.local import plan
from kvferry.services.local.access import Access
from kvferry.services.local.cli import main
from kvferry.services.local.up import how_to_use
from tests.gateway.fake_decode import FakeDecode
from tests.gateway.harness import Setup, config, gateway, run

KEY, LINE = new_key("alice")


class Files:
    """A server's certificate, a client's, and the authorities of both, which are two."""

    def __init__(self, folder: Path) -> None:
        for name, identity in (("server", "localhost"), ("client", "me@example.org")):
            authority = trustme.CA()
            made = authority.issue_cert(identity)
            authority.cert_pem.write_to_path(folder / f"{name}-ca.pem")
            made.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
            made.private_key_pem.write_to_path(folder / f"{name}-key.pem")
        self.server = {
            "ssl_certfile": str(folder / "server.pem"),
            "ssl_keyfile": str(folder / "server-key.pem"),
            "ssl_ca_certs": str(folder / "client-ca.pem"),
        }
        self.trust = ["--ssl-ca-certs", str(folder / "server-ca.pem")]
        self.show = ["--ssl-certfile", str(folder / "client.pem"), "--ssl-keyfile", str(folder / "client-key.pem")]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def url_of(setup: Setup) -> str:
    return str(setup.client.base_url)


async def command(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


def test_every_command_gets_in_and_says_what_is_missing(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Hello"])

    def ask(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", ask)

    async def scenario(setup: Setup) -> None:
        url = ["--url", url_of(setup)]
        for options, problem in (
            ([], "is not trusted"),
            (files.trust, "seems to ask for a client certificate"),
            (files.trust + files.show, "asks for an API key"),
            ([*files.trust, *files.show, "--api-key", "kvf-wrong"], "does not know this API key"),
        ):
            for name in (["top", "--once"], ["explain", "mine"], ["chat"]):
                assert await command(*name, *url, *options) == 2
                said = capsys.readouterr().err
                assert problem in said, (name, said)
                assert "kvf-wrong" not in said
        every = [*url, *files.trust, *files.show]
        assert await command("chat", *every, "--api-key", KEY, "--max-tokens", "4") == 0
        assert "error" not in capsys.readouterr().out
        monkeypatch.setenv("KVFERRY_API_KEY", KEY)
        assert await command("top", *every) == 0
        (ended,) = setup.gateway.service.recent.requests
        assert ended.output_tokens == 4
        assert await command("explain", ended.request_id, *every) == 0
        assert await command("explain", "unknown", *every) == 2
        assert "knows no recent request" in capsys.readouterr().err

    run(gateway(FakeDecode(), over_port=True, api_keys=LINE, **files.server), scenario)


def test_openais_variable_counts_for_chat_only_and_ours_before_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr(builtins, "input", ask)

    async def scenario(setup: Setup) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert await command("chat", "--url", url_of(setup)) == 0
        assert await command("top", "--url", url_of(setup)) == 2
        assert "asks for an API key" in capsys.readouterr().err
        monkeypatch.setenv("KVFERRY_API_KEY", "kvf-other")
        assert await command("chat", "--url", url_of(setup)) == 2

    run(gateway(FakeDecode(), over_port=True, api_keys=LINE), scenario)


@pytest.mark.parametrize(
    ("access", "problem"),
    [
        (Access("https://x", api_key="zwei Wörter"), "characters"),
        (Access("https://x", api_key="a\nb"), "characters"),
        (Access("https://x", ssl_ca_certs="/nowhere.pem"), "/nowhere.pem"),
        (Access("https://x", ssl_certfile=__file__), "test_access.py"),
        (Access("https://x", ssl_keyfile="/key.pem"), "--ssl-certfile"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_sent(access: Access, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        access.client(1.0)
    assert "Wörter" not in caught.value.message
    assert "Wörter" not in repr(access)


def test_the_supervisor_sees_a_gateway_ready_whose_clients_must_show_other_certificates_than_its_own(
    files: Files,
) -> None:
    async def scenario(setup: Setup) -> None:
        port = int(url_of(setup).rsplit(":", 1)[1])
        program = plan.gateway_program(config(host="localhost", port=port, api_keys=LINE, **files.server))
        assert await program.is_ready()
        nobody = plan.gateway_program(config(host="localhost", port=1, api_keys=LINE, **files.server))
        assert not await nobody.is_ready()

    run(gateway(FakeDecode(), over_port=True, api_keys=LINE, **files.server), scenario)


def test_the_command_line_that_is_shown_has_a_place_for_the_key_and_never_the_key() -> None:
    assert "authorization" not in how_to_use(config())
    shown = how_to_use(config(api_keys=LINE, ssl_certfile="c.pem", ssl_ca_certs="ca.pem"))
    assert '-H "authorization: Bearer $KVFERRY_API_KEY"' in shown
    assert "curl -N --cert CLIENT.pem --key CLIENT-KEY.pem https://" in shown
    assert LINE.split()[0] not in shown
