// Logits after the output layer: x = cap * tanh(scale * x / cap), or x = scale * x.
//
//   logits [num_rows][width] f32, changed in place    cap: the bound of their magnitude; 0: none
//
// Grid (num_rows, n), any n: the blocks of a row share its elements. Moves 8 bytes per element. No shared memory. Not
// measured yet.
#include "common.cuh"

KERNEL(transform_logits, 1024)(float* __restrict__ logits, float scale, float cap, int width) {
    float* const row = logits + static_cast<size_t>(blockIdx.x) * width;
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (int i = first; i < width; i += step) {
        const float x = scale * row[i];
        row[i] = cap == 0.0f ? x : cap * tanhf(x / cap);
    }
}
EXPORT_KERNEL(transform_logits)
