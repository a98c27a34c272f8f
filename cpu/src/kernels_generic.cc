#include "generic_kernels.inc"

namespace jqx {

const Kernels kGeneric = {"plain C++", quantize, magnitude, sum,     dots,  pack, panel,
                          correct,     scale,    split,     grouped, nullptr, nullptr, shift,
                          join,        nullptr,  decode,    add_products};

}  // namespace jqx
