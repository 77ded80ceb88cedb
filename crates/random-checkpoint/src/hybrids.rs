//! Shapes of models with recurrent layers.

use serde_json::{Value, json};

use crate::{Shape, Tensor};

/// Qwen/Qwen3.5-0.8B, its language model.
pub const QWEN3_5_0_8B: Qwen35 = Qwen35 {
    hidden: 1024,
    layers: 24,
    heads: 8,
    kv_heads: 2,
    value_heads: 16,
    inter: 3584,
};

/// Qwen/Qwen3.5-4B, its language model.
pub const QWEN3_5_4B: Qwen35 = Qwen35 {
    hidden: 2560,
    layers: 32,
    heads: 16,
    kv_heads: 4,
    value_heads: 32,
    inter: 9216,
};

/// ibm-granite/granite-4.0-h-350m: Mamba 2, with attention in four layers.
pub const GRANITE_H_350M: GraniteH = GraniteH {
    hidden: 768,
    layers: 32,
    attention: &[10, 13, 17, 27],
    heads: 12,
    kv_heads: 4,
    scan_heads: 48,
    inter: 2048,
};

/// LiquidAI/LFM2-350M: short convolutions, with attention in six layers.
pub const LFM2_350M: Lfm2 = Lfm2 {
    hidden: 1024,
    layers: 16,
    attention: &[2, 5, 8, 10, 12, 14],
    heads: 16,
    kv_heads: 8,
    inter: 4608,
};

/// Qwen3.5: the gated delta rule in three of four layers, in the others attention with gates.
pub struct Qwen35 {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    /// Of a recurrent layer.
    value_heads: usize,
    inter: usize,
}

impl Qwen35 {
    const VOCAB: usize = 248_320;
    const HEAD_DIM: usize = 256;
    /// Of a recurrent layer.
    const KEY_HEADS: usize = 16;
    const RECURRENT_HEAD_DIM: usize = 128;
    const CONVOLUTION: usize = 4;
    const ATTENTION_INTERVAL: usize = 4;

    fn has_attention(layer: usize) -> bool {
        (layer + 1).is_multiple_of(Self::ATTENTION_INTERVAL)
    }

    fn attention(&self, name: impl Fn(&str) -> String) -> Vec<Tensor> {
        let [q, kv] = [self.heads, self.kv_heads].map(|heads| heads * Self::HEAD_DIM);
        let norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
        let norms = norms.map(|norm| Tensor::ones(name(norm), Self::HEAD_DIM));
        // The projection of queries has gates, too.
        let mut tensors = attention(&name, self.hidden, [2 * q, kv, q], "o_proj");
        tensors.extend(norms);
        tensors
    }

    fn delta_rule(&self, name: impl Fn(&str) -> String) -> Vec<Tensor> {
        let keys = Self::KEY_HEADS * Self::RECURRENT_HEAD_DIM;
        let values = self.value_heads * Self::RECURRENT_HEAD_DIM;
        let convolved = 2 * keys + values;
        let name = |part: &str| name(&format!("linear_attn.{part}"));
        let random = |part: &str, dimensions: &[usize]| Tensor::random(name(part), dimensions);
        vec![
            random("in_proj_qkv.weight", &[convolved, self.hidden]),
            random("in_proj_z.weight", &[values, self.hidden]),
            random("in_proj_b.weight", &[self.value_heads, self.hidden]),
            random("in_proj_a.weight", &[self.value_heads, self.hidden]),
            random("conv1d.weight", &[convolved, 1, Self::CONVOLUTION]),
            random("A_log", &[self.value_heads]),
            random("dt_bias", &[self.value_heads]),
            Tensor::ones(name("norm.weight"), Self::RECURRENT_HEAD_DIM),
            random("out_proj.weight", &[self.hidden, values]),
        ]
    }
}

impl Shape for Qwen35 {
    fn vocab(&self) -> usize {
        Self::VOCAB
    }

