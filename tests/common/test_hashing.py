from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.hashing import NAME_BYTES, block_names, root_name

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=100)
ROOT = root_name("fp", "num", "salt")


def test_names_never_change():
    """Golden: nodes of different versions share blocks only while these hold."""
    assert ROOT.hex() == "4527999195dd2e6c10a4bb6d927cb551"
    assert [name.hex() for name in block_names(ROOT, range(40), 16)] == [
        "154803ff4e40f9b8a86c1a01de3b9ea1",
        "887ba05ebe2e19bbed271ceed33cfc8c",
    ]
    assert [name.hex() for name in block_names(root_name("", ""), [0, 2**32 - 1, 1, 49151], 2)] == [
        "e5f88e56bb0f255a80d0a947da477ef8",
        "525bb3a6a3d2dadd3cbe3102036f90ab",
    ]


def test_every_process_gives_the_same_names():
    code = (
        "from kvferry.common.hashing import *;"
        "print([n.hex() for n in block_names(root_name('a', 'b', 'c'), range(64), 16)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(outputs) == 1


@given(tokens=token_ids, block_size=st.integers(1, 40))
def test_only_full_blocks_have_names_and_each_its_own(tokens, block_size):
    names = block_names(ROOT, tokens, block_size)
    assert len(names) == len(tokens) // block_size
    assert all(len(name) == NAME_BYTES for name in names)
    assert len(set(names)) == len(names)


@given(tokens=token_ids, more=token_ids, block_size=st.integers(1, 20))
def test_a_prefix_keeps_its_names(tokens, more, block_size):
    names = block_names(ROOT, tokens, block_size)
    assert block_names(ROOT, tokens + more, block_size)[: len(names)] == names


@given(tokens=token_ids, block_size=st.integers(1, 20), data=st.data())
def test_a_chain_can_be_continued_from_any_block(tokens, block_size, data):
    names = block_names(ROOT, tokens, block_size)
    split = data.draw(st.integers(0, len(names)))
    parent = names[split - 1] if split else None
    assert block_names(ROOT, tokens[split * block_size :], block_size, parent) == names[split:]


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), data=st.data())
def test_one_other_token_changes_every_name_from_its_block_on(tokens, data):
    names = block_names(ROOT, tokens, 4)
    at = data.draw(st.integers(0, len(names) * 4 - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    other = block_names(ROOT, changed, 4)
    assert other[: at // 4] == names[: at // 4]
    assert not set(other[at // 4 :]) & set(names[at // 4 :])


def test_model_numerics_and_tenant_each_have_chains_of_their_own():
    roots = {root_name(*parts) for parts in (("a", "b", "c"), ("x", "b", "c"), ("a", "x", "c"), ("a", "b", "x"))}
    assert len(roots) == 4
    assert root_name("ab", "c") != root_name("a", "bc")
    assert root_name("a", "b") == root_name("a", "b", "")
