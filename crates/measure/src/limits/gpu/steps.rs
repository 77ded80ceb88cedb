//! The kernels of a step.

use super::{Gpu, Shape};

/// A kernel or matrix product in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kernel {
    /// As in `kernels/`, or the projection.
    pub name: &'static str,
    /// Launches of a step.
    pub calls: usize,
    /// Bytes that a call reads and writes, each counted once.
    pub bytes: usize,
    /// Multiplications and additions of a call.
    pub operations: usize,
    /// What computes them.
    pub unit: Unit,
}

/// What computes a kernel's multiplications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// cuBLASLt in bf16.
    Bf16,
    /// cuBLASLt in FP8.
    Fp8,
    /// Attention over a context.
    Context,
    /// Products with quantised weights.
    Fused,
}

impl Kernel {
    /// The least time of a call: of its bytes or its operations, whichever is longer.
    pub fn seconds(&self, gpu: &Gpu) -> f64 {
        let flops = match self.unit {
            Unit::Bf16 => gpu.flops,
            Unit::Fp8 => gpu.fp8_flops,
            Unit::Context => gpu.context_flops,
            Unit::Fused => gpu.fused_flops,
        };
        (self.bytes as f64 / gpu.bytes_per_s).max(self.operations as f64 / flops)
    }
}

/// What weights of the layers, activations of their products, and keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// All bf16.
    Bf16,
    /// All FP8: `fp8_activations`, with an FP8 checkpoint, and `kv_cache_dtype: fp8`. The output layer is bf16.
    Fp8,
}

/// Positions of a split of paged attention.
const SPLIT_LEN: usize = 256;

/// The kernels of a step in which each of `batch` sequences, with `context` positions in the cache, generates a token.
pub fn generation_step(
    shape: &Shape,
    numbers: Numbers,
    batch: usize,
    context: usize,
) -> Vec<Kernel> {
    let layer = Layer {
        shape,
        numbers,
        num_rows: batch,
    };
    let Shape {
        hidden,
        layers,
        heads,
        head_dim,
        vocab,
        ..
    } = *shape;
    let q = heads * head_dim;
    let num_splits = context.div_ceil(SPLIT_LEN);
    let mut kernels = layer.before_attention();
    kernels.push(Kernel {
        name: "paged_attention_generation",
        calls: layers,
        bytes: batch * (context * layer.position_bytes() + 4 * q),
        operations: 4 * batch * context * q,
        unit: Unit::Bf16,
    });
    if num_splits > 1 {
        // The partial results of each query head are written, and read again.
        let partial = 4 * (head_dim + 8) * heads * num_splits;
        kernels.push(layer.rows("paged_attention_merge", layers, 2 * partial + 2 * q));
    }
    kernels.extend(layer.after_attention());
    kernels.push(output_layer(hidden, vocab, batch));
    kernels
}

/// The kernels of a step that computes a prompt of `len` tokens.
pub fn prompt_step(shape: &Shape, numbers: Numbers, len: usize) -> Vec<Kernel> {
    let layer = Layer {
        shape,
        numbers,
        num_rows: len,
    };
    let q = shape.heads * shape.head_dim;
    let mut kernels = layer.before_attention();
    kernels.push(Kernel {
        name: "paged_attention_context",
        calls: shape.layers,
        bytes: len * (layer.position_bytes() + 4 * q),
        // A query sees half of the positions on average.
        operations: 2 * len * (len + 1) * q,
        unit: Unit::Context,
    });
    kernels.extend(layer.after_attention());
    kernels.push(output_layer(shape.hidden, shape.vocab, 1));
    kernels
}

/// The kernels of a layer, for some rows.
struct Layer<'a> {
    shape: &'a Shape,
    numbers: Numbers,
    num_rows: usize,
}

impl Layer<'_> {
    fn before_attention(&self) -> Vec<Kernel> {
        let Shape {
            hidden,
            layers,
            heads,
            head_dim,
            ..
        } = *self.shape;
        let (q, kv) = (heads * head_dim, self.kv());
        let rope = match self.numbers {
            Numbers::Bf16 => "rope_and_store_bf16",
            Numbers::Fp8 => "rope_and_store_fp8",
        };
        let mut kernels = vec![
            self.rows("embed", 1, 6 * hidden),
            self.rows("rms_norm", 2 * layers + 1, 6 * hidden),
        ];
        kernels.extend(self.product("qkv", q + 2 * kv, hidden, false));
        let row_bytes = 4 * (q + 2 * kv) + 2 * q + self.position_bytes();
        kernels.push(self.rows(rope, layers, row_bytes));
        kernels
    }

    fn after_attention(&self) -> Vec<Kernel> {
        let Shape {
            hidden,
            layers,
            heads,
            head_dim,
            inter,
            ..
        } = *self.shape;
        let mut kernels = self.product("o", hidden, heads * head_dim, true);
        kernels.extend(self.product("gate_up", 2 * inter, hidden, false));
        kernels.push(self.rows("silu_mul", layers, 4 * 2 * inter + 2 * inter));
        kernels.extend(self.product("down", hidden, inter, true));
        kernels
    }

    /// A projection; with FP8 activations their rounding and the scales too.
    fn product(&self, name: &'static str, n: usize, k: usize, is_added: bool) -> Vec<Kernel> {
        let (layers, num_rows) = (self.shape.layers, self.num_rows);
        let operations = 2 * num_rows * n * k;
        match self.numbers {
            Numbers::Bf16 => {
                let bytes_out = if is_added { 8 } else { 4 };
                vec![Kernel {
                    name,
                    calls: layers,
                    bytes: 2 * n * k + num_rows * (2 * k + bytes_out * n),
                    operations,
                    unit: Unit::Bf16,
                }]
            }
            Numbers::Fp8 => {
                let product = Kernel {
                    name,
                    calls: layers,
                    bytes: n * k + num_rows * (k + 4 * n),
                    operations,
                    unit: Unit::Fp8,
                };
                let bytes_of_scaling = if is_added { 12 } else { 8 };
                vec![
                    self.rows("round_to_fp8", layers, 3 * k),
                    product,
                    self.rows("scale_sums", layers, bytes_of_scaling * n),
                ]
            }
        }
    }

    fn rows(&self, name: &'static str, calls: usize, bytes_of_row: usize) -> Kernel {
        Kernel {
            name,
            calls,
            bytes: self.num_rows * bytes_of_row,
            operations: 0,
            unit: Unit::Bf16,
        }
    }

    fn kv(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    /// Bytes of the key and the value of a position in a layer.
    fn position_bytes(&self) -> usize {
        match self.numbers {
            Numbers::Bf16 => 4 * self.kv(),
            // With a scale of 4 bytes for each.
            Numbers::Fp8 => 2 * self.kv() + 8 * self.shape.kv_heads,
        }
    }
}

