"""Reading programs of compilers that need not be there, from texts in their style."""

import pytest

from jqx._src.diagnostics.hlo import Program, bits
from jqx._src.diagnostics.lowering import contractions_of

# A fusion inside of a fusion, a loop whose condition alone bounds it, and cycles.
TPU = """
%read (p: s8[4,64,32], i: s32[]) -> bf16[64,32] {
  %p = s8[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = s8[1,64,32]{2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,64,32}
  %flat = s8[64,32]{1,0} bitcast(%one)
  ROOT %wide = bf16[64,32]{1,0} convert(%flat)
}
%product (x: bf16[16,64], w: s8[4,64,32], i: s32[]) -> f32[16,32] {
  %x.1 = bf16[16,64]{1,0} parameter(0)
  %w.1 = s8[4,64,32]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %fusion.1 = bf16[64,32]{1,0} fusion(%w.1, %i.1), kind=kLoop, calls=%read
  ROOT %conv = f32[16,32]{1,0} convolution(%x.1, %fusion.1), dim_labels=bf_io->bf, NAME
}
%body (arg: (s32[], bf16[16,64], s8[4,64,32])) -> (s32[], bf16[16,64], s8[4,64,32]) {
  %arg = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%arg), index=0
  %x.2 = bf16[16,64]{1,0} get-tuple-element(%arg), index=1
  %w.2 = s8[4,64,32]{2,1,0} get-tuple-element(%arg), index=2
  %y = f32[16,32]{1,0} fusion(%x.2, %w.2, %n), kind=kOutput, calls=%product, CYCLES
  %step = s32[] STEP
  %next = s32[] add(%n, %step)
  ROOT %out = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) tuple(%next, %x.2, %w.2)
}
%condition (arg: (s32[], bf16[16,64], s8[4,64,32])) -> pred[] {
  %bound = s32[] constant(7)
  %arg.1 = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %less = pred[] compare(%n.1, %bound), direction=LT
}
ENTRY %main (w: s8[4,64,32], scale: f32[4,1,32], x: bf16[16,64]) -> f32[16,32] {
  %w = s8[4,64,32]{2,1,0} parameter(0), metadata={op_name="w.values"}
  %scale = f32[4,1,32]{2,1,0} parameter(1), metadata={op_name="w.scale"}
  %x = bf16[16,64]{1,0} parameter(2), metadata={op_name="x"}
  %start = s32[] FIRST
  %first = s32[] copy(%start)
  %carry = (s32[], bf16[16,64]{1,0}, s8[4,64,32]{2,1,0}) tuple(%first, %x, %w)
  ROOT %loop = (s32[], bf16[16,64]{1,0}) while(%carry), condition=%condition, body=%body
}
"""
NAME = 'metadata={op_name="jit(f)/while/body/jqx[a/w:dot_general#1]/dot_general"}'
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"123"}}'


def tpu(first="constant(3)", step="constant(1)"):
    text = TPU.replace("CYCLES", CYCLES).replace("NAME", NAME)
    text = text.replace("FIRST", first).replace("STEP", step)
    (found,) = contractions_of(Program.parse(text), "tpu")
    return found


def test_a_fusion_in_a_fusion_is_read_through():
    found = tpu()
    assert found.site == "a/w:dot_general#1"
    assert found.operands == ("bf16[16,64]", "bf16[64,32]")
    assert found.reads == (("bf16",), ("s8",))
    assert (found.runs, found.widened, found.left) == ("output fusion", (), "")


def test_the_bound_of_a_counter_is_how_often_a_loop_runs():
    assert (tpu().times, tpu().cycles) == (7 - 3, 123)
    assert tpu("constant(9)").times == 0
    assert tpu(step="constant(3)").times == 2  # 3 and 6
    assert tpu("rng-get-and-update-state()").times is None
    assert tpu(step="rng-get-and-update-state()").times is None


LOOP = """
%sum (p: bf16[512], q: s8[512,64]) -> f32[64] {
  %p = bf16[512]{0} parameter(0)
  %q = s8[512,64]{1,0} parameter(1)
  %p.1 = f32[512]{0} convert(%p)
  %spread = f32[512,64]{1,0} broadcast(%p.1), dimensions={0}
  %wide = f32[512,64]{1,0} convert(%q)
  %times = f32[512,64]{1,0} multiply(%spread, %wide)NAME1
  %zero = f32[] constant(0)
  ROOT %total = f32[64]{0} reduce(%times, %zero), dimensions={0}, to_apply=%addNAME2
}
ENTRY %main (x: bf16[512], w: s8[512,64]) -> f32[64] {
  %x = bf16[512]{0} parameter(0), metadata={op_name="x"}
  %w = s8[512,64]{1,0} parameter(1), metadata={op_name="w"}
  ROOT %y = f32[64]{0} fusion(%x, %w), kind=kInput, calls=%sum
}
"""


@pytest.mark.parametrize("named", ["NAME1", "NAME2"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_product_that_is_written_as_a_sum_of_elements_is_found_by_its_name(platform, named):
    text = LOOP.replace(named, ', metadata={op_name="jit(f)/dot_general"}')
    text = text.replace("NAME1", "").replace("NAME2", "")
    (found,) = contractions_of(Program.parse(text), platform)
    assert found.operands == ("f32[512]", "f32[512,64]")
    assert found.reads == (("bf16",), ("s8",))
    assert (found.runs, found.left) == (
        "input fusion, by elements",
        "elements are multiplied and summed",
    )


def test_another_sum_of_products_is_no_contraction():
    text = LOOP.replace("NAME1", "").replace("NAME2", ', metadata={op_name="jit(f)/reduce_sum"}')
    assert contractions_of(Program.parse(text), "tpu") == []


@pytest.mark.parametrize(
    "dtype, expected", [("s4", 4), ("bf16", 16), ("f8e4m3fn", 8), ("f4e2m1fn", 4), ("pred", 8)]
)
def test_the_bits_of_a_dtype(dtype, expected):
    assert bits(dtype) == expected
