"""`python -m jqx` as a program; `quantize`: what is quantized and how, what is refused, and how
little memory it takes; `report`: faults are found, and totals are those of the file.
"""

import dataclasses
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx._src.command_line.main import main
from jqx._src.diagnostics.report import measure

from ..arrays import on_device
from ..interop.trees import assert_same
from ..tensor.tensors import spread_out
from .files import error_of, run, run_json, saved, torch_weights


@pytest.fixture
def source(tmp_path):
    return saved(tmp_path / "in.safetensors", torch_weights())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.safetensors"


def by_hand(x, qtype, granularity, **fields):
    pack = -1 if numerics.format_of(qtype).bits < 8 else None
    return jqx.QTensor.quantize(on_device(x), jqx.QSpec(qtype, granularity, **fields), pack=pack)


def test_a_policy_quantizes_what_is_named_as_weights_are(capsys, source, out):
    code, text, _ = run(capsys, "quantize", source, out, "--policy", "w8a16")
    assert code == 0 and "4 of 7 tensors quantized" in text
    weights, read = torch_weights(), jqx.load(out)
    want = {
        name: by_hand(x, jnp.int8, jqx.per_axis(0)) if name.endswith("weight") and x.ndim > 1 else x
        for name, x in weights.items()
    }
    assert_same(read, want)


def test_groups_run_along_what_is_contracted(capsys, source, out):
    assert run(capsys, "quantize", source, out, "--policy", "w4a16")[0] == 0
    weights, read = torch_weights(), jqx.load(out)
    name = "layers.0.mlp.weight"
    blocks = jqx.per_block({0: 1, 1: 32}, tail=True)  # of 16: one a row
    (rule,) = jqx.presets.w4a16().rules
    expected = by_hand(weights[name], jnp.int4, blocks, calibrator=rule.weight.calibrator)
    assert_same(read[name], expected)
    conv = read["layers.1.conv.weight"]  # 4 x 3 x 3 for 32: as many whole kernels as fit in, 9 x 3
    assert conv.scale.shape == (8, 2, 1, 1) and conv.shape == (8, 4, 3, 3)


def test_rules_come_before_the_policy_and_the_first_wins(capsys, source, out):
    rules = "lm_head.*=float .*mlp.weight=nf4:block=8 .*(mlp|embed).*weight=uint4:asymmetric"
    flags = [part for rule in rules.split() for part in ("--rule", rule)]
    code, done = run_json(capsys, "quantize", source, out, "--policy", "w8a16", *flags)
    assert code == 0 and done["written"] == str(out)
    schemes = {t["path"]: t["scheme"] for t in done["tensors"]}
    assert schemes == {
        "embed.weight": "uint4 per_axis(0) asymmetric",
        "layers.0.mlp.weight": "nf4 per_block({0: 1, 1: 8})",
        "layers.0.mlp.bias": None,
        "layers.0.norm.weight": None,
        "layers.1.conv.weight": "int8 per_axis(0)",
        "lm_head.weight": None,
        "position_ids": None,
    }
    read = jqx.load(out)
    weight = torch_weights()["layers.0.mlp.weight"]
    assert_same(
        read["layers.0.mlp.weight"], by_hand(weight, numerics.nf4, jqx.per_block({0: 1, 1: 8}))
    )


def test_rules_reach_what_no_policy_does(capsys, source, out):
    assert run(capsys, "quantize", source, out, "--rule", ".*bias=int8:group=32")[0] == 0
    bias = torch_weights()["layers.0.mlp.bias"]
    assert_same(jqx.load(out)["layers.0.mlp.bias"], by_hand(bias, jnp.int8, jqx.per_block({0: 32})))


