"""The C library's heap, told to keep what a training step frees, since the next step asks for it again."""

import ctypes
import sys

_SETTINGS = (
    (-8, 1),  # M_ARENA_MAX: all threads share one heap
    (-4, 0),  # M_MMAP_MAX: large blocks come from the heap, too
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: its end is not given back
)


def keep() -> bool:
    """Whether the heap now keeps freed memory: with glibc yes, elsewhere nothing is changed.

    XLA:CPU allocates a program's temporaries anew in each execution, and glibc maps and unmaps what is above 32 MiB: a
    page fault for every 4 KiB. Call it before the backend's threads exist. Source: mallopt(3).
    """
    libc = _glibc()
    return libc is not None and all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS)


def trim() -> bool:
    """Whether freed memory was given back to the system: after compiling, which takes more than a small run's step.

    Source: malloc_trim(3).
    """
    libc = _glibc()
    return libc is not None and libc.malloc_trim(0) == 1


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        _ = libc.gnu_get_libc_version
        return libc
    except (OSError, AttributeError):
        return None
