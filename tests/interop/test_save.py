"""What is saved is what is loaded, bit for bit; what cannot be is refused, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jqx
from jqx import numerics
from jqx.interop import Lazy, write
from tests.arrays import normal
from tests.command_line.files import run
from tests.interop.trees import DTYPES, KINDS, assert_same, kind, quantized, random_array, trees
from tests.oracles.refusals import assert_error
from tests.strategies import law


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@law
@given(tree=trees())
def test_what_is_loaded_is_what_was_saved(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("law") / "tree.safetensors"
    jqx.save(path, tree)
    assert_same(jqx.load(path), tree)


@pytest.mark.many
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_qtensor_comes_back(path, name):
    q = kind(name)
    jqx.save(path, {"w": q})
    assert_same(jqx.load(path)["w"], q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(path, dtype):
    x = random_array(np.random.default_rng(0), dtype, (3, 5))
    jqx.save(path, x)
    read = jqx.load(path)
    assert_same(read, x)
    assert isinstance(read, np.ndarray) == (dtype[-2:] == "64" and dtype != "complex64")


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bits_are_jax_arrays_where_jax_has_them(path, dtype):
    x = random_array(np.random.default_rng(0), dtype, (3, 5))
    jqx.save(path, [x])
    with jax.enable_x64(True):
        (read,) = jqx.load(path)
        assert isinstance(read, jax.Array)
        assert_same(read, x)


def test_complex_leaves_are_saved_as_they_are(path):
    pairs = np.array([[1 + 2j, -0.0 + 0j, complex(np.nan, -np.inf)]] * 2)
    tree = {"s": pairs[0, 0], "t": pairs.T, "none": pairs[:0], "c64": pairs.astype(np.complex64)}
    jqx.save(path, tree)
    with jqx.interop.Archive(path) as archive:
        for name, x in tree.items():
            assert (archive.spec(name).shape, archive.spec(name).dtype) == (x.shape, x.dtype)
            for leaf in (archive.numpy(name), archive.view(name)):
                assert_same(leaf, np.asarray(x))
    jqx.save(path.parent / "again", jqx.load(path), resume=True)
    assert (path.parent / "again").read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="does not fit safetensors files of other libraries"):
        jqx.interop.write(path.parent / "m", {"s": pairs}, "safetensors", config={})


def test_a_qtensor_is_three_tensors_and_json(path):
    q = quantized(jnp.uint8)
    jqx.save(path, {"layer": [q]})
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["layer/0.values"]["dtype"] == "U8"
    assert header["layer/0.scale"]["shape"] == [4, 1]
    assert header["layer/0.zero_point"]["dtype"] == "U8"
    described = json.loads(header["__metadata__"]["jqx"])
    assert described["version"] == 2
    node = described["tree"]["dict"][0][1]["list"][0]
    assert node["fields"]["qtype"] == "uint8" and node["fields"]["dtype"] == "float32"
    assert node["values"] == {"array": "layer/0.values", "dtype": "uint8"}


def test_a_format_of_the_user_is_looked_up_by_its_name(path):
    class Mine(numerics.Codebook):
        pass

    mine = Mine((-1.0, 0.5, 1.0), "mine")
    q = quantized(mine)
    assert_error(lambda: jqx.save(path, q), "type Mine is neither of a class of jqx")
    jqx.save(path, q, values={"mine": mine})
    assert_error(lambda: jqx.load(path), "the object 'mine' at tree")
    assert_same(jqx.load(path, values={"mine": mine}), q)


def test_arrays_on_several_devices_are_gathered(path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.arange(8), sharding)
    jqx.save(path, x)
    assert_same(jqx.load(path), np.arange(8, dtype=np.int32))


def test_what_was_loaded_does_not_change_with_the_file(path):
    jqx.save(path, jnp.arange(1000))
    read = jqx.load(path)
    with open(path, "r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 800)
    assert_same(read, np.arange(1000, dtype=np.int32))


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


REFUSED = {
    "a named tuple": (Pair(np.ones(2), np.ones(2)), TypeError, "the Pair at the root"),
    "a number": ({"step": 3}, TypeError, "at 'step'"),
    "text": ([{"name": "x"}], TypeError, "at '0/name'"),
    "a key": ({"a": {1.5: np.ones(2)}}, TypeError, "the key 1.5"),
    "a key that is no integer": ({True: np.ones(2)}, TypeError, "the key True"),
    "long numbers": ({"z": np.ones(2, np.longdouble)}, ValueError, "float128"),
    "strings": ({"z": np.array(["a"])}, ValueError, "<U1"),
    "a random key": ({"k": jax.random.key(0)}, ValueError, "key<fry>"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_stored_is_refused_in_four_parts(path, name):
    tree, error, words = REFUSED[name]
    with pytest.raises(error) as info:
        jqx.save(path, tree)
    text = str(info.value)
    assert words in text and "jqx.save: " in text and "fix: " in text
    assert not path.exists()


def test_a_traced_array_is_refused(path):
    with pytest.raises(TypeError, match="has no values yet"):
        jax.jit(lambda x: jqx.save(path, {"x": x}))(jnp.ones(2))


def test_an_unfinished_write_keeps_the_old_file_and_leaves_no_other(path):
    jqx.save(path, {"x": jnp.ones(3)})
    before = path.read_bytes()
    like = jax.ShapeDtypeStruct((2,), jnp.float32)

    def leaves():
        yield jnp.zeros(2)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        jqx.interop.save_leaves(path, [like, like], leaves())
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


WRONG = {
    "shape": (jnp.zeros(3), "the tensor '1' differs from what was announced"),
    "dtype": (jnp.zeros(2, jnp.int32), "the tensor '1' differs from what was announced"),
    "kind": (quantized(jnp.int8), "the leaf '1' differs from what was announced"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_leaf_that_is_not_what_was_announced_is_refused(path, what):
    like = jax.ShapeDtypeStruct((2,), jnp.float32)
    leaf, problem = WRONG[what]
    with pytest.raises(ValueError, match=problem):
        jqx.interop.save_leaves(path, [like, like], [jnp.zeros(2), leaf])
    with pytest.raises(ValueError, match="shorter"):
        jqx.interop.save_leaves(path, [like, like], [jnp.zeros(2)])
    assert not list(path.parent.iterdir())


# Parameters that are read leaf by leaf, and writes that go on where they were interrupted.


NAMES = [f"layers.{i}.weight" for i in range(6)]


def f(p, x):
    for name in NAMES:
        x = jnp.tanh(x @ p[name]) + p["bias"][None]
    return x


@pytest.fixture
def source(tmp_path):
    """A file of float weights."""
    tree = {name: normal(i, 64, 64) for i, name in enumerate(NAMES)} | {"bias": normal(9, 64)}
    jqx.save(tmp_path / "in.safetensors", tree)
    return tmp_path / "in.safetensors"


def lazily(archive, policy=None):
    """Lazy parameters, quantized, and the plan."""
    params = archive.map(archive.lazy)
    plan = jqx.make_plan(f, policy or jqx.presets.w4a16())(params, jnp.ones((1, 64)))
    return jqx.quantize_params(params, plan), plan


def counted(tree, most=None):
    """The same tree, which counts what is read, and fails behind so many leaves."""
    reads = []

    def count(x):
        def make():
            if most is not None and len(reads) >= most:
                raise KeyboardInterrupt
            reads.append(x)
            return x.make()

        return Lazy(x.spec, make, x.source)

    return jax.tree.map(count, tree, is_leaf=lambda x: isinstance(x, Lazy)), reads


def test_lazy_leaves_become_lazy_qtensors_with_the_bits_of_others(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, plan = lazily(archive)
        assert all(isinstance(x, Lazy) for x in jax.tree.leaves(q))
        expected = jqx.quantize_params(jqx.load(source), plan)
        jqx.save(tmp_path / "out", q)
        jqx.save(tmp_path / "plain", expected)
        assert_same(jax.tree.map(lambda x: x.read(), q), expected)
        packed = jqx.quantize_params(archive.map(archive.lazy), plan, target="cpu")
        assert_same(packed[NAMES[0]].read(), jqx.pack_for(expected[NAMES[0]], "cpu"))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


def test_steps_of_a_scan_that_rules_select(tmp_path):
    scan = lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]  # noqa: E731
    jqx.save(tmp_path / "in", {"w": normal(0, 4, 32, 32)})
    policy = jqx.Policy({"w[0]": "int8", ".*": "int4"})
    with jqx.interop.Archive(tmp_path / "in") as archive:
        params = archive.map(archive.lazy)
        run = lambda p, x: scan(p["w"], x)  # noqa: E731
        plan = jqx.make_plan(run, policy)(params, jnp.ones((1, 32)))
        assert plan.splits
        jqx.save(tmp_path / "out", jqx.quantize_params(params, plan))
        expected = jqx.quantize_params(jqx.load(tmp_path / "in"), plan)
    jqx.save(tmp_path / "plain", expected)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


def test_a_write_goes_on_where_it_was_interrupted(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, _ = lazily(archive)
        jqx.save(tmp_path / "plain", q)
        for most in range(7):
            tree, reads = counted(q, most)
            with pytest.raises(KeyboardInterrupt):
                jqx.save(tmp_path / "out", tree, resume=True)
            assert len(reads) == most and not (tmp_path / "out").exists()
            tree, reads = counted(q)
            jqx.save(tmp_path / "out", tree, resume=True)
            assert len(reads) == 7 - most
            assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
            (tmp_path / "out").unlink()
            assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "plain"]


def interrupted(tree, path, most, **options):
    with pytest.raises(KeyboardInterrupt):
        jqx.save(path, counted(tree, most)[0], resume=True, **options)


def reads_of(tree, path, **options):
    tree, reads = counted(tree)
    jqx.save(path, tree, resume=True, **options)
    return len(reads)


def test_what_is_made_of_something_else_is_made_again(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, _ = lazily(archive)
        interrupted(q, tmp_path / "out", 5)
        # Of the same shapes and formats, with scales that are found in another way.
        spec = jqx.QSpec("int4", jqx.per_group(32), calibrator=jqx.calibrators.absmax)
        other, _ = lazily(archive, jqx.Policy([jqx.Rule(weight=spec)]))
        assert reads_of(other, tmp_path / "out") >= 6  # the bias may stay
        assert_same(jqx.load(tmp_path / "out"), jax.tree.map(lambda x: x.read(), other))
        interrupted(q, tmp_path / "again", 5)
        wider, _ = lazily(archive, jqx.presets.w8a16())
        assert reads_of(wider, tmp_path / "again") == 7
        interrupted(q, tmp_path / "out", 5)
    os.utime(source, ns=(0, 0))  # another file of that name
    with jqx.interop.Archive(source) as archive:
        assert reads_of(lazily(archive)[0], tmp_path / "out") == 7


def test_leaves_without_a_source_are_written_again(tmp_path):
    tree = {str(i): Lazy(jax.ShapeDtypeStruct((4,), "f4"), lambda: np.ones(4, "f4")) for i in "abc"}
    interrupted(tree, tmp_path / "out", 2)
    assert reads_of(tree, tmp_path / "out") == 3


def test_a_line_of_the_journal_that_was_cut_short_says_nothing(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, _ = lazily(archive)
        jqx.save(tmp_path / "plain", q)
        interrupted(q, tmp_path / "out", 4)
        (journal,) = tmp_path.glob("*.part.journal")
        journal.write_bytes(journal.read_bytes()[:-7])
        interrupted(q, tmp_path / "out", 2)
        assert reads_of(q, tmp_path / "out") == 2
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("size", [4, 5], ids=["the same leaf", "another leaf"])
def test_a_second_writer_is_an_error(tmp_path, size):
    def lazy(size, before=lambda: None):
        kind = jax.ShapeDtypeStruct((size,), "f4")
        return Lazy(kind, lambda: before() or np.ones(size, "f4"))

    def again():
        jqx.save(tmp_path / "out", {"a": lazy(size)}, resume=True)

    with pytest.raises(ValueError, match="another process writes this file"):
        jqx.save(tmp_path / "out", {"a": lazy(4, again)}, resume=True)


def test_what_is_made_must_be_what_was_announced():
    lazy = Lazy(jax.ShapeDtypeStruct((2,), "f4"), lambda: np.ones(3, "f4"))
    assert_error(lazy.read, "the result of `make` does not match `spec`")


def test_a_weight_that_is_quantized_already(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, plan = lazily(archive)
        assert_error(lambda: jqx.quantize_params(q, plan), "is quantized already")


@pytest.mark.slow
def test_killed_at_any_moment_and_run_again_the_bytes_are_the_same(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 512), np.float32)
    jqx.interop.save_leaves(
        tmp_path / "in", {f"{i}.weight": x for i in range(48)}, (x + i for i in range(48))
    )
    command = [sys.executable, "-m", "jqx", "quantize", tmp_path / "in"]
    options = ["--policy", "w4a16", "--resume"]
    start = time.perf_counter()
    subprocess.run([*command, tmp_path / "plain", *options], check=True, capture_output=True)
    whole = time.perf_counter() - start
    out, kills = tmp_path / "out", 0
    while kills < 6:
        process = subprocess.Popen([*command, out, *options], stdout=subprocess.DEVNULL)
        try:
            process.wait(rng.random() * whole * 1.2)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert not out.exists() or out.read_bytes() == (tmp_path / "plain").read_bytes()
        if out.exists():
            assert out.read_bytes() == (tmp_path / "plain").read_bytes()
            out.unlink()
    subprocess.run([*command, out, *options, "--force"], check=True, capture_output=True)
    assert out.read_bytes() == (tmp_path / "plain").read_bytes()


def test_a_leaf_that_is_being_replaced_is_none_that_is_whole(tmp_path):
    """Interrupted between two tensors of a leaf that is made of something else, the leaf that was
    there before is neither.
    """
    spec = jqx.QSpec("int8", jqx.per_axis(0))
    made = {name: jqx.QTensor.quantize(normal(i, 8, 8), spec) for i, name in enumerate("ab")}
    kind = jax.eval_shape(lambda: made["a"])
    lazy = {name: Lazy(kind, lambda q=q: q, name) for name, q in made.items()}
    interrupted({"x": lazy["a"], "y": lazy["a"]}, tmp_path / "out", 1)

    class Stops:
        """A scale that cannot be written: the codes are, by then."""

        shape, dtype = kind.scale.shape, kind.scale.dtype

        def __array__(self, *args, **kwargs):
            raise KeyboardInterrupt

    codes = jqx.QTensor.quantize(normal(9, 8, 8), spec)
    leaves = [codes.values, Stops()]
    broken = jax.tree.unflatten(jax.tree.structure(codes), leaves)
    with pytest.raises(KeyboardInterrupt):
        tree = {"x": Lazy(kind, lambda: broken, "other"), "y": lazy["a"]}
        jqx.save(tmp_path / "out", tree, resume=True)
    assert reads_of({"x": lazy["a"], "y": lazy["a"]}, tmp_path / "out") == 2
    assert_same(jqx.load(tmp_path / "out"), {"x": made["a"], "y": made["a"]})


def test_the_last_line_of_a_leaf_counts(tmp_path):
    kind = jax.ShapeDtypeStruct((2,), "f4")

    def stop():
        raise KeyboardInterrupt

    def tree(value, source):
        return {"a": Lazy(kind, lambda: np.full(2, value, "f4"), source)} | {"b": Lazy(kind, stop)}

    for value, source in [(1, "A"), (2, "B"), (3, "C")]:
        interrupted(tree(value, source), tmp_path / "out", 1)
    (journal,) = tmp_path.glob("*.part.journal")
    lines = [json.loads(line) for line in journal.read_bytes().split(b"\n") if line]
    assert [source for leaf, source in lines if leaf == "a"] == [None, "A", None, "B", None, "C"]
    journal.write_bytes(journal.read_bytes() + b'["a", "E", 7]\n7\n[["a"], "E"]\n["a", "E')
    final = {
        "a": Lazy(kind, lambda: np.full(2, 5, "f4"), "C"),
        "b": Lazy(kind, lambda: np.ones(2, "f4")),
    }
    jqx.save(tmp_path / "out", final, resume=True)
    np.testing.assert_array_equal(jqx.load(tmp_path / "out")["a"], 3)
    assert os.listdir(tmp_path) == ["out"]


# What a killed writer leaves is removed by the next writer of the same file; what others write
# stays.


TREE = {"a.weight": np.ones((4, 32), np.float32)}
KIND = jax.ShapeDtypeStruct((4, 32), "f4")
LEFT = f"out.{'0' * 31}a.part"
GGUF = {"general.architecture": "x"}

WRITERS = {
    "save": lambda path: jqx.save(path, TREE),
    "save_leaves": lambda path: jqx.interop.save_leaves(path, {"a": KIND}, TREE.values()),
    "a folder": lambda path: write(path, TREE, "safetensors", config={}),
    "gguf": lambda path: write(path, TREE, "gguf", metadata=GGUF),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path, name):
    (tmp_path / LEFT).mkdir()
    (tmp_path / LEFT / "model.safetensors").write_bytes(b"half")
    (tmp_path / LEFT.replace("a.part", "b.part")).write_bytes(b"half")
    others = [f"other.{'0' * 32}.part", f"out.{'0' * 8}.part", "out.part", f"{LEFT}.old"]
    for other in others:
        (tmp_path / other).write_bytes(b"of others")
    (tmp_path / "out.0.part").symlink_to(tmp_path / others[0])
    WRITERS[name](tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "out.0.part", "out"])


def test_what_another_writer_of_the_file_writes_stays(tmp_path):
    def make():
        (part,) = tmp_path.glob("out.*.part")
        shutil.copy(part, tmp_path / LEFT)  # as if its writer were killed
        jqx.save(tmp_path / "out", {"a": np.zeros(4, "f4")})
        assert sorted(os.listdir(tmp_path)) == sorted(["out", part.name])
        return TREE["a.weight"]

    jqx.save(tmp_path / "out", {"a": Lazy(KIND, make)})
    assert jqx.load(tmp_path / "out")["a"].shape == (4, 32)
    assert os.listdir(tmp_path) == ["out"]


def test_the_command_line_removes_it_too(capsys, tmp_path):
    jqx.save(tmp_path / "in", TREE)
    (tmp_path / LEFT).write_bytes(b"half")
    assert run(capsys, "quantize", tmp_path / "in", tmp_path / "out", "--policy", "w8a16")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.slow
def test_a_signal_in_a_callback_of_the_garbage_collector_ends_the_command(tmp_path):
    """Python drops an exception in such a callback, of which jax has one."""
    program = f"""if True:
        import gc, os, runpy, signal, sys

        def callback(phase, info):
            if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                gc.callbacks.remove(callback)
                os.kill(os.getpid(), signal.SIGTERM)

        gc.callbacks.append(callback)
        sys.argv[1:] = ["report", {str(tmp_path / "in")!r}]
        gc.set_threshold(10)
        runpy.run_module("jqx", run_name="__main__")
    """
    jqx.save(tmp_path / "in", {str(i): np.eye(4, dtype=np.float32) for i in range(4096)})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed(capsys, tmp_path, number):
    x = np.ones((512, 512), np.float32)
    tree = {f"{i}.weight": KIND.update(shape=x.shape) for i in range(64)}
    jqx.interop.save_leaves(tmp_path / "in", tree, (x for _ in tree))
    command = [sys.executable, "-m", "jqx", "quantize", tmp_path / "in", tmp_path / "out"]
    command += ["--policy", "w4a16"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not [*tmp_path.glob("out*")]:
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert len([*tmp_path.glob("out.*.part")]) == (number == signal.SIGKILL)
    assert run(capsys, *command[3:])[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
