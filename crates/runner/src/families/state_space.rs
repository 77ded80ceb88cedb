//! Keys of config.json that describe the state space of Mamba-2, and the names of its modules.
//!
//! Source: Dao and Gu, arXiv:2405.21060.

use super::bounds::{MAX_HEAD_DIM, MAX_HEADS};
use super::dimensions::Dimensions;
use super::recurrent::{MAX_KERNEL_LEN, times};
use crate::recurrence_spec::{RecurrenceSpec, RuleModules};
use crate::spec::{AttentionSpec, Projection, RecurrenceBlock};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{RecurrenceShape, RecurrentRule, SpaceNorm, StateSpaceShape};
use inflight_numbers::Stacking;

/// The state space of a layer without attention.
pub struct StateSpace {
    pub shape: StateSpaceShape,
    kernel_len: usize,
    modules: SpaceModules,
    has_convolution_bias: bool,
    has_bias: bool,
}

/// The modules and parameters of a state space.
#[derive(Clone, Copy)]
pub struct SpaceModules {
    pub input: &'static str,
    pub convolution: &'static str,
    pub rule: RuleModules,
    pub output: &'static str,
}

impl SpaceModules {
    /// The names of most families.
    pub const MAMBA: Self = Self {
        input: "mamba.in_proj",
        convolution: "mamba.conv1d",
        rule: RuleModules {
            log_rates: "mamba.A_log",
            time_biases: "mamba.dt_bias",
            skips: Some("mamba.D"),
            norm: Some("mamba.norm"),
            key_norms: None,
        },
        output: "mamba.out_proj",
    };
}

impl StateSpace {
    /// Reads `mamba_d_state` and its like.
    ///
    /// # Errors
    /// A key is out of range, or heads are not as wide together as they should be.
    pub fn read(config: &JsonFile, dimensions: &Dimensions) -> Result<Self, LoadError> {
        let expand = config.size("mamba_expand", 1..=16)?.unwrap_or(2);
        Self::of_width(config, dimensions, expand * dimensions.hidden_size)
    }

    /// [`StateSpace::read`] with heads that are so wide together.
    ///
    /// # Errors
    /// As [`StateSpace::read`].
    pub fn of_width(
        config: &JsonFile,
        dimensions: &Dimensions,
        inner: usize,
    ) -> Result<Self, LoadError> {
        const HEADS: &str = "mamba_n_heads";
        let size = |key, max, default: usize| Ok(config.size(key, 1..=max)?.unwrap_or(default));
        let [num_heads, num_groups] =
            heads_and_groups(config, [HEADS, "mamba_n_groups"], [128, 1])?;
        let told = match config.string("mamba_d_head") {
            Ok(Some("auto")) => None,
            _ => config.size("mamba_d_head", 1..=MAX_HEAD_DIM)?,
        };
        let head_dim = told.unwrap_or(inner / num_heads);
        if num_heads * head_dim != inner {
            let expected = format!("one whose heads of {head_dim} are {inner} wide together");
            return Err(config.unexpected(HEADS, num_heads, expected));
        }
        let shape = StateSpaceShape {
            num_heads,
            head_dim,
            num_groups,
            state_dim: size("mamba_d_state", MAX_HEAD_DIM, 256)?,
            input_scales: [1.0; 5],
            norm: SpaceNorm::Gated,
            num_norm_groups: num_groups,
            norm_eps: dimensions.norm.eps,
            times: times(config, "time_step_limit")?,
        };
        let kernel_len = size("mamba_d_conv", MAX_KERNEL_LEN, 4)?;
        let biases = [
            config.bool_or("mamba_conv_bias", true)?,
            config.bool_or("mamba_proj_bias", false)?,
        ];
        Ok(Self::new(shape, kernel_len, SpaceModules::MAMBA, biases))
    }

    /// One of these sizes, and whether its convolution has biases, and whether its projections have.
    pub const fn new(
        shape: StateSpaceShape,
        kernel_len: usize,
        modules: SpaceModules,
        [has_convolution_bias, has_bias]: [bool; 2],
    ) -> Self {
        Self {
            shape,
            kernel_len,
            modules,
            has_convolution_bias,
            has_bias,
        }
    }

    fn recurrence(&self) -> RecurrenceSpec {
        let rule = self.modules.rule;
        RecurrenceSpec {
            shape: RecurrenceShape {
                kernel_len: self.kernel_len,
                rule: RecurrentRule::StateSpace(self.shape),
            },
            convolution: self.modules.convolution,
            convolution_parts: None,
            has_convolution_bias: self.has_convolution_bias,
            modules: Some(RuleModules {
                norm: rule.norm.filter(|_| self.shape.norm != SpaceNorm::Absent),
                ..rule
            }),
        }
    }

    /// The projections of what it reads, and of its results.
    fn projections(&self, hidden_size: usize) -> [Projection; 2] {
        let shape = &self.shape;
        let (value_len, key_len) = (shape.value_len(), shape.key_len());
        // In the module gates come first.
        let parts = [value_len, value_len + 2 * key_len, shape.num_heads];
        let module = self.modules.input;
        let mut input = Projection::fused(module, &parts, hidden_size, Stacking::Concatenated);
        input.parts.swap(0, 1);
        let output = Projection::single(self.modules.output, hidden_size, value_len);
        [input, output].map(|it| it.with_bias(self.has_bias))
    }

    /// Its place beside attention, and the factor of its results.
    pub fn beside(&self, hidden_size: usize, scale: f32) -> RecurrenceBlock {
        let [input, output] = self.projections(hidden_size);
        RecurrenceBlock {
            input,
            recurrence: self.recurrence(),
            output,
            scale,
        }
    }

    /// Puts it in the place of attention.
    pub fn replace(&self, attention: &mut AttentionSpec, hidden_size: usize) {
        [attention.qkv, attention.o] = self.projections(hidden_size);
        attention.recurrence = Some(self.recurrence());
    }
}

/// The heads of a state space and their groups, by their keys and defaults.
///
/// # Errors
/// A key is out of range, or groups are unequal.
pub fn heads_and_groups(
    config: &JsonFile,
    [heads, groups]: [&str; 2],
    [num_heads, num_groups]: [usize; 2],
) -> Result<[usize; 2], LoadError> {
    let size = |key, default: usize| Ok(config.size(key, 1..=MAX_HEADS)?.unwrap_or(default));
    let (num_heads, num_groups) = (size(heads, num_heads)?, size(groups, num_groups)?);
    match num_heads.is_multiple_of(num_groups) {
        true => Ok([num_heads, num_groups]),
        false => {
            let expected = format!("a multiple of {groups} {num_groups}");
            Err(config.unexpected(heads, num_heads, expected))
        }
    }
}
