"""The CUDA back end, and whether this machine has a GPU that it can use. Imports nothing heavy."""

from clocher_kernels.guards import no_driver

LOWEST_CAPABILITY = 80


def unusable() -> str:
    """Return why the CUDA back end cannot run here, else ""."""
    reason = no_driver()
    if reason:
        return reason
    try:
        import torch
        import triton
    except ImportError as error:
        name = error.name or error
        return f"{name} is not installed; pip install '.[cuda]' in a clone of Clocher"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; it may be a CPU build"
    major, minor = torch.cuda.get_device_capability()
    if major * 10 + minor < LOWEST_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} is sm_{major}{minor}; sm_{LOWEST_CAPABILITY} or newer is needed"
    # Releases before 3.7 leave out a barrier in matmuls of loops there (triton-lang/triton#9871).
    if major in (10, 11) and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return f"Triton {triton.__version__} miscomputes on sm_{major}{minor}; install 3.7 or newer"
    return ""


def describe() -> dict[str, str | int]:
    """Return name, driver, memory, SMs and clocks (0 without NVML) of the current GPU."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, sm_clock, memory_clock = _nvml(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": properties.major * 10 + properties.minor,
        "sms": properties.multi_processor_count,
        "memory_mib": properties.total_memory >> 20,
        "driver": driver,
        "sm_clock_mhz": sm_clock,
        "memory_clock_mhz": memory_clock,
    }


def _nvml(index: int) -> tuple[str, int, int]:
    try:
        import pynvml
    except ImportError:
        return "", 0, 0
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        version = pynvml.nvmlSystemGetDriverVersion()
        clocks = [
            int(pynvml.nvmlDeviceGetMaxClockInfo(handle, kind))
            for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
        ]
    except pynvml.NVMLError:
        return "", 0, 0
    return version if isinstance(version, str) else version.decode(), clocks[0], clocks[1]
