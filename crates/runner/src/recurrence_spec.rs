//! A layer with a recurrent state, as data.

use inflight_device::RecurrenceShape;

/// A layer's recurrence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrenceSpec {
    /// The sizes.
    pub shape: RecurrenceShape,
    /// The convolution, whose weights are `[num_channels, 1, kernel_len]`.
    pub convolution: &'static str,
    /// The convolutions of queries, of keys and of values, if a checkpoint may have one for each.
    pub convolution_parts: Option<[&'static str; 3]>,
    /// Whether that has a bias, `[num_channels]`.
    pub has_convolution_bias: bool,
    /// The rule's modules, if it has more than a convolution.
    pub modules: Option<RuleModules>,
}

/// The modules and parameters of a rule, below the layer: see [`RuleWeights`](inflight_device::RuleWeights).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleModules {
    /// The logarithms of the rates, a parameter.
    pub log_rates: &'static str,
    /// A parameter.
    pub time_biases: &'static str,
    /// A parameter, of a state space or a selective scan.
    pub skips: Option<&'static str>,
    /// The RMS norm of the results, which a state space may lack; none of a selective scan.
    pub norm: Option<&'static str>,
    /// The RMS norms of keys and of queries of a selective scan, if they have weights.
    pub key_norms: Option<[&'static str; 2]>,
}
