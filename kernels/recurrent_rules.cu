// The rules of layers with recurrent states, behind their convolution. A result takes the place of its value in x, in
// front of gate and norm (recurrent_gates.cu).
//
//   delta_rule_N      the gated delta rule (Yang, Kautz, Hatamizadeh, arXiv:2412.06464), for keys of up to N elements:
//                       S = exp(-rate * softplus(decay + time_bias)) * S
//                       S += k^T * strength_scale * sigmoid(strength) * (v - k * S)
//                       result = q * S / sqrt(key_dim), with queries and keys divided by their lengths
//   channel_delta_rule_N  as delta_rule_N with a decay for each row of S (Kimi Delta Attention; Kimi Team, arXiv:2510.26692):
//                       decays [num_tokens][num_heads][key_dim] f32
//   state_space_N     the selective state space of Mamba-2 (Dao and Gu, arXiv:2405.21060), for states of up to N elements:
//                       time = clamp(softplus(time + time_bias), least, most)
//                       S = exp(-rate * time) * S + b^T * time * x
//                       result = c * S + skip * x
//
//   states, x                                recurrence.cuh says how they lie; matrices are transposed:
//                                            [num_heads][value_dim][key_dim] and [num_heads][head_dim][state_dim]
//   rates, time_biases, skips [num_heads] f32; by channels time_biases [num_heads][key_dim]
//
// A block has 32 columns of the matrix of one head of a sequence, in registers, and goes over the tokens in order, so
// that the bits of a token depend on its sequence alone. 8 lanes of a warp share a column:
//
//   lane 0    rows 0, 8, 16, ...
//   lane 1    rows 1, 9, 17, ...      partial sums of the lanes are added by shuffles
//
// Grid (num_heads * ceil(value_dim / 32), num_spans), 256 threads. A block reads and writes its part of a state once,
// and for each token the query and the key of its head, ahead of the token. No shared memory.
#include "recurrence.cuh"

namespace {

constexpr int LANES = 8;
constexpr int COLUMNS = 32;
// Added to the squared length of a query or key, as transformers and flash-linear-attention do.
constexpr float LENGTH_EPS = 1e-6f;

// The rows of a column that a thread has, and its column.
template <int ROWS>
struct Column {
    int lane;
    int index;
    int num_rows;
    // Whether the matrix has this column.
    bool is_there;
    float state[ROWS];

    __device__ __forceinline__ Column(int first_column, int num_rows, int num_columns)
        : lane(threadIdx.x % LANES),
          index(first_column + threadIdx.x / LANES),
          num_rows(num_rows),
          is_there(index < num_columns) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) state[i] = 0.0f;
    }

    // The elements of a vector of num_rows elements at the rows of this thread; zeros behind its end.
    __device__ __forceinline__ void read_rows(float (&to)[ROWS], const float* from) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) to[i] = i * LANES + lane < num_rows ? from[i * LANES + lane] : 0.0f;
    }

    __device__ __forceinline__ void read(const float* matrix) {
        if (is_there) read_rows(state, matrix + static_cast<size_t>(index) * num_rows);
    }

    __device__ __forceinline__ void write(float* matrix) const {
        float* const to = matrix + static_cast<size_t>(index) * num_rows;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (is_there && i * LANES + lane < num_rows) to[i * LANES + lane] = state[i];
        }
    }

    // The value of the column's first lane, in all lanes: others must not read it from x, which the first one writes.
    __device__ __forceinline__ float of_first_lane(const float* values) const {
        const float own = is_there && lane == 0 ? values[index] : 0.0f;
        return __shfl_sync(ALL_LANES, own, threadIdx.x % WARP_SIZE - lane);
    }
};

// The sizes of a rule's heads and of a row of x.
struct Shape {
    u64 slot_len;
    int input_len;
    // Elements of a key, and of a value.
    int num_rows;
    int num_columns;
    // Where the matrices begin in a slot.
    int convolution_len;
};

// Goes over the tokens of a sequence. `Rule` has
//   Inputs                              what a token brings, besides its value
//   read(inputs, column, row of x, token, head)
//   result(column, inputs, value, is_repeated)
//   values                              where the values of the head begin in a row of x
template <int ROWS, class Rule>
__device__ __forceinline__ void scan(float* x, float* states, const RecurrentSpan* spans, const SavedState* saved,
                                     const Shape& shape, const Rule& rule) {
    const RecurrentSpan span = spans[blockIdx.y];
    if (span.num_tokens == 0) return;
    const int blocks_per_head = (shape.num_columns + COLUMNS - 1) / COLUMNS;
    const int head = blockIdx.x / blocks_per_head;
    Column<ROWS> column(blockIdx.x % blocks_per_head * COLUMNS, shape.num_rows, shape.num_columns);
    const size_t matrix = shape.convolution_len + static_cast<size_t>(head) * shape.num_rows * shape.num_columns;
    float* const own = states + span.slot * shape.slot_len + matrix;
    if (!(span.flags & BEGINS)) column.read(own);
    const auto row_of = [&](u32 token) { return x + static_cast<size_t>(token) * shape.input_len; };
    typename Rule::Inputs next;
    rule.read(next, column, row_of(span.first_token), span.first_token, head);
    u32 next_saved = 0;
    for (u32 i = 0; i < span.num_tokens; ++i) {
        const u32 token = span.first_token + i;
        typename Rule::Inputs inputs = next;
        if (i + 1 < span.num_tokens) rule.read(next, column, row_of(token + 1), token + 1, head);
        float* const values = row_of(token) + rule.first_value + head * shape.num_columns;
        const float value = column.of_first_lane(values);
        const float result = rule.result(column, inputs, value, head, span.flags & IS_REPEATED);
        if (column.is_there && column.lane == 0) values[column.index] = result;
        save_states(span, saved, token, next_saved, states, shape.slot_len,
                    [&](float* slot) { column.write(slot + matrix); });
    }
    if (!(span.flags & IS_REPEATED)) column.write(own);
}

