"""Compile a test's own kernel and call it, in a cache of the test's own."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.objects import ObjectCache

_numbers = itertools.count()


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the kernels of a test module out of the user's cache."""
    kept = ObjectCache._instance
    root = tmp_path_factory.mktemp("kernels")
    ObjectCache._instance = ObjectCache(root)
    yield root
    ObjectCache._instance = kept


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return a C function of the int64 parameters of a kernel function."""
    kernel = Kernel(function)
    kernel.name += f"_{next(_numbers)}"  # closures of one function are different kernels
    return kernel.callable
