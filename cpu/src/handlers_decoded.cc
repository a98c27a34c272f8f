// What XLA calls for weights whose codes stand for floats.

#include <cmath>

#include "checks.h"
#include "decoded.h"

namespace jqx {
namespace {

// Whether an element is one byte of codes.
bool is_byte(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::U8:
    case ffi::F8E3M4:
    case ffi::F8E4M3:
    case ffi::F8E4M3FN:
    case ffi::F8E4M3FNUZ:
    case ffi::F8E4M3B11FNUZ:
    case ffi::F8E5M2:
      return true;
    default:
      return false;
  }
}

ffi::Error decoded_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                           ffi::AnyBuffer scale, ffi::AnyBuffer step, ffi::AnyBuffer sizes,
                           ffi::Span<const float> table, ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "decoded_product";
  const auto rows = x.dimensions(), columns = w.dimensions(), scales = scale.dimensions();
  if (rows.size() != 3) return wrong(kName, "rows are [batch, m, k]", x);
  if (columns.size() != 3) return wrong(kName, "weights are [batch, n, bytes]", w);
  if (scales.size() != 3) return wrong(kName, "scales are [batch, groups, n]", scale);
  const int64_t batch = rows[0], m = rows[1], k = rows[2], n = columns[1], count = scales[1];
  if (!has(x, ffi::F32, {batch, m, k})) return wrong(kName, "rows are f32[batch, m, k]", x);
  if (!has(*y, ffi::F32, {batch, m, n})) return wrong(kName, "the result is f32[batch, m, n]", *y);
  if (is_absent(*y)) return ffi::Error::Success();
  if ((table.size() != 16 && table.size() != 256) || !std::isfinite(table[0])) {
    return ffi::Error::InvalidArgument(
        "jqx_cpu: decoded_product: a table has 16 or 256 floats, the first of them finite.");
  }
  const int bits = table.size() == 16 ? 4 : 8;
  const Table decoded(bits, table.begin());
  if (bits == 8 && !decoded.is_half) {
    return ffi::Error::InvalidArgument(
        "jqx_cpu: decoded_product: codes of 8 bits are floats that float16 holds, times a number.");
  }
  if (count <= 0 || k % count != 0 || !has_groups(k, k / count, bits)) {
    return wrong(kName, "there is no kernel for such groups, of scales", scale);
  }
  Groups groups;
  if (auto error = find(kName, step, &sizes, w, batch, &groups); error.failure()) return error;
  const int64_t width = k * bits / 8;
  const bool is_code = bits == 8 ? is_byte(w.element_type()) : w.element_type() == ffi::U8;
  if (!is_code || !has(w, w.element_type(), {groups.stack, n, width})) {
    return wrong(kName, "weights are bytes [batch, n, k * bits / 8]", w);
  }
  const bool is_power = scale.element_type() == ffi::F8E8M0FNU;
  if (!has(scale, is_power ? ffi::F8E8M0FNU : ffi::F32, {groups.weights, count, n})) {
    return wrong(kName, "scales are f32 or f8e8m0fnu[batch, groups, n]", scale);
  }
  DecodedProduct p = {batch, m, n, k, k / count, decoded};
  p.x = static_cast<const float*>(x.untyped_data());
  p.w = static_cast<const uint8_t*>(w.untyped_data()) + groups.at * n * width;
  if (is_power) {
    p.exponents = static_cast<const uint8_t*>(scale.untyped_data());
  } else {
    p.scale = static_cast<const float*>(scale.untyped_data());
  }
  p.y = static_cast<float*>(y->untyped_data());
  return run(pool, [&](Pool& threads) { groups.product(p, threads); });
}

}  // namespace
}  // namespace jqx

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jqx_cpu_decoded_product, jqx::decoded_product,
    jqx::bound<5>().Attr<ffi::Span<const float>>("table").Ret<ffi::AnyBuffer>());
