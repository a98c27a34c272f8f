#include "generic_kernels.inc"

namespace jqx {

const Kernels& generic_kernels() {
  static const Kernels all = plain_kernels("plain C++");
  return all;
}

}  // namespace jqx
