"""The arithmetic by which numpy does for all sequences of a step what a loop would do for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """`counts` [n] things of n owners, one owner's after the other's: of each its owner, and which of the owner's."""
    owners = np.arange(len(counts)).repeat(counts)
    return owners, np.arange(len(owners)) - (counts.cumsum() - counts)[owners]
