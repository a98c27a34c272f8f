"""Records what jqx does: digests of what must be equal, and arrays of what may differ a little."""

import functools
import gzip
import io
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from .cases import (
    ALGORITHMS,
    PRESETS,
    Learned,
    cases,
    codes_of,
    forget,
    kernels_of,
    learned,
    plan_of,
)
from .comparisons import check_learned
from .normal_forms import digest
from .products import product_sums
from .wide import TARGETS, WIDE, wide_form

FOLDER = pathlib.Path(__file__).parent / "recorded"


class Store:
    """The recorded digests, the forms that they are of, and what algorithms chose."""

    def __init__(self) -> None:
        path = FOLDER / "digests.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        self.jax = known.get("jax", jax.__version__)
        self.digests: dict[str, str] = known.get("digests", {})
        path = FOLDER / "forms.json.gz"
        self.forms = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}

    def add(self, key: str, form: Any) -> None:
        """Records a form under a key."""
        self.digests[key] = digest(form)
        self.forms[self.digests[key]] = form

    def form(self, key: str) -> Any:
        """The recorded form of a key; `None` if there is none."""
        return self.forms.get(self.digests.get(key))

    def write(self) -> None:
        """Writes the digests in order, and the forms that they need."""
        FOLDER.mkdir(exist_ok=True)
        digests = dict(sorted(self.digests.items()))
        text = json.dumps({"jax": self.jax, "digests": digests}, indent=0)
        (FOLDER / "digests.json").write_text(text + "\n")
        forms = {key: self.forms[key] for key in sorted(set(digests.values()))}
        raw = gzip.compress(json.dumps(forms).encode(), mtime=0)
        (FOLDER / "forms.json.gz").write_bytes(raw)


@functools.cache
def recorded(name: str) -> dict[str, Learned]:
    """What the algorithm with this name chose for each function and policy. After the name and
    another `@` follows the kind of processor, where the algorithm chose something else there.
    """
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    bounds = json.loads(arrays["cases"].tobytes())
    return {
        key: Learned(*(arrays[x][a:b] for x, (a, b) in zip(Learned._fields, each, strict=True)))
        for key, each in bounds.items()
    }


def choices(algorithm: str, key: str) -> list[Learned]:
    """What an algorithm chose for a function and policy, on one kind of processor or another: a
    search takes the next of two candidates that are as good where sums have another order.
    """
    names = [algorithm, *sorted(path.stem for path in FOLDER.glob(f"{algorithm}@*.npz"))]
    return [recorded(name)[key] for name in names if key in recorded(name)]


def write_learned(name: str, found: dict[str, Learned]) -> None:
    """Writes what an algorithm chose; equal arrays are written once."""
    parts: dict[str, list[np.ndarray]] = {field: [] for field in Learned._fields}
    ends, places, bounds = dict.fromkeys(parts, 0), {}, {}
    for key, each in found.items():
        bounds[key] = []
        for field, x in zip(Learned._fields, each, strict=True):
            place = field, x.tobytes()
            if place not in places:
                places[place] = ends[field], ends[field] + x.size
                ends[field] += x.size
                parts[field].append(x)
            bounds[key].append(places[place])
    arrays = {field: np.concatenate(each) for field, each in parts.items()}
    raw = np.frombuffer(json.dumps(bounds).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, cases=raw, **arrays)
    (FOLDER / f"{name}.npz").write_bytes(file.getvalue())


STORE = Store()


def main(algorithms: list[str]) -> None:
    """Records the exact forms anew, and what these algorithms choose."""
    is_all = set(algorithms) == set(ALGORITHMS)
    assert is_all or STORE.jax == jax.__version__, f"record with jax {STORE.jax}, or record all"
    STORE.jax = jax.__version__
    if is_all:
        STORE.digests.clear()
    FOLDER.mkdir(exist_ok=True)
    for name, policy in cases():
        STORE.add(f"{name}/{policy}: plan", plan_of(name, policy))
        STORE.add(f"{name}/{policy}: codes", codes_of(name, policy))
    for kind in WIDE:
        for preset in PRESETS:
            for target in TARGETS:
                STORE.add(f"{kind}/{preset}/{target}: wide", wide_form(kind, preset, target))
    for key, sums in product_sums().items():
        STORE.add(f"{key}: integers", sums)
    for algorithm in algorithms:
        found = {}
        for name, policy in cases():
            form = kernels_of(name, policy, algorithm)
            STORE.add(f"{name}/{policy}/{algorithm}: kernels", form)
            each = learned(name, policy, algorithm)
            if each is not None:
                found[f"{name}/{policy}"] = each
        write_learned(algorithm, found)
        STORE.write()
        print(f"{algorithm}: {len(found)} cases", flush=True)
        forget()


def add_choices(processor: str, algorithms: list[str]) -> None:
    """Records what algorithms choose on this kind of processor, where that is nowhere recorded."""
    for algorithm in algorithms:
        found = {}
        for name, policy in cases():
            key, each = f"{name}/{policy}", learned(name, policy, algorithm)
            try:
                check_learned([(key, choices(algorithm, key), each)])
            except AssertionError as error:
                print(str(error)[:200], flush=True)
                assert each is not None, key
                found[key] = each
        if found:
            write_learned(f"{algorithm}@{processor}", found)
        forget()


if __name__ == "__main__":
    from .. import conftest  # the settings of the tests, whose programs are not optimized

    assert conftest
    jax.config.update("jax_disable_most_optimizations", True)
    processors = [name[1:] for name in sys.argv[1:] if name[0] == "@"]
    names = [name for name in sys.argv[1:] if name[0] != "@"]
    unknown = set(names) - set(ALGORITHMS)
    assert not unknown, f"no algorithms: {unknown}; there are {', '.join(ALGORITHMS)}"
    names = names or list(ALGORITHMS)
    if processors:
        add_choices(processors[0], names)
    else:
        main(names)
