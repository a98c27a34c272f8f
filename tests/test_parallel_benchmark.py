"""The benchmark of many devices: what it counts and what it computes, by hand."""

import pytest

from .environment import benchmarks

benchmark, model = benchmarks("bench_parallel", "_parallel_model")
POD, CUBE, SMALL = (
    next(network for network in model.NETWORKS if network.name.endswith(name))
    for name in (", 16x16", "16x16x16", "2x4")
)
NODES = model.NETWORKS[-1]
WAYS = {way.name: way for way in (*model.SUMS, *model.GATHERS)}

LINES = {
    "%r = f32[16,8]{1,0} all-reduce(%x), to_apply=%add": ("f32", 2 * 7 / 8 * 512),
    "%r = (s8[16]{0}, s8[128]{0}) all-gather-start(%x)": ("s8", 7 / 8 * 128),
    "%r = s4[8,16]{1,0} all-to-all(%x), dimensions={0}": ("s4", 7 / 8 * 64),
    "%r = (u8[8]{0}, u8[8]{0}) all-to-all(%x, %y)": ("u8", 7 / 8 * 16),
    "%r = f32[4]{0} reduce-scatter(%x), to_apply=%add": ("f32", 7 * 16),
    "%r = (f32[32]{0}, f32[4]{0}) reduce-scatter-start(%x)": ("f32", 7 * 16),
    "%r = (f8e4m3fn[9]{0}, f8e4m3fn[9]{0}, u32[], u32[]) collective-permute-start(%x)": (
        "f8e4m3fn",
        9,
    ),
    "%r = bf16[] all-reduce-start(%x), to_apply=%max": ("bf16", 2 * 7 / 8 * 2),
}


@pytest.mark.parametrize("line", LINES)
def test_bytes_are_read_from_a_program(line):
    dtype, size = LINES[line]
    found, collectives = benchmark.bytes_sent(f"  {line}\n  %y = f32[9]{{0}} add(%r, %r)\n", 8)
    assert found == pytest.approx({dtype: size})
    assert collectives == 1


def test_scales_are_bytes_too():
    assert model.bytes_of(32) == 4
    assert model.bytes_of(8) == 1 + 4 / 256
    assert model.bytes_of(4, message=32) == 0.5 + 4 / 32
    assert WAYS["int8, two phases"].sent(SMALL) == 2 * 7 / 8 * (1 + 4 / 256)


def test_a_pod_is_as_fast_as_its_maker_says():
    """For TPU v5e: 51.2 TB/s of all-reduce on a pod, 1.6 TB/s through its middle."""
    size = 2.0**40
    sums = WAYS["psum, float32"].time(POD, size / 4)
    assert 256 * 2 * size * (255 / 256) / sums == pytest.approx(51.2e12, rel=1e-3)
    middle = POD.count * size / 4  # of all messages half go through it, half of them each way
    assert middle * (255 / 256) / POD.exchanged(size) == pytest.approx(1.6e12, rel=1e-3)


def test_what_the_model_tells():
    """Gathers gain all that codes save; sums over all chips of a large torus, or node by node
    without a second axis, gain nothing beside bfloat16.
    """
    size = benchmark.ARRAYS["a gradient"]

    def ratio(way, network):
        beside = "gather, bfloat16" if way.startswith("gather") else "psum, bfloat16"
        return WAYS[way].time(network, size) / WAYS[beside].time(network, size)

    assert all(0.5 < ratio("gather, int8", network) < 0.53 for network in model.NETWORKS)
    assert ratio("int8, two phases", SMALL) < 0.8
    assert all(ratio("int8, two phases", network) > 1.3 for network in (POD, CUBE, NODES))
    assert ratio("int8, two phases, by nodes", NODES) < 0.55
    assert WAYS["int8, two phases, by nodes"].time(POD, size) is None


def test_a_compiler_that_is_not_installed_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(benchmark.lowering, "_is_installed", lambda name: False)
    assert list(benchmark.all_programs()) == []
    told = capsys.readouterr().out
    assert "skipped: no compiler for tpu-v5e: the extra aot-tpu is not installed" in told
    assert "skipped: no compiler for h200: the extra aot-gpu is not installed" in told
