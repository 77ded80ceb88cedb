//! Llama's shapes, with experts Mixtral's.

use serde_json::{Value, json};

use crate::{Shape, Tensor};

/// Small enough for a GPU that is computed on the CPU.
pub const TINY: Llama = Llama {
    hidden: 64,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    inter: 128,
    experts: None,
    vocab: 512,
    tied: false,
    theta: 10_000.0,
    llama3_rope: None,
    positions: 1024,
    repeats: false,
};

/// JackFram/llama-160m, except for its grouped key and value heads.
pub const LLAMA_160M: Llama = Llama {
    hidden: 768,
    layers: 12,
    heads: 12,
    kv_heads: 4,
    inter: 3072,
    experts: None,
    vocab: 32_000,
    tied: false,
    theta: 10_000.0,
    llama3_rope: None,
    positions: 4096,
    repeats: false,
};

/// With 8 experts in each layer.
pub const LLAMA_160M_EXPERTS: Llama = Llama {
    experts: Some([8, 2]),
    repeats: true,
    ..LLAMA_160M
};

/// meta-llama/Llama-3.2-1B.
pub const LLAMA_3_2_1B: Llama = Llama {
    hidden: 2048,
    layers: 16,
    heads: 32,
    kv_heads: 8,
    inter: 8192,
    experts: None,
    vocab: 128_256,
    tied: true,
    theta: 500_000.0,
    llama3_rope: Some(32.0),
    positions: 131_072,
    repeats: false,
};

/// meta-llama/Llama-3.1-8B.
pub const LLAMA_3_1_8B: Llama = Llama {
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    inter: 14_336,
    experts: None,
    vocab: 128_256,
    tied: false,
    theta: 500_000.0,
    llama3_rope: Some(8.0),
    positions: 131_072,
    repeats: true,
};

pub struct Llama {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    inter: usize,
    /// Experts of a layer, if it has some, and how many of them a token has.
    experts: Option<[usize; 2]>,
    vocab: usize,
    tied: bool,
    theta: f64,
    /// The factor of Llama 3's scaling of rotary frequencies, if it uses that.
    llama3_rope: Option<f64>,
    positions: usize,
    repeats: bool,
}

impl Shape for Llama {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn config(&self) -> Value {
        let rope_scaling = self.llama3_rope.map(|factor| {
            json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            })
        });
        let (class, model_type) = match self.experts {
            Some(_) => ("MixtralForCausalLM", "mixtral"),
            None => ("LlamaForCausalLM", "llama"),
        };
        let mut config = json!({
            "architectures": [class],
            "model_type": model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden / self.heads,
            "intermediate_size": self.inter,
            "tie_word_embeddings": self.tied,
            "rope_theta": self.theta,
            "rope_scaling": rope_scaling,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "attention_bias": false,
            "mlp_bias": false,
        });
        if let Some([num_experts, num_chosen]) = self.experts {
            config["num_local_experts"] = json!(num_experts);
            config["num_experts_per_tok"] = json!(num_chosen);
        }
        config
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, inter) = (self.hidden, self.inter);
        let kv = hidden / self.heads * self.kv_heads;
        let mut tensors = vec![Tensor::random(
            "model.embed_tokens.weight",
            &[self.vocab, hidden],
        )];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            tensors.extend([
                Tensor::ones(name("input_layernorm"), hidden),
                Tensor::random(name("self_attn.q_proj"), &[hidden, hidden]),
                Tensor::random(name("self_attn.k_proj"), &[kv, hidden]),
                Tensor::random(name("self_attn.v_proj"), &[kv, hidden]),
                Tensor::random(name("self_attn.o_proj"), &[hidden, hidden]),
                Tensor::ones(name("post_attention_layernorm"), hidden),
            ]);
            let Some([num_experts, _]) = self.experts else {
                tensors.extend([
                    Tensor::random(name("mlp.gate_proj"), &[inter, hidden]),
                    Tensor::random(name("mlp.up_proj"), &[inter, hidden]),
                    Tensor::random(name("mlp.down_proj"), &[hidden, inter]),
                ]);
                continue;
            };
            let router = name("block_sparse_moe.gate");
            tensors.push(Tensor::random(router, &[num_experts, hidden]));
            for expert in 0..num_experts {
                let name = |part: &str| name(&format!("block_sparse_moe.experts.{expert}.{part}"));
                tensors.extend([
                    Tensor::random(name("w1"), &[inter, hidden]),
                    Tensor::random(name("w2"), &[hidden, inter]),
                    Tensor::random(name("w3"), &[inter, hidden]),
                ]);
            }
        }
        tensors.push(Tensor::ones("model.norm.weight", hidden));
        if !self.tied {
            tensors.push(Tensor::random("lm_head.weight", &[self.vocab, hidden]));
        }
        tensors
    }

    fn repeats(&self) -> bool {
        self.repeats
    }
}
