// Which kernels this processor runs.

#include "kernels.h"

namespace jqx {

const Kernels* const* all_kernels() {
  static const Kernels* found[4] = {nullptr, nullptr, nullptr, nullptr};
  static const bool is_known = [] {
    int count = 0;
#if defined(JQX_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found[count++] = &kAvx512Vnni;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = &kAvx2;
#endif
#if defined(JQX_ARM)
    found[count++] = &kNeon;
#endif
    found[count++] = &kGeneric;
    return true;
  }();
  (void)is_known;
  return found;
}

const Kernels& kernels() { return *all_kernels()[0]; }

}  // namespace jqx
