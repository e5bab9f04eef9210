"""What one of each thing takes, to come nearest to measured times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["unit_seconds"]


def unit_seconds(amounts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how long one of each thing takes, none less than 0: that is for what no sample does, or needs to.

    Args:
        amounts: a row for each sample: how much it does of each thing, for each second that it took. So they all
            weigh alike, whatever time they took.
    """
    used = np.flatnonzero(amounts.any(axis=0)).tolist()
    seconds = np.zeros(amounts.shape[1])
    while used:
        # Equal scales, so that a second a byte and a second to start are found alike well.
        scales = np.linalg.norm(amounts[:, used], axis=0)
        found = np.linalg.lstsq(amounts[:, used] / scales, np.ones(len(amounts)), rcond=None)[0] / scales
        if (found >= 0).all():
            seconds[used] = found
            break
        used.pop(int(np.argmin(found * scales)))
    return seconds
