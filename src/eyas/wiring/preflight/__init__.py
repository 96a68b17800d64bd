"""What a launch would run into, known before it is tried. No torch."""

from eyas.wiring.preflight.launch import Launch, parse_launch
from eyas.wiring.preflight.machine import Gpu
from eyas.wiring.preflight.memory import MemoryPlan
from eyas.wiring.preflight.run import Preflight, preflight

__all__ = ["Gpu", "Launch", "MemoryPlan", "Preflight", "parse_launch", "preflight"]
