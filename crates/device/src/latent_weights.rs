//! The weights and operands of latent attention.

use super::attention::AttentionParams;
use super::latent::LatentShape;
use super::linear::Linear;
use super::load::Load;

/// The operands of latent attention that a layer has.
pub struct LatentParams<'a, D: Load> {
    /// The sizes.
    pub shape: LatentShape,
    /// The weights of the RMS norm of latents, `[latent_dim]`.
    pub norm: &'a D::Vector,
    /// Added to their mean square.
    pub norm_eps: f32,
    /// The angles, `[rotary_dim / 2]` for each position.
    pub angles: &'a D::Angles,
    /// The linear layers of heads from and to latents.
    pub heads: &'a LatentHeads<D>,
    /// The attention of all heads to the keys in the cache.
    pub attention: AttentionParams,
}

/// The linear layers of heads from and to latents: one for each head or, on a device that
/// [stacks](super::Device::STACKS) matrices, one whose matrix has all heads, one after the other.
pub struct LatentHeads<D: Load> {
    /// From queries to latents, `[latent_dim, content_dim]`: the transpose of what makes keys of latents.
    pub keys: Vec<Linear<D>>,
    /// From latents to values, `[value_dim, latent_dim]`.
    pub values: Vec<Linear<D>>,
}
