"""What a launch would run into, known before it is tried. No torch."""

from eyas.launch.arguments import Launch, parse_launch
from eyas.launch.gpus import Gpu
from eyas.wiring.preflight.memory import MemoryPlan
from eyas.wiring.preflight.run import Preflight, preflight

__all__ = ["Gpu", "Launch", "MemoryPlan", "Preflight", "parse_launch", "preflight"]
