"""Memory that is freed, and that the C library holds for the next time."""

import ctypes


def give_back() -> None:
    """Gives it back to the system. It does something with glibc alone, which holds what has many
    small pieces, such as compilers': some 100 MB.
    """
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of that name
        return None


_LIBRARY = _library()
