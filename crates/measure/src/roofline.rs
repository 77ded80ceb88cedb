//! Lower bound of a step's time: reading its operands or computing them, whichever takes longer.
//!
//! Read are the weights, once per step, and the keys and values of every sequence. Computed are two
//! operations per weight and token, and attention. Everything else counts as free, and so does reading what
//! is still in a cache. The embedding is a lookup and is not counted.

use std::fmt;

use clap::ValueEnum;
use inflight_base::BlockSize;
use inflight_device::{Device, KvDtype};
use inflight_numbers::CodeBits;
use inflight_runner::{ModelRunner, ModelSpec, WeightPrecision};
use serde::Serialize;

use crate::limits::MachineLimits;
use crate::load::Load;

/// Storage type of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 16 bits.
    Bf16,
    /// 8 bits; scales are not counted.
    Int8,
    /// 4 bits plus a 16-bit scale per 32 weights; the output layer has 8 bits.
    Int4,
}

impl Precision {
    const fn bits(self) -> f64 {
        match self {
            Self::Bf16 => 16.0,
            Self::Int8 => 8.0,
            Self::Int4 => 4.5,
        }
    }

    /// The rounding of a floating-point checkpoint's weights to this type; `None` for bf16.
    pub const fn rounding(self) -> Option<WeightPrecision> {
        match self {
            Self::Bf16 => None,
            Self::Int8 => Some(WeightPrecision::new(CodeBits::Eight)),
            Self::Int4 => Some(WeightPrecision::new(CodeBits::Four)),
        }
    }

