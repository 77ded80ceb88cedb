// The selective scan of Mamba (Gu and Dao, arXiv:2312.00752), behind its convolution (convolve_values of convolve.cu).
//
//   selective_scan_N     for states of up to N elements; for each channel:
//                          time = softplus(time + time_bias)
//                          s = exp(-rate * time) * s + b * time * x
//                          out = (c * s + skip * x) * silu(gate)
//
//   x [num_tokens][2 * num_channels] f32, values and gates       times [num_tokens][num_channels] f32
//   keys [num_tokens][2 * state_dim] f32, b and c                norm [2 * state_dim] f32: weights of an RMS norm of each, or null
//   states            of a slot, behind the convolution's part: [state_dim][num_channels] f32
//   rates [state_dim][num_channels]    time_biases, skips [num_channels] f32    out [num_tokens][num_channels] bf16
//
// Grid (num_channels / 128, num_spans), 128 threads: a thread has the state of a channel in registers, and goes over
// the tokens of its sequence in order. Moves 14 bytes an element of a token, and a state once in each direction; 16 * N
// bytes of shared memory, in which the keys of two tokens alternate.
#include "activations.cuh"
#include "recurrence.cuh"

namespace {

struct Scan {
    const float* x;
    const float* times;
    const float* keys;
    const float* rates;
    const float* time_biases;
    const float* skips;
    const float* norm;
    int num_channels;
    int state_dim;
    float norm_eps;

    // The factor that gives the elements of a key or a query a mean square of 1.
    __device__ __forceinline__ float scale_of(const float* elements) const {
        float sum = 0.0f;
        for (int i = 0; i < state_dim; ++i) sum += elements[i] * elements[i];
        return 1.0f / sqrtf(sum / state_dim + norm_eps);
    }

    template <int N>
    __device__ __forceinline__ void run(bf16* out, float* states, const RecurrentSpan& span, const SavedState* saved,
                                        u64 slot_len, int convolution_len, float* both) const {
        const int index = blockIdx.x * blockDim.x + threadIdx.x;
        const bool is_there = index < num_channels;
        const bool is_repeated = span.flags & IS_REPEATED;
        const auto has = [&](int i) { return is_there && i < state_dim; };
        float state[N], rate[N];
        const auto of_slot = [&](float* slot) { return slot + convolution_len + index; };
        float* const own = of_slot(states + span.slot * slot_len);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            rate[i] = has(i) ? rates[static_cast<size_t>(i) * num_channels + index] : 0.0f;
            const bool is_stored = has(i) && !(span.flags & BEGINS);
            state[i] = is_stored ? own[static_cast<size_t>(i) * num_channels] : 0.0f;
        }
        const auto write = [&](float* to) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (has(i)) to[static_cast<size_t>(i) * num_channels] = state[i];
            }
        };
        const float bias = is_there ? time_biases[index] : 0.0f, skip = is_there ? skips[index] : 0.0f;
        u32 next_saved = 0;
        for (u32 step = 0; step < span.num_tokens; ++step) {
            const size_t token = span.first_token + step;
            float* const key = both + step % 2 * 2 * N;
            const float* const query = key + state_dim;
            for (int i = threadIdx.x; i < 2 * state_dim; i += blockDim.x) key[i] = keys[token * 2 * state_dim + i];
            __syncthreads();
            if (!is_there) continue;
            const bool has_norm = norm != nullptr;
            const float key_scale = has_norm ? scale_of(key) : 1.0f, query_scale = has_norm ? scale_of(query) : 1.0f;
            const float value = x[token * 2 * num_channels + index];
            const float gate = x[(token * 2 + 1) * num_channels + index];
            const float time = softplus(times[token * num_channels + index] + bias);
            const float added = time * value;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i >= state_dim) break;
                const float key_weight = has_norm ? key_scale * norm[i] : 1.0f;
                const float query_weight = has_norm ? query_scale * norm[state_dim + i] : 1.0f;
                if (!is_repeated) state[i] = state[i] * expf(-rate[i] * time) + added * (key[i] * key_weight);
                sum += state[i] * (query[i] * query_weight);
            }
            out[token * num_channels + index] = to_bf16((sum + skip * value) * Silu::of(gate));
            save_states(span, saved, span.first_token + step, next_saved, states, slot_len,
                        [&](float* slot) { write(of_slot(slot)); });
        }
        if (!is_repeated) write(own);
    }
};

}  // namespace

#define SELECTIVE_SCAN(name, n)                                                                                      \
    KERNEL(name, 128)                                                                                                \
    (bf16* __restrict__ out, const float* __restrict__ x, const float* __restrict__ times,                           \
     const float* __restrict__ keys, float* __restrict__ states, const float* __restrict__ rates,                    \
     const float* __restrict__ time_biases, const float* __restrict__ skips, const float* __restrict__ norm,         \
     const RecurrentSpan* __restrict__ spans, const SavedState* __restrict__ saved, u64 slot_len, int num_channels,  \
     int state_dim, int convolution_len, float norm_eps) {                                                           \
        SHARED_ARRAY(float, both, 4 * n);                                                                            \
        const RecurrentSpan span = spans[blockIdx.y];                                                                \
        if (span.num_tokens == 0) return;                                                                            \
        const Scan scan{x, times, keys, rates, time_biases, skips, norm, num_channels, state_dim, norm_eps};         \
        scan.run<n>(out, states, span, saved, slot_len, convolution_len, both);                                      \
    }                                                                                                                \
    EXPORT_KERNEL(name)

SELECTIVE_SCAN(selective_scan_16, 16)
SELECTIVE_SCAN(selective_scan_64, 64)
