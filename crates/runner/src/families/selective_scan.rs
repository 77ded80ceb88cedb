//! Keys of config.json that describe the selective scan of Mamba, and the names of its modules.
//!
//! Source: Gu and Dao, arXiv:2312.00752.

use super::bounds::{MAX_HEAD_DIM, MAX_WIDTH};
use super::recurrent::MAX_KERNEL_LEN;
use crate::recurrence_spec::{RecurrenceSpec, RuleModules};
use crate::spec::{AttentionSpec, LateInputsSpec, Projection, TimeNorm};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{RecurrenceShape, RecurrentRule, ScanShape};
use inflight_numbers::Stacking;

/// The selective scan of a layer without attention.
pub struct SelectiveScan {
    shape: ScanShape,
    kernel_len: usize,
    /// Results of the first projection of times.
    rank: usize,
    modules: ScanModules,
    has_convolution_bias: bool,
    has_bias: bool,
}

/// Keys of config.json: its sizes, and whether projections have biases.
pub struct ScanKeys {
    /// The channels, if a config may tell them instead of `expand`.
    pub num_channels: Option<&'static str>,
    pub expand: &'static str,
    pub state_dim: &'static str,
    pub kernel_len: &'static str,
    pub rank: &'static str,
    pub has_convolution_bias: &'static str,
    pub has_bias: &'static str,
}

/// The modules and parameters of a selective scan.
#[derive(Clone, Copy)]
pub struct ScanModules {
    pub input: &'static str,
    pub convolution: &'static str,
    /// Times of low rank, keys and queries, in one module.
    pub selection: &'static str,
    pub times: &'static str,
    /// The norm of times, if it has weights.
    pub time_norm: Option<&'static str>,
    pub rule: RuleModules,
    pub output: &'static str,
}

impl SelectiveScan {
    /// Reads the sizes. With `norm_eps`, times, keys and queries have norms.
    ///
    /// # Errors
    /// A key is out of range.
    pub fn read(
        config: &JsonFile,
        keys: &ScanKeys,
        modules: ScanModules,
        hidden_size: usize,
        norm_eps: Option<f32>,
    ) -> Result<Self, LoadError> {
        let size = |key, max, default: usize| Ok(config.size(key, 1..=max)?.unwrap_or(default));
        let told = match config.string(keys.rank) {
            Ok(Some("auto")) => None,
            _ => config.size(keys.rank, 1..=MAX_WIDTH)?,
        };
        let told_channels = match keys.num_channels {
            Some(key) => config.size(key, 1..=MAX_WIDTH)?,
            None => None,
        };
        let expand = size(keys.expand, 16, 2)?;
        let num_channels = told_channels.unwrap_or(expand * hidden_size);
        if num_channels > MAX_WIDTH {
            let expected =
                format_args!("at most {MAX_WIDTH} channels with hidden_size {hidden_size}");
            return Err(config.unexpected(keys.expand, expand, expected));
        }
        Ok(Self {
            shape: ScanShape {
                num_channels,
                state_dim: size(keys.state_dim, MAX_HEAD_DIM, 16)?,
                norm_eps,
            },
            kernel_len: size(keys.kernel_len, MAX_KERNEL_LEN, 4)?,
            rank: told.unwrap_or(hidden_size.div_ceil(16)),
            modules,
            has_convolution_bias: config.bool_or(keys.has_convolution_bias, true)?,
            has_bias: config.bool_or(keys.has_bias, false)?,
        })
    }

    /// Puts it in the place of attention.
    pub fn replace(&self, attention: &mut AttentionSpec, hidden_size: usize) {
        let ScanShape {
            num_channels,
            state_dim,
            norm_eps,
        } = self.shape;
        let modules = &self.modules;
        let projection = |module, outputs, inputs| {
            Projection::single(module, outputs, inputs).with_bias(self.has_bias)
        };
        let parts = [self.rank, state_dim, state_dim];
        let stacking = Stacking::Concatenated;
        let mut times = Projection::fused(modules.selection, &parts, num_channels, stacking);
        let mut keys = times.clone();
        keys.parts.remove(0);
        times.parts.truncate(1);
        attention.qkv = projection(modules.input, 2 * num_channels, hidden_size);
        attention.o = projection(modules.output, hidden_size, num_channels);
        attention.late = Some(LateInputsSpec::Selected {
            times: [
                times,
                Projection::single(modules.times, num_channels, self.rank),
            ],
            time_norm: norm_eps.map(|eps| TimeNorm {
                module: modules.time_norm,
                eps,
            }),
            keys,
        });
        attention.recurrence = Some(RecurrenceSpec {
            shape: RecurrenceShape {
                kernel_len: self.kernel_len,
                rule: RecurrentRule::SelectiveScan(self.shape),
            },
            convolution: modules.convolution,
            convolution_parts: None,
            has_convolution_bias: self.has_convolution_bias,
            modules: Some(modules.rule),
        });
    }
}
