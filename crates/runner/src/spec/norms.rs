//! The norms of the residual stream.

/// How norms compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// The formula.
    pub kind: NormKind,
    /// Whether the norms of the residual stream have weights, which are 1 otherwise.
    pub has_weights: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// What is added to the weights of all norms of the model, those of heads too, as the checkpoint stores them: 0, or
    /// 1 where they are stored as differences from 1.
    pub weight_offset: f32,
}

/// The formula of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * weight`.
    Rms,
    /// `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias`.
    Layer {
        /// Whether there is a bias.
        has_bias: bool,
    },
}

/// How the two blocks of a layer are joined to the residual stream `x`, and with which norms: their modules, their
/// weights in a checkpoint, or those on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms<N = &'static str> {
    /// One after the other: `x += after(block(before(x)))`.
    Sequential {
        /// The norms of the attention block.
        attention: BlockNorms<N>,
        /// The norms of the feed-forward block.
        feed_forward: BlockNorms<N>,
    },
    /// Side by side: `x += attention(norm(x)) + feed_forward(norm(x))`.
    Parallel {
        /// The norm in front of the attention block.
        attention: N,
        /// The norm in front of the feed-forward block. `None`: that of the attention block.
        feed_forward: Option<N>,
    },
    /// Of the residual stream itself, behind each block: `x = norm(x + block(x))`.
    OfSums {
        /// The norm behind the attention block.
        attention: N,
        /// The norm behind the feed-forward block.
        feed_forward: N,
    },
    /// Of a layer with one block alone: `x += block(norm(x))`.
    OfOne {
        /// The block that it has. What the description has of the other one counts for nothing.
        block: Block,
        /// The norm in front of it.
        norm: N,
    },
}

/// A block of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Attention, or a recurrence in its place.
    Attention,
    /// The feed-forward block, or experts.
    FeedForward,
}

/// The norms of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNorms<N> {
    /// Of what it reads. `None`: it reads the residual stream itself.
    pub before: Option<N>,
    /// Of its result. `None`: it is added as it is.
    pub after: Option<N>,
}

impl<N> Norms<N> {
    /// A norm in front of each block.
    pub const fn before(attention: N, feed_forward: N) -> Self {
        Self::Sequential {
            attention: BlockNorms {
                before: Some(attention),
                after: None,
            },
            feed_forward: BlockNorms {
                before: Some(feed_forward),
                after: None,
            },
        }
    }

    /// A norm of the result of each block.
    pub const fn after(attention: N, feed_forward: N) -> Self {
        Self::Sequential {
            attention: BlockNorms {
                before: None,
                after: Some(attention),
            },
            feed_forward: BlockNorms {
                before: None,
                after: Some(feed_forward),
            },
        }
    }

    /// The norm of what the attention block reads. `None`: it reads the residual stream itself.
    pub const fn first(&self) -> Option<&N> {
        match self {
            Self::Sequential { attention, .. } => attention.before.as_ref(),
            Self::Parallel { attention, .. } => Some(attention),
            Self::OfOne { norm, .. } => Some(norm),
            Self::OfSums { .. } => None,
        }
    }

    /// Whether results of blocks are normalised.
    pub const fn has_after(&self) -> bool {
        match self {
            Self::Sequential {
                attention,
                feed_forward,
            } => attention.after.is_some() || feed_forward.after.is_some(),
            Self::Parallel { .. } | Self::OfSums { .. } | Self::OfOne { .. } => false,
        }
    }

    /// Whether they normalise the residual stream itself.
    pub const fn are_of_sums(&self) -> bool {
        matches!(self, Self::OfSums { .. })
    }

    /// Whether the layer has a block.
    pub fn has(&self, wanted: Block) -> bool {
        match self {
            Self::OfOne { block, .. } => *block == wanted,
            Self::Sequential { .. } | Self::Parallel { .. } | Self::OfSums { .. } => true,
        }
    }

    /// Turns each norm into something else.
    ///
    /// # Errors
    /// The first error of `convert`.
    pub fn try_map<M, E>(
        &self,
        mut convert: impl FnMut(&N) -> Result<M, E>,
    ) -> Result<Norms<M>, E> {
        let mut block = |norms: &BlockNorms<N>| {
            Ok(BlockNorms {
                before: norms.before.as_ref().map(&mut convert).transpose()?,
                after: norms.after.as_ref().map(&mut convert).transpose()?,
            })
        };
        Ok(match self {
            Self::Sequential {
                attention,
                feed_forward,
            } => Norms::Sequential {
                attention: block(attention)?,
                feed_forward: block(feed_forward)?,
            },
            Self::Parallel {
                attention,
                feed_forward,
            } => Norms::Parallel {
                attention: convert(attention)?,
                feed_forward: feed_forward.as_ref().map(convert).transpose()?,
            },
            Self::OfSums {
                attention,
                feed_forward,
            } => Norms::OfSums {
                attention: convert(attention)?,
                feed_forward: convert(feed_forward)?,
            },
            Self::OfOne { block, norm } => Norms::OfOne {
                block: *block,
                norm: convert(norm)?,
            },
        })
    }
}
