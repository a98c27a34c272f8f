// What XLA calls. Sizes, types and alignment are checked: a wrong buffer is an error of XLA.

#include <cmath>

#include "checks.h"

namespace jqx {
namespace {

// Reads rows, weights and zero points of a product; of rows in groups, also their sizes.
ffi::Error read(const char* function, const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                const ffi::AnyBuffer& x_zero, const ffi::AnyBuffer& w_zero,
                const ffi::AnyBuffer& step, const ffi::AnyBuffer* sizes, Product* p,
                Groups* groups) {
  const auto rows = x.dimensions(), columns = w.dimensions();
  if (rows.size() != 3) return wrong(function, "rows are [batch, m, k]", x);
  if (columns.size() != 3) return wrong(function, "weights are [batch, n, k]", w);
  p->batch = rows[0], p->m = rows[1], p->k = rows[2], p->n = columns[1];
  if (auto error = find(function, step, sizes, w, p->batch, groups); error.failure()) return error;
  if (!has(w, ffi::S8, {groups->stack, p->n, p->k})) {
    return wrong(function, "weights are s8[batch, n, k]", w);
  }
  p->w = static_cast<const int8_t*>(w.untyped_data()) + groups->at * p->n * p->k;
  const bool rounds = x.element_type() == ffi::F32;
  if (!has(x, rounds ? ffi::F32 : ffi::S8, {p->batch, p->m, p->k})) {
    return wrong(function, "rows are s8 or f32[batch, m, k]", x);
  }
  static const float nothing = 0;  // where there are no elements
  const void* data = is_absent(x) ? &nothing : x.untyped_data();
  if (rounds) {
    p->floats = static_cast<const float*>(data);
  } else {
    p->codes = static_cast<const int8_t*>(data);
  }
  if (!read(x_zero, ffi::S32, p->batch, p->m, &p->x_zero)) {
    return wrong(function, "zero points of rows are s32[batch, m or 1]", x_zero);
  }
  if (!read(w_zero, ffi::S32, groups->weights, p->n, &p->w_zero)) {
    return wrong(function, "zero points of weights are s32[batch, n or 1]", w_zero);
  }
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::AnyBuffer x_scale, ffi::AnyBuffer x_zero, ffi::AnyBuffer w_scale,
                   ffi::AnyBuffer w_zero, ffi::AnyBuffer step, ffi::AnyBuffer sizes, float low,
                   float high, ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "product";
  Product p;
  Groups groups;
  if (auto error = read(kName, x, w, x_zero, w_zero, step, &sizes, &p, &groups); error.failure()) {
    return error;
  }
  const bool rounds = p.floats != nullptr;
  const bool are_whole = low == std::nearbyint(low) && high == std::nearbyint(high);
  if (rounds && !(are_whole && low >= -128 && low <= high && high <= 127)) {
    return ffi::Error::InvalidArgument("jqx_cpu: product: codes are in [-128, 127].");
  }
  if (rounds) p.low = int32_t(low), p.high = int32_t(high);
  if (!read(x_scale, ffi::F32, p.batch, p.m, &p.x_scale)) {
    return wrong(kName, "scales of rows are f32[batch, m or 1]", x_scale);
  }
  if (!read(w_scale, ffi::F32, groups.weights, p.n, &p.w_scale)) {
    return wrong(kName, "scales of weights are f32[batch, n or 1]", w_scale);
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
  return run(pool, [&](Pool& threads) { groups.product(p, threads); });
}

ffi::Error float_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::AnyBuffer x_scale, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                         ffi::AnyBuffer step, ffi::AnyBuffer sizes, int32_t bits, bool is_signed,
                         int32_t digits, ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "float_product";
  const auto rows = x.dimensions(), columns = w.dimensions(), scales = scale.dimensions();
  if (rows.size() != 3) return wrong(kName, "rows are [batch, m, k]", x);
  if (columns.size() != 3) return wrong(kName, "weights are [batch, n, bytes]", w);
  if (scales.size() != 3) return wrong(kName, "scales are [batch, groups, n]", scale);
  FloatProduct p = {};
  p.batch = rows[0], p.m = rows[1], p.k = rows[2], p.n = columns[1];
  p.bits = bits, p.is_signed = is_signed;
  const bool are_codes = x.element_type() == ffi::S8;
  const bool are_bfloats = x.element_type() == ffi::BF16;
  if (!has(x, are_codes ? ffi::S8 : are_bfloats ? ffi::BF16 : ffi::F32, {p.batch, p.m, p.k})) {
    return wrong(kName, "rows are s8, bf16 or f32[batch, m, k]", x);
  }
  if (digits != 2 && digits != 3) {
    return ffi::Error::InvalidArgument("jqx_cpu: float_product: digits of floats are 2 or 3.");
  }
  p.digits = digits;
  if (!has(*y, ffi::F32, {p.batch, p.m, p.n})) {
    return wrong(kName, "the result is f32[batch, m, n]", *y);
  }
  if (is_absent(*y)) return ffi::Error::Success();
  if (!read(x_scale, ffi::F32, p.batch, p.m, &p.x_scale) || are_codes == is_absent(x_scale)) {
    return wrong(kName, "codes have scales f32[batch, m or 1], floats none", x_scale);
  }
  const int64_t count = scales[1];
  if (count <= 0 || p.k % count != 0 || !has_groups(p.k, p.k / count, bits)) {
    return wrong(kName, "there is no kernel for such groups, of scales", scale);
  }
  p.group = p.k / count;
  Groups groups;
  if (auto error = find(kName, step, &sizes, w, p.batch, &groups); error.failure()) return error;
  const bool is_byte = w.element_type() == ffi::S8 && bits == 8;
  const int64_t width = p.k * bits / 8;
  if (!has(w, is_byte ? ffi::S8 : ffi::U8, {groups.stack, p.n, width})) {
    return wrong(kName, "weights are u8[batch, n, k * bits / 8]", w);
  }
  if (!has(scale, ffi::F32, {groups.weights, count, p.n})) {
    return wrong(kName, "scales are f32[batch, groups, n]", scale);
  }
  if (!is_absent(zero) && !has(zero, ffi::S8, {groups.weights, count, p.n})) {
    return wrong(kName, "zero points are s8[batch, groups, n]", zero);
  }
  if (are_codes) {
    p.codes = static_cast<const int8_t*>(x.untyped_data());
  } else if (are_bfloats) {
    p.bfloats = static_cast<const uint16_t*>(x.untyped_data());
  } else {
    p.x = static_cast<const float*>(x.untyped_data());
  }
  p.w = static_cast<const uint8_t*>(w.untyped_data()) + groups.at * p.n * width;
  p.scale = static_cast<const float*>(scale.untyped_data());
  p.zero = is_absent(zero) ? nullptr : static_cast<const int8_t*>(zero.untyped_data());
  p.y = static_cast<float*>(y->untyped_data());
  return run(pool, [&](Pool& threads) { groups.product(p, threads); });
}

using Find = void (*)(const float*, int64_t, int64_t, float*, const Kernels&, Pool&);

// Calls what finds some numbers for each row: a result [m], or [m, each].
ffi::Error of_rows(const char* function, Find find, int64_t each, ffi::ThreadPool& pool,
                   const ffi::AnyBuffer& x, ffi::AnyBuffer& y) {
  const auto rows = x.dimensions();
  if (rows.size() != 2 || !has(x, ffi::F32, {rows[0], rows[1]})) {
    return wrong(function, "rows are f32[m, k]", x);
  }
  const bool fits = each == 1 ? has(y, ffi::F32, {rows[0]}) : has(y, ffi::F32, {rows[0], each});
  if (!fits) return wrong(function, each == 1 ? "the result is f32[m]" : "the result is f32[m, 3]", y);
  const float* from = static_cast<const float*>(x.untyped_data());
  float* to = static_cast<float*>(y.untyped_data());
  return run(pool, [&](Pool& threads) { find(from, rows[0], rows[1], to, kernels(), threads); });
}

ffi::Error magnitudes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  return of_rows("magnitudes", find_magnitudes, 1, pool, x, *y);
}

ffi::Error ranges(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  return of_rows("ranges", find_ranges, 3, pool, x, *y);
}

}  // namespace
}  // namespace jqx

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jqx_cpu_product, jqx::product,
    jqx::bound<8>().Attr<float>("low").Attr<float>("high").Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_float_product, jqx::float_product,
                              jqx::bound<7>()
                                  .Attr<int32_t>("bits")
                                  .Attr<bool>("is_signed")
                                  .Attr<int32_t>("digits")
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_magnitudes, jqx::magnitudes,
                              jqx::bound<1>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_ranges, jqx::ranges, jqx::bound<1>().Ret<ffi::AnyBuffer>());

extern "C" const char* jqx_cpu_kernels() { return jqx::kernels().name; }
extern "C" bool jqx_cpu_choose(const char* name) { return jqx::choose(name); }
