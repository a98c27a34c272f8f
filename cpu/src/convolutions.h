// Convolutions of int8 images and kernels. No image of all patches is made: each tile of a result
// gathers those of its own rows.

#ifndef JQX_CPU_CONVOLUTIONS_H_
#define JQX_CPU_CONVOLUTIONS_H_

#include <cstdint>

#include "kernels.h"
#include "parallel.h"
#include "products.h"

namespace jqx {

// A spatial axis and the window over it.
struct Axis {
  int64_t size, taps;         // of images, and of the kernel
  int64_t stride = 1;         // from one place of the window to the next
  int64_t dilation = 1;       // from one tap to the next
  int64_t low = 0, high = 0;  // padding, which may be negative

  // How many places the window has.
  int64_t places() const {
    const int64_t span = size + low + high, reach = (taps - 1) * dilation + 1;
    return taps > 0 && span >= reach ? (span - reach) / stride + 1 : 0;
  }
};

// sum (image - image_zero) (kernel - kernel_zero), int32 modulo 2**32, or times image_scale *
// kernel_scale in float32. Padding is the zero point of the image, or 0 without one.
struct Convolution {
  int64_t batch, features, outputs, groups;
  Axis height, width;
  const int8_t* image;   // [batch, height, width, features]
  const int8_t* kernel;  // [taps, taps, features / groups, outputs]
  Each<float> image_scale, kernel_scale;  // of batches, and of outputs
  Each<int8_t> image_zero, kernel_zero;
  int32_t* sums = nullptr;   // [batch, places, places, outputs], or
  float* scaled = nullptr;  // likewise
};

void convolve(const Convolution& p, const Kernels& kernels, Pool& pool);

}  // namespace jqx

#endif  // JQX_CPU_CONVOLUTIONS_H_
