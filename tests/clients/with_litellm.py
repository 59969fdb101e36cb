"""LiteLLM against a kvferry gateway: URL MODEL. Runs in an environment without kvferry."""

from __future__ import annotations

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
COMMON = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"q": {"enum": ["a", "b"]}},
            "required": ["q"],
            "additionalProperties": False,
        },
    },
}

whole = litellm.completion(**COMMON, messages=HELLO, max_tokens=8, temperature=0)
parts = litellm.completion(**COMMON, messages=HELLO, max_tokens=8, temperature=0, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == whole.choices[0].message.content, (text, whole)
assert whole.usage.completion_tokens > 0

called = litellm.completion(
    **COMMON, messages=HELLO, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200, seed=1
).choices[0]
assert called.finish_reason == "tool_calls", called
assert json.loads(called.message.tool_calls[0].function.arguments)["q"] in "ab"

try:
    litellm.completion(**COMMON, messages=HELLO, temperature=0, top_p=5)
except litellm.BadRequestError as exc:
    told = str(exc)
else:
    raise AssertionError("top_p 5 was accepted")
assert "top_p" in told, told
