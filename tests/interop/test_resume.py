"""Parameters that are read leaf by leaf, and writes that go on where they were interrupted."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.interop import Lazy

from ..arrays import normal
from .trees import assert_same

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
        (journal,) = tmp_path.glob("*.part.0")
        journal.write_bytes(journal.read_bytes()[:-7])
        interrupted(q, tmp_path / "out", 2)
        assert reads_of(q, tmp_path / "out") == 2
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


def test_several_processes_write_one_file(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, _ = lazily(archive)
        jqx.save(tmp_path / "plain", q)
        found = []
        for index in (2, 0, 1):
            assert not (tmp_path / "out").exists()
            found.append(reads_of(q, tmp_path / "out", share=(index, 3)))
        assert sorted(found) == [2, 2, 3]
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out", "plain"]


def test_two_processes_of_one_share_are_an_error(tmp_path):
    leaf = jax.ShapeDtypeStruct((4,), "f4")

    def again():
        jqx.save(tmp_path / "out", tree, resume=True)

    tree = {"a": Lazy(leaf, lambda: again() or np.ones(4, "f4"))}
    with pytest.raises(ValueError, match="another process writes this file"):
        jqx.save(tmp_path / "out", tree, resume=True)


@pytest.mark.parametrize(
    "options",
    [{"share": (0, 2)}, {"share": (2, 2), "resume": True}, {"share": 1, "resume": True}],
)
def test_shares_that_are_none(options, tmp_path):
    with pytest.raises(ValueError, match="`share`"):
        jqx.save(tmp_path / "out", {"a": jnp.ones(2)}, **options)


def test_what_is_made_must_be_what_was_announced():
    lazy = Lazy(jax.ShapeDtypeStruct((2,), "f4"), lambda: np.ones(3, "f4"))
    with pytest.raises(ValueError, match="the result of `make` does not match `spec`"):
        lazy.read()


def test_a_weight_that_is_quantized_already(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, plan = lazily(archive)
        with pytest.raises(ValueError, match="is quantized already"):
            jqx.quantize_params(q, plan)


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


@pytest.mark.slow
def test_processes_at_once(source, tmp_path):
    program = """
        import sys, jax, jqx
        with jqx.interop.Archive(sys.argv[1]) as archive:
            share = int(sys.argv[3]), 2
            jqx.save(sys.argv[2], archive.map(archive.lazy), resume=True, share=share)
    """
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(program), str(source), str(out)]
    both = [subprocess.Popen([*command, str(i)]) for i in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert_same(jqx.load(out), jqx.load(source))


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


def test_what_another_process_writes_is_not_started_again(tmp_path):
    leaf, wider = (jax.ShapeDtypeStruct((n,), "f4") for n in (4, 5))

    def again():
        tree = {"a": Lazy(wider, lambda: np.ones(5, "f4"))}
        jqx.save(tmp_path / "out", tree, resume=True)

    tree = {"a": Lazy(leaf, lambda: again() or np.ones(4, "f4"))}
    with pytest.raises(ValueError, match="another process writes this file"):
        jqx.save(tmp_path / "out", tree, resume=True)


def test_another_number_of_processes_goes_on(source, tmp_path):
    with jqx.interop.Archive(source) as archive:
        q, _ = lazily(archive)
        jqx.save(tmp_path / "plain", q)
        interrupted(q, tmp_path / "out", 4)
        assert (
            reads_of(q, tmp_path / "out", share=(1, 2))
            + reads_of(q, tmp_path / "out", share=(0, 2))
            == 3
        )
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out", "plain"]


def test_the_order_of_a_journal_is_that_of_its_lines_whatever_the_clock_says(tmp_path, monkeypatch):
    kind, clock = jax.ShapeDtypeStruct((2,), "f4"), [1000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: clock[0] / 1e9)

    def tree(value, source):
        return {"a": Lazy(kind, lambda: np.full(2, value, "f4"), source)} | {"b": Lazy(kind, stop)}

    def stop():
        raise KeyboardInterrupt

    for value, source in [(1, "A"), (2, "B")]:
        clock[0] -= 300
        interrupted(tree(value, source), tmp_path / "out", 1)
    clock[0] -= 300
    jqx.save(tmp_path / "out", tree(3, "C"), resume=True, share=(0, 2))
    (journal,) = tmp_path.glob("*.part.0")
    journal.write_bytes(journal.read_bytes() + b'["a", "E", 12345678900]\n["a", "C", 99]\n')
    final = {
        "a": Lazy(kind, lambda: np.full(2, 5, "f4"), "C"),
        "b": Lazy(kind, lambda: np.ones(2, "f4")),
    }
    jqx.save(tmp_path / "out", final, resume=True)
    np.testing.assert_array_equal(jqx.load(tmp_path / "out")["a"], 3)
