//! Causal convolutions of channels, and the rule that has nothing else.
//!
//! ```text
//! window     t-3  t-2  t-1  t         the last inputs of some channels, [kernel_len, channels]
//! kernel      w0   w1   w2   w3       their sum, from left to right, then the bias
//! ```

use super::super::Cpu;
use super::super::math::{silu, to_bf16_bits};
use super::super::simd::for_each_simd;
use super::{SpanState, Tasks};

/// Channels of a task.
const TASK_CHANNELS: usize = 128;

/// Some channels of a convolution, whose weights are `[kernel_len, num_channels]`.
#[derive(Clone, Copy)]
struct Channels<'a> {
    kernel: &'a [f32],
    bias: &'a [f32],
    num_channels: usize,
    first: usize,
    len: usize,
}

impl Channels<'_> {
    /// Writes the sums of a window.
    #[inline(always)]
    fn convolve(&self, window: &[f32], out: &mut [f32]) {
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
    }
}

impl Cpu {
    /// `x = silu(convolution(x))` of the first channels of all tokens.
    pub(super) fn convolve_channels(&mut self, tasks: &Tasks<'_>) {
        let simd = tasks.simd;
        self.for_each_window(tasks, |(token, is_repeated), channels, window, sums| {
            let start = token * tasks.shape.input_len() + channels.first;
            // SAFETY: the channels of a sequence are of one task, and each token is of one sequence.
            let x = unsafe { tasks.x.slice(start, channels.len) };
            for_each_simd!(simd, convolve_token, (
                channels: Channels<'_>,
                is_repeated: bool,
                x: &mut [f32],
                window: &mut [f32],
                sums: &mut [f32],
            ));
        });
    }

    /// `out = c * convolution(b * x)` of all tokens.
    pub(super) fn mix_convolution(&mut self, tasks: &Tasks<'_>) {
        let simd = tasks.simd;
        let num_channels = tasks.shape.num_channels();
        self.for_each_window(tasks, |(token, is_repeated), channels, window, sums| {
            let len = channels.len;
            let part = |index: usize| {
                let column = index * num_channels + channels.first;
                let start = token * tasks.shape.input_len() + column;
                // SAFETY: nothing writes them.
                unsafe { tasks.x.read(start, len) }
            };
            let operands = [part(0), part(1), part(2)];
            // SAFETY: the channels of a sequence are of one task, and each token is of one sequence.
            let out = unsafe { tasks.out.slice(token * num_channels + channels.first, len) };
            for_each_simd!(simd, mix_token, (
                channels: Channels<'_>,
                is_repeated: bool,
                operands: [&[f32]; 3],
                window: &mut [f32],
                sums: &mut [f32],
                out: &mut [u16],
            ));
        });
    }

    /// Calls `body((token, is_repeated), channels, window, sums)` for the tokens of each sequence, in order, and some
    /// channels. The window has the last inputs; `sums` has room for one number of each channel.
    fn for_each_window(
        &mut self,
        tasks: &Tasks<'_>,
        body: impl Fn((usize, bool), Channels<'_>, &mut [f32], &mut [f32]) + Sync,
    ) {
        let num_channels = tasks.shape.num_channels();
        let per_span = num_channels.div_ceil(TASK_CHANNELS);
        let num_tasks = tasks.num_spans() * per_span;
        let Self { pool, workers, .. } = self;
        pool.for_each(workers, num_tasks, |worker, task| {
            let span = tasks.span(task / per_span);
            let first = task % per_span * TASK_CHANNELS;
            let channels = Channels {
                kernel: tasks.kernel,
                bias: tasks.bias,
                num_channels,
                first,
                len: TASK_CHANNELS.min(num_channels - first),
            };
            let window_len = tasks.shape.kernel_len * channels.len;
            let scratch = &mut worker.recurrence.values;
            scratch.resize(window_len + channels.len, 0.0);
            let (window, sums) = scratch.split_at_mut(window_len);
            read_window(tasks, &span, channels, window);
            for token in span.tokens.clone() {
                body((token, span.is_repeated), channels, window, sums);
                for slot in tasks.saved_to(token) {
                    write_window(tasks, slot, channels, window);
                }
            }
            write_window(tasks, span.state, channels, window);
        });
    }
}

/// Fills a window with the inputs that the state of a sequence has.
fn read_window(tasks: &Tasks<'_>, span: &SpanState, channels: Channels<'_>, window: &mut [f32]) {
    let rows = window.chunks_exact_mut(channels.len);
    for (row, inputs) in rows.enumerate() {
        if span.begins {
            inputs.fill(0.0);
            continue;
        }
        let start = span.state + row * channels.num_channels + channels.first;
        // SAFETY: the channels of a sequence are of one task, and sequences have slots of their own.
        inputs.copy_from_slice(unsafe { tasks.states.slice(start, channels.len) });
    }
}

/// Stores the last inputs of a window in the state of a sequence, which begins at `state`.
fn write_window(tasks: &Tasks<'_>, state: usize, channels: Channels<'_>, window: &[f32]) {
    let rows = window.chunks_exact(channels.len);
    for (row, inputs) in rows.enumerate() {
        let start = state + row * channels.num_channels + channels.first;
        // SAFETY: the channels of a sequence are of one task, and sequences and saved states have slots of their own.
        unsafe { tasks.states.slice(start, channels.len) }.copy_from_slice(inputs);
    }
}

/// Moves a window on. Returns its last row, for the next token.
#[inline(always)]
fn next_row(window: &mut [f32], len: usize) -> &mut [f32] {
    window.copy_within(len.., 0);
    let last = window.len() - len;
    &mut window[last..]
}

#[inline(always)]
fn convolve_token(
    channels: Channels<'_>,
    is_repeated: bool,
    x: &mut [f32],
    window: &mut [f32],
    sums: &mut [f32],
) {
    if !is_repeated {
        next_row(window, channels.len).copy_from_slice(x);
    }
    channels.convolve(window, sums);
    for (x, sum) in x.iter_mut().zip(sums) {
        *x = silu(*sum);
    }
}

#[inline(always)]
fn mix_token(
    channels: Channels<'_>,
    is_repeated: bool,
    [b, c, x]: [&[f32]; 3],
    window: &mut [f32],
    sums: &mut [f32],
    out: &mut [u16],
) {
    if !is_repeated {
        let row = next_row(window, channels.len);
        for ((input, b), x) in row.iter_mut().zip(b).zip(x) {
            *input = b * x;
        }
    }
    channels.convolve(window, sums);
    for ((out, c), sum) in out.iter_mut().zip(c).zip(sums) {
        *out = to_bf16_bits(c * *sum);
    }
}