    /// Peak operations per second with such weights.
    pub fn peak(self, limits: &MachineLimits) -> f64 {
        match self {
            Self::Bf16 => limits.bf16_flops,
            Self::Int8 | Self::Int4 => limits.int8_ops,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

/// Bytes and operations of a model's steps.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCost {
    /// Storage type of the weights.
    pub precision: Precision,
    /// Number of weights in all layers, without experts.
    layer_weights: f64,
    /// Number of weights of the experts of all layers.
    expert_weights: f64,
    /// The share of the experts that a token has.
    chosen_share: f64,
    /// Number of weights of the projection to logits.
    lm_head_weights: f64,
    kv_bytes_per_token: f64,
    /// Operations per query and visible position, in one layer.
    attention_operations: f64,
    /// The layers' windows, in tokens.
    windows: Vec<f64>,
}

impl ModelCost {
    /// The cost of a model on a device, whose keys and values are stored in blocks.
    pub fn of<D: Device>(
        spec: &ModelSpec,
        precision: Precision,
        block_size: BlockSize,
        kv_dtype: KvDtype,
    ) -> Self {
        let block_bytes = <ModelRunner<D>>::kv_bytes_per_block(spec, block_size, kv_dtype);
        let all = spec.num_layer_weights() as f64;
        let chosen_share = spec.mixture().map_or(1.0, |mixture| {
            mixture.routing.num_chosen as f64 / mixture.routing.num_experts as f64
        });
        let unread = all - spec.num_layer_weights_of_token() as f64;
        let expert_weights = match chosen_share < 1.0 {
            true => unread / (1.0 - chosen_share),
            false => 0.0,
        };
        Self {
            precision,
            layer_weights: all - expert_weights,
            expert_weights,
            chosen_share,
            lm_head_weights: spec.num_output_weights() as f64,
            kv_bytes_per_token: block_bytes as f64 / block_size.tokens().index() as f64,
            attention_operations: 4.0 * spec.q_width() as f64,
            windows: spec
                .windows()
                .map(|window| window.map_or(f64::INFINITY, |window| f64::from(window.get())))
                .collect(),
        }
    }

    /// Upper bound of output tokens per second while all sequences of a load generate, with their context
    /// half-way through the output.
    pub fn generation_tokens_per_s(&self, load: &Load, limits: &MachineLimits) -> f64 {
        let context = f64::from(load.input) + f64::from(load.output) / 2.0;
        let concurrency = f64::from(load.concurrency);
        let seen = self.seen(|window| context.min(window));
        let weights = self.weights_read(concurrency) + self.lm_head_weights;
        let weights_of_token = self.weights_of_token() + self.lm_head_weights;
        let kv_bytes = seen / self.windows.len() as f64 * self.kv_bytes_per_token;
        let bytes = self.weight_bytes(weights) + concurrency * kv_bytes;
        let operations = concurrency * (2.0 * weights_of_token + seen * self.attention_operations);
        concurrency / limits.seconds(bytes, operations, self.precision.peak(limits))
    }

    /// Upper bound of prompt tokens per second for one prompt, whose last row alone needs logits.
    pub fn prompt_tokens_per_s(&self, num_tokens: u32, limits: &MachineLimits) -> f64 {
        let tokens = f64::from(num_tokens);
        let seen = self.seen(|window| {
            let growing = tokens.min(window);
            growing * (growing + 1.0) / 2.0 + (tokens - growing) * growing
        });
        let bytes = self.weight_bytes(self.weights_read(tokens) + self.lm_head_weights);
        let products = tokens * self.weights_of_token() + self.lm_head_weights;
        let operations = 2.0 * products + seen * self.attention_operations;
        tokens / limits.seconds(bytes, operations, self.precision.peak(limits))
    }

    /// Weights read by one step of `tokens` tokens, in all layers. Assumes that all experts are equally likely.
    fn weights_read(&self, tokens: f64) -> f64 {
        let touched_share = 1.0 - (1.0 - self.chosen_share).powf(tokens);
        self.layer_weights + self.expert_weights * touched_share
    }

    /// Weights multiplied for one token, in all layers.
    fn weights_of_token(&self) -> f64 {
        self.layer_weights + self.expert_weights * self.chosen_share
    }

    fn weight_bytes(&self, weights: f64) -> f64 {
        weights * self.precision.bits() / 8.0
    }

    /// Sum over all layers of `in_layer(window)`.
    fn seen(&self, in_layer: impl Fn(f64) -> f64) -> f64 {
        self.windows.iter().map(|&window| in_layer(window)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two cores with AVX-512 bf16 and VNNI.
    const LIMITS: MachineLimits = MachineLimits {
        read_bytes_per_s: 53e9,
        f32_flops: 545e9,
        bf16_flops: 1008e9,
        int8_ops: 2170e9,
    };

    fn llama_160m(precision: Precision, kv_bytes: f64) -> ModelCost {
        ModelCost {
            precision,
            layer_weights: 12.0 * 768.0 * (2.0 * 768.0 + 2.0 * 256.0 + 3.0 * 3072.0),
            expert_weights: 0.0,
            chosen_share: 1.0,
            lm_head_weights: 32000.0 * 768.0,
            kv_bytes_per_token: 12.0 * 512.0 * kv_bytes,
            attention_operations: 4.0 * 768.0,
            windows: vec![f64::INFINITY; 12],
        }
    }

    fn generation(cost: &ModelCost) -> [f64; 3] {
        [1, 8, 32].map(|concurrency| {
            let load = Load {
                concurrency,
                input: 128,
                output: 128,
            };
            cost.generation_tokens_per_s(&load, &LIMITS)
        })
    }

    fn assert_near(figures: [f64; 3], expected: [f64; 3]) {
        for (figure, expected) in figures.into_iter().zip(expected) {
            assert!((figure / expected - 1.0).abs() < 0.01, "{figures:?}");
        }
    }

    #[test]
    fn generation_is_bound_by_memory_and_with_many_sequences_by_arithmetic() {
        // Computed by hand: 257 MB of weights and 2.4 MB of keys and values per sequence at 53 GB/s, and 264
        // MFLOP per sequence.
        let bf16 = llama_160m(Precision::Bf16, 2.0);
        assert_near(generation(&bf16), [204.6, 1537.6, 3818.0]);
        let int8 = llama_160m(Precision::Int8, 1.0);
        assert_near(generation(&int8), [409.0, 3075.0, 8217.0]);
        let int4 = llama_160m(Precision::Int4, 2.0);
        assert_near(generation(&int4), [711.0, 4655.0, 8217.0]);
    }

    #[test]
    fn a_prompt_is_bound_by_arithmetic_and_a_single_token_by_memory() {
        let cost = llama_160m(Precision::Bf16, 2.0);
        let prompt = cost.prompt_tokens_per_s(512, &LIMITS);
        assert!((prompt / 4641.0 - 1.0).abs() < 0.01, "{prompt}");
        let token = cost.prompt_tokens_per_s(1, &LIMITS);
        assert!((token / 206.4 - 1.0).abs() < 0.01, "{token}");
    }

    #[test]
    fn of_experts_a_step_reads_those_that_any_of_its_tokens_has() {
        let mut cost = llama_160m(Precision::Bf16, 2.0);
        let of_expert = 12.0 * 768.0 * 3.0 * 3072.0;
        cost.layer_weights -= of_expert;
        (cost.expert_weights, cost.chosen_share) = (8.0 * of_expert, 0.25);
        // Computed by hand: 87 MB for all tokens and 170 MB for each expert; one token has 2 of them, 8 tokens have
        // 7.2, and 32 tokens all, with 434 MFLOP for each.
        assert_near(generation(&cost), [123.5, 319.1, 1114.9]);
    }

    #[test]
    fn a_window_limits_the_positions_read() {
        let mut cost = llama_160m(Precision::Bf16, 2.0);
        let load = Load {
            concurrency: 8,
            input: 4096,
            output: 0,
        };
        let all = cost.generation_tokens_per_s(&load, &LIMITS);
        cost.windows = vec![1024.0; 12];
        let quarter = cost.generation_tokens_per_s(&load, &LIMITS);
        let read = |context: f64| 8.0 * 53e9 / (256.8e6 + 8.0 * context * 12288.0);
        assert!((all / read(4096.0) - 1.0).abs() < 0.01, "{all}");
        assert!((quarter / read(1024.0) - 1.0).abs() < 0.01, "{quarter}");
    }
}
