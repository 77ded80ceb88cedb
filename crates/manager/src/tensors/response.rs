//! Writing a response's tensors, with the names and shapes of TensorRT-LLM's Batch Manager.
//!
//! | tensor | shape | what it is |
//! |---|---|---|
//! | `output_ids` | INT32 [1, beams, max_seq_len] | prompt and output, padded with `pad_id`; if it streams, [1, beams, new] with the new tokens |
//! | `sequence_length` | INT32 [1, beams] | tokens of prompt and output so far |
//! | `context_logits` | FP32 [1, prompt, vocabulary] | or a dummy [1, 1, 1] |
//! | `generation_logits` | FP32 [1, beams, output, vocabulary] | or a dummy [1, 1, 1, 1] |
//! | `output_log_probs` | FP32 [1, beams, output] | on request, and always with beams |
//! | `cum_log_probs` | FP32 [1, beams] | on request, and always with beams: the sum so far |
//! | `kv_cache_alloc_new_blocks`, `kv_cache_reused_blocks`, `kv_cache_alloc_total_blocks` | INT32 \[1\] | with `return_perf_metrics`, at the end: KV cache blocks, and their sum |
//! | `total_draft_tokens`, `total_accepted_draft_tokens` | INT32 \[1\] | the same: draft tokens |
//! | `acceptance_rate` | FP32 \[1\] | the same: the share of accepted draft tokens |

use super::model::TensorModel;
use super::request::ReadRequest;
use super::tensor::{HostTensor, HostTensors};
use crate::{Response, Submission};
use inflight_base::TokenId;
use inflight_engine::{DraftTotals, ExtraOutputs, KvBlocks};
use inflight_sampling::FinishReason;

/// The state from which the responses of a request in flight are written.
pub(super) struct PendingResponse {
    /// The prompt, if the response repeats it: if it does not stream.
    prompt: Vec<TokenId>,
    num_prompt_tokens: usize,
    is_streaming: bool,
    pad_id: i32,
    beam_width: usize,
    wants_log_probs: bool,
    num_generated: usize,
    cum_log_prob: f32,
    /// The blocks and drafts so far, if they are requested.
    metrics: Option<(KvBlocks, DraftTotals)>,
}

/// The tensors of a response, and its error. A response with an error has no tensors.
pub(super) fn write(
    response: &Response<'_>,
    pending: Option<&mut PendingResponse>,
    model: &TensorModel,
) -> (HostTensors, String) {
    let error = match &response.end {
        Some(Err(error)) => error.to_string(),
        Some(Ok(FinishReason::Error(error))) => error.to_string(),
        _ => String::new(),
    };
    let tensors = match pending {
        Some(pending) if error.is_empty() => pending.tensors(response, model),
        _ => HostTensors::new(),
    };
    (tensors, error)
}

/// The part of one beam in a response.
struct BeamRow<'a> {
    tokens: &'a [TokenId],
    log_probs: Vec<f32>,
    cum_log_prob: f32,
    logits: Vec<&'a [f32]>,
    length: usize,
}

impl PendingResponse {
    /// Nothing sent yet.
    pub(super) fn new(read: &ReadRequest) -> Self {
        let Submission {
            request,
            is_streaming,
        } = &read.submission;
        Self {
            prompt: match is_streaming {
                true => Vec::new(),
                false => request.prompt.to_vec(),
            },
            num_prompt_tokens: request.prompt.len(),
            is_streaming: *is_streaming,
            pad_id: read.pad_id,
            beam_width: read.beam_width,
            wants_log_probs: request.outputs.log_probs.is_some(),
            num_generated: 0,
            cum_log_prob: 0.0,
            metrics: request.outputs.kv_blocks.then(Default::default),
        }
    }

