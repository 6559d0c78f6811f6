"""Signals between instructions and the scheduler."""

from __future__ import annotations

import numpy as np


class Park(Exception):  # noqa: N818 (a signal, no error)
    """A `.sync` instruction met warps of which lanes are still on their way.

    `warps` (bool, per warp of the batch) marks the warps that must wait at this instruction.
    """

    def __init__(self, warps: np.ndarray) -> None:
        super().__init__()
        self.warps = warps
