"""Programmatic dependent launch: a kernel that starts while its predecessor still runs."""

import triton
import triton.language as tl


@triton.jit
def start(PDL: tl.constexpr):
    """Wait until the predecessor is done, and let the successor start its own wait.

    What comes before it may read only what no kernel of the step writes: weights and tables.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
