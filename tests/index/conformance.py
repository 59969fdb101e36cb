"""What any `PrefixIndex` must do. A check gets `connect`: each call is one more client of one empty store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.common.errors import IndexUnavailable, Unavailable
from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import BlockAccounts, LayoutCard, NodeLoad, NodeRecord, NodeState, Role
from kvferry.services.index.base import MAX_EXPECTED, Matches, PrefixIndex

Connect = Callable[[], PrefixIndex]

CARD = LayoutCard("fingerprint", "numerics", "float32", 16, 2, 3, 64, "0.1.0")
TTL_S = 30.0


def node(instance: str, node_id: str | None = None, role: Role = Role.PREFILL) -> NodeRecord:
    return NodeRecord(instance, node_id or f"node-{instance}", role, "127.0.0.1:1", "tiny", CARD, 2048)


def chain(num_blocks: int, salt: str = "") -> list[bytes]:
    return block_names(root_name("model", "numerics", salt), range(16 * num_blocks), 16)


async def check_a_record_comes_back_as_it_was_announced(connect: Connect) -> None:
    load = NodeLoad(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=700,
        num_waiting_positions=245_000,
        num_blocks=100,
        accounts=BlockAccounts(10, 20, 30, 25, 15),
        num_leases=4,
        prefill_tokens_per_s=812.5,
        prompt_token_ms=1.25,
        prompt_position_ms=2.5e-5,
        step_ms=41.25,
        num_steps=99,
    )
    record = replace(node("a", role=Role.BOTH), state=NodeState.DRAINING, load=load, metrics_address="h:9")
    await connect().announce(record, TTL_S)
    assert (await connect().nodes()).records == [record]


async def check_nodes_are_ordered_by_node_id(connect: Connect) -> None:
    for name in ("c", "a", "b"):
        await connect().announce(node(f"instance-{name}", name), TTL_S)
    assert [record.node_id for record in (await connect().nodes()).records] == ["a", "b", "c"]


async def check_announce_tells_whether_the_instance_was_known(connect: Connect) -> None:
    index = connect()
    assert await index.announce(node("a"), TTL_S) is True
    assert await index.announce(node("a"), TTL_S) is False
    assert await connect().announce(node("a"), TTL_S) is False


async def check_a_renewal_replaces_the_load_and_keeps_the_blocks(connect: Connect) -> None:
    index = connect()
    await index.announce(node("a"), TTL_S)
    await index.store("a", chain(4))
    await index.announce(replace(node("a"), load=NodeLoad(num_running=7)), TTL_S)
    assert (await index.nodes()).records[0].load.num_running == 7
    assert (await index.match(chain(4))).held == {"a": 4}


async def check_a_silent_node_is_gone_and_comes_back_empty(connect: Connect) -> None:
    index = connect()
    await index.announce(node("a"), 0.1)
    await index.announce(node("b"), TTL_S)
    await index.store("a", chain(4))
    await asyncio.sleep(0.2)
    assert [record.instance_id for record in (await index.nodes()).records] == ["b"]
    assert (await index.match(chain(4))).held == {}
    await index.store("a", chain(4))
    assert await index.announce(node("a"), TTL_S) is True
    assert (await index.match(chain(4))).held == {}
    await index.store("a", chain(4))
    assert (await index.match(chain(4))).held == {"a": 4}


async def check_a_new_instance_replaces_the_old_at_once(connect: Connect) -> None:
    old, new = connect(), connect()
    await old.announce(node("old", "n"), TTL_S)
    await old.store("old", chain(4))
    assert await new.announce(node("new", "n"), TTL_S) is True
    assert [record.instance_id for record in (await old.nodes()).records] == ["new"]
    assert (await old.match(chain(4))).held == {}
    await old.store("old", chain(4))
    assert (await new.match(chain(4))).held == {}


async def check_a_replaced_instance_is_refused_for_good(connect: Connect) -> None:
    old, new = connect(), connect()
    await old.announce(node("old", "n"), TTL_S)
    await new.announce(node("new", "n"), TTL_S)
    for _ in range(2):
        with pytest.raises(Unavailable, match="newer instance"):
            await old.announce(node("old", "n"), TTL_S)
    assert [record.instance_id for record in (await new.nodes()).records] == ["new"]
    assert await new.announce(node("new", "n"), TTL_S) is False
    await new.withdraw("new")
    with pytest.raises(Unavailable, match="newer instance"):
        await old.announce(node("old", "n"), TTL_S)


async def check_an_instance_replaced_after_it_expired_is_refused(connect: Connect) -> None:
    index = connect()
    await index.announce(node("old", "n"), 0.05)
    await asyncio.sleep(0.1)
    await index.announce(node("new", "n"), TTL_S)
    with pytest.raises(Unavailable, match="newer instance"):
        await index.announce(node("old", "n"), TTL_S)


async def check_withdraw_removes_the_node_and_its_blocks(connect: Connect) -> None:
    index = connect()
    for name in ("a", "b"):
        await index.announce(node(name), TTL_S)
        await index.store(name, chain(3))
    await connect().withdraw("a")
    await index.withdraw("a")
    await index.withdraw("never seen")
    assert [record.instance_id for record in (await index.nodes()).records] == ["b"]
    assert (await index.match(chain(3))).held == {"b": 3}
    assert await index.announce(node("a"), TTL_S) is True
    assert (await index.match(chain(3))).held == {"b": 3}


async def check_the_memory_stays_whoever_comes_leaves_or_falls_silent(connect: Connect) -> None:
    index = connect()
    await index.announce(node("a"), TTL_S)
    memory = (await index.nodes()).memory
    await index.announce(node("b"), 0.05)
    await index.announce(node("c"), TTL_S)
    await index.announce(replace(node("a"), instance_id="a2"), TTL_S)
    await asyncio.sleep(0.1)
    await index.withdraw("c")
    found = await connect().nodes()
    assert [record.instance_id for record in found.records] == ["a2"]
    assert found.memory == memory != b""


async def check_match_counts_leading_blocks_only(connect: Connect) -> None:
    index, names = connect(), chain(20)
    for name, held in {"all": names, "half": names[:10], "nine": names[:9], "one": names[:1], "none": []}.items():
        await index.announce(node(name), TTL_S)
        await index.store(name, held)
    assert (await connect().match(names)).held == {"all": 20, "half": 10, "nine": 9, "one": 1}
    assert (await connect().match(names[:3])).held == {"all": 3, "half": 3, "nine": 3, "one": 1}
    other = names[:2] + chain(9, salt="another end")
    assert (await connect().match(other)).held == {"all": 2, "half": 2, "nine": 2, "one": 1}
    assert (await index.match(chain(5, salt="other tenant"))).held == {}
    assert await index.match([]) == Matches({}, {})


async def check_store_and_remove_may_be_repeated(connect: Connect) -> None:
    index, names = connect(), chain(6)
    for name in ("a", "b", "c"):
        await index.announce(node(name), TTL_S)
        await index.store(name, names)
        await index.store(name, names[2:] + names[:3])
    await index.remove("b", names[3:])
    await index.remove("b", names[3:] + chain(2, salt="never stored"))
    assert (await index.match(names)).held == {"a": 6, "b": 3, "c": 6}
    await index.store("b", names[3:])
    await index.remove("a", names)
    assert (await index.match(names)).held == {"b": 6, "c": 6}


async def check_unknown_instances_are_ignored(connect: Connect) -> None:
    index = connect()
    await index.store("nobody", chain(2))
    await index.remove("nobody", chain(2))
    assert (await index.match(chain(2))).held == {}
    await index.announce(node("a"), TTL_S)
    await index.store("nobody", chain(2))
    assert (await index.match(chain(2))).held == {}


async def check_long_chains_go_through(connect: Connect) -> None:
    index, names = connect(), chain(5000)
    await index.announce(node("a"), TTL_S)
    await index.store("a", names)
    assert (await index.match(names)).held == {"a": 5000}
    await index.remove("a", names[3000:])
    assert (await index.match(names)).held == {"a": 3000}


async def check_what_a_node_has_been_sent_is_told_to_every_caller(connect: Connect) -> None:
    index, names = connect(), chain(20)
    for name in ("a", "b"):
        await index.announce(node(name), TTL_S)
    await index.store("a", names[:3])
    gateway = connect()
    await gateway.expect("a", names, TTL_S)
    await gateway.expect("a", names[:7], TTL_S)
    await gateway.expect("b", names[:5] + chain(9, salt="another end"), TTL_S)
    await gateway.expect("b", [], TTL_S)
    for caller in (gateway, connect()):
        assert await caller.match(names) == Matches({"a": 3}, {"a": 20, "b": 5})
        assert await caller.match(names[:2]) == Matches({"a": 2}, {"a": 2, "b": 2})
        assert await caller.match(names[:9] + chain(30, salt="an end")) == Matches({"a": 3}, {"a": 9, "b": 5})
        assert await caller.match(chain(20, salt="other tenant")) == Matches({}, {})


async def check_what_is_expected_is_forgotten_by_itself(connect: Connect) -> None:
    index, names = connect(), chain(6)
    for name in ("short", "long", "again"):
        await index.announce(node(name), TTL_S)
    for name, ttl_s in {"short": 0.1, "long": TTL_S, "again": TTL_S}.items():
        await index.expect(name, names, ttl_s)
    await index.expect("again", names, 0.1)
    await index.expect("long", names[:4], 0.1)
    await index.expect("short", chain(3, salt="alone"), 0.1)
    await asyncio.sleep(0.2)
    assert (await index.match(names)).coming == {"long": 6, "again": 6}
    assert (await index.match(chain(3, salt="alone"))).coming == {}


async def check_nothing_is_expected_of_nodes_that_do_not_live(connect: Connect) -> None:
    index, gateway, names = connect(), connect(), chain(6)
    for name in ("dies", "leaves", "old", "stays"):
        await index.announce(node(name), 0.3 if name == "dies" else TTL_S)
    for name in ("dies", "leaves", "old", "stays", "never seen"):
        await gateway.expect(name, names, TTL_S)
    await index.withdraw("leaves")
    await index.announce(node("new", "node-old"), TTL_S)
    assert (await gateway.match(names)).coming.keys() - {"dies"} == {"stays"}
    await asyncio.sleep(0.4)
    assert [record.instance_id for record in (await index.nodes()).records] == ["new", "stays"]
    assert (await connect().match(names)).coming == {"stays": 6}


async def check_a_long_prompt_is_expected_to_a_64th_of_its_length(connect: Connect) -> None:
    index, names = connect(), chain(5000)
    await index.announce(node("a"), TTL_S)
    await index.expect("a", names, TTL_S)
    assert (await index.match(names)).coming == {"a": 5000}
    assert (await index.match(names + chain(3, salt="more"))).coming == {"a": 5000}
    for shared in (100, 1234, 4999):
        found = (await index.match(names[:shared] + chain(9, salt="another end"))).coming
        assert shared - 5000 / 64 - 1 < found["a"] <= shared


async def check_of_many_prompts_with_one_beginning_the_longest_lasting_are_remembered(connect: Connect) -> None:
    index, names = connect(), chain(3)
    ends = [i * 7 % (3 * MAX_EXPECTED) for i in range(3 * MAX_EXPECTED)]
    for i in range(3 * MAX_EXPECTED):
        await index.announce(node(str(i)), TTL_S)
        await index.expect(str(i), names, 1000.0 * (1 + ends[i]))
    expected = [i for i, end in enumerate(ends) if end >= 2 * MAX_EXPECTED]
    assert (await index.match(names)).coming == {str(i): 3 for i in expected}


async def check_many_callers_at_once_get_their_own_answers(connect: Connect) -> None:
    index = connect()
    chains = [chain(i + 1, salt=str(i)) for i in range(40)]
    await asyncio.gather(*(index.announce(node(str(i)), TTL_S) for i in range(40)))
    await asyncio.gather(*(index.store(str(i), names) for i, names in enumerate(chains)))
    found = await asyncio.gather(*(index.match(names) for names in chains))
    assert [matches.held for matches in found] == [{str(i): i + 1} for i in range(40)]


async def check_a_closed_index_says_so(connect: Connect) -> None:
    index = connect()
    await index.announce(node("a"), TTL_S)
    await index.aclose()
    await index.aclose()
    with pytest.raises(IndexUnavailable, match="closed"):
        await index.nodes()


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
