"""What kernels are written in, to be imported as `v`: operations, loads, stores, conversions."""

from cpu_fallback.lanes.maths import *  # noqa: F403
from cpu_fallback.lanes.memory import *  # noqa: F403
from cpu_fallback.lanes.narrow import *  # noqa: F403
from cpu_fallback.lanes.simd import *  # noqa: F403
from cpu_fallback.lanes.vector import *  # noqa: F403