    /// The tensors of a response without an error.
    fn tensors(&mut self, response: &Response<'_>, model: &TensorModel) -> HostTensors {
        let rows = match self.beam_width {
            1 => vec![self.row(response)],
            _ => self.beams(response),
        };
        let num_rows = rows.len();
        let vocab_size = model.vocab_size as usize;
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        let num_ids = match self.is_streaming {
            true => longest,
            false => model.max_seq_len.index(),
        };
        let ids = rows.iter().flat_map(|row| {
            let known = self.prompt.iter().chain(row.tokens).map(|id| *id as i32);
            known.chain(std::iter::repeat(self.pad_id)).take(num_ids)
        });
        let lengths = rows.iter().map(|row| row.length as i32);
        let mut tensors = HostTensors::from([
            (
                "output_ids".to_owned(),
                HostTensor::of(&[1, num_rows, num_ids], ids),
            ),
            (
                "sequence_length".to_owned(),
                HostTensor::of(&[1, num_rows], lengths),
            ),
            (
                "context_logits".to_owned(),
                context_logits(response.extra_outputs, vocab_size),
            ),
            (
                "generation_logits".to_owned(),
                generation_logits(&rows, longest, vocab_size),
            ),
        ]);
        if self.wants_log_probs || self.beam_width > 1 {
            let filled = |row: &BeamRow<'_>| {
                let own = row.log_probs.clone().into_iter();
                own.chain(std::iter::repeat(0.0)).take(longest)
            };
            let log_probs = rows.iter().flat_map(filled);
            let sums = rows.iter().map(|row| row.cum_log_prob);
            let log_probs = HostTensor::of(&[1, num_rows, longest], log_probs);
            tensors.insert("output_log_probs".to_owned(), log_probs);
            tensors.insert(
                "cum_log_probs".to_owned(),
                HostTensor::of(&[1, num_rows], sums),
            );
        }
        if let Some((blocks, drafts)) = &mut self.metrics {
            for extra_outputs in response.extra_outputs {
                *blocks = extra_outputs.kv_blocks.unwrap_or(*blocks);
                *drafts = extra_outputs.drafts.unwrap_or(*drafts);
            }
            if response.is_final() {
                tensors.extend(metrics(*blocks, *drafts));
            }
        }
        tensors
    }

    fn row<'a>(&mut self, response: &Response<'a>) -> BeamRow<'a> {
        let extra_outputs = response.extra_outputs.iter();
        let chosen = extra_outputs.clone().filter_map(|it| it.log_probs.as_ref());
        let log_probs: Vec<f32> = chosen.map(|it| it.chosen.log_prob).collect();
        self.cum_log_prob += log_probs.iter().sum::<f32>();
        self.num_generated += response.tokens.len();
        let logits = extra_outputs.map(|it| &it.generation_logits[..]);
        BeamRow {
            tokens: response.tokens,
            log_probs,
            cum_log_prob: self.cum_log_prob,
            logits: logits.filter(|logits| !logits.is_empty()).collect(),
            length: self.num_prompt_tokens + self.num_generated,
        }
    }

    fn beams<'a>(&self, response: &Response<'a>) -> Vec<BeamRow<'a>> {
        let found = response.hypotheses.iter();
        found
            .map(|found| BeamRow {
                tokens: &found.tokens,
                log_probs: found.log_probs.clone(),
                cum_log_prob: found.cum_log_prob,
                logits: found.generation_logits.iter().map(|it| &it[..]).collect(),
                length: self.num_prompt_tokens + found.tokens.len(),
            })
            .collect()
    }
}

/// The outputs of `return_perf_metrics`.
fn metrics(blocks: KvBlocks, drafts: DraftTotals) -> HostTensors {
    let total = blocks.num_new + blocks.num_reused;
    let counts = [
        ("kv_cache_alloc_new_blocks", blocks.num_new.0 as i32),
        ("kv_cache_reused_blocks", blocks.num_reused.0 as i32),
        ("kv_cache_alloc_total_blocks", total.0 as i32),
        ("total_draft_tokens", drafts.num_drafted as i32),
        ("total_accepted_draft_tokens", drafts.num_accepted as i32),
    ];
    let counts = counts.map(|(name, count)| (name.to_owned(), HostTensor::of(&[1], [count])));
    let mut tensors = HostTensors::from(counts);
    let rate = HostTensor::of(&[1], [drafts.acceptance_rate() as f32]);
    tensors.insert("acceptance_rate".to_owned(), rate);
    tensors
}

fn context_logits(extra_outputs: &[ExtraOutputs], vocab_size: usize) -> HostTensor {
    let rows = extra_outputs
        .iter()
        .flat_map(|it| &it.context_logits)
        .copied();
    match rows.clone().count() / vocab_size {
        0 => HostTensor::of(&[1, 1, 1], [0.0_f32]),
        num_rows => HostTensor::of(&[1, num_rows, vocab_size], rows),
    }
}

fn generation_logits(rows: &[BeamRow<'_>], longest: usize, vocab_size: usize) -> HostTensor {
    if rows.iter().all(|row| row.logits.is_empty()) {
        return HostTensor::of(&[1, 1, 1, 1], [0.0_f32]);
    }
    let blank = vec![0.0_f32; vocab_size];
    let filled = rows.iter().flat_map(|row| {
        let own = row.logits.iter().copied();
        own.chain(std::iter::repeat(&blank[..])).take(longest)
    });
    let elements = filled.flatten().copied();
    HostTensor::of(&[1, rows.len(), longest, vocab_size], elements)
}
