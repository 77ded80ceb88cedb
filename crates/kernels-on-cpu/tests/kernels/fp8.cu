// The conversions of fp8.cuh, for tests: one block converts n elements, a multiple of 2.
#include "fp8.cuh"

KERNEL(test_to_e4m3, 32)(u16* codes, const float* x, int n) {
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
        codes[i] = static_cast<u16>(to_e4m3_pair(x[2 * i], x[2 * i + 1]));
    }
}
EXPORT_KERNEL(test_to_e4m3)

// The upper bytes of both halves are noise.
KERNEL(test_widen_e4m3, 32)(u32* widened, const u16* codes, int n) {
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
        widened[i] = widen_codes<e4m3>((codes[i] & 0xffu) | (codes[i] & 0xff00u) << 8 | 0xa500d200u);
    }
}
EXPORT_KERNEL(test_widen_e4m3)