template <int ROWS, bool BY_CHANNELS>
struct DeltaRule {
    struct Inputs {
        float query[ROWS];
        float key[ROWS];
        float strength;
        float decay[BY_CHANNELS ? ROWS : 1];
    };

    // By channels: [num_tokens][num_heads][key_dim].
    const float* decays;
    int num_heads;
    const float* rates;
    const float* time_biases;
    int heads_per_group;
    int key_dim;
    float query_scale;
    float strength_scale;
    // Where the parts of a row begin.
    int first_key;
    int first_value;
    int first_strength;
    int first_decay;

    __device__ __forceinline__ void read(Inputs& inputs, const Column<ROWS>& column, const float* row, u32 token,
                                         int head) const {
        const int group = head / heads_per_group * key_dim;
        column.read_rows(inputs.query, row + group);
        column.read_rows(inputs.key, row + first_key + group);
        inputs.strength = row[first_strength + head];
        if constexpr (BY_CHANNELS) {
            column.read_rows(inputs.decay, decays + (static_cast<size_t>(token) * num_heads + head) * key_dim);
        } else {
            inputs.decay[0] = row[first_decay + head];
        }
    }

    // Multiplies the state with its decays, and gives what it has for the key.
    __device__ __forceinline__ float decay(Column<ROWS>& column, const Inputs& inputs, int head) const {
        float(&state)[ROWS] = column.state;
        float known = 0.0f;
        if constexpr (BY_CHANNELS) {
            float biases[ROWS];
            column.read_rows(biases, time_biases + head * key_dim);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                state[i] *= expf(-rates[head] * softplus(inputs.decay[i] + biases[i]));
                known += state[i] * inputs.key[i];
            }
        } else {
            const float decay = expf(-rates[head] * softplus(inputs.decay[0] + time_biases[head]));
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                state[i] *= decay;
                known += state[i] * inputs.key[i];
            }
        }
        return known;
    }

    // Gives x the length `factor`.
    static __device__ __forceinline__ void normalise(float (&x)[ROWS], float factor) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sum += x[i] * x[i];
        const float scale = factor / sqrtf(group_sum(sum, LANES) + LENGTH_EPS);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) x[i] *= scale;
    }

    __device__ __forceinline__ float result(Column<ROWS>& column, Inputs& inputs, float value, int head,
                                            bool is_repeated) const {
        float(&state)[ROWS] = column.state;
        if (!is_repeated) {
            normalise(inputs.key, 1.0f);
            const float strength = strength_scale / (1.0f + expf(-inputs.strength));
            const float known = decay(column, inputs, head);
            const float written = (value - group_sum(known, LANES)) * strength;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) state[i] += written * inputs.key[i];
        }
        normalise(inputs.query, query_scale);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sum += state[i] * inputs.query[i];
        return group_sum(sum, LANES);
    }
};

template <int ROWS>
struct StateSpace {
    struct Inputs {
        float query[ROWS];
        float key[ROWS];
        float time;
    };

    const float* rates;
    const float* time_biases;
    const float* skips;
    int heads_per_group;
    int state_dim;
    float least;
    float most;
    // Where the parts of a row begin.
    int first_value;
    int first_key;
    int first_query;
    int first_time;

    __device__ __forceinline__ void read(Inputs& inputs, const Column<ROWS>& column, const float* row, u32,
                                         int head) const {
        const int group = head / heads_per_group * state_dim;
        column.read_rows(inputs.key, row + first_key + group);
        column.read_rows(inputs.query, row + first_query + group);
        inputs.time = row[first_time + head];
    }

    __device__ __forceinline__ float result(Column<ROWS>& column, Inputs& inputs, float value, int head,
                                            bool is_repeated) const {
        float(&state)[ROWS] = column.state;
        if (!is_repeated) {
            // Comparisons instead of fminf and fmaxf, which would hide NaN.
            float time = softplus(inputs.time + time_biases[head]);
            time = time < least ? least : time;
            time = time > most ? most : time;
            const float decay = expf(-rates[head] * time);
            const float added = time * value;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) state[i] = state[i] * decay + added * inputs.key[i];
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sum += state[i] * inputs.query[i];
        return group_sum(sum, LANES) + skips[head] * value;
    }
};

}  // namespace

