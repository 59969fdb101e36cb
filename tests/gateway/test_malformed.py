"""A thousand broken bodies: each is answered, none with a 5xx, and the gateway serves on."""

from __future__ import annotations

from collections import Counter

from tests.gateway.fake_decode import FakeDecode
from tests.gateway.harness import Setup, gateway, run
from tests.gateway.malformed import malformed, table


def test_a_thousand_malformed_bodies_are_answered_without_a_5xx() -> None:
    async def scenario(setup: Setup) -> None:
        statuses: Counter[tuple[str, int]] = Counter()
        for sent in malformed("tiny", 1000):
            answer = await setup.client.post(sent.path, content=sent.content)
            statuses[sent.way, answer.status_code] += 1
            assert answer.status_code < 500, (sent, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, sent
        print(table(statuses))
        assert sum(n for (_, status), n in statuses.items() if status == 400) > 500
        assert (await setup.complete("Hello", max_tokens=1)).status_code == 200

    run(gateway(FakeDecode()), scenario)
