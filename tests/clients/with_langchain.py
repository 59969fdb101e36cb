"""LangChain's OpenAI client against a kvferry gateway: URL MODEL. Runs in an environment without kvferry."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Ferry(BaseModel):
    kind: Literal["car", "train"]


@tool
def lookup(q: Literal["a", "b"]) -> str:
    """Looks it up."""
    return q


chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=8)
whole = chat.invoke("Say hello.")
assert "".join(str(part.content) for part in chat.stream("Say hello.")) == whole.content
assert whole.usage_metadata
assert whole.usage_metadata["output_tokens"] > 0

long = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200, seed=1)
ferry = long.with_structured_output(Ferry, method="json_schema").invoke("Which one?")
assert isinstance(ferry, Ferry), ferry
ferry = long.with_structured_output(Ferry, method="function_calling", strict=True).invoke("Which one?")
assert isinstance(ferry, Ferry), ferry
called = long.bind_tools([lookup], tool_choice="lookup", parallel_tool_calls=False, strict=True).invoke("Look it up.")
assert called.tool_calls[0]["name"] == "lookup", called
assert called.tool_calls[0]["args"]["q"] in ("a", "b")
