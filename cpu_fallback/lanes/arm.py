"""What an Arm processor can do, as the system tells it: LLVM does not ask every system."""

import ctypes
import sys

_AT_HWCAP, _AT_HWCAP2 = 16, 26
_LINUX = {"lse": (_AT_HWCAP, 8), "dotprod": (_AT_HWCAP, 20), "i8mm": (_AT_HWCAP2, 13)}
_DARWIN = {"lse": "FEAT_LSE", "dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM"}


def features() -> dict[str, bool]:
    """Return LLVM's names of the features that kernels use, and whether this processor has them.

    Source: arch/arm64/include/uapi/asm/hwcap.h of Linux (the bits of the auxiliary vector), and
    Apple's "Determining instruction set characteristics" (the names of sysctl).
    """
    system = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return {name: _darwin_has(system, about) for name, about in _DARWIN.items()}
    words = system.getauxval
    words.restype, words.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return {name: bool(words(word) >> bit & 1) for name, (word, bit) in _LINUX.items()}


def _darwin_has(system: ctypes.CDLL, feature: str) -> bool:
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    name = f"hw.optional.arm.{feature}".encode()
    failed = system.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and bool(value.value)
