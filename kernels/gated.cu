// Gated activations (Shazeer, arXiv:2002.05202): out = activation(factor * (gate + bias)) * (up + bias).
//
//   gate_up [num_rows][2 * width] f32    bias [2 * width] f32, or null    out [num_rows][width] bf16
//
//   | gate: width elements | up: width elements |     a row of gate_up and bias
//
// Grid (num_rows, n), any n: the blocks of a row share its vectors of 8 outputs. Moves 10 bytes per output (8 read,
// 2 written); the bias comes from the L2 cache. No shared memory.
#include "activations.cuh"

namespace {

template <class Activation>
__device__ __forceinline__ void gate_and_multiply(bf16* __restrict__ out, const float* __restrict__ gate_up,
                                                  const float* __restrict__ bias, int width, float factor) {
    const size_t row = blockIdx.x;
    const float* const gate = gate_up + row * 2 * width;
    const float* const up = gate + width;
    bf16* const to = out + row * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (width % VECTOR == 0) {
        for (int i = first * VECTOR; i < width; i += step * VECTOR) {
            float g[VECTOR], u[VECTOR];
            load_8(g, gate + i);
            load_8(u, up + i);
            if (bias != nullptr) {
                float gate_bias[VECTOR], up_bias[VECTOR];
                load_8(gate_bias, bias + i);
                load_8(up_bias, bias + width + i);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) g[j] += gate_bias[j], u[j] += up_bias[j];
            }
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) g[j] = Activation::of(factor * g[j]) * u[j];
            store_8(to + i, g);
        }
    } else {
        for (int i = first; i < width; i += step) {
            const float g = bias != nullptr ? gate[i] + bias[i] : gate[i];
            const float u = bias != nullptr ? up[i] + bias[width + i] : up[i];
            to[i] = to_bf16(Activation::of(factor * g) * u);
        }
    }
}

}  // namespace

KERNEL(silu_mul, 1024)
(bf16* __restrict__ out, const float* __restrict__ gate_up, const float* __restrict__ bias, int width,
 float factor) {
    gate_and_multiply<Silu>(out, gate_up, bias, width, factor);
}
EXPORT_KERNEL(silu_mul)

KERNEL(gelu_mul, 1024)
(bf16* __restrict__ out, const float* __restrict__ gate_up, const float* __restrict__ bias, int width,
 float factor) {
    gate_and_multiply<Gelu>(out, gate_up, bias, width, factor);
}
EXPORT_KERNEL(gelu_mul)

KERNEL(gelu_tanh_mul, 1024)
(bf16* __restrict__ out, const float* __restrict__ gate_up, const float* __restrict__ bias, int width,
 float factor) {
    gate_and_multiply<GeluTanh>(out, gate_up, bias, width, factor);
}
EXPORT_KERNEL(gelu_tanh_mul)

KERNEL(relu_mul, 1024)
(bf16* __restrict__ out, const float* __restrict__ gate_up, const float* __restrict__ bias, int width,
 float factor) {
    gate_and_multiply<Relu>(out, gate_up, bias, width, factor);
}
EXPORT_KERNEL(relu_mul)

KERNEL(squared_relu_mul, 1024)
(bf16* __restrict__ out, const float* __restrict__ gate_up, const float* __restrict__ bias, int width,
 float factor) {
    gate_and_multiply<SquaredRelu>(out, gate_up, bias, width, factor);
}
EXPORT_KERNEL(squared_relu_mul)
