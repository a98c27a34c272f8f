// Which kernels this processor runs.

#include "kernels.h"

#include <atomic>
#include <cstring>

#if defined(JQX_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(JQX_AMX) && !defined(JQX_EMULATED_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jqx {

#if defined(JQX_AMX)
namespace {

// Whether the processor multiplies tiles of int8 and of bfloat16, the system keeps them for threads,
// and lets this process use them, which Linux is asked for.
bool has_amx() {
#if defined(JQX_EMULATED_AMX)
  return true;
#else
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c >> 27 & 1) == 0) return false;  // OSXSAVE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if ((d & kNeeded) != kNeeded) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr unsigned kTiles = 3u << 17;  // XTILECFG, XTILEDATA
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return (a & kTiles) == kTiles && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
}

}  // namespace
#endif

#if defined(JQX_ARM)
namespace {

bool has_dot_products() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;  // of Apple's processors all have them
#endif
}

}  // namespace
#endif

const Kernels* const* all_kernels() {
  static const Kernels* found[6] = {};
  static const bool is_known = [] {
    int count = 0;
#if defined(JQX_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
#if defined(JQX_AMX)
      if (has_amx()) found[count++] = &amx_kernels();
#endif
#if defined(JQX_BF16)
      if (__builtin_cpu_supports("avx512bf16")) found[count++] = &avx512_bf16_kernels();
#endif
      found[count++] = &avx512_vnni_kernels();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = &avx2_kernels();
#endif
#if defined(JQX_ARM)
    if (has_dot_products()) found[count++] = &neon_kernels();
#endif
    found[count++] = &generic_kernels();
    return true;
  }();
  (void)is_known;
  return found;
}

namespace {

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* own = chosen.load();
  return own != nullptr ? *own : *all_kernels()[0];
}

bool choose(const char* name) {
  for (const Kernels* const* each = all_kernels(); *each != nullptr; ++each) {
    if (std::strcmp((*each)->name, name) == 0) return chosen.store(*each), true;
  }
  return false;
}

}  // namespace jqx
