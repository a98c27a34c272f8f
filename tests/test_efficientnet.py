"""The classifier of the examples: how it reads a file of torch, and folds normalizations."""

import collections
import pickle
import sys
import types

import numpy as np
import pytest

from .environment import example


@pytest.fixture(scope="module")
def efficientnet():
    """The example, as a module."""
    return example("efficientnet")


@pytest.fixture
def torch(monkeypatch):
    """What pickles of torch name: classes and a function, all of which do nothing."""
    names = {"torch": ("FloatStorage", "LongStorage"), "torch._utils": ("_rebuild_tensor_v2",)}
    for module, inside in names.items():
        made = types.ModuleType(module)
        for name in inside:
            setattr(made, name, type(name, (), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, made)
    return sys.modules["torch"]


class Storage:
    """Numbers, of which tensors are views."""

    def __init__(self, key, kind, numbers):
        self.key, self.kind, self.numbers = key, kind, numbers


class Tensor:
    """A view of a storage, which is pickled as torch does."""

    def __init__(self, *view):
        self.view = view

    def __reduce__(self):
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (*self.view, False, collections.OrderedDict())


class Pickler(pickle.Pickler):
    """Names storages, whose numbers come later."""

    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            return ("storage", obj.kind, obj.key, "cpu", len(obj.numbers), None)


def write(path, tensors, storages, number=0x1950A86A20F9469CFC6C):
    head = (number, 1001, {"little_endian": True, "type_sizes": {"int": 4}})
    with open(path, "wb") as file:
        for value in (*head, tensors, [storage.key for storage in storages]):
            Pickler(file, protocol=2).dump(value)
        for storage in storages:
            file.write(len(storage.numbers).to_bytes(8, "little") + storage.numbers.tobytes())


def test_a_file_of_torch_is_read_and_nothing_is_made_of_it(efficientnet, torch, tmp_path):
    floats = Storage("7", torch.FloatStorage, np.arange(12, dtype="<f4"))
    count = Storage("3", torch.LongStorage, np.array([5], "<i8"))
    tensors = collections.OrderedDict(
        a=Tensor(floats, 0, (2, 3), (3, 1)),
        b=Tensor(floats, 6, (3, 2), (1, 3)),
        n=Tensor(count, 0, (), ()),
    )
    for given in (tensors, collections.OrderedDict(list(tensors.items())[:1])):
        write(tmp_path / "x.pth", given, [count, floats] if len(given) > 1 else [floats])
        found = efficientnet.read_torch(tmp_path / "x.pth")
        assert list(found) == list(given)
        np.testing.assert_array_equal(found["a"], np.arange(6).reshape(2, 3))
        if len(given) > 1:
            np.testing.assert_array_equal(found["b"], np.arange(6, 12).reshape(2, 3).T)
            assert found["n"].shape == () and found["n"] == 5


def test_other_files_are_no_files_of_torch(efficientnet, torch, tmp_path):
    write(tmp_path / "x.pth", collections.OrderedDict(), [], number=5)
    with pytest.raises(AssertionError, match="not a file of torch"):
        efficientnet.read_torch(tmp_path / "x.pth")
    (tmp_path / "x.pth").write_bytes(pickle.dumps(frozenset([1]), protocol=4))
    with pytest.raises(ValueError, match="unknown operation FRAME"):
        efficientnet.read_torch(tmp_path / "x.pth")


def test_a_folded_convolution_is_the_one_that_is_normalized_after_it(efficientnet):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(4, 3, 5, 2))
    scale, bias, mean = rng.normal(size=(3, 4))
    variance = rng.random(4)
    patch = rng.normal(size=(3, 5, 2))
    want = scale * ((kernel * patch).sum((1, 2, 3)) - mean) / np.sqrt(variance + 1e-3) + bias
    own, offset = efficientnet.fold(kernel, scale, bias, mean, variance)
    found = np.einsum("ihw,hwio->o", patch, own) + offset
    np.testing.assert_allclose(found, want, rtol=1e-12)  # float64, sums of 30
