//! Mixtures of experts: how the experts of a token are chosen, and the weights that their results have.
//!
//! ```text
//! logits of a token   0.1  2.0 -0.3  1.2  0.9         5 experts, of which 2 are chosen
//! scores              0.07 0.47 0.05 0.21 0.16        softmax
//! chosen              expert 1 (0.47), expert 3 (0.21)
//! weights             0.69, 0.31                      if they are normalised
//! ```
//!
//! Source: Shazeer et al., arXiv:1701.06538; Jiang et al., arXiv:2401.04088.

/// How the experts of a token follow from the logits of the router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts to choose from.
    pub num_experts: usize,
    /// The last ones of these, which have no weights: they return their input (LongCat Flash). Only on devices with
    /// [layer inputs](super::Device::LAYER_INPUTS).
    pub num_zero_experts: usize,
    /// Experts of a token: at least one, and no more than there are.
    pub num_chosen: usize,
    /// How they are chosen, and what they weigh.
    pub rule: RoutingRule,
    /// Whether there is one more logit, that of the shared expert, which weighs `sigmoid(logit)`.
    pub has_shared_gate: bool,
}

/// A rule by which experts are chosen. Of equal scores, that of the first expert counts as the larger one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutingRule {
    /// The experts with the largest scores, where the scores are the softmax of all logits.
    Softmax {
        /// Whether weights are the scores divided by their sum, or the scores as they are.
        is_normalised: bool,
    },
    /// One after the other, each the one with the largest logit of the rest. Its weight is its share in the softmax of
    /// those logits of the rest that are near it: `(largest - logit) / max(|logit|, largest) <= 2 * jitter`
    /// (SparseMixer, Liu et al., arXiv:2310.00811, without its random choices, which are for training).
    SparseMixer {
        /// How near.
        jitter: f32,
    },
    /// The experts with the largest logits. The input of each expert is scaled by the sigmoid of its logit, and the
    /// outputs are summed unscaled (Llama 4). Only on devices with
    /// [layer inputs](super::Device::LAYER_INPUTS).
    WeightedInputs,
    /// The experts with the largest scores of the best groups (DeepSeek-AI, arXiv:2405.04434 and arXiv:2412.19437).
    Grouped(GroupedRouting),
}

/// A rule that chooses groups of experts first. A correction of each expert, if there are some, is added to its score
/// for the choice, not for its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedRouting {
    /// What scores are.
    pub scores: RouterScores,
    /// Groups of equally many consecutive experts: one, or a divisor of the number of experts.
    pub num_groups: usize,
    /// How many of them experts are chosen from. They have as many experts as are chosen.
    pub num_chosen_groups: usize,
    /// How many of its largest scores a group is chosen by: their sum.
    pub num_group_scores: usize,
    /// Whether weights are divided by their sum.
    pub is_normalised: bool,
    /// The factor of weights after that.
    pub scale: f32,
}

/// The scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// The softmax of all logits.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
    /// Each logit, to which corrections are added, for the choice; its sigmoid for the weight.
    SigmoidOfLogit,
}

/// The sizes of a model's mixtures of experts, which all layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixtureShape {
    /// How experts are chosen.
    pub routing: Routing,
    /// Width of the rows that go in and come out.
    pub hidden_size: usize,
    /// Width inside of an expert.
    pub expert_size: usize,
    /// Width inside of the shared expert; 0 without one.
    pub shared_size: usize,
}

impl Routing {
    /// Logits of a token.
    pub fn num_logits(&self) -> usize {
        self.num_experts + usize::from(self.has_shared_gate)
    }

    /// Experts with weights.
    pub fn num_computed_experts(&self) -> usize {
        self.num_experts - self.num_zero_experts
    }
}
