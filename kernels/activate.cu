// The activation of a feed-forward block without a gate: out = activation(x + bias).
//
//   x [num_rows][width] f32    bias [width] f32, or null    out [num_rows][width] bf16
//
// Grid (num_rows, n), any n: the blocks of a row share its vectors of 8 elements. Moves 6 bytes per element (4 read,
// 2 written); the bias comes from the L2 cache. No shared memory. Not measured yet.
#include "activations.cuh"

namespace {

template <class Activation>
__device__ __forceinline__ void activate(bf16* __restrict__ out, const float* __restrict__ x,
                                         const float* __restrict__ bias, int width, const Activation& activation = {}) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (width % VECTOR == 0) {
        for (int i = first * VECTOR; i < width; i += step * VECTOR) {
            float v[VECTOR], b[VECTOR] = {};
            load_8(v, x + row + i);
            if (bias != nullptr) load_8(b, bias + i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) v[j] = activation.of(v[j] + b[j]);
            store_8(out + row + i, v);
        }
    } else {
        for (int i = first; i < width; i += step) {
            out[row + i] = to_bf16(activation.of(x[row + i] + (bias != nullptr ? bias[i] : 0.0f)));
        }
    }
}

// xIELU (Huang and Schlag, arXiv:2411.13010): x / 2 + positive * x^2 above 0, else
// x / 2 + negative * (expm1(min(x, -1e-6)) - x).
struct Xielu {
    float positive, negative;

    __device__ __forceinline__ float of(float x) const {
        const float below = x < -1e-6f ? x : -1e-6f;
        return (x > 0.0f ? positive * x * x : negative * (expm1f(below) - x)) + 0.5f * x;
    }
};

// x * sigmoid(1.702 * x), an approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415).
struct QuickGelu {
    static __device__ __forceinline__ float of(float x) { return x / (1.0f + __expf(-1.702f * x)); }
};

}  // namespace

KERNEL(silu, 1024)(bf16* out, const float* x, const float* bias, int width) { activate<Silu>(out, x, bias, width); }
EXPORT_KERNEL(silu)

KERNEL(gelu, 1024)(bf16* out, const float* x, const float* bias, int width) { activate<Gelu>(out, x, bias, width); }
EXPORT_KERNEL(gelu)

KERNEL(gelu_tanh, 1024)(bf16* out, const float* x, const float* bias, int width) {
    activate<GeluTanh>(out, x, bias, width);
}
EXPORT_KERNEL(gelu_tanh)

KERNEL(relu, 1024)(bf16* out, const float* x, const float* bias, int width) { activate<Relu>(out, x, bias, width); }
EXPORT_KERNEL(relu)

KERNEL(squared_relu, 1024)(bf16* out, const float* x, const float* bias, int width) {
    activate<SquaredRelu>(out, x, bias, width);
}
EXPORT_KERNEL(squared_relu)

KERNEL(quick_gelu, 1024)(bf16* out, const float* x, const float* bias, int width) {
    activate<QuickGelu>(out, x, bias, width);
}
EXPORT_KERNEL(quick_gelu)

KERNEL(xielu, 1024)
(bf16* out, const float* x, const float* bias, int width, float positive, float negative) {
    activate(out, x, bias, width, Xielu{positive, negative});
}
EXPORT_KERNEL(xielu)
