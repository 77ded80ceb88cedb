// Kernels for the tests of the stand-in itself.
#include "common.cuh"

// out[i] += factor * x[i]
KERNEL(stand_in_scale_add, 256)
(float* __restrict__ out, const float* __restrict__ x, float factor, int len) {
    SHARED_ARRAY(float, tile, 256);
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    tile[threadIdx.x] = i < len ? x[i] : 0.0f;
    __syncthreads();
    if (i < len) out[i] += factor * tile[threadIdx.x];
}
EXPORT_KERNEL(stand_in_scale_add)

struct StandInArguments {
    float* out;
    unsigned char byte;
    unsigned short half;
    unsigned long long sum;
};

// out[0] = the sum of all arguments; one of each kind.
KERNEL(stand_in_arguments, 32)
(StandInArguments in_struct, signed char a, short b, int c, long long d, float e, double f, bool g) {
    if (threadIdx.x != 0) return;
    const double in_all = static_cast<double>(in_struct.sum) + in_struct.byte + in_struct.half;
    in_struct.out[0] = static_cast<float>(in_all + a + b + c + static_cast<double>(d) + e + f + (g ? 1.0 : 0.0));
}
EXPORT_KERNEL(stand_in_arguments)

// Uses all of its dynamic shared memory; out[0] = its last element.
KERNEL(stand_in_shared, 32)
(float* out, int len) {
    DYNAMIC_SHARED(float, all);
    for (int i = static_cast<int>(threadIdx.x); i < len; i += 32) all[i] = static_cast<float>(i);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = all[len - 1];
}
EXPORT_KERNEL(stand_in_shared)

// Writes beyond what its argument points to.
KERNEL(stand_in_write_at, 32)
(float* out, long long index) {
    if (threadIdx.x == 0) out[index] = 1.0f;
}
EXPORT_KERNEL(stand_in_write_at)