    fn config(&self) -> Value {
        json!({
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": Self::HEAD_DIM,
            "intermediate_size": self.inter,
            "full_attention_interval": Self::ATTENTION_INTERVAL,
            "layer_types": layer_types(self.layers, Self::has_attention, ["full_attention", "linear_attention"]),
            "linear_num_key_heads": Self::KEY_HEADS,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": Self::RECURRENT_HEAD_DIM,
            "linear_value_head_dim": Self::RECURRENT_HEAD_DIM,
            "linear_conv_kernel_dim": Self::CONVOLUTION,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": true,
            },
            "tie_word_embeddings": true,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "max_position_embeddings": 262_144,
            "attention_bias": false,
        })
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, inter) = (self.hidden, self.inter);
        let layer = |index: usize, name: &dyn Fn(&str) -> String| {
            let mut tensors = vec![Tensor::ones(name("input_layernorm.weight"), hidden)];
            tensors.extend(match Self::has_attention(index) {
                true => self.attention(name),
                false => self.delta_rule(name),
            });
            tensors.extend([
                Tensor::ones(name("post_attention_layernorm.weight"), hidden),
                Tensor::random(name("mlp.gate_proj.weight"), &[inter, hidden]),
                Tensor::random(name("mlp.up_proj.weight"), &[inter, hidden]),
                Tensor::random(name("mlp.down_proj.weight"), &[hidden, inter]),
            ]);
            tensors
        };
        model([Self::VOCAB, hidden], self.layers, layer, "norm")
    }
}

/// Granite 4's hybrids without experts.
pub struct GraniteH {
    hidden: usize,
    layers: usize,
    /// The layers with attention.
    attention: &'static [usize],
    heads: usize,
    kv_heads: usize,
    /// Of a layer with Mamba 2.
    scan_heads: usize,
    inter: usize,
}

impl GraniteH {
    const VOCAB: usize = 100_352;
    const STATE: usize = 128;
    const CONVOLUTION: usize = 4;
    const EXPANSION: usize = 2;

    fn attention(&self, name: impl Fn(&str) -> String) -> Vec<Tensor> {
        let kv = self.hidden / self.heads * self.kv_heads;
        attention(name, self.hidden, [self.hidden, kv, self.hidden], "o_proj")
    }

    fn scan(&self, name: impl Fn(&str) -> String) -> Vec<Tensor> {
        let inner = Self::EXPANSION * self.hidden;
        let convolved = inner + 2 * Self::STATE;
        let name = |part: &str| name(&format!("mamba.{part}"));
        let random = |part: &str, dimensions: &[usize]| Tensor::random(name(part), dimensions);
        vec![
            random(
                "in_proj.weight",
                &[inner + convolved + self.scan_heads, self.hidden],
            ),
            random("conv1d.weight", &[convolved, 1, Self::CONVOLUTION]),
            random("conv1d.bias", &[convolved]),
            random("A_log", &[self.scan_heads]),
            random("D", &[self.scan_heads]),
            random("dt_bias", &[self.scan_heads]),
            Tensor::ones(name("norm.weight"), inner),
            random("out_proj.weight", &[self.hidden, inner]),
        ]
    }
}

impl Shape for GraniteH {
    fn vocab(&self) -> usize {
        Self::VOCAB
    }

    fn config(&self) -> Value {
        let has_attention = |layer| self.attention.contains(&layer);
        json!({
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": layer_types(self.layers, has_attention, ["attention", "mamba"]),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inter,
            "shared_intermediate_size": self.inter,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": self.scan_heads,
            "mamba_d_head": Self::EXPANSION * self.hidden / self.scan_heads,
            "mamba_d_state": Self::STATE,
            "mamba_n_groups": 1,
            "mamba_d_conv": Self::CONVOLUTION,
            "mamba_expand": Self::EXPANSION,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": true,
            "mamba_proj_bias": false,
            "position_embedding_type": "nope",
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.246,
            "logits_scaling": 3.0,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": true,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "attention_bias": false,
        })
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, inter) = (self.hidden, self.inter);
        let layer = |index: usize, name: &dyn Fn(&str) -> String| {
            let mut tensors = vec![Tensor::ones(name("input_layernorm.weight"), hidden)];
            tensors.extend(match self.attention.contains(&index) {
                true => self.attention(name),
                false => self.scan(name),
            });
            let gate_and_up = name("shared_mlp.input_linear.weight");
            let down = name("shared_mlp.output_linear.weight");
            tensors.extend([
                Tensor::ones(name("post_attention_layernorm.weight"), hidden),
                Tensor::random(gate_and_up, &[2 * inter, hidden]),
                Tensor::random(down, &[hidden, inter]),
            ]);
            tensors
        };
        model([Self::VOCAB, hidden], self.layers, layer, "norm")
    }
}

/// LFM2 without experts.
pub struct Lfm2 {
    hidden: usize,
    layers: usize,
    /// The layers with attention.
    attention: &'static [usize],
    heads: usize,
    kv_heads: usize,
    inter: usize,
}

