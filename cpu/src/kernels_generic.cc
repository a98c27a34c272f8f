#include "generic_kernels.inc"

namespace jqx {

const Kernels kGeneric = {"plain C++", quantize, magnitude, sum, dots, pack, pack_rows, panel,
                          depthwise, correct, scale, requantize, split, arrange, grouped, nullptr,
                          nullptr, shift, join};

}  // namespace jqx
