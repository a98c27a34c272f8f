"""Kernels of jqx for CPUs, in C++, called by XLA.

jqx runs them where this package is installed, on weights that `jqx.pack_for(tree, "cpu")` has laid
out. Importing it tells XLA where they are: a function that was exported with calls of kernels needs
no more of jqx than that.
"""

import ctypes
import functools
import os
import pathlib

import jax

__version__ = "0.1.0"

HANDLERS = (
    "product",
    "float_product",
    "decoded_product",
    "convolution",
    "magnitudes",
    "ranges",
    "rows",
)

VARIABLE = "JQX_CPU_KERNELS"
"""The environment variable that names the instructions to use, such as "AVX2", if not the best."""


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library of kernels.

    Raises:
      ImportError: it was built for another system, or is not there.
    """
    folder = pathlib.Path(__file__).parent
    found = [path for path in folder.glob("jqx_cpu*") if path.suffix in (".so", ".dylib", ".dll")]
    if not found:
        raise ImportError(
            f"jqx_cpu: there is no library in {str(folder)!r}. Build the package: pip install ./cpu"
        )
    try:
        return ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise ImportError(f"jqx_cpu: its library cannot be loaded: {error}") from error


def kernels() -> str:
    """Returns the name of the instructions that kernels use on this processor."""
    name = library().jqx_cpu_kernels
    name.restype = ctypes.c_char_p
    return name().decode()


def _choose(name: str) -> None:
    choose = library().jqx_cpu_choose
    choose.argtypes, choose.restype = (ctypes.c_char_p,), ctypes.c_bool
    if not choose(name.encode()):
        raise ImportError(
            f"jqx_cpu: this processor has no kernels {name!r}, which {VARIABLE} names. Its best "
            f"ones are {kernels()!r}; leave the variable out to use them."
        )


CHOSEN = os.environ.get(VARIABLE, "")
"""What that variable names, if anything, as it was when this was imported."""

if CHOSEN:
    _choose(CHOSEN)
for _name in HANDLERS:
    _handler = jax.ffi.pycapsule(getattr(library(), f"jqx_cpu_{_name}"))
    jax.ffi.register_ffi_target(f"jqx_cpu_{_name}", _handler, platform="cpu")
