"""What attention's rules are tried on: options, and what dropout is drawn from."""

from __future__ import annotations

from typing import Any

import torch

ATTENDS: dict[str, Any] = {"is_causal": False, "scale": 0.3, "soft_cap": 0.0, "window": 0, "keep_below": 0, "keep_scale": 1.0}
ATTENDS |= {"implementation": "triton"}
DROPS = ATTENDS | {"keep_below": 3 << 30, "keep_scale": 4 / 3}
# Of scores [2, 4, 6, 10].
DRAWS = [torch.empty(shape, dtype=torch.int64) for shape in ((2, 4, 6, 1), (), (10,))]
