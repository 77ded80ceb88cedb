//! The encoder layer of CLIP and SigLIP: LayerNorm in front of each block, biases everywhere, and no gate.

use crate::families::dimensions::Dimensions;
use crate::rope::Rope;
use crate::spec::{LayerSpec, NormKind, Norms, Projection};
use inflight_numbers::Stacking;

/// Describes the layer, and sets what all layers have in common. Positions are learned.
pub fn clip_layer(dimensions: &mut Dimensions) -> LayerSpec {
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    let hidden = dimensions.hidden_size;
    let [q, kv, _] = dimensions.qkv_widths();
    let qkv = [
        ("self_attn.q_proj", q),
        ("self_attn.k_proj", kv),
        ("self_attn.v_proj", kv),
    ];
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("layer_norm1", "layer_norm2");
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    layer.attention.o = Projection::single("self_attn.out_proj", hidden, q);
    layer.attention.set_biases(true);
    layer.feed_forward = dimensions.plain("mlp.fc1", "mlp.fc2");
    layer.feed_forward.set_biases(true);
    layer
}
