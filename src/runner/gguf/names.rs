//! What llama.cpp calls the tensors.

/// llama.cpp's name for a tensor of transformers: `blk.3.ffn_up.weight` for `model.layers.3.mlp.up_proj.weight`.
pub(super) fn gguf_name(name: &str) -> Option<String> {
    let (module, kind) = name.rsplit_once('.')?;
    let top = match module {
        "model.embed_tokens" => Some("token_embd"),
        "model.norm" => Some("output_norm"),
        "lm_head" => Some("output"),
        _ => None,
    };
    if let Some(top) = top {
        return Some(format!("{top}.{kind}"));
    }
    let (layer, module) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let module = match module {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" => "ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{module}.{kind}"))
}

/// Whether llama.cpp's converter turns the rows of this tensor of a llama: those of queries and keys.
pub(super) fn is_turned(name: &str) -> bool {
    name.contains(".self_attn.q_proj.") || name.contains(".self_attn.k_proj.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_of_a_decoder_has_a_name() {
        for (ours, theirs) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.norm.weight", "output_norm.weight"),
            (
                "model.layers.11.self_attn.q_proj.bias",
                "blk.11.attn_q.bias",
            ),
            (
                "model.layers.0.post_attention_layernorm.weight",
                "blk.0.ffn_norm.weight",
            ),
        ] {
            assert_eq!(gguf_name(ours).as_deref(), Some(theirs));
        }
        assert_eq!(gguf_name("model.layers.0.mlp.router.weight"), None);
        assert!(is_turned("model.layers.0.self_attn.k_proj.weight"));
        assert!(!is_turned("model.layers.0.self_attn.k_norm.weight"));
    }
}
