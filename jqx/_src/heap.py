"""Freed memory that the C library keeps for later use."""

import ctypes


def give_back() -> None:
    """Returns freed memory to the system. This has an effect only with glibc, which keeps memory
    that consists of many small pieces, such as those of compilers: about 100 MB.
    """
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows does not support this
        return None


_LIBRARY = _library()
