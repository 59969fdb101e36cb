"""Random bodies that are broken in one way or several, and what a server says to them.

    python -m tests.gateway.malformed URL MODEL [COUNT]

sends them to a cluster, asks whether it is still there, and prints a table of the statuses.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 3.5, 1e308, 2**31, 2**63, 10**30, "", "x", "\x00", "🙂" * 50)
ODD += ([], {}, [[]], [None], {"a": {"b": []}}, [-1], [10**9], ["x", 1], {"type": "function"}, {"type": "json_schema"})
FIELDS = "model prompt messages max_tokens n stop stream stream_options temperature top_p top_k min_p seed logit_bias"
FIELDS += " logprobs top_logprobs prompt_logprobs echo best_of suffix tools tool_choice parallel_tool_calls tokens"
FIELDS += (
    " response_format structured_outputs allowed_token_ids bad_words stop_token_ids min_tokens cache_salt priority"
)
FIELDS += " request_id truncate_prompt_tokens continue_final_message add_generation_prompt chat_template_kwargs"
FIELDS += " use_beam_search length_penalty repetition_penalty presence_penalty max_completion_tokens return_token_ids"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Sent:
    """`way`: how it is broken."""

    path: str
    content: bytes
    way: str


def malformed(model: str, count: int, seed: int = 0) -> Iterator[Sent]:
    """The same ones for the same seed. Never asks for much work, should one be served after all."""
    dice = random.Random(seed)
    for _ in range(count):
        path = dice.choice(PATHS)
        body = _good(path, model)
        way = dice.choice(("value", "value", "values", "cut", "bytes", "no object", "nested", "missing"))
        if way in ("value", "values"):
            for _ in range(1 if way == "value" else dice.randint(2, 5)):
                body[dice.choice(FIELDS.split())] = dice.choice(ODD)
        elif way == "missing":
            del body[dice.choice(list(body.keys() - {"max_tokens"}))]
        elif way == "nested":
            body[dice.choice(("messages", "tools", "response_format", "prompt"))] = _nested(dice)
        content = json.dumps(body).encode()
        if way == "cut":
            content = content[: dice.randrange(len(content))]
        elif way == "bytes":
            changed = bytearray(content)
            for _ in range(dice.randint(1, 4)):
                changed[dice.randrange(len(changed))] = dice.randrange(256)
            content = bytes(changed)
        elif way == "no object":
            content = json.dumps(dice.choice(ODD)).encode()
        yield Sent(path, content, way)


def _good(path: str, model: str) -> dict[str, Any]:
    few: dict[str, Any] = {"model": model, "max_tokens": 2}
    if path == "/v1/completions":
        return few | {"prompt": "Hello"}
    if path == "/v1/chat/completions":
        return few | {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "tool_choice": "none"}
    return {"model": model} | ({"prompt": "Hello"} if path == "/tokenize" else {"tokens": [5, 6]})


def _nested(dice: random.Random) -> Any:
    value: Any = dice.choice(ODD)
    for _ in range(dice.choice((1, 3, 200))):
        value = [value] if dice.random() < 0.5 else {dice.choice(("type", "role", "content", "function")): value}
    return value


def table(statuses: Mapping[tuple[str, int], int]) -> str:
    """Ways down, statuses across."""
    codes = sorted({status for _, status in statuses})
    rows = ["| broken how | " + " | ".join(map(str, codes)) + " |", "|---" * (len(codes) + 1) + "|"]
    for way in sorted({way for way, _ in statuses}):
        rows.append(f"| {way} | " + " | ".join(str(statuses.get((way, code), 0)) for code in codes) + " |")
    total = [str(sum(n for (_, status), n in statuses.items() if status == code)) for code in codes]
    return "\n".join([*rows, "| all | " + " | ".join(total) + " |"])


def main(url: str, model: str, count: int) -> int:
    statuses: Counter[tuple[str, int]] = Counter()
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for sent in malformed(model, count):
            answer = client.post(sent.path, content=sent.content)
            statuses[sent.way, answer.status_code] += 1
            if answer.status_code >= 500:
                print(f"{answer.status_code} {sent.path} {sent.content[:300]!r}: {answer.text[:300]}")
        after = client.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 1})
    print(table(statuses))
    print(f"a good request afterwards: {after.status_code}")
    return int(after.status_code != 200 or any(status >= 500 for _, status in statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1000))
