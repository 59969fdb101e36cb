"""Names of full KV blocks: a chained 128-bit blake2b over (parent name, token ids).

The one function that engine, index and gateway share. The chain starts from a root that binds everything
that changes the bytes of a block: the model fingerprint, the numerics id and the tenant's cache salt.
Same in every process, on every host and Python version.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

NAME_BYTES = 16


def root_name(model_fingerprint: str, numerics_id: str, cache_salt: str = "") -> bytes:
    """Where the chain of one (model, numerics, tenant) begins, 16 bytes."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES, person=b"kvferry-root")
    for part in (model_fingerprint, numerics_id, cache_salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def block_names(root: bytes, token_ids: Sequence[int], block_size: int, parent: bytes | None = None) -> list[bytes]:
    """Names of the full blocks of `token_ids`, in order; a partly filled last block has none.

    `parent` continues a chain: the name of the block before `token_ids[0]` (default: the root).
    Token ids must be in [0, 2**32).
    """
    raw = array("I", token_ids)
    if sys.byteorder == "big":
        raw.byteswap()
    view, width = memoryview(raw.tobytes()), block_size * raw.itemsize
    name, names = parent or root, []
    for start in range(0, len(token_ids) // block_size * width, width):
        name = hashlib.blake2b(view[start : start + width], digest_size=NAME_BYTES, key=name).digest()
        names.append(name)
    return names
