// How a token is sampled from a row of logits: what change_logits.cu and sample.cu read.
#pragma once

#include "common.cuh"

struct SamplingRow {
    u64 seed;
    u64 num_generated;
    // The natural logarithm of min_p; -infinity: none.
    double log_min_p;
    // 0: the most likely token.
    float temperature;
    // 1: all tokens.
    float top_p;
    // 0: all tokens.
    u32 top_k;
    // Not 0: the row is neither changed nor read, and its answer is ASK_HOST.
    u32 is_skipped;
    // What changes the logits: the index of the first word of its lists, and their lengths, see change_logits.cu.
    u32 lists;
    u32 num_biases, num_forbidden, num_ignored, num_counted;
    float repetition_penalty, presence_penalty, frequency_penalty;
};