LAYOUTS = {
    "torch": ("weight", (8, 6), ["--layout", "torch"], (8, 1)),
    "torch by name": ("weight", (8, 6), [], (8, 1)),
    "flax": ("weight", (8, 6), ["--layout", "flax"], (1, 6)),
    "flax by name": ("kernel", (8, 6), [], (1, 6)),
    "flax convolution": ("kernel", (3, 3, 8, 6), [], (1, 1, 1, 6)),
    "flax embedding": ("embedding", (8, 6), ["--layout", "flax", "--tables", "int8"], (8, 1)),
    "torch convolution": ("weight", (8, 6, 3, 3), [], (8, 1, 1, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_says_which_axes_have_their_own_scale(capsys, tmp_path, out, name):
    last, shape, flags, scale = LAYOUTS[name]
    source = saved(tmp_path / "in", {f"block.{last}": spread_out(shape)})
    assert run(capsys, "quantize", source, out, "--policy", "w8a16", *flags)[0] == 0
    assert jqx.load(out)[f"block.{last}"].scale.shape == scale


TABLES = dict.fromkeys(
    ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "token/embedding"), (8, 6)
)
OTHERS = {"patch_embedding.weight": (8, 3, 2, 2), "embed.weight": (8, 6), "lm_head.weight": (8, 6)}


@pytest.mark.parametrize(
    "tables, scheme",
    [
        (None, None),
        ("int8", "int8 per_axis(0)"),
        ("int4:group=2", "int4 per_block({0: 1, 1: 2})"),
    ],
)
def test_a_policy_leaves_tables_in_float_unless_it_has_a_spec_for_them(
    capsys, tmp_path, out, tables, scheme
):
    weights = {name: spread_out(shape) for name, shape in (TABLES | OTHERS).items()}
    flags = ["--policy", "w8a16", *(["--tables", tables] if tables else [])]
    _, done = run_json(capsys, "quantize", saved(tmp_path / "in", weights), out, *flags)
    assert [t["path"] for t in done["tensors"]] == [*weights]
    for tensor in done["tensors"]:
        if tensor["path"] in TABLES:
            assert tensor["scheme"] == scheme and tensor["why"] == f"tables {tables or 'float'}"
        else:
            assert tensor["scheme"].startswith("int8") and tensor["why"] == "policy w8a16"


def test_tables_without_a_policy_are_an_error(capsys, source, out):
    error = error_of(capsys, "quantize", source, out, "--rule", ".*=int8", "--tables", "int8")
    assert "`--tables` int8 has no use without a policy" in error


def test_a_rule_may_name_the_contracted_axes(capsys, tmp_path, out):
    source = saved(tmp_path / "in", {"attention/query/kernel": spread_out((16, 4, 8))})
    rule = ".*kernel=int8:contract=0"
    assert run(capsys, "quantize", source, out, "--rule", rule)[0] == 0
    assert jqx.load(out)["attention/query/kernel"].scale.shape == (1, 4, 8)


def test_a_tree_keeps_its_structure_and_what_is_quantized_already(capsys, tmp_path, out):
    q = by_hand(spread_out((4, 8)), jnp.int4, jqx.per_axis(0))
    tree = {"b": ({"kernel": spread_out((8, 6))}, [None, q]), "a": jnp.arange(3)}
    source = saved(tmp_path / "in", tree)
    code, done = run_json(capsys, "quantize", source, out, "--policy", "w8a16")
    assert code == 0
    assert [t["why"] for t in done["tensors"]] == ["policy w8a16", "quantized already", "no floats"]
    tree["b"][0]["kernel"] = by_hand(tree["b"][0]["kernel"], jnp.int8, jqx.per_axis(1))
    assert_same(jqx.load(out), tree)


def test_a_dry_run_prints_and_writes_nothing(capsys, source, out):
    code, text, _ = run(capsys, "quantize", source, out, "--policy", "w4a16", "--dry-run")
    assert code == 0 and not out.exists()
    row = next(line for line in text.splitlines() if line.startswith("layers.0.mlp.weight"))
    assert row.split() == [
        *("layers.0.mlp.weight", "float32[64,", "16]", "int4", "per_axis(0)", "policy", "w4a16"),
        *("4,096", f"{64 * 8 + 64 * 4}"),
    ]
    assert "4 of 7 tensors quantized" in text


def test_bytes_are_those_of_the_file(capsys, source, out):
    _, done = run_json(capsys, "quantize", source, out, "--policy", "w4a16")
    assert done["bytes_before"] == sum(x.nbytes for x in torch_weights().values())
    with open(out, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert done["bytes_after"] == os.path.getsize(out) - header


def test_the_input_may_be_the_output(capsys, source):
    command = ["quantize", source, source, "--policy", "w8a16"]
    assert "exists already" in error_of(capsys, *command)
    assert run(capsys, *command, "--dry-run")[0] == 0
    assert not isinstance(jqx.load(source)["embed.weight"], jqx.QTensor)
    assert run(capsys, *command, "--force")[0] == 0
    assert isinstance(jqx.load(source)["embed.weight"], jqx.QTensor)


def test_metadata_of_the_input_is_kept(capsys, tmp_path, out):
    like = jnp.ones((2, 2))
    jqx.interop.save_leaves(tmp_path / "in", {"weight": like}, [like], metadata={"format": "pt"})
    assert run(capsys, "quantize", tmp_path / "in", out, "--policy", "w8a16")[0] == 0
    with jqx.interop.Archive(out) as archive:
        assert archive.metadata == {"format": "pt"}


ERRORS = {
    "no rules": ([], "nothing would be quantized"),
    "a rule for nothing": (["--rule", "mlp=int8"], "the rule 'mlp=int8' matches no name"),
    "a rule for integers": (["--rule", "position_ids=int8"], "matches no"),
    "a shadowed rule": (["--rule", ".*=int8", "--rule", "embed.*=int4"], "'embed.*=int4' matches"),
    "no rule": (["--rule", "mlp"], "the rule is not regex=scheme"),
    "a regex": (["--rule", "(=int8"], "no valid regular expression"),
    "a format": (["--rule", ".*=int9"], "the format is unknown"),
    "an option": (["--rule", ".*=int8:size=3"], "the option 'size=3' is unknown"),
    "a value": (["--rule", ".*=int8:group"], "the option 'group' is unknown, lacks a value"),
    "a flag": (["--rule", ".*=int8:tensor=1"], "the option 'tensor=1'"),
    "twice": (["--rule", ".*=int8:group=1:group=2"], "or is given twice"),
    "both": (["--rule", ".*=int8:group=1:tensor"], "gives two granularities"),
    "a number": (["--rule", ".*=int8:group=x"], "'x' is not an integer"),
    "a size": (["--rule", ".*=int8:group=0"], "`size` is out of range"),
    "a calibrator": (["--rule", ".*=int8:calibrator=best"], "the calibrator is unknown"),
    "float": (["--rule", ".*=float:group=3"], "`float` has no options"),
    "unsigned": (["--rule", ".*=uint4"], "uint4"),
    "an axis": (["--rule", "embed.*=int8:contract=2"], "at: 'embed.weight'"),
    "blocks": (["--rule", "embed.*=mxfp4:tensor"], "mxfp4 has blocks of 32"),
    "a policy": (["--policy", "w3"], "invalid choice: 'w3'"),
    "an argument": (["--what"], "unrecognized arguments: --what"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_nothing_is_written(capsys, source, out, name):
    flags, problem = ERRORS[name]
    assert problem in error_of(capsys, "quantize", source, out, *flags)
    assert not out.exists()


def test_a_wrong_file_is_one_line(capsys, tmp_path, out):
    assert "No such file" in error_of(capsys, "quantize", tmp_path / "no", out, "--policy", "w8a16")
    (tmp_path / "bad").write_bytes(b"bad")
    error = error_of(capsys, "quantize", tmp_path / "bad", out, "--policy", "w8a16")
    assert "is not a safetensors file" in error and "; fix: " in error


def test_float64_is_not_cut(capsys, tmp_path, out):
    source = saved(tmp_path / "in", {"weight": np.ones((4, 4)), "x.weight": jnp.ones((4, 4))})
    command = ["quantize", source, out, "--policy", "w8a16"]
    assert "JAX_ENABLE_X64=1" in error_of(capsys, *command)
    assert run(capsys, *command, "--rule", "weight=float")[0] == 0
    assert jqx.load(out)["weight"].dtype == np.float64
    with jax.enable_x64(True):
        assert run(capsys, *command, "--force")[0] == 0
        q = jqx.load(out)["weight"]
        assert (q.dtype, q.dequantize().dtype) == (np.float64, np.float64)


STATUS = pathlib.Path("/proc/self/status")
PEAK = f"""
import pathlib, re, sys
from jqx._src.command_line.main import main
code = main(sys.argv[1:])
text = pathlib.Path("{STATUS}").read_text()
print(code, int(re.search(r"VmHWM:\\s*(\\d+) kB", text)[1]) * 1024)
"""
"""Not `ru_maxrss`, which begins with what the parent has."""


def peak(*argv):
    """The most memory that a run of the command line takes, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, argv)], capture_output=True, text=True, check=True
    )
    code, size = done.stdout.splitlines()[-1].split()
    assert code == "0"
    return int(size)


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="the kernel does not tell the peak of a process")
def test_a_file_larger_than_the_memory_it_takes(tmp_path):
    """A run on 512 MiB takes less than that in all, JAX included, and no more than 64 MiB above a
    run on one hundredth of it.
    """
    x = spread_out((1024, 1024))
    for name, count in (("small", 1), ("large", 128)):
        tree = {f"{i}.weight": x for i in range(count)}
        jqx.interop.save_leaves(tmp_path / name, tree, tree.values())
    limit = os.path.getsize(tmp_path / "large")
    small = peak("quantize", tmp_path / "small", tmp_path / "small.out", "--policy", "w8a16")
    large = peak("quantize", tmp_path / "large", tmp_path / "large.out", "--policy", "w8a16")
    (tmp_path / "large").unlink()
    with jqx.interop.Archive(tmp_path / "large.out") as archive:
        assert len(archive.paths) == 128
        assert_same(archive.read("127.weight"), by_hand(x, jnp.int8, jqx.per_axis(0)))
    (tmp_path / "large.out").unlink()
    assert large < limit and large - small < limit / 8


# What a command can do nothing with is an error that says what to do, and is left as it was.


@pytest.fixture
def quantized(capsys, tmp_path):
    """A file of which `--policy w8a16` has quantized all weights."""
    source = saved(tmp_path / "float", torch_weights())
    assert run(capsys, "quantize", source, tmp_path / "quantized", "--policy", "w8a16")[0] == 0
    return tmp_path / "quantized"


def commands(source, tmp_path):
    return {
        "quantize": ["quantize", source, tmp_path / "out"],
        "dry run": ["quantize", source, tmp_path / "out", "--dry-run"],
        "report": ["report", source],
        "plot": ["plot", source, "--out", tmp_path / "out"],
    }


@pytest.mark.parametrize("name", ["quantize", "dry run", "report", "plot"])
def test_a_policy_for_what_is_quantized_already_is_an_error(capsys, quantized, tmp_path, name):
    command = commands(quantized, tmp_path)[name]
    for flags in (["--policy", "w4a16"], ["--policy", "w8a16"], ["--rule", ".*mlp.weight=int4"]):
        error = error_of(capsys, *command, *flags)
        assert "is quantized already" in error and flags[1] in error
        assert "start from the float file" in error and "=float" in error
    assert not (tmp_path / "out").exists()


def test_a_rule_leaves_what_is_quantized_already(capsys, tmp_path):
    q = by_hand(spread_out((4, 8)), jnp.int8, jqx.per_axis(0))
    source = saved(tmp_path / "in", {"a.weight": q, "b.weight": spread_out((4, 8))})
    command = ["quantize", source, tmp_path / "out", "--policy", "w8a16"]
    assert "'a.weight' is quantized already" in error_of(capsys, *command)
    code, done = run_json(capsys, *command, "--rule", "a.*=float")
    assert code == 0
    assert [t["why"] for t in done["tensors"]] == ["a.*=float", "policy w8a16"]
    code, report = run_json(capsys, "report", source, "--policy", "w8a16", "--rule", "a.*=float")
    assert code == 0 and len(report["weights"]) == 2
    rules = ["--rule", "a.*=float", "--rule", "c=int4"]
    assert "matches no" in error_of(capsys, *command, "--force", *rules)


def test_a_layout_for_nothing_is_an_error(capsys, quantized, tmp_path):
    for command in commands(quantized, tmp_path).values():
        assert "`--layout` flax has no use" in error_of(capsys, *command, "--layout", "flax")


def test_inputs_that_are_no_files_are_refused_at_once(capsys, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    good = saved(tmp_path / "good", torch_weights())
    words = {"fifo": "a FIFO", "folder": "a folder", "empty": "a file of 0 bytes"}
    for name, word in (*words.items(), ("/dev/null", "a device"), ("/dev/zero", "a device")):
        path = tmp_path / name
        made = [*commands(path, tmp_path).values(), ["diff", path, good], ["diff", good, path]]
        for command in made:
            error = error_of(capsys, *command)
            assert word in error and f"'{path}'" in error
    assert not (tmp_path / "out").exists()


def test_outputs_that_are_no_files_are_refused_by_their_names(capsys, tmp_path):
    source = saved(tmp_path / "in", torch_weights())
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    words = {"fifo": "a FIFO", "folder": "a folder", "absent/x/out": "there is no folder"}
    words |= {"/dev/full": "a device", "in/out": "Not a directory"}
    for name, word in words.items():
        path = tmp_path / name
        for command in (
            ["quantize", source, path, "--policy", "w8a16"],
            ["plot", source, "--out", path],
        ):
            error = error_of(capsys, *command)
            assert word in error and f"'{path}'" in error and ".part" not in error
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "in"]


def test_a_picture_has_the_name_that_was_given(capsys, tmp_path):
    source = saved(tmp_path / "in", torch_weights())
    begins = {"picture": b"\x89PNG", "picture.svg": b"<?xml", "picture.pdf": b"%PDF"}
    for name, first in begins.items():
        assert run(capsys, "plot", source, "--out", tmp_path / name)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(first)
    assert "not supported" in error_of(capsys, "plot", source, "--out", tmp_path / "picture.what")
    assert not (tmp_path / "picture.what").exists()


def finite(error):
    """The fields of a measure as JSON has them."""
    fields = dataclasses.asdict(error)
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()
    }


def test_each_weight_is_measured_as_it_would_be_written(capsys, source):
    code, report = run_json(capsys, "report", source, "--rule", ".*mlp.weight=int4:block=8")
    x = torch_weights()["layers.0.mlp.weight"]
    q = by_hand(x, jnp.int4, jqx.per_block({0: 1, 1: 8}))
    assert code == 0
    assert report["weights"] == [finite(measure(on_device(x), q, "layers.0.mlp.weight"))]
    assert report["bytes_before"] == sum(x.nbytes for x in torch_weights().values())
    assert report["bytes_before"] - report["bytes_after"] == x.nbytes - q.nbytes


def test_totals_are_those_that_quantize_writes(capsys, source, tmp_path):
    flags = ["--policy", "w4a16", "--rule", "lm_head.*=float"]
    _, report = run_json(capsys, "report", source, *flags)
    _, written = run_json(capsys, "quantize", source, tmp_path / "out", *flags)
    assert report["bytes_before"] == written["bytes_before"]
    assert report["bytes_after"] == written["bytes_after"]


def test_a_dead_row_and_an_outlier_are_seen_in_the_table(capsys, tmp_path):
    healthy = np.sign(spread_out((8, 64)))  # exact in int4: scales 1 / 7
    dead, outlier = healthy.copy(), healthy.copy()
    dead[3], outlier[5, 7] = 0, 100.0  # the row's others fall to zero
    weights = {"a.weight": healthy, "b.weight": dead, "c.weight": outlier}
    source = saved(tmp_path / "in", weights)
    code, text, _ = run(capsys, "report", source, "--rule", ".*=int4")
    rows = {line.split()[0]: line.split() for line in text.splitlines()[2:]}
    assert code == 0 and "3 of 3 tensors quantized" in text
    assert rows["b.weight"][-2] == "1" and rows["a.weight"][-2] == rows["c.weight"][-2] == "-"
    _, report = run_json(capsys, "report", source, "--rule", ".*=int4")
    a, b, c = (weight["sqnr"] for weight in report["weights"])
    lost = 10 * math.log10((8 * 64 - 1 + 100.0**2) / 63)
    assert c == lost and (a is None or a > 100) and (b is None or b > 100)


def test_a_quantized_file_reports_what_is_known_of_it(capsys, source, tmp_path):
    out = tmp_path / "out"
    assert run(capsys, "quantize", source, out, "--policy", "w8a16")[0] == 0
    _, before = run_json(capsys, "report", source, "--policy", "w8a16")
    code, after = run_json(capsys, "report", out)
    assert code == 0
    for a, b in zip(before["weights"], after["weights"], strict=True):
        for key in ("path", "scheme", "bits", "bytes_after", "dead"):
            assert a[key] == b[key]
        assert b["sqnr"] is None and b["clipped"] is None
    assert "exact" not in run(capsys, "report", out)[1]


def test_nothing_to_report_is_an_error(capsys, source):
    assert "there is nothing to report" in error_of(capsys, "report", source)
    assert "No such file" in error_of(capsys, "report", str(source) + "x", "--policy", "w8a16")


def program(*argv, **fields):
    return subprocess.run(
        [sys.executable, "-m", "jqx", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        **fields,
    )


def test_a_session(tmp_path):
    a = saved(tmp_path / "a.safetensors", {"w.weight": jnp.eye(4) * 127, "b": jnp.zeros(3)})
    done = program("quantize", a, "q.safetensors", "--policy", "w8a16", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("q.safetensors: 1 of 2 tensors quantized; 76 bytes become 44")
    assert main(["diff", str(a), str(a)]) == 0
    done = program("diff", a, tmp_path / "q.safetensors")
    assert done.returncode == 1 and "exact" in done.stdout


def test_errors_go_to_standard_error_without_a_traceback(tmp_path):
    done = program("report", tmp_path / "missing", "--policy", "w8a16")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("count", [1, 300])  # one table that a buffer holds, one that it does not
def test_a_reader_that_leaves_early_is_no_error(tmp_path, count):
    a = saved(tmp_path / "a", {f"{i}.weight": jnp.ones((2, 2)) for i in range(count)})
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jqx", "quantize", a, "b", "--policy", "w8a16", "--dry-run"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "command", [[], *([name] for name in "quantize convert verify report diff plot".split())]
)
def test_help_says_what_there_is(capsys, command):
    with pytest.raises(SystemExit) as info:
        main([*command, "--help"])
    assert info.value.code == 0
    out = capsys.readouterr().out
    assert "usage: python -m jqx" in out
    assert ("Exit codes: " in out) == (command in ([], ["diff"], ["verify"]))
    assert ("int4:group=32" in out) == (command[:1] not in ([], ["diff"], ["verify"]))


def test_the_version(capsys):
    with pytest.raises(SystemExit) as info:
        main(["--version"])
    assert info.value.code == 0
    assert capsys.readouterr().out == f"jqx {jqx.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["what"], ["diff"], ["diff", "a"], ["plot", "a"]])
def test_wrong_usage_is_one_line(capsys, argv):
    assert "--help" in error_of(capsys, *argv)


def test_the_session_prints_what_the_guide_says(capsys, tmp_path, monkeypatch):
    text = (pathlib.Path(__file__).parents[2] / "docs/guides/command_line.md").read_text()
    code, session = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("python", "console")
    )
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    commands = re.findall(r"\$ python -m jqx (.*)\n((?:[^$].*\n)*)", session)
    assert len(commands) == 3
    for command, printed in commands:
        _, out, err = run(capsys, *shlex.split(command))
        assert out + err == printed
