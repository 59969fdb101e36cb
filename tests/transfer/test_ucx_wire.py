"""The messages of transport `ucx`: what is written is what is read, and nothing else passes."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.common.errors import BlockCorrupt, LeaseExpired, TransferFailed
from kvferry.services.transfer.conformance.owners import content, fill
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.ucx_wire import (
    ReadRequest,
    message_bytes,
    new_buffer,
    new_tag,
    parse_message,
    read_error,
    read_run,
    stop_message,
    write_error,
    write_run,
)


@pytest.mark.parametrize("block_ids", [(), (7,), tuple(range(5000))])
def test_a_request_survives_the_wire(block_ids: tuple[int, ...]) -> None:
    request = ReadRequest(new_tag(), 46080, "instance", "lease", block_ids)
    assert parse_message(request.to_bytes()) == request
    assert parse_message(stop_message(request.tag)) == request.tag
    assert [i for n in range(request.num_runs) for i in block_ids[request.run(n)]] == list(block_ids)


@pytest.mark.parametrize("message", [b"", b"x" * 400, ReadRequest(1, 2, "i", "l", (3, 4)).to_bytes()[:-1]])
def test_what_is_no_request_is_refused(message: bytes) -> None:
    with pytest.raises(TransferFailed):
        parse_message(message)


@pytest.mark.parametrize("block_bytes", [1, 63, 5000])
@pytest.mark.parametrize("block_ids", [(), (7,), (3, 9, 1, 2)])
def test_a_run_survives_the_wire(block_ids: tuple[int, ...], block_bytes: int) -> None:
    segment = PoolSegment.anonymous(10, block_bytes)
    fill(segment)
    memory = write_run(segment.buffer, block_ids, 99, new_buffer(block_bytes))
    assert len(memory) <= message_bytes(len(block_ids), block_bytes)
    assert read_error(memory) is None
    np.testing.assert_array_equal(read_run(memory, block_ids, block_bytes, 99), content(block_ids, block_bytes))


def test_any_changed_byte_and_any_other_run_is_noticed() -> None:
    segment = PoolSegment.anonymous(10, 64)
    fill(segment)
    whole = write_run(segment.buffer, (4, 5), 99, new_buffer(64))
    for at in range(4, len(whole)):  # before that lies the status
        memory = whole.copy()
        memory[at] ^= 1
        with pytest.raises(TransferFailed):
            read_run(memory, (4, 5), 64, 99)
    with pytest.raises(TransferFailed):
        read_run(whole, (4, 5), 64, 100)
    with pytest.raises(BlockCorrupt, match="block 5"):
        read_run(whole, (5, 4), 64, 99)


def test_an_error_of_any_length_survives_the_wire() -> None:
    for text in ("", "gone", "long " * 1000):
        memory = write_error(LeaseExpired(text))
        assert len(memory) <= message_bytes(1, 1)
        error = read_error(memory)
        assert isinstance(error, LeaseExpired)
        assert text.startswith(error.message)
