"""What narrower weights and KV cost in quality: perplexity and log-probabilities against float32 on a fixed text.

    python -m benchmarks quality [--model M] [--tokens 8192] [--text FILE] [--formats bfloat16,float16,int8]
        [--kv-formats bfloat16,float16]

The text is what Python's own help says about the language, unless a file is given; its digest is printed with the
figures. It is read in stretches of 2,048 tokens, each from an empty context.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from kvferry.common.models import resolve_model
from kvferry.kernels.ops import WeightFormat
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel

BLOCK = 16
CHUNK = 256
STRETCH = 2048
FORMATS: tuple[WeightFormat, ...] = ("bfloat16", "float16", "int8")
KV_FORMATS = ("bfloat16", "float16")

Reader = Callable[[Sequence[int]], Iterator[torch.Tensor]]


def log_probs(model: LlamaModel, kv_dtype: torch.dtype, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """For each chunk [num_tokens, vocab_size] of what may follow each token of it."""
    config = model.config
    num_blocks = -(-len(tokens) // BLOCK)
    shape = num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim
    kv_cache = torch.empty(shape, dtype=kv_dtype)
    for start in range(0, len(tokens), CHUNK):
        chunk = torch.tensor(tokens[start : start + CHUNK])
        positions = torch.arange(start, start + len(chunk))
        batch = Batch(
            token_ids=chunk,
            positions=positions,
            slot_mapping=positions,
            block_tables=torch.arange(num_blocks)[None],
            query_starts=(0, len(chunk)),
            context_lens=(start,),
            logit_rows=torch.arange(len(chunk)),
        )
        yield model.forward(batch, kv_cache).log_softmax(-1)


def compare(base: Reader, other: Reader, tokens: Sequence[int]) -> dict[str, float]:
    """Perplexities, and over all positions: mean divergence, same first choice, mean |error| of the text's own."""
    sums = dict.fromkeys(("base", "other", "divergence", "agreement", "error"), 0.0)
    count = 0
    for start in range(0, len(tokens), STRETCH):
        stretch, at = tokens[start : start + STRETCH], 1
        for p, q in zip(base(stretch), other(stretch), strict=True):
            following = torch.tensor(stretch[at : at + len(p)])
            at, p, q = at + len(p), p[: len(following)], q[: len(following)]
            mine, theirs = (x.gather(1, following[:, None]) for x in (p, q))
            sums["base"] -= float(mine.sum())
            sums["other"] -= float(theirs.sum())
            sums["divergence"] += float((p.exp() * (p - q)).sum())
            sums["agreement"] += int((p.argmax(1) == q.argmax(1)).sum())
            sums["error"] += float((mine - theirs).abs().sum())
            count += len(following)
    means = {key: value / count for key, value in sums.items()}
    return means | {"base": math.exp(means["base"]), "other": math.exp(means["other"])}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--formats", default=",".join(FORMATS), help="of weights, over float32 KV blocks")
    parser.add_argument("--kv-formats", default=",".join(KV_FORMATS), help="of KV blocks, over float32 weights")
    args = parser.parse_args(argv)
    folder = resolve_model(args.model)
    text = args.text.read_text() if args.text else "\n".join(topics[name] for name in sorted(topics))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: args.tokens]
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()
    print(f"{len(tokens)} tokens, digest {digest}")
    model = load_model(folder, torch.float32)
    base = partial(log_probs, model, torch.float32)
    for weight_format in filter(None, args.formats.split(",")):
        narrow = load_model(folder, torch.float32, weight_format=weight_format)
        _print(f"weights {weight_format}", compare(base, partial(log_probs, narrow, torch.float32), tokens))
    for kv_format in filter(None, args.kv_formats.split(",")):
        _print(f"KV {kv_format}", compare(base, partial(log_probs, model, getattr(torch, kv_format)), tokens))
    return 0


def _print(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:16} perplexity {found['other']:.4f} (float32 {found['base']:.4f}, "
        f"{found['other'] / found['base'] - 1:+.3%}), divergence {found['divergence']:.2e} nats, "
        f"same first choice {found['agreement']:.2%}, log-probability off by {found['error']:.4f} in the mean",
        flush=True,
    )
