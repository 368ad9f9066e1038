"""The engine's public face. Names load on first use, so `import engine.events` never pulls in torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import bench, events, sizing
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import SetupError
    from engine.knobs import Group, Knob, KnobError, Setting, check_fields, settings_of
    from engine.params import SamplingParams
    from engine.sim.simulated import Simulation
    from engine.sim.workload import Workload, load_workload

__all__ = [
    "Engine",
    "EngineConfig",
    "Group",
    "Knob",
    "KnobError",
    "SamplingParams",
    "Setting",
    "SetupError",
    "Simulation",
    "Workload",
    "bench",
    "check_fields",
    "events",
    "load_workload",
    "settings_of",
    "sizing",
]

_home = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.params",
    "SetupError": "engine.errors",
    **dict.fromkeys(("Group", "Knob", "KnobError", "Setting", "check_fields", "settings_of"), "engine.knobs"),
    "Simulation": "engine.sim.simulated",
    "Workload": "engine.sim.workload",
    "load_workload": "engine.sim.workload",
}


def __getattr__(name: str) -> Any:
    if name in _home:
        return getattr(import_module(_home[name]), name)
    if name in __all__:
        return import_module(f"engine.{name}")
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
