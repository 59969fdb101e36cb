"""The lease table: by example, against a model, and under threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvferry.common.errors import LeaseExpired, Overloaded
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.transfer.lease import LeaseCounts, LeaseTable

LEASE_S = 8.0


class FakePool:
    """Counts pins as a block pool does, and refuses what a block pool must never see."""

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()

    def pin(self, block_ids: Sequence[int]) -> None:
        assert block_ids
        assert len(set(block_ids)) == len(block_ids)
        self.pins.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        assert block_ids
        self.pins.subtract(block_ids)
        assert min(self.pins.values()) >= 0
        self.pins += Counter()


class Rig:
    def __init__(self, max_pinned_blocks: int = 4) -> None:
        self.pool, self.now = FakePool(), 100.0
        self.table = LeaseTable(
            self.pool.pin,
            self.pool.unpin,
            lease_s=LEASE_S,
            max_pinned_blocks=max_pinned_blocks,
            clock=lambda: self.now,
        )

    def open(self, *block_ids: int, for_cached: bool = False) -> str:
        lease_id = self.table.open("reader", for_cached=for_cached).lease_id
        self.table.extend(lease_id, block_ids)
        return lease_id


def test_a_lease_pins_its_blocks_until_it_is_released() -> None:
    rig = Rig()
    lease_id = rig.open(0, 1)
    rig.table.extend(lease_id, [1, 2])
    assert rig.pool.pins == {0: 1, 1: 1, 2: 1}
    assert rig.table.release(lease_id)
    assert not rig.pool.pins


@pytest.mark.parametrize("how", ["released", "expired", "revoked"])
def test_blocks_that_were_leased_are_evicted_children_before_parents(how: str) -> None:
    """Whatever their numbers are: else what is left of a chain would be found by nobody."""
    pool, now = BlockPool(8), [0.0]
    pool.release([4, 1, 7, 0, 2, 6, 3, 5] if pool.allocate(8) else [])
    table = pool.allocate(4)
    assert table not in (sorted(table), sorted(table, reverse=True))
    names = [pool.register(block_id, bytes([block_id])) and bytes([block_id]) for block_id in table]
    leases = LeaseTable(pool.pin, pool.unpin, lease_s=LEASE_S, max_pinned_blocks=8, clock=lambda: now[0])
    lease_id = leases.open("reader", for_cached=True).lease_id
    for filled in (1, 3, 4):
        leases.extend(lease_id, table[:filled])
    pool.release(table)
    now[0] = LEASE_S if how == "expired" else 0.0
    assert leases.expire_due() or leases.revoke_cached() if how != "released" else leases.release(lease_id)
    for num_left in (3, 2, 1, 0):
        pool.allocate(pool.accounts().free + 1)
        assert len(pool.lookup(names)) == num_left


def test_a_second_release_says_no_and_unpins_nothing() -> None:
    rig = Rig()
    other, lease_id = rig.open(1), rig.open(1)
    assert rig.table.release(lease_id)
    assert not rig.table.release(lease_id)
    assert rig.pool.pins == {1: 1}
    assert rig.table.release(other)


def test_a_renewed_lease_lives_on() -> None:
    rig = Rig()
    lease_id = rig.open(1)
    for _ in range(3):
        rig.now += LEASE_S - 0.1
        rig.table.renew(lease_id)
    assert rig.table.expire_due() == []
    assert rig.table.release(lease_id)


def test_past_its_deadline_a_lease_is_dead_even_before_it_is_swept() -> None:
    rig = Rig()
    lease_id = rig.open(1)
    rig.now += LEASE_S
    with pytest.raises(LeaseExpired, match=lease_id[:8]):
        rig.table.check(lease_id, [1])
    with pytest.raises(LeaseExpired, match="of reader expired"):
        rig.table.renew(lease_id)
    with pytest.raises(LeaseExpired):
        rig.table.extend(lease_id, [2])
    assert rig.pool.pins == {1: 1}
    assert not rig.table.release(lease_id)
    assert not rig.pool.pins


def test_the_sweep_returns_each_expired_lease_once() -> None:
    rig = Rig()
    old = rig.open(1, 2)
    rig.now += 5
    young = rig.open(2, 3)
    rig.now += 4
    assert rig.table.expire_due() == [old]
    assert rig.table.expire_due() == []
    assert rig.pool.pins == {2: 1, 3: 1}
    assert rig.table.counts() == LeaseCounts(num_open=1, num_pins=2, num_opened=2, num_expired=1)
    assert rig.table.release(young)


@pytest.mark.parametrize("block_id", [0, 3])
def test_a_block_that_a_lease_does_not_cover_is_refused_by_its_number(block_id: int) -> None:
    rig = Rig()
    lease_id = rig.open(1, 2)
    rig.table.check(lease_id, [2, 1])
    with pytest.raises(LeaseExpired, match=f"does not cover block {block_id}"):
        rig.table.check(lease_id, [1, block_id])


def test_an_unknown_lease_is_named_by_a_part_that_nobody_can_use() -> None:
    with pytest.raises(LeaseExpired, match=r"^lease 01234567 is unknown"):
        Rig().table.check("0123456789abcdef", [])


def test_ids_are_long_and_never_repeat() -> None:
    rig = Rig()
    ids = {rig.open() for _ in range(1000)}
    assert len(ids) == 1000
    assert min(map(len, ids)) == 32


def test_leases_for_cached_blocks_share_a_cap_and_others_have_none() -> None:
    rig = Rig(max_pinned_blocks=4)
    first = rig.open(1, 2, 3, for_cached=True)
    second = rig.open(for_cached=True)
    rig.open(*range(10, 30))
    with pytest.raises(Overloaded, match="5 cached blocks pinned for peers, allowed 4"):
        rig.table.extend(second, [3, 4])
    rig.table.extend(second, [4])
    rig.table.release(first)
    rig.table.extend(second, [5, 6, 7])
    assert rig.table.counts().num_cached_pins == 4


def test_revoking_ends_the_leases_of_cached_blocks_and_no_others() -> None:
    rig = Rig(max_pinned_blocks=4)
    cached, promised = rig.open(1, 2, for_cached=True), rig.open(2, 3)
    assert rig.table.revoke_cached() == [cached]
    assert rig.pool.pins == Counter((2, 3))
    assert not rig.table.release(cached), "a revoked lease was called valid throughout"
    assert rig.table.release(promised)


def test_a_pin_that_fails_leaves_the_lease_as_it_was() -> None:
    pool = FakePool()

    def pin(block_ids: Sequence[int]) -> None:
        if 9 in block_ids:
            raise KeyError(9)
        pool.pin(block_ids)

    table = LeaseTable(pin, pool.unpin, lease_s=LEASE_S)
    lease_id = table.open("reader").lease_id
    table.extend(lease_id, [1])
    with pytest.raises(KeyError):
        table.extend(lease_id, [8, 9])
    with pytest.raises(LeaseExpired):
        table.check(lease_id, [8])
    assert table.release(lease_id)
    assert not pool.pins


def test_release_all_leaves_nothing_pinned() -> None:
    rig = Rig()
    rig.open(1, 2)
    rig.open(2, 3)
    rig.table.release_all()
    assert not rig.pool.pins
    assert rig.table.num_open == 0


def test_threads_that_release_and_expire_the_same_leases_unpin_once() -> None:
    pool = FakePool()
    table = LeaseTable(pool.pin, pool.unpin, lease_s=0.0005)
    ids = [table.open("reader").lease_id for _ in range(300)]
    confirmed: list[int] = [0, 0, 0]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n, lease_id in enumerate(ids):
                try:
                    table.extend(lease_id, [n, n + 1])
                    table.renew(lease_id)
                except LeaseExpired:
                    pass
                if n % 7 == i:
                    table.expire_due()
                confirmed[i] += table.release(lease_id)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table.expire_due()
    assert not errors
    assert not pool.pins
    counts = table.counts()
    assert counts.num_released == sum(confirmed)
    assert counts.num_released + counts.num_expired == 300


class LeaseMachine(RuleBasedStateMachine):
    """The real table beside a model: lease id -> (expires_at, blocks, for_cached)."""

    leases = Bundle("leases")
    cap = 6

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(max_pinned_blocks=self.cap)
        self.model: dict[str, tuple[float, set[int], bool]] = {}

    def alive(self, lease_id: str) -> bool:
        return lease_id in self.model and self.rig.now < self.model[lease_id][0]

    def cached_pins(self) -> int:
        return sum(len(blocks) for _, blocks, for_cached in self.model.values() if for_cached)

    @rule(target=leases, for_cached=st.booleans())
    def open(self, for_cached: bool) -> str:
        lease_id = self.rig.table.open("reader", for_cached=for_cached).lease_id
        self.model[lease_id] = (self.rig.now + LEASE_S, set(), for_cached)
        return lease_id

    @rule(lease_id=leases, block_ids=st.lists(st.integers(0, 7), max_size=6))
    def extend(self, lease_id: str, block_ids: list[int]) -> None:
        try:
            self.rig.table.extend(lease_id, block_ids)
        except LeaseExpired:
            assert not self.alive(lease_id)
        except Overloaded:
            _, blocks, for_cached = self.model[lease_id]
            assert for_cached
            assert self.cached_pins() + len(set(block_ids) - blocks) > self.cap
        else:
            assert self.alive(lease_id)
            self.model[lease_id][1].update(block_ids)

    @rule(lease_id=leases)
    def renew(self, lease_id: str) -> None:
        try:
            self.rig.table.renew(lease_id)
        except LeaseExpired:
            assert not self.alive(lease_id)
        else:
            assert self.alive(lease_id)
            self.model[lease_id] = (self.rig.now + LEASE_S, *self.model[lease_id][1:])

    @rule(lease_id=leases, block_ids=st.lists(st.integers(0, 7), max_size=3))
    def check(self, lease_id: str, block_ids: list[int]) -> None:
        covered = self.alive(lease_id) and self.model[lease_id][1].issuperset(block_ids)
        try:
            self.rig.table.check(lease_id, block_ids)
        except LeaseExpired:
            assert not covered
        else:
            assert covered

    @rule(lease_id=leases)
    def release(self, lease_id: str) -> None:
        assert self.rig.table.release(lease_id) == self.alive(lease_id)
        self.model.pop(lease_id, None)

    @rule()
    def expire_due(self) -> None:
        due = {lease_id for lease_id in self.model if not self.alive(lease_id)}
        swept = self.rig.table.expire_due()
        assert sorted(swept) == sorted(due)
        for lease_id in due:
            del self.model[lease_id]

    @rule()
    def revoke_cached(self) -> None:
        cached = {lease_id for lease_id, (_, _, for_cached) in self.model.items() if for_cached}
        assert set(self.rig.table.revoke_cached()) == cached
        for lease_id in cached:
            del self.model[lease_id]

    @rule(seconds=st.sampled_from([0.1, 3.0, LEASE_S, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.rig.now += seconds

    @invariant()
    def pins_are_the_blocks_of_the_leases(self) -> None:
        assert self.rig.pool.pins == Counter(b for _, blocks, _ in self.model.values() for b in blocks)

    @invariant()
    def the_counts_add_up(self) -> None:
        counts = self.rig.table.counts()
        assert counts.num_open == len(self.model) == self.rig.table.num_open
        assert counts.num_pins == self.rig.pool.pins.total()
        assert counts.num_cached_pins == self.cached_pins() <= self.cap
        assert counts.num_opened == counts.num_open + counts.num_released + counts.num_expired

    def teardown(self) -> None:
        self.rig.table.release_all()
        assert not self.rig.pool.pins


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
