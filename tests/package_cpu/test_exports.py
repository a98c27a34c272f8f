"""Exported functions that call kernels of jqx-cpu."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

import jqx
from jqx._src import package_cpu

from ..arrays import normal

package = pytest.importorskip("jqx_cpu")

READER = """
import sys
import jax
import numpy as np
from jax import export
{imports}
f = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
np.save(sys.argv[2], f.call(np.load(sys.argv[2])))
assert "jqx" not in sys.modules
"""


def exported(**options):
    w = jqx.QTensor.quantize(normal(0, 256, 192), jqx.QSpec("int8", jqx.per_axis(1)))
    w = jqx.pack_for(w, "cpu")
    f = jax.jit(lambda x: jqx.matmul(x, w))
    x = normal(1, 3, 256)
    return export.export(f, **options)(x), x, f(x)


def test_an_exported_function_calls_kernels_where_it_is_told_to():
    with jqx.kernels_in_exports() as checks:
        with_kernels, x, y = exported(disabled_checks=checks)
    assert "jqx_cpu_float_product" in with_kernels.mlir_module()
    np.testing.assert_array_equal(with_kernels.call(x), y)
    assert "jqx_cpu" not in exported()[0].mlir_module()


def test_one_that_is_read_without_the_package_says_what_is_missing(tmp_path):
    pytest.importorskip("flatbuffers")
    with jqx.kernels_in_exports() as checks:
        with_kernels, x, y = exported(disabled_checks=checks)
    (tmp_path / "f").write_bytes(with_kernels.serialize())

    def read(imports):
        np.save(tmp_path / "x.npy", x)
        command = [sys.executable, "-c", READER.format(imports=imports)]
        given = [*command, str(tmp_path / "f"), str(tmp_path / "x.npy")]
        return subprocess.run(given, capture_output=True, text=True, check=False)

    assert "No FFI handler registered for jqx_cpu_float_product" in read("").stderr
    found = read("import jqx_cpu")
    assert found.returncode == 0, found.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), y)


def test_for_several_platforms_the_cpu_alone_calls_kernels():
    with jqx.kernels_in_exports() as checks:
        both, x, y = exported(disabled_checks=checks, platforms=("cpu", "tpu"))
    assert both.mlir_module().count("@jqx_cpu_float_product") == 1
    np.testing.assert_array_equal(both.call(x), y)


def test_without_the_package_they_are_refused(monkeypatch):
    monkeypatch.setattr(package_cpu, "is_installed", lambda: False)
    with pytest.raises(ImportError, match=r"jqx-cpu is not installed(.|\n)+fix:"):
        jqx.kernels_in_exports().__enter__()
