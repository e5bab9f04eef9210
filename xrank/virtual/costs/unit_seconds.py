"""Least-squares fit of the seconds per unit of work to measured times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def unit_seconds(amounts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Fit the seconds per unit of each kind of work; a kind that would be negative or is unused gets 0.

    Args:
        amounts: one row per sample: its amount of each kind of work per second of its time, for equal weights.
    """
    used = np.flatnonzero(amounts.any(axis=0)).tolist()
    seconds = np.zeros(amounts.shape[1])
    while used:
        # Equal scales keep the problem well-conditioned: a second per byte is tiny against a second per start.
        scales = np.linalg.norm(amounts[:, used], axis=0)
        found = np.linalg.lstsq(amounts[:, used] / scales, np.ones(len(amounts)), rcond=None)[0] / scales
        if (found >= 0).all():
            seconds[used] = found
            break
        used.pop(int(np.argmin(found * scales)))
        # Non-negative least squares: drop the most negative kind and fit the rest again.
    return seconds
