//! The time of each operation of a layer, called many times one after the other, beside what the machine can do.
//!
//! Weights take turns, so that no cache holds them. The keys and values of a layer are larger than a cache, except with
//! one sequence.

use cudarc::driver::CudaContext;
use half::bf16;
use inflight_base::TokenId;
use inflight_device::{
    Activation, EmbeddingTable, HeadBiases, HeadShape, InnerActivation, Linear, Load,
    LogitsTransform, Norm, Ops, Output, RopeParams, RopeTable, StepIo,
};
use inflight_runner::{ModelSource, ModelSpec};
use inflight_sampling::{ChangeLists, DeviceSampling, Owner, SamplingInput, SamplingParams};

use super::bench::{Bench, ROTATED_BYTES, Work, attention_params};
use super::budget::Budget;
use super::check::Check;
use super::checkpoint;
use super::latent;
use super::machine::{open, random_matrix};
use super::one_step::OneStep;
use super::report::Report;
use crate::Result;

/// Measures the operations of the model.
pub fn run(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let source = ModelSource::open(&checkpoint::folder(check, report)?)?;
    let spec = source.spec();
    let is_quick = check.options.quick;
    let batches: &[usize] = if is_quick {
        &[1, 3]
    } else {
        &[1, 32, 128, 256]
    };
    let bench = Bench {
        check,
        context: CudaContext::new(check.options.gpu)?,
        num_calls: if is_quick { 3 } else { 200 },
        context_len: if is_quick { 40 } else { 1024 },
    };
    for &num_rows in batches {
        for measure in [
            Bench::products,
            Bench::norm,
            Bench::embedding,
            Bench::rotation,
            Bench::attention,
            Bench::sampling,
        ] {
            if budget.is_over() {
                return report.skipped("no time is left");
            }
            measure(&bench, spec, num_rows, report)?;
        }
        latent::generation(&bench, num_rows, report)?;
    }
    for len in if is_quick { [24, 60] } else { [1024, 8192] } {
        if budget.is_over() {
            return report.skipped("no time is left");
        }
        bench.prompt_attention(spec, len, report)?;
        latent::prompt(&bench, len, report)?;
    }
    Ok(())
}

