"""A quantile, as every benchmark takes it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so many of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
