//! The names of modules in GGUF files.

/// llama.cpp's name for a module of transformers: `blk.3.ffn_up` for `model.layers.3.mlp.up_proj`.
pub(super) fn gguf_name(module: &str) -> Option<String> {
    let top = match module {
        "model.embed_tokens" => Some("token_embd"),
        "model.norm" => Some("output_norm"),
        "lm_head" => Some("output"),
        _ => None,
    };
    if let Some(top) = top {
        return Some(top.to_owned());
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
    Some(format!("blk.{layer}.{module}"))
}

/// Whether llama.cpp's converter permutes the rows of this module of a llama: queries and keys.
pub(super) fn is_permuted(module: &str) -> bool {
    module.ends_with(".self_attn.q_proj") || module.ends_with(".self_attn.k_proj")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_of_a_decoder_has_a_name() {
        for (ours, theirs) in [
            ("model.embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("model.norm", "output_norm"),
            ("model.layers.11.self_attn.q_proj", "blk.11.attn_q"),
            ("model.layers.0.post_attention_layernorm", "blk.0.ffn_norm"),
        ] {
            assert_eq!(gguf_name(ours).as_deref(), Some(theirs));
        }
        assert_eq!(gguf_name("model.layers.0.mlp.router"), None);
        assert!(is_permuted("model.layers.0.self_attn.k_proj"));
        assert!(!is_permuted("model.layers.0.self_attn.k_norm"));
    }
}
