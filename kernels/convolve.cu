// Causal convolutions of channels, in layers with recurrent states:
//
//   convolve_channels     x = silu(convolution(x)), of the first num_channels elements of a row
//   convolve_values       the same; out = x, rounded
//   gated_convolution     out = c * convolution(b * x) (Liquid AI, LFM2 technical report, arXiv:2511.23404)
//
//   states, x        recurrence.cuh says how they lie
//   weights [kernel_len][num_channels] f32, the token's own position last    bias [num_channels] f32, or null
//   out [num_tokens][num_channels] bf16
//
//   window     t-3  t-2  t-1  t        the last inputs of a channel, in the registers of a thread
//   weights     w0   w1   w2   w3      their sum, from left to right, then the bias
//
// Grid (num_channels / blockDim.x, num_spans): a thread has a channel of a sequence, and goes over its tokens in order.
// It reads the inputs of AHEAD tokens before it computes the first of these. Moves 8 bytes an element, 10 with out, 14
// with gates; no shared memory.
#include "activations.cuh"
#include "recurrence.cuh"

namespace {

// The longest convolution, as crates/device-cuda/src/recurrence.rs knows it.
constexpr int MAX_KERNEL_LEN = 8;
constexpr int AHEAD = 4;

// The last inputs of a channel. The first MAX_KERNEL_LEN - kernel_len elements are not used.
struct Channel {
    float weights[MAX_KERNEL_LEN];
    float window[MAX_KERNEL_LEN];
    float bias;
    bool has_bias;
    int unused;

    __device__ __forceinline__ Channel(const float* weights_of_all, const float* biases, int index, int num_channels,
                                       int kernel_len)
        : bias(biases != nullptr ? biases[index] : 0.0f),
          has_bias(biases != nullptr),
          unused(MAX_KERNEL_LEN - kernel_len) {
#pragma unroll
        for (int i = 0; i < MAX_KERNEL_LEN; ++i) {
            window[i] = 0.0f;
            weights[i] = i < unused ? 0.0f : weights_of_all[(i - unused) * num_channels + index];
        }
    }

    __device__ __forceinline__ void read(const float* state, int num_channels) {
#pragma unroll
        for (int i = 0; i < MAX_KERNEL_LEN; ++i) {
            if (i >= unused) window[i] = state[(i - unused) * num_channels];
        }
    }

    __device__ __forceinline__ void write(float* state, int num_channels) const {
#pragma unroll
        for (int i = 0; i < MAX_KERNEL_LEN; ++i) {
            if (i >= unused) state[(i - unused) * num_channels] = window[i];
        }
    }

    __device__ __forceinline__ void push(float input) {
#pragma unroll
        for (int i = 0; i + 1 < MAX_KERNEL_LEN; ++i) window[i] = window[i + 1];
        window[MAX_KERNEL_LEN - 1] = input;
    }

    __device__ __forceinline__ float sum() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_KERNEL_LEN; ++i) {
            if (i >= unused) sum += weights[i] * window[i];
        }
        return has_bias ? sum + bias : sum;
    }
};

// `input_of(token)` is an input of the convolution, `store(token, sum)` takes a result of it.
template <class InputOf, class Store>
__device__ __forceinline__ void convolve(Channel& channel, const RecurrentSpan& span, const SavedState* saved, float* states,
                                         u64 slot_len, int index, int num_channels, const InputOf& input_of,
                                         const Store& store) {
    float* const state = states + span.slot * slot_len + index;
    if (!(span.flags & BEGINS)) channel.read(state, num_channels);
    u32 next_saved = 0;
    for (u32 start = 0; start < span.num_tokens; start += AHEAD) {
        float inputs[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) {
            if (start + i < span.num_tokens) inputs[i] = input_of(span.first_token + start + i);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) {
            if (start + i >= span.num_tokens) break;
            const u32 token = span.first_token + start + i;
            if (!(span.flags & IS_REPEATED)) channel.push(inputs[i]);
            store(token, channel.sum());
            save_states(span, saved, token, next_saved, states, slot_len,
                        [&](float* slot) { channel.write(slot + index, num_channels); });
        }
    }
    channel.write(state, num_channels);
}

}  // namespace

KERNEL(convolve_channels, 128)
(float* __restrict__ x, float* __restrict__ states, const float* __restrict__ weights, const float* __restrict__ bias,
 const RecurrentSpan* __restrict__ spans, const SavedState* __restrict__ saved, u64 slot_len, int input_len,
 int num_channels, int kernel_len) {
    const RecurrentSpan span = spans[blockIdx.y];
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (span.num_tokens == 0 || index >= num_channels) return;
    Channel channel(weights, bias, index, num_channels, kernel_len);
    const auto element = [&](u32 token) { return x + static_cast<size_t>(token) * input_len + index; };
    convolve(
        channel, span, saved, states, slot_len, index, num_channels, [&](u32 token) { return *element(token); },
        [&](u32 token, float sum) { *element(token) = Silu::of(sum); });
}
EXPORT_KERNEL(convolve_channels)

KERNEL(convolve_values, 128)
(bf16* __restrict__ out, float* __restrict__ x, float* __restrict__ states, const float* __restrict__ weights,
 const float* __restrict__ bias, const RecurrentSpan* __restrict__ spans, const SavedState* __restrict__ saved,
 u64 slot_len, int input_len, int num_channels, int kernel_len) {
    const RecurrentSpan span = spans[blockIdx.y];
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (span.num_tokens == 0 || index >= num_channels) return;
    Channel channel(weights, bias, index, num_channels, kernel_len);
    const auto element = [&](u32 token) { return x + static_cast<size_t>(token) * input_len + index; };
    convolve(
        channel, span, saved, states, slot_len, index, num_channels, [&](u32 token) { return *element(token); },
        [&](u32 token, float sum) {
            const float value = Silu::of(sum);
            *element(token) = value;
            out[static_cast<size_t>(token) * num_channels + index] = to_bf16(value);
        });
}
EXPORT_KERNEL(convolve_values)

KERNEL(gated_convolution, 128)
(bf16* __restrict__ out, const float* __restrict__ x, float* __restrict__ states, const float* __restrict__ weights,
 const float* __restrict__ bias, const RecurrentSpan* __restrict__ spans, const SavedState* __restrict__ saved,
 u64 slot_len, int num_channels, int kernel_len) {
    const RecurrentSpan span = spans[blockIdx.y];
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (span.num_tokens == 0 || index >= num_channels) return;
    Channel channel(weights, bias, index, num_channels, kernel_len);
    const auto part = [&](u32 token, int which) {
        return x[(static_cast<size_t>(token) * 3 + which) * num_channels + index];
    };
    convolve(
        channel, span, saved, states, slot_len, index, num_channels,
        [&](u32 token) { return part(token, 0) * part(token, 2); },
        [&](u32 token, float sum) {
            out[static_cast<size_t>(token) * num_channels + index] = to_bf16(part(token, 1) * sum);
        });
}
EXPORT_KERNEL(gated_convolution)
