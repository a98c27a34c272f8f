// What XLA calls to convolve. As in handlers.cc, a wrong buffer is an error of XLA.

#include "checks.h"
#include "convolutions.h"

namespace jqx {
namespace {

// Reads how a window goes over two axes; returns whether it can.
bool read(Integers strides, Integers dilation, Integers padding, Axis* axes) {
  if (strides.size() != 2 || dilation.size() != 2 || padding.size() != 4) return false;
  constexpr int64_t kMost = 1 << 30;  // nothing overflows
  for (int i = 0; i < 2; ++i) {
    Axis& axis = axes[i];
    axis.stride = strides[i], axis.dilation = dilation[i];
    axis.low = padding[2 * i], axis.high = padding[2 * i + 1];
    const bool steps = std::min(axis.stride, axis.dilation) >= 1 &&
                       std::max(axis.stride, axis.dilation) <= kMost;
    if (!steps || std::min(axis.low, axis.high) < -kMost) return false;
    if (std::max(axis.low, axis.high) > kMost || axis.taps > kMost) return false;
  }
  return true;
}

ffi::Error convolution(ffi::ThreadPool pool, ffi::AnyBuffer image, ffi::AnyBuffer kernel,
                       ffi::AnyBuffer image_scale, ffi::AnyBuffer image_zero,
                       ffi::AnyBuffer kernel_scale, ffi::AnyBuffer kernel_zero, Integers strides,
                       Integers dilation, Integers padding, int64_t groups,
                       ffi::Result<ffi::AnyBuffer> y) {
  constexpr const char* kName = "convolution";
  const auto images = image.dimensions(), taps = kernel.dimensions();
  if (images.size() != 4) return wrong(kName, "images are [batch, height, width, features]", image);
  if (taps.size() != 4) return wrong(kName, "a kernel is [taps, taps, features, outputs]", kernel);
  Axis axes[2];
  for (int i = 0; i < 2; ++i) axes[i].size = images[1 + i], axes[i].taps = taps[i];
  if (!read(strides, dilation, padding, axes)) {
    return ffi::Error::InvalidArgument(
        "jqx_cpu: convolution: strides and dilation are two numbers from 1 on, padding is four.");
  }
  Convolution p;
  p.height = axes[0], p.width = axes[1];
  p.batch = images[0], p.features = images[3], p.outputs = taps[3], p.groups = groups;
  if (groups < 1 || p.features != taps[2] * groups || p.outputs % groups != 0) {
    return wrong(kName, "features are those of the kernel times the groups", image);
  }
  if (!has(image, ffi::S8, {p.batch, axes[0].size, axes[1].size, p.features})) {
    return wrong(kName, "images are s8[batch, height, width, features]", image);
  }
  if (!has(kernel, ffi::S8, {axes[0].taps, axes[1].taps, taps[2], p.outputs})) {
    return wrong(kName, "a kernel is s8[taps, taps, features, outputs]", kernel);
  }
  p.image = static_cast<const int8_t*>(image.untyped_data());
  p.kernel = static_cast<const int8_t*>(kernel.untyped_data());
  if (!read(image_scale, ffi::F32, 1, p.batch, &p.image_scale)) {
    return wrong(kName, "scales of images are f32[1, batch or 1]", image_scale);
  }
  if (!read(kernel_scale, ffi::F32, 1, p.outputs, &p.kernel_scale)) {
    return wrong(kName, "scales of a kernel are f32[1, outputs or 1]", kernel_scale);
  }
  if (!read(image_zero, ffi::S8, 1, p.batch, &p.image_zero)) {
    return wrong(kName, "zero points of images are s8[1, batch or 1]", image_zero);
  }
  if (!read(kernel_zero, ffi::S8, 1, p.outputs, &p.kernel_zero)) {
    return wrong(kName, "zero points of a kernel are s8[1, outputs or 1]", kernel_zero);
  }
  const bool is_scaled = y->element_type() == ffi::F32;
  const std::initializer_list<int64_t> shape = {p.batch, axes[0].places(), axes[1].places(),
                                                p.outputs};
  if (!has(*y, is_scaled ? ffi::F32 : ffi::S32, shape)) {
    return wrong(kName, "the result is s32 or f32[batch, places, places, outputs]", *y);
  }
  if (is_absent(*y)) return ffi::Error::Success();
  if (is_scaled && (p.image_scale.data == nullptr || p.kernel_scale.data == nullptr)) {
    return ffi::Error::InvalidArgument("jqx_cpu: convolution: a scale is missing.");
  }
  if (is_scaled) {
    p.scaled = static_cast<float*>(y->untyped_data());
  } else {
    p.sums = static_cast<int32_t*>(y->untyped_data());
  }
  return run(pool, [&](Pool& threads) { convolve(p, kernels(), threads); });
}

}  // namespace
}  // namespace jqx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_convolution, jqx::convolution,
                              jqx::bound<6>()
                                  .Attr<jqx::Integers>("strides")
                                  .Attr<jqx::Integers>("dilation")
                                  .Attr<jqx::Integers>("padding")
                                  .Attr<int64_t>("groups")
                                  .Ret<ffi::AnyBuffer>());
