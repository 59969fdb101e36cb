from __future__ import annotations

import pytest

from kvferry.kernels.cpu.rows import can_copy_rows

pytest.register_assert_rewrite("kvferry.services.transfer.conformance.suite")


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Compiled, where that is still to do, before a test counts seconds."""
    assert can_copy_rows()