fn output_layer(hidden: usize, vocab: usize, num_rows: usize) -> Kernel {
    Kernel {
        name: "lm_head",
        calls: 1,
        bytes: 2 * vocab * hidden + num_rows * (2 * hidden + 4 * vocab),
        operations: 2 * num_rows * vocab * hidden,
        unit: Unit::Bf16,
    }
}

/// A step's time on paper, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Weights and keys and values once, or the products, whichever takes longer: the roofline.
    pub least: f64,
    /// The sum of the kernels' least times.
    pub kernels: f64,
    /// The same with what each kernel takes besides.
    pub expected: f64,
    /// Logits that the host reads, if it samples.
    pub logits: f64,
}

/// The time of a generation step.
pub fn step_time(
    gpu: &Gpu,
    shape: &Shape,
    numbers: Numbers,
    batch: usize,
    context: usize,
) -> StepTime {
    let kernels = generation_step(shape, numbers, batch, context);
    let calls: usize = kernels.iter().map(|kernel| kernel.calls).sum();
    let sum = seconds_of(gpu, &kernels);
    let Shape { hidden, layers, .. } = *shape;
    let layer = Layer {
        shape,
        numbers,
        num_rows: batch,
    };
    let q = shape.heads * shape.head_dim;
    let of_layers = layers * hidden * (2 * q + 2 * layer.kv() + 3 * shape.inter);
    let of_output = shape.vocab * hidden;
    let (weight_bytes, flops) = match numbers {
        Numbers::Bf16 => (2, gpu.flops),
        Numbers::Fp8 => (1, gpu.fp8_flops),
    };
    let kv_bytes = batch * context * layers * layer.position_bytes();
    let per_weight = 2.0 * batch as f64;
    let products = per_weight * (of_layers as f64 / flops + of_output as f64 / gpu.flops);
    let read = (weight_bytes * of_layers + 2 * of_output) as f64 / gpu.bytes_per_s;
    StepTime {
        least: read.max(products) + kv_bytes as f64 / gpu.bytes_per_s,
        kernels: sum,
        expected: sum + calls as f64 * gpu.seconds_per_kernel,
        logits: (4 * batch * shape.vocab) as f64 / gpu.host_bytes_per_s,
    }
}

/// The sum of the least times of all calls.
pub(super) fn seconds_of<'k>(gpu: &Gpu, kernels: impl IntoIterator<Item = &'k Kernel>) -> f64 {
    let seconds = kernels
        .into_iter()
        .map(|kernel| kernel.calls as f64 * kernel.seconds(gpu));
    seconds.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::gpu::{H200, LLAMA_8B};

    #[test]
    fn products_read_all_weights_and_no_more() {
        for numbers in [Numbers::Bf16, Numbers::Fp8] {
            let step = generation_step(&LLAMA_8B, numbers, 1, 1);
            let products = step.iter().filter(|kernel| {
                kernel.operations > 0 && kernel.name != "paged_attention_generation"
            });
            let weights: usize = products
                .map(|kernel| kernel.calls * kernel.operations / 2)
                .sum();
            // All 8,030,261,248 parameters but the embedding and the norms.
            assert_eq!(weights, 8_030_261_248 - 128_256 * 4096 - 65 * 4096);
        }
    }

    #[test]
    fn a_step_is_not_faster_than_its_roofline() {
        for numbers in [Numbers::Bf16, Numbers::Fp8] {
            for batch in [1, 32, 128, 256] {
                let time = step_time(&H200, &LLAMA_8B, numbers, batch, 1024);
                assert!(
                    time.least < time.kernels && time.kernels < time.expected,
                    "{time:?}"
                );
            }
        }
        // 15.01 GB of weights and 134 MB of keys and values at 4.3 TB/s; in FP8 8.03 GB and 71 MB.
        for (numbers, least) in [(Numbers::Bf16, 3.522e-3), (Numbers::Fp8, 1.884e-3)] {
            let one = step_time(&H200, &LLAMA_8B, numbers, 1, 1024);
            assert!((one.least - least).abs() < 1e-5, "{one:?}");
        }
    }

    #[test]
    fn the_products_of_a_prompt_take_half_the_time_in_fp8() {
        let seconds = |numbers, name: &str| {
            let step = prompt_step(&LLAMA_8B, numbers, 8192);
            seconds_of(&H200, step.iter().filter(|kernel| kernel.name == name))
        };
        for name in ["qkv", "o", "gate_up", "down"] {
            let ratio = seconds(Numbers::Bf16, name) / seconds(Numbers::Fp8, name);
            assert!((ratio - 2.0).abs() < 1e-9, "{name}: {ratio}");
        }
    }
}
