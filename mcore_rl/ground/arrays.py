"""The numpy arrays of indices, counts and log-probs that packages hand to one another, named by their dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]
RoutesArray = NDArray[np.integer[Any]]  # numbers of experts, uint8 or int16: ``MoeConfig.choice_bytes``
