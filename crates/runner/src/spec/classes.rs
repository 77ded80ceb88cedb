//! The head that sorts prompts into classes.

use inflight_base::TokenId;
use inflight_config::PoolingMode;

/// The classification head.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassHead {
    /// Its modules.
    pub modules: ClassModules,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// Two tokens of a model that generates: its only number is the logit of the second less that of the first. The
    /// last linear layer is the output layer then.
    pub tokens: Option<[TokenId; 2]>,
    /// The transform of the results in an answer, unless the request asks for raw results.
    pub transform: ClassTransform,
    /// The token that pads prompts.
    pub padding: Option<TokenId>,
}

/// The modules of a classification head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassModules {
    /// Which state it reads, unless the configuration says otherwise.
    pub pooling: PoolingMode,
    /// The linear layer in front of the last one.
    pub dense: Option<ClassDense>,
    /// The last linear layer, `[labels.len(), embedding_width]`.
    pub output: &'static str,
    /// Whether that has a bias.
    pub has_bias: bool,
}

/// A linear layer, `[hidden_size, hidden_size]`, in front of the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassDense {
    /// Its module.
    pub module: &'static str,
    /// Whether it has a bias.
    pub has_bias: bool,
    /// The activation of its outputs.
    pub activation: ClassActivation,
    /// The norm behind that, of the model's kind, if there is one.
    pub norm: Option<&'static str>,
}

/// An activation of a classification head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassActivation {
    /// The hyperbolic tangent.
    Tanh,
    /// `x` times the standard normal distribution function at `x`.
    Gelu,
}

/// How results of classes become what an answer has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClassTransform {
    /// The logits stay as they are.
    #[default]
    Identity,
    /// Each becomes a probability of its own.
    Sigmoid,
    /// The logits become probabilities whose sum is 1.
    Softmax,
}
