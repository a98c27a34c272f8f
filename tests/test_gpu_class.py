"""Reading optimized HLO: which kernels there are, and what the GPU benchmark calls them."""

from jqx._src.diagnostics.hlo import Program

from .environment import benchmarks

(classes,) = benchmarks("_gpu_class")

TRITON = """
%gemm (p0: bf16[16,64], p1: s4[32,64]) -> f32[16,32] {
  %p0 = bf16[16,64]{1,0} parameter(0)
  %p1 = s4[32,64]{1,0:E(4)} parameter(1)
  %wide = bf16[32,64]{1,0} convert(%p1)
  ROOT %dot.1 = f32[16,32]{1,0} dot(%p0, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
WIDEN = """
%widen (q: s4[32,64]) -> bf16[32,64] {
  %q = s4[32,64]{1,0:E(4)} parameter(0)
  ROOT %real = bf16[32,64]{1,0} convert(%q)
}
"""
SLICE = """
%slice (s: s4[3,32,64], i: s32[]) -> s4[1,32,64] {
  %s = s4[3,32,64]{2,1,0:E(4)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = s4[1,32,64]{2,1,0:E(4)} dynamic-slice(%s, %i), dynamic_slice_sizes={1,32,64}
}
"""
GEMM_CALL = 'kind=kCustom, calls=%gemm, backend_config={"fusion_backend_config":{"kind":"KIND"}}'


def entry(*lines, head=""):
    arguments = (
        'x = bf16[16,64]{1,0} parameter(0), metadata={op_name="xs[0]"}',
        'w = s4[32,64]{1,0:E(4)} parameter(1), metadata={op_name="ws[0].values"}',
    )
    body = "\n".join(f"  %{line}" for line in (*arguments, *lines))
    shape = "ENTRY %main (x: bf16[16,64], w: s4[32,64]) -> f32[16,32]"
    return Program.parse(f"HloModule m\n{TRITON}{WIDEN}{SLICE}{head}\n{shape} {{\n{body}\n}}\n")


def gemm(w="w", kind="__triton_nested_gemm_fusion"):
    return f"y = f32[16,32]{{1,0}} fusion(%x, %{w}), {GEMM_CALL.replace('KIND', kind)}"


def described(program, weight=32 * 64):
    return classes.classify(program, "ws", weight), classes.launches(program)


def test_a_fused_conversion_is_no_copy():
    assert described(entry(gemm())) == ("Triton bf16 x bf16 -> f32, reads s4", 1)
    assert described(entry(gemm(kind="__other")))[0] == "__other bf16 x bf16 -> f32, reads s4"


def test_weights_that_are_widened_or_copied_first_are_named():
    widened = "wide = bf16[32,64]{1,0} fusion(%w), kind=kLoop, calls=%widen"
    read = "Triton bf16 x bf16 -> f32, reads s4"
    assert described(entry(widened, gemm("wide"))) == (f"{read}; writes W as bf16", 2)
    assert described(entry("c = s4[32,64]{0,1:E(4)} copy(%w)", gemm("c")))[0] == (
        f"{read}; writes W as s4"
    )
    view = "b = s4[32,64]{1,0:E(4)} bitcast(%w)"
    assert described(entry(view, gemm("b"))) == (read, 1)
    # as many elements, of x alone, of a part, or after the contraction: not the weights
    for other in (
        "z = bf16[32,64]{1,0} fusion(%x), kind=kLoop, calls=%widen",
        "z = bf16[8,64]{1,0} fusion(%w), kind=kLoop, calls=%widen",
        "z = bf16[32,64]{1,0} fusion(%w, %y), kind=kLoop, calls=%widen",
    ):
        assert described(entry(gemm(), other)) == (read, 2)


def test_library_calls_and_fusions_without_a_dot_are_distinguished():
    call = 'y = (f32[16,32]{1,0}, s8[33]{0}) custom-call(%x, %w), custom_call_target="TARGET"'
    for target in ("__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__cudnn$convForward"):
        program = entry(call.replace("TARGET", target))
        assert described(program) == (f"{target} bf16 x s4 -> f32", 1)
    loop = "y = f32[16,32]{1,0} fusion(%x, %w), kind=kLoop, calls=%widen"
    sort = call.replace("TARGET", "__cub$DeviceRadixSort")
    for line in (loop, sort):
        assert described(entry(line)) == ("loop fusion, no tensor cores", 1)
    assert described(entry("y = f32[16,32]{1,0} dot(%x, %x)"))[0] == "dot bf16 x bf16 -> f32"


def test_a_loop_is_followed_and_counts_its_trips():
    body = f"""
%body (arg: (s32[], s4[3,32,64], bf16[16,64])) -> (s32[], s4[3,32,64], bf16[16,64]) {{
  %arg = (s32[], s4[3,32,64]{{2,1,0:E(4)}}, bf16[16,64]{{1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%arg), index=0
  %stack = s4[3,32,64]{{2,1,0:E(4)}} get-tuple-element(%arg), index=1
  %x = bf16[16,64]{{1,0}} get-tuple-element(%arg), index=2
  %go = ((s4[3,32,64]{{2,1,0:E(4)}}, s32[]), s4[1,32,64]{{2,1,0:E(4)}}) START(%stack, %n), CALLED
  %one = s4[1,32,64]{{2,1,0:E(4)}} fusion-done(%go)
  %w = s4[32,64]{{1,0:E(4)}} bitcast(%one)
  %{gemm()}
  %next = s32[] fusion(%n), kind=kLoop, calls=%count
  ROOT %out = (s32[], s4[3,32,64]{{2,1,0:E(4)}}, bf16[16,64]{{1,0}}) tuple(%next, %stack, %x)
}}
""".replace("START", "fusion-start").replace("CALLED", "kind=kLoop, calls=%slice")
    program = entry(
        "zero = s32[] constant(0)",
        'ws = s4[3,32,64]{2,1,0:E(4)} parameter(2), metadata={op_name="ws"}',
        "start = (s32[], s4[3,32,64], bf16[16,64]) tuple(%zero, %ws, %x)",
        "loop = (s32[], s4[3,32,64], bf16[16,64]) while(%start), condition=%c, body=%body, "
        'backend_config={"known_trip_count":{"n":"3"}}',
        "y = bf16[16,64]{1,0} get-tuple-element(%loop), index=2",
        head=body,
    )
    text = "Triton bf16 x bf16 -> f32, reads s4; writes W as s4"
    assert described(program) == (text, 3 * 2)  # the counter is left out
