// The sequences of a step in layers with recurrent states.
//
//   states [num_slots][slot_len] f32, of a layer: convolution [kernel_len][num_channels] | matrices of the rule's heads
//
//   x [num_tokens][input_len] f32, products of the layer's input projection:
//     gated convolution     b | c | x
//     gated delta rule      queries | keys | values | gates | strengths | decays
//       by channels         queries | keys | values | strengths
//     state space           values | keys | queries | gates | times
//     selective scan        values | gates
#pragma once
#include "common.cuh"

// A sequence of a step. One without tokens has no state. crates/device-cuda/src/recurrent_spans.rs writes these.
struct RecurrentSpan {
    u32 first_token;
    u32 num_tokens;
    u32 slot;
    // BEGINS, IS_REPEATED.
    u32 flags;
    // Its states that are saved, in order of their tokens.
    u32 first_saved;
    u32 num_saved;
};

// Its tokens are the first ones: the states before them are zeros.
constexpr u32 BEGINS = 1;
// Its only token is computed again, and changes no state.
constexpr u32 IS_REPEATED = 2;

// States behind a token of the step, which are copied to another slot.
struct SavedState {
    u32 token;
    u32 slot;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Calls `save(state of the slot)` for the slots that the states behind `token` are copied to. `next` counts the saved
// states of the sequence.
template <class Save>
__device__ __forceinline__ void save_states(const RecurrentSpan& span, const SavedState* saved, u32 token, u32& next,
                                            float* states, u64 slot_len, const Save& save) {
    for (; next < span.num_saved; ++next) {
        const SavedState state = saved[span.first_saved + next];
        if (state.token != token) return;
        save(states + state.slot * slot_len);
    }
}
