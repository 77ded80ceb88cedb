//! Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434).
//!
//! Keys and values of all heads are linear in one latent `c` of a position, except for a rotated part of the keys, `r`,
//! that all heads share. The cache holds only `c` and `r`. A head never computes its keys and values: it takes its
//! query to the space of the latents, and the weighted latent to its values.
//!
//! ```text
//! key of head h       [ K_h c | r ]            value of head h     V_h c
//!
//! score               q . (K_h c) + p . r   =  (K_h^T q) . c + p . r           q, p: the query's two parts, p rotated
//! result              sum of w V_h c        =  V_h (sum of w c)
//! ```
//!
//! So each head attends with the query `[K_h^T q | p]` to the one key `[c | r]` of a position, whose value is its first
//! part.

use super::KvValues;
use super::attention::HeadShape;

/// The sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Heads.
    pub num_heads: usize,
    /// Elements of a head's query that meet the latent.
    pub content_dim: usize,
    /// Elements of a head's query that are rotated and meet the shared key; an even number.
    pub rotary_dim: usize,
    /// Elements of a latent, an even number.
    pub latent_dim: usize,
    /// Elements of a head's result.
    pub value_dim: usize,
}

impl LatentShape {
    /// Elements of a head's query.
    pub const fn query_dim(&self) -> usize {
        self.content_dim + self.rotary_dim
    }

    /// Elements that the cache holds of a position.
    pub const fn key_dim(&self) -> usize {
        self.latent_dim + self.rotary_dim
    }

    /// Width of the queries of all heads.
    pub const fn q_len(&self) -> usize {
        self.num_heads * self.query_dim()
    }

    /// Width of the results of all heads.
    pub const fn out_len(&self) -> usize {
        self.num_heads * self.value_dim
    }

    /// The heads in the space of the latents.
    pub const fn head_shape(&self) -> HeadShape {
        HeadShape {
            num_q_heads: self.num_heads,
            num_kv_heads: 1,
            head_dim: self.key_dim(),
            value_dim: self.latent_dim,
        }
    }

    /// Where the cache has values.
    pub const fn kv_values(&self) -> KvValues {
        KvValues::InKeys(self.latent_dim)
    }
}
