"""What the command line says of a simulation and of a load: words in, checked values out.

Owns which of these options need which others. Whatever is wrong is one SetupError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import SetupError
from kvtop.cli.options import KvDtypeName

if TYPE_CHECKING:
    from engine import Simulation


def simulation(
    simulate: str | None,
    on: str | None,
    weights: str | None,
    kv_cache_dtype: KvDtypeName,
    speed: float | None,
    *,
    live: str | None,
) -> Simulation | None:
    """None: a live engine. live: the model that --model names. Raises SetupError."""
    if simulate is None:
        foreign = None if weights in ("int8", "int4", "fp8") else weights
        given = {"--on": on, "--weights": foreign, "--speed": speed}
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None:
            raise SetupError(f"{extra} goes with --simulate MODEL --on DEVICE")
        return None
    if on is None:
        raise SetupError("--simulate needs --on DEVICE, like --on h100, --on rtx-4070 or --on 4xh200")
    if live is not None:
        raise SetupError("--simulate names the model; leave out --model")
    from engine import Simulation

    return Simulation(simulate, on, weights, kv_cache_dtype, speed)