#define DELTA_RULE(name, rows)                                                                                \
    KERNEL(name, 256)                                                                                         \
    (float* __restrict__ x, float* __restrict__ states, const float* __restrict__ rates,                      \
     const float* __restrict__ time_biases, const RecurrentSpan* __restrict__ spans,                          \
     const SavedState* __restrict__ saved, u64 slot_len, int num_key_heads, int num_value_heads, int key_dim, \
     int value_dim, int convolution_len, float strength_scale) {                                              \
        const int key_len = num_key_heads * key_dim, value_len = num_value_heads * value_dim;                 \
        DeltaRule<rows, false> rule;                                                                          \
        rule.rates = rates, rule.time_biases = time_biases;                                                   \
        rule.heads_per_group = num_value_heads / num_key_heads, rule.key_dim = key_dim;                       \
        rule.query_scale = 1.0f / sqrtf(static_cast<float>(key_dim)), rule.strength_scale = strength_scale;   \
        rule.first_key = key_len, rule.first_value = 2 * key_len;                                             \
        rule.first_strength = 2 * (key_len + value_len);                                                      \
        rule.first_decay = rule.first_strength + num_value_heads;                                             \
        const int input_len = rule.first_decay + num_value_heads;                                             \
        scan<rows>(x, states, spans, saved, {slot_len, input_len, key_dim, value_dim, convolution_len}, rule); \
    }                                                                                                         \
    EXPORT_KERNEL(name)

DELTA_RULE(delta_rule_64, 8)
DELTA_RULE(delta_rule_128, 16)
DELTA_RULE(delta_rule_256, 32)

#define CHANNEL_DELTA_RULE(name, rows)                                                                         \
    KERNEL(name, 256)                                                                                          \
    (float* __restrict__ x, const float* __restrict__ decays, float* __restrict__ states,                      \
     const float* __restrict__ rates, const float* __restrict__ time_biases,                                   \
     const RecurrentSpan* __restrict__ spans, const SavedState* __restrict__ saved, u64 slot_len,              \
     int num_key_heads, int num_value_heads, int key_dim, int value_dim, int convolution_len,                  \
     float strength_scale) {                                                                                   \
        const int key_len = num_key_heads * key_dim, value_len = num_value_heads * value_dim;                  \
        DeltaRule<rows, true> rule;                                                                            \
        rule.decays = decays, rule.num_heads = num_value_heads;                                                \
        rule.rates = rates, rule.time_biases = time_biases;                                                    \
        rule.heads_per_group = num_value_heads / num_key_heads, rule.key_dim = key_dim;                        \
        rule.query_scale = 1.0f / sqrtf(static_cast<float>(key_dim)), rule.strength_scale = strength_scale;    \
        rule.first_key = key_len, rule.first_value = 2 * key_len;                                              \
        rule.first_strength = 2 * key_len + value_len;                                                         \
        const int input_len = rule.first_strength + num_value_heads;                                           \
        scan<rows>(x, states, spans, saved, {slot_len, input_len, key_dim, value_dim, convolution_len}, rule); \
    }                                                                                                          \
    EXPORT_KERNEL(name)

CHANNEL_DELTA_RULE(channel_delta_rule_64, 8)
CHANNEL_DELTA_RULE(channel_delta_rule_128, 16)
// For keys of 256 elements a thread would have too many registers.

#define STATE_SPACE(name, rows)                                                                                    \
    KERNEL(name, 256)                                                                                              \
    (float* __restrict__ x, float* __restrict__ states, const float* __restrict__ rates,                           \
     const float* __restrict__ time_biases, const float* __restrict__ skips,                                       \
     const RecurrentSpan* __restrict__ spans, const SavedState* __restrict__ saved, u64 slot_len, int num_groups,  \
     int num_heads, int state_dim, int head_dim, int convolution_len, float least, float most) {                   \
        const int key_len = num_groups * state_dim, value_len = num_heads * head_dim;                              \
        StateSpace<rows> rule;                                                                                     \
        rule.rates = rates, rule.time_biases = time_biases, rule.skips = skips;                                    \
        rule.heads_per_group = num_heads / num_groups, rule.state_dim = state_dim;                                 \
        rule.least = least, rule.most = most;                                                                      \
        rule.first_value = 0, rule.first_key = value_len, rule.first_query = value_len + key_len;                  \
        rule.first_time = 2 * (value_len + key_len);                                                               \
        const int input_len = rule.first_time + num_heads;                                                         \
        scan<rows>(x, states, spans, saved, {slot_len, input_len, state_dim, head_dim, convolution_len}, rule);    \
    }                                                                                                              \
    EXPORT_KERNEL(name)

STATE_SPACE(state_space_64, 8)
STATE_SPACE(state_space_128, 16)
STATE_SPACE(state_space_256, 32)