impl Lfm2 {
    const VOCAB: usize = 65_536;
    const CONVOLUTION: usize = 3;

    fn attention(&self, name: impl Fn(&str) -> String) -> Vec<Tensor> {
        let head_dim = self.hidden / self.heads;
        let norms = [
            "self_attn.q_layernorm.weight",
            "self_attn.k_layernorm.weight",
        ];
        let norms = norms.map(|norm| Tensor::ones(name(norm), head_dim));
        let lens = [self.hidden, head_dim * self.kv_heads, self.hidden];
        let mut tensors = attention(&name, self.hidden, lens, "out_proj");
        tensors.extend(norms);
        tensors
    }

    fn convolution(&self, name: impl Fn(&str) -> String) -> Vec<Tensor> {
        let hidden = self.hidden;
        let name = |part: &str| name(&format!("conv.{part}.weight"));
        vec![
            Tensor::random(name("in_proj"), &[3 * hidden, hidden]),
            Tensor::random(name("conv"), &[hidden, 1, Self::CONVOLUTION]),
            Tensor::random(name("out_proj"), &[hidden, hidden]),
        ]
    }
}

impl Shape for Lfm2 {
    fn vocab(&self) -> usize {
        Self::VOCAB
    }

    fn config(&self) -> Value {
        let has_attention = |layer| self.attention.contains(&layer);
        json!({
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": layer_types(self.layers, has_attention, ["full_attention", "conv"]),
            "full_attn_idxs": self.attention,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inter,
            "block_auto_adjust_ff_dim": false,
            "conv_L_cache": Self::CONVOLUTION,
            "conv_bias": false,
            "rope_theta": 1e6,
            "tie_word_embeddings": true,
            "norm_eps": 1e-5,
            "max_position_embeddings": 128_000,
        })
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, inter) = (self.hidden, self.inter);
        let layer = |index: usize, name: &dyn Fn(&str) -> String| {
            let mut tensors = vec![Tensor::ones(name("operator_norm.weight"), hidden)];
            tensors.extend(match self.attention.contains(&index) {
                true => self.attention(name),
                false => self.convolution(name),
            });
            tensors.extend([
                Tensor::ones(name("ffn_norm.weight"), hidden),
                Tensor::random(name("feed_forward.w1.weight"), &[inter, hidden]),
                Tensor::random(name("feed_forward.w2.weight"), &[hidden, inter]),
                Tensor::random(name("feed_forward.w3.weight"), &[inter, hidden]),
            ]);
            tensors
        };
        model([Self::VOCAB, hidden], self.layers, layer, "embedding_norm")
    }
}

/// The tensors of a model: its embedding, its layers, whose tensors `layer` gives by their index and what completes
/// their names, and the norm behind the last one.
fn model(
    [vocab, hidden]: [usize; 2],
    num_layers: usize,
    layer: impl Fn(usize, &dyn Fn(&str) -> String) -> Vec<Tensor>,
    norm: &str,
) -> Vec<Tensor> {
    let embedding = Tensor::random("model.embed_tokens.weight", &[vocab, hidden]);
    let layers = (0..num_layers)
        .flat_map(|index| layer(index, &|part: &str| format!("model.layers.{index}.{part}")));
    let norm = Tensor::ones(format!("model.{norm}.weight"), hidden);
    [embedding]
        .into_iter()
        .chain(layers)
        .chain([norm])
        .collect()
}

/// The projections of attention, with so many outputs of queries, of keys and of values, and as many inputs of `output`
/// as the last number says.
fn attention(
    name: impl Fn(&str) -> String,
    hidden: usize,
    [q, kv, attended]: [usize; 3],
    output: &str,
) -> Vec<Tensor> {
    let name = |part: &str| name(&format!("self_attn.{part}.weight"));
    vec![
        Tensor::random(name("q_proj"), &[q, hidden]),
        Tensor::random(name("k_proj"), &[kv, hidden]),
        Tensor::random(name("v_proj"), &[kv, hidden]),
        Tensor::random(name(output), &[hidden, attended]),
    ]
}

/// The kind of each layer: the first name for attention, the second for a recurrent layer.
fn layer_types(
    num_layers: usize,
    has_attention: impl Fn(usize) -> bool,
    [attention, recurrent]: [&'static str; 2],
) -> Vec<&'static str> {
    let layers = 0..num_layers;
    layers
        .map(|layer| match has_attention(layer) {
            true => attention,
            false => recurrent,
        })
        .collect()
}
