"""Who is in the cluster: layout cards, node records and their loads. Plain data with a JSON form."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field

from kvferry.common.errors import LayoutMismatch


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class NodeState(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class LayoutCard:
    """Everything two nodes must agree on before a block of one means anything to the other."""

    model_fingerprint: str
    numerics_id: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    version: str
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def block_bytes(self) -> int:
        item = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * item

    def check_compatible(self, other: LayoutCard, who: str) -> None:
        """Raises LayoutMismatch that names the first field that differs and both values.

        `version` is not compared: what may differ between versions is bound by the fingerprint and the numerics id.
        """
        for name in _CARD_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise LayoutMismatch(
                    f"{who} has {name} {theirs!r}, this node has {mine!r}: start both with the same value",
                    param=name,
                )


_CARD_FIELDS = (
    "model_fingerprint",
    "numerics_id",
    "dtype",
    "block_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "tp_rank",
    "tp_size",
)


@dataclass(frozen=True, slots=True)
class BlockAccounts:
    """Where the pool's blocks are. Each block is in exactly one account; the sum is the pool."""

    free: int = 0
    cached: int = 0
    sequence: int = 0
    lease: int = 0
    incoming: int = 0

    @property
    def total(self) -> int:
        return self.free + self.cached + self.sequence + self.lease + self.incoming

    @property
    def available(self) -> int:
        """Blocks that an allocation may take at once (cached ones by eviction)."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node's own report, at most one heartbeat old."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    accounts: BlockAccounts = field(default_factory=BlockAccounts)
    num_leases: int = 0
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    num_steps: int = 0
    num_shared_blocks: int = 0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One running node. `instance_id` is new with every process start; `node_id` is the name that stays."""

    instance_id: str
    node_id: str
    role: Role
    address: str
    model: str
    card: LayoutCard
    max_model_len: int
    batch_invariant: bool = False  # what runs beside a request cannot change its bits
    metrics_address: str = ""
    state: NodeState = NodeState.READY
    load: NodeLoad = field(default_factory=NodeLoad)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str | bytes) -> NodeRecord:
        """Raises ValueError on a record that does not parse (an incompatible peer)."""
        try:
            d = json.loads(raw)
            load = d.pop("load")
            accounts = BlockAccounts(**load.pop("accounts"))
            return cls(
                role=Role(d.pop("role")),
                state=NodeState(d.pop("state")),
                card=LayoutCard(**d.pop("card")),
                load=NodeLoad(accounts=accounts, **load),
                **d,
            )
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not a node record: {exc}") from exc
