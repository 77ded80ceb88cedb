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

use super::model::TensorModel;
use super::tensor::{HostTensor, HostTensors};
use crate::base::TokenId;
use crate::engine::ExtraOutputs;
use crate::manager::Response;

/// What is needed to write the responses of a request in flight.
pub(super) struct PendingResponse {
    /// The prompt, if the response repeats it: if it does not stream.
    pub(super) prompt: Vec<TokenId>,
    pub(super) num_prompt_tokens: usize,
    pub(super) is_streaming: bool,
    pub(super) pad_id: i32,
    pub(super) beam_width: usize,
    pub(super) wants_log_probs: bool,
    pub(super) num_generated: usize,
    pub(super) cum_log_prob: f32,
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
    /// The tensors of a response. None if it only says that the request has ended with an error.
    pub(super) fn tensors(&mut self, response: &Response<'_>, model: &TensorModel) -> HostTensors {
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
