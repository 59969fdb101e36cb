"""kvferry: LLM serving with prefill and decode on separate services that share paged KV blocks."""

__version__ = "0.1.0"
