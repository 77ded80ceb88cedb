//! Causal convolutions of channels, and the rule that has nothing else.
//!
//! ```text
//! window     t-3  t-2  t-1 | t        the last inputs of some channels, [kernel_len, channels]
//! kernel      w0   w1   w2   w3       their sum, from left to right, then the bias
//! ```

use super::super::math::to_bf16_bits;
use super::super::simd::for_each_simd;
use super::super::{Cpu, Worker};
use super::{SpanState, Tasks};

/// Channels of a task.
const TASK_CHANNELS: usize = 128;

/// Some channels of a convolution, whose weights are `[kernel_len, num_channels]`.
#[derive(Clone, Copy)]
pub(super) struct Channels<'a> {
    pub(super) kernel: &'a [f32],
    pub(super) bias: &'a [f32],
    pub(super) num_channels: usize,
    pub(super) first: usize,
    pub(super) len: usize,
}

impl Channels<'_> {
    /// Moves the window on, whose last row has the inputs of the next token, and writes the sums.
    #[inline(always)]
    pub(super) fn convolve(&self, window: &mut [f32], out: &mut [f32]) {
        let (first, len) = (self.first, self.len);
        out.fill(0.0);
        let weights = self.kernel.chunks_exact(self.num_channels);
        for (weights, inputs) in weights.zip(window.chunks_exact(len)) {
            let weights = &weights[first..first + len];
            for ((out, weight), input) in out.iter_mut().zip(weights).zip(inputs) {
                *out += weight * input;
            }
        }
        if !self.bias.is_empty() {
            let bias = &self.bias[first..first + len];
            for (out, bias) in out.iter_mut().zip(bias) {
                *out += bias;
            }
        }
        window.copy_within(len.., 0);
    }
}

impl Tasks<'_> {
    /// Channels of the layer's convolution.
    pub(super) fn channels(&self, first: usize, len: usize) -> Channels<'_> {
        Channels {
            kernel: self.kernel,
            bias: self.bias,
            num_channels: self.shape.num_channels(),
            first,
            len,
        }
    }

    /// Fills a window with the inputs that the state of a sequence has.
    ///
    /// # Safety
    ///
    /// No other task has these channels of the sequence.
    pub(super) unsafe fn read_window(
        &self,
        span: SpanState<'_>,
        channels: Channels<'_>,
        window: &mut [f32],
    ) {
        let rows = window.chunks_exact_mut(channels.len);
        for (row, inputs) in rows.take(self.shape.kernel_len - 1).enumerate() {
            if span.begins {
                inputs.fill(0.0);
                continue;
            }
            let start = span.state + row * channels.num_channels + channels.first;
            // SAFETY: the caller has these channels alone.
            inputs.copy_from_slice(unsafe { self.states.slice(start, channels.len) });
        }
    }

    /// Stores the last inputs of a window in the state of a sequence.
    ///
    /// # Safety
    ///
    /// No other task has these channels of the sequence.
    pub(super) unsafe fn write_window(
        &self,
        span: SpanState<'_>,
        channels: Channels<'_>,
        window: &[f32],
    ) {
        let rows = window.chunks_exact(channels.len);
        for (row, inputs) in rows.take(self.shape.kernel_len - 1).enumerate() {
            let start = span.state + row * channels.num_channels + channels.first;
            // SAFETY: the caller has these channels alone.
            unsafe { self.states.slice(start, channels.len) }.copy_from_slice(inputs);
        }
    }
}

/// `out = c * convolution(b * x)` of all tokens.
pub(super) fn mix(cpu: &mut Cpu, tasks: &Tasks<'_>, num_channels: usize) {
    let per_span = num_channels.div_ceil(TASK_CHANNELS);
    let num_tasks = tasks.step.batch.spans().len() * per_span;
    let Cpu { pool, workers, .. } = cpu;
    pool.for_each(workers, num_tasks, |worker, task| {
        let span = tasks.span(task / per_span);
        let first = task % per_span * TASK_CHANNELS;
        let channels = tasks.channels(first, TASK_CHANNELS.min(num_channels - first));
        mix_channels(tasks, span, channels, worker);
    });
}

fn mix_channels(
    tasks: &Tasks<'_>,
    span: SpanState<'_>,
    channels: Channels<'_>,
    worker: &mut Worker,
) {
    let (len, simd) = (channels.len, tasks.simd);
    let window_len = tasks.shape.kernel_len * len;
    let scratch = &mut worker.recurrence.values;
    scratch.resize(window_len + len, 0.0);
    let (window, sums) = scratch.split_at_mut(window_len);
    // SAFETY: the channels of a sequence are of one task, and sequences have slots of their own.
    unsafe { tasks.read_window(span, channels, window) };
    let rows = span.x.chunks_exact(tasks.shape.input_len());
    for (token, x) in (span.first_token..).zip(rows) {
        let start = token * channels.num_channels + channels.first;
        // SAFETY: as above, each token is of one sequence.
        let out = unsafe { tasks.out.slice(start, len) };
        for_each_simd!(simd, mix_token, (
            channels: Channels<'_>,
            x: &[f32],
            window: &mut [f32],
            sums: &mut [f32],
            out: &mut [u16],
        ));
    }
    // SAFETY: as above.
    unsafe { tasks.write_window(span, channels, window) };
}

#[inline(always)]
fn mix_token(
    channels: Channels<'_>,
    x: &[f32],
    window: &mut [f32],
    sums: &mut [f32],
    out: &mut [u16],
) {
    let part = |index: usize| {
        let start = index * channels.num_channels + channels.first;
        &x[start..start + channels.len]
    };
    let (b, c, x) = (part(0), part(1), part(2));
    let last = window.len() - channels.len;
    for ((input, b), x) in window[last..].iter_mut().zip(b).zip(x) {
        *input = b * x;
    }
    channels.convolve(window, sums);
    for ((out, c), sum) in out.iter_mut().zip(c).zip(sums) {
        *out = to_bf16_bits(c * *sum);
    }
}