impl Bench<'_> {
    /// The projections of a layer, and that to logits.
    fn products(&self, spec: &ModelSpec, num_rows: usize, report: &mut Report) -> Result<()> {
        let heads = heads(spec);
        let (hidden, inter) = (spec.hidden_size, spec.max_intermediate_size());
        for (name, n, k, is_gated) in [
            ("qkv", heads.qkv_len(), hidden, false),
            ("o", hidden, heads.q_len(), false),
            ("gate_up and silu_mul", 2 * inter, hidden, true),
            ("down", hidden, inter, false),
            ("lm_head", spec.vocab_size, hidden, false),
        ] {
            let mut device = open(self.check.options.gpu)?;
            let num_copies = match self.check.options.quick {
                true => 2,
                false => ROTATED_BYTES.div_ceil(2 * n * k).max(2),
            };
            let mut linears = Vec::new();
            for _ in 0..num_copies {
                linears.push(Linear {
                    matrix: random_matrix(&mut device, n, k)?,
                    bias: None,
                    place: None,
                });
            }
            let x = device.alloc_inputs(num_rows, k)?;
            let mut out = device.alloc_sums(num_rows, n)?;
            let mut inner = device.alloc_inputs(num_rows, n / 2)?;
            let work = Work {
                num_bytes: 2 * n * k + num_rows * (2 * k + if is_gated { n } else { 4 * n }),
                num_operations: 2 * num_rows * n * k,
                rows: batch(num_rows),
            };
            self.time(name, work, &mut device, report, |device, call| {
                let linear = &linears[call % num_copies];
                match is_gated {
                    true => {
                        let activation = InnerActivation::Gated(Activation::Silu);
                        device
                            .project_activated(num_rows, &x, linear, activation, None, &mut inner);
                    }
                    false => device.project(num_rows, &x, linear, Output::Store, None, &mut out),
                }
            })?;
        }
        Ok(())
    }

    fn norm(&self, spec: &ModelSpec, num_rows: usize, report: &mut Report) -> Result<()> {
        let mut device = open(self.check.options.gpu)?;
        let width = spec.hidden_size;
        let weight = device.upload_vector(vec![1.0; width])?;
        let x = device.alloc_sums(num_rows, width)?;
        let mut out = device.alloc_inputs(num_rows, width)?;
        let work = Work {
            num_bytes: num_rows * width * 6,
            num_operations: num_rows * width * 4,
            rows: batch(num_rows),
        };
        self.time("rms_norm", work, &mut device, report, |device, _| {
            let norm = Norm::Rms {
                weight: &weight,
                eps: spec.norm.eps,
            };
            device.norm(num_rows, &x, norm, &mut out);
        })
    }

    fn embedding(&self, spec: &ModelSpec, num_rows: usize, report: &mut Report) -> Result<()> {
        let mut device = open(self.check.options.gpu)?;
        let width = spec.hidden_size;
        let step = OneStep::generation(num_rows, self.context_len);
        let cache = step.cache(&mut device, heads(spec))?;
        let table =
            device.upload_embedding(vec![bf16::ONE; step.token_ids.len() * width], width)?;
        let mut out = device.alloc_sums(num_rows, width)?;
        let begun = device.begin_step(&cache, step.inputs());
        let work = Work {
            num_bytes: num_rows * width * 6,
            num_operations: 0,
            rows: batch(num_rows),
        };
        self.time("embed", work, &mut device, report, |device, _| {
            device.embed(&begun, EmbeddingTable::Own(&table), 1.0, &mut out);
        })
    }

    fn rotation(&self, spec: &ModelSpec, num_rows: usize, report: &mut Report) -> Result<()> {
        let mut device = open(self.check.options.gpu)?;
        let heads = heads(spec);
        let step = OneStep::generation(num_rows, self.context_len);
        let mut cache = step.cache(&mut device, heads)?;
        let frequencies = vec![1e-3; spec.head_dim / 2];
        let angles = RopeTable::new(&frequencies, 1.0, self.context_len)?;
        let angles = device.upload_angles(angles)?;
        let mut qkv = device.alloc_sums(num_rows, heads.qkv_len())?;
        let mut q = device.alloc_inputs(num_rows, heads.q_len())?;
        let begun = device.begin_step(&cache, step.inputs());
        let work = Work {
            num_bytes: num_rows * heads.qkv_len() * 6,
            num_operations: 0,
            rows: batch(num_rows),
        };
        self.time("rope_and_store", work, &mut device, report, |device, _| {
            let params = RopeParams {
                heads,
                qk_norm: None,
                angles: &angles,
            };
            device.rope_and_store(&begun, params, &mut qkv, &mut cache, 0, &mut q, None);
        })
    }

    fn attention(&self, spec: &ModelSpec, num_rows: usize, report: &mut Report) -> Result<()> {
        let heads = heads(spec);
        let step = OneStep::generation(num_rows, self.context_len);
        let kv_len = 2 * heads.num_kv_heads * heads.head_dim;
        let work = Work {
            num_bytes: num_rows * (2 * self.context_len * kv_len + 4 * heads.q_len()),
            num_operations: num_rows * self.context_len * 4 * heads.q_len(),
            rows: batch(num_rows),
        };
        self.time_attention(heads, &step, num_rows, work, report)
    }

    /// The tokens of all rows, by different options.
    fn sampling(&self, spec: &ModelSpec, num_rows: usize, report: &mut Report) -> Result<()> {
        let (width, vocab_size) = (spec.hidden_size, spec.vocab_size);
        let mut device = open(self.check.options.gpu)?;
        let mut step = OneStep::generation(num_rows, self.context_len);
        let cache = step.cache(&mut device, heads(spec))?;
        let table = vec![bf16::ONE; step.token_ids.len() * width];
        let table = device.upload_embedding(table, width)?;
        let weight = device.upload_vector(vec![1.0; width])?;
        let lm_head = Linear {
            matrix: random_matrix(&mut device, vocab_size, width)?,
            bias: None,
            place: None,
        };
        let mut sums = device.alloc_sums(num_rows, width)?;
        let mut states = device.alloc_inputs(num_rows, width)?;
        let mut logits = device.alloc_logits(num_rows, vocab_size)?;
        let sampled = |change: fn(&mut SamplingParams)| {
            let mut params = SamplingParams {
                temperature: 1.0,
                ..SamplingParams::default()
            };
            change(&mut params);
            params
        };
        for (name, params) in [
            ("sample, greedy", SamplingParams::default()),
            ("sample, top_p 0.9", sampled(|params| params.top_p = 0.9)),
            (
                "sample, penalties",
                sampled(|params| params.repetition_penalty = 1.1),
            ),
        ] {
            let mut lists = ChangeLists::new(num_rows, self.context_len);
            let tokens: Vec<TokenId> = (0..self.context_len as u32).collect();
            let input = SamplingInput {
                params: &params,
                tokens: &tokens,
                num_prompt_tokens: 1,
                beam: 0,
                owner: Owner::default(),
            };
            step.sampling = (0..num_rows)
                .map(|_| DeviceSampling::of(input, &mut lists))
                .collect();
            step.change_lists = lists.words().to_vec();
            let begun = device.begin_step(&cache, step.inputs());
            device.embed(&begun, EmbeddingTable::Own(&table), 1.0, &mut sums);
            let norm = Norm::Rms {
                weight: &weight,
                eps: spec.norm.eps,
            };
            device.norm(num_rows, &sums, norm, &mut states);
            let unchanged = LogitsTransform::IDENTITY;
            device.logits(num_rows, &states, &lm_head, unchanged, None, &mut logits);
            let work = Work {
                num_bytes: num_rows * vocab_size * 4,
                num_operations: 0,
                rows: batch(num_rows),
            };
            self.time(name, work, &mut device, report, |device, _| {
                device.sample(&begun, &mut logits);
            })?;
        }
        Ok(())
    }

    /// Attention of a whole prompt.
    fn prompt_attention(&self, spec: &ModelSpec, len: usize, report: &mut Report) -> Result<()> {
        let heads = heads(spec);
        let step = OneStep::prompt(len);
        let kv_len = 2 * heads.num_kv_heads * heads.head_dim;
        let work = Work {
            num_bytes: len * (2 * kv_len + 4 * heads.q_len()),
            // A query sees half of the keys on average.
            num_operations: 2 * len * (len + 1) * heads.q_len(),
            rows: format!("prompt of {len}"),
        };
        self.time_attention(heads, &step, len, work, report)
    }

    /// Attention of the `num_rows` queries of a step.
    fn time_attention(
        &self,
        heads: HeadShape,
        step: &OneStep,
        num_rows: usize,
        work: Work,
        report: &mut Report,
    ) -> Result<()> {
        let mut device = open(self.check.options.gpu)?;
        let cache = step.cache(&mut device, heads)?;
        let q = device.alloc_inputs(num_rows, heads.q_len())?;
        let mut out = device.alloc_inputs(num_rows, heads.q_len())?;
        let params = attention_params(heads);
        let begun = device.begin_step(&cache, step.inputs());
        self.time("paged_attention", work, &mut device, report, |device, _| {
            device.paged_attention(
                &begun,
                &params,
                HeadBiases::NONE,
                (&q, None),
                &cache,
                0,
                &mut out,
            );
        })
    }
}

fn batch(num_rows: usize) -> String {
    format!("batch of {num_rows}")
}

fn heads(spec: &ModelSpec) -> HeadShape {
    HeadShape {
        num_q_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        value_dim: spec.head_dim,
    }
}
