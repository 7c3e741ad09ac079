"""The kernels of the ops, and how calls of a Plan become launches."""
