"""Array types and the compiler options of the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def planner_compiled(function: Callable[..., Any]) -> Any:
    """Compile without the GIL, cached on disk; no zero check at divisions."""
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
