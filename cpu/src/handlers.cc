// What XLA calls. Sizes, types and alignment are checked: a wrong buffer is an error of XLA.

#include "checks.h"

namespace ffi = xla::ffi;

namespace jqx {
namespace {

ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::AnyBuffer x_scale, ffi::AnyBuffer x_zero, ffi::AnyBuffer w_scale,
                   ffi::AnyBuffer w_zero, ffi::AnyBuffer step, float low, float high,
                   ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "product";
  const auto rows = x.dimensions(), columns = w.dimensions();
  if (rows.size() != 3) return wrong(kName, "rows are [batch, m, k]", x);
  if (columns.size() != 3) return wrong(kName, "weights are [batch, n, k]", w);
  Product p;
  p.batch = rows[0], p.m = rows[1], p.k = rows[2], p.n = columns[1], p.low = low, p.high = high;
  int64_t count, at;
  if (auto error = find(kName, step, w, p.batch, &count, &at); error.failure()) return error;
  if (!has(w, ffi::S8, {count, p.n, p.k})) return wrong(kName, "weights are s8[batch, n, k]", w);
  p.w = static_cast<const int8_t*>(w.untyped_data()) + at * p.n * p.k;
  const bool rounds = x.element_type() == ffi::F32;
  if (!has(x, rounds ? ffi::F32 : ffi::S8, {p.batch, p.m, p.k})) {
    return wrong(kName, "rows are s8 or f32[batch, m, k]", x);
  }
  if (rounds) {
    p.floats = static_cast<const float*>(x.untyped_data());
    if (!(low >= -128 && low <= high && high <= 127)) {
      return ffi::Error::InvalidArgument("jqx_cpu: product: codes are in [-128, 127].");
    }
  } else {
    p.codes = static_cast<const int8_t*>(x.untyped_data());
  }
  if (!read(x_scale, ffi::F32, p.batch, p.m, &p.x_scale)) {
    return wrong(kName, "scales of rows are f32[batch, m or 1]", x_scale);
  }
  if (!read(w_scale, ffi::F32, p.batch, p.n, &p.w_scale)) {
    return wrong(kName, "scales of weights are f32[batch, n or 1]", w_scale);
  }
  if (!read(x_zero, ffi::S32, p.batch, p.m, &p.x_zero)) {
    return wrong(kName, "zero points of rows are s32[batch, m or 1]", x_zero);
  }
  if (!read(w_zero, ffi::S32, p.batch, p.n, &p.w_zero)) {
    return wrong(kName, "zero points of weights are s32[batch, n or 1]", w_zero);
  }
  const bool is_scaled = y->element_type() == ffi::F32;
  if (!has(*y, is_scaled ? ffi::F32 : ffi::S32, {p.batch, p.m, p.n})) {
    return wrong(kName, "the result is s32 or f32[batch, m, n]", *y);
  }
  if (is_absent(*y)) return ffi::Error::Success();
  if ((is_scaled && p.w_scale.data == nullptr) ||
      ((is_scaled || rounds) && p.x_scale.data == nullptr)) {
    return ffi::Error::InvalidArgument("jqx_cpu: product: a scale is missing.");
  }
  if (is_scaled) {
    p.scaled = static_cast<float*>(y->untyped_data());
  } else {
    p.sums = static_cast<int32_t*>(y->untyped_data());
  }
  return run(pool, [&](Pool& threads) { multiply(p, kernels(), threads); });
}

ffi::Error float_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer step,
                         int32_t bits, bool is_signed, ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "float_product";
  const auto rows = x.dimensions(), columns = w.dimensions(), groups = scale.dimensions();
  if (rows.size() != 3) return wrong(kName, "rows are [batch, m, k]", x);
  if (columns.size() != 3) return wrong(kName, "weights are [batch, n, bytes]", w);
  if (groups.size() != 3) return wrong(kName, "scales are [batch, groups, n]", scale);
  FloatProduct p;
  p.batch = rows[0], p.m = rows[1], p.k = rows[2], p.n = columns[1];
  p.bits = bits, p.is_signed = is_signed;
  if (!has(x, ffi::F32, {p.batch, p.m, p.k})) return wrong(kName, "rows are f32[batch, m, k]", x);
  if (!has(*y, ffi::F32, {p.batch, p.m, p.n})) {
    return wrong(kName, "the result is f32[batch, m, n]", *y);
  }
  if (is_absent(*y)) return ffi::Error::Success();
  const int64_t count = groups[1];
  if (count <= 0 || p.k % count != 0 || !has_groups(p.k, p.k / count, bits)) {
    return wrong(kName, "there is no kernel for such groups, of scales", scale);
  }
  p.group = p.k / count;
  int64_t stack, at;
  if (auto error = find(kName, step, w, p.batch, &stack, &at); error.failure()) return error;
  const bool is_byte = w.element_type() == ffi::S8 && bits == 8;
  const int64_t width = p.k * bits / 8;
  if (!has(w, is_byte ? ffi::S8 : ffi::U8, {stack, p.n, width})) {
    return wrong(kName, "weights are u8[batch, n, k * bits / 8]", w);
  }
  if (!has(scale, ffi::F32, {p.batch, count, p.n})) {
    return wrong(kName, "scales are f32[batch, groups, n]", scale);
  }
  if (!is_absent(zero) && !has(zero, ffi::S8, {p.batch, count, p.n})) {
    return wrong(kName, "zero points are s8[batch, groups, n]", zero);
  }
  p.x = static_cast<const float*>(x.untyped_data());
  p.w = static_cast<const uint8_t*>(w.untyped_data()) + at * p.n * width;
  p.scale = static_cast<const float*>(scale.untyped_data());
  p.zero = is_absent(zero) ? nullptr : static_cast<const int8_t*>(zero.untyped_data());
  p.y = static_cast<float*>(y->untyped_data());
  return run(pool, [&](Pool& threads) { multiply(p, kernels(), threads); });
}

ffi::Error magnitudes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "magnitudes";
  const auto rows = x.dimensions();
  if (rows.size() != 2 || !has(x, ffi::F32, {rows[0], rows[1]})) {
    return wrong(kName, "rows are f32[m, k]", x);
  }
  if (!has(*y, ffi::F32, {rows[0]})) return wrong(kName, "the result is f32[m]", *y);
  const float* from = static_cast<const float*>(x.untyped_data());
  float* to = static_cast<float*>(y->untyped_data());
  return run(pool, [&](Pool& threads) {
    find_magnitudes(from, rows[0], rows[1], to, kernels(), threads);
  });
}

}  // namespace
}  // namespace jqx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_product, jqx::product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<float>("low")
                                  .Attr<float>("high")
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_float_product, jqx::float_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<int32_t>("bits")
                                  .Attr<bool>("is_signed")
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_magnitudes, jqx::magnitudes,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

extern "C" const char* jqx_cpu_kernels() { return jqx::kernels().name; }
