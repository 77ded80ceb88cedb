// The conversions of fp8.cuh, for tests: one block converts n elements, a multiple of 4.
#include "fp8.cuh"

KERNEL(test_to_e4m3, 32)(u16* codes, const float* x, int n) {
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
        codes[i] = static_cast<u16>(to_e4m3_pair(x[2 * i], x[2 * i + 1]));
    }
}
EXPORT_KERNEL(test_to_e4m3)

KERNEL(test_widen_e4m3, 32)(uint2* widened, const u32* codes, int n) {
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) widened[i] = widen_codes<e4m3>(codes[i]);
}
EXPORT_KERNEL(test_widen_e4m3)
