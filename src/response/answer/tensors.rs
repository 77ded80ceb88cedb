//! A response: the new part of an answer, as output tensors.
//!
//! ```text
//! of the request     num_input_tokens, prompt_logprobs, context_logits, blocks, drafts, moments   [1, ..]
//! of each row        text_output, sequence_length, finish_reason, ...            [1, rows]
//! of each token      output_ids, output_log_probs, generation_logits             [1, rows, tokens, ..]
//! ```
//!
//! Without a batch dimension, shapes lack the leading 1.
//!
//! Rows are padded to the longest one, ids with the padding id, numbers with zeros; `sequence_length` and
//! `num_output_tokens` give the length of each row.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::ops::Range;
use std::time::Instant;

use crate::response::answer::{Answer, Echo, Row, tool_calls};
use crate::response::log_probs;
use inflight_base::TokenId;
use inflight_config::{ClientCompatibility, OutputKind};
use inflight_engine::{DraftTotals, KvBlocks};
use inflight_sampling::FinishReason;
use inflight_triton::{Completion, Element, Error, UnsentResponse, now_ns};

impl Answer {
    /// A response with the new tokens of some rows, after the prompt if the answer repeats it.
    pub(super) fn response(
        &mut self,
        completion: Completion,
        range: Range<usize>,
        echo: Option<&Echo>,
    ) -> Result<UnsentResponse, Error> {
        let mut response = self.factory.new_response()?;
        if let Some(warning) = self.format.warning.take() {
            response.set_parameter(c"warning", &warning)?;
        }
        if let Some(usage) = self.usage_text(completion) {
            response.set_parameter(c"usage", &usage)?;
        }
        let compatibility = self.format.compatibility;
        // Where the shape of a tensor begins.
        let from = usize::from(!self.format.has_batch_dim);
        let mut clock = None;
        let mut ns = |moment| clock.get_or_insert_with(SteadyClock::now).ns(moment);
        let (kv_blocks, drafts) = (self.kv_blocks(), self.drafts());
        let (first_token, last_token) = (self.first_token(), self.last_token());
        // Values of every token are sent once, and hypotheses repeatedly.
        let is_brief = self.format.searches && completion == Completion::Partial;
        let first_row = range.start;
        let rows = &mut self.rows[range];
        let num_rows = rows.len() as i64;
        let num_new = rows.iter().map(|row| row.new_tokens().len()).max();
        let num_new = num_new.unwrap_or_default();
        for output in &self.format.outputs {
            let name = output.c_name();
            match output {
                OutputKind::TextOutput => {
                    let text = |row: &mut Row| match echo {
                        Some(echo) => echo.text.clone() + &row.take_text(),
                        None => row.take_text(),
                    };
                    let from = if compatibility.has_flat_text() {
                        1
                    } else {
                        from
                    };
                    strings(&mut response, name, from, rows, text)?;
                }
                OutputKind::OutputIds => {
                    let prompt = prompt_of(echo);
                    let width = prompt.len() + num_new;
                    let ids = |row| {
                        prompt
                            .iter()
                            .chain(Row::new_tokens(row))
                            .map(|id| *id as i32)
                    };
                    let filler = compatibility
                        .padding_value()
                        .map_or(self.format.pad_id, i32::from);
                    let ids = padded(rows.iter().map(ids), width, filler);
                    response.output(name, &[1, num_rows, width as i64][from..], &ids)?;
                }
                OutputKind::SequenceLength => {
                    let length = |row: &Row| match compatibility.counts_response_ids() {
                        true => (prompt_of(echo).len() + row.new_tokens().len()) as i32,
                        false => (self.format.num_prompt_tokens + row.tokens().len()) as i32,
                    };
                    numbers(&mut response, name, from, rows, length)?;
                }
                OutputKind::ReasoningContent => {
                    strings(&mut response, name, from, rows, Row::take_reasoning)?;
                }
                OutputKind::ToolCalls => {
                    let ids = self.format.call_ids;
                    // Hypotheses are sent whole.
                    let in_stream = self.format.stream && !self.format.searches;
                    let mut row_index = first_row;
                    let calls = |row: &mut Row| {
                        let (calls, num_before) = row.new_calls();
                        let json = tool_calls::json(calls, ids, row_index, num_before, in_stream);
                        row_index += 1;
                        json
                    };
                    strings(&mut response, name, from, rows, calls)?;
                }
                OutputKind::FinishReason => {
                    let reason = |row: &mut Row| {
                        let has_calls = row.has_calls();
                        reason_name(row.finish_of_text(), has_calls, compatibility)
                    };
                    strings(&mut response, name, from, rows, reason)?;
                }
                OutputKind::NumInputTokens if compatibility.has_unsigned_counts() => {
                    response.output(
                        name,
                        &[1, 1][from..],
                        &[self.format.num_prompt_tokens as u32],
                    )?;
                }
                OutputKind::NumInputTokens => {
                    response.output(
                        name,
                        &[1, 1][from..],
                        &[self.format.num_prompt_tokens as i32],
                    )?;
                }
                OutputKind::NumOutputTokens => {
                    let num_tokens = |row: &Row| match compatibility.counts_new_tokens() {
                        true => row.new_tokens().len(),
                        false => row.tokens().len(),
                    };
                    match compatibility.has_unsigned_counts() {
                        true => numbers(&mut response, name, from, rows, |row| {
                            num_tokens(row) as u32
                        })?,
                        false => numbers(&mut response, name, from, rows, |row| {
                            num_tokens(row) as i32
                        })?,
                    }
                }
                OutputKind::OutputLogProbs => {
                    let log_probs = rows.iter().map(Row::new_chosen_log_probs);
                    let filler = compatibility.padding_value().map_or(0.0, f32::from);
                    let chosen = padded(log_probs, num_new, filler);
                    response.output(name, &[1, num_rows, num_new as i64][from..], &chosen)?;
                }
                OutputKind::CumLogProbs | OutputKind::CumulativeLogprob => {
                    let sum = |row: &Row| row.cum_log_prob() as f32;
                    numbers(&mut response, name, from, rows, sum)?;
                }
                OutputKind::Logprobs => {
                    let tokenizer = self.format.tokenizer.as_deref();
                    if self.format.has_null_logprobs {
                        strings(&mut response, name, from, rows, |_| "null")?;
                        continue;
                    }
                    let shown = |row| Row::new_log_probs(row).filter(|_| !is_brief);
                    let lens = rows
                        .iter()
                        .map(|row| log_probs::num_bytes(shown(row), tokenizer))
                        .collect::<Vec<_>>();
                    let lens = lens.iter().copied();
                    response.output_written(name, &[1, num_rows][from..], lens, |i, place| {
                        // It has room for as much as was counted.
                        let _ = log_probs::write(place, shown(&rows[i]), tokenizer);
                    })?;
                }
                OutputKind::PromptLogprobs => {
                    let tokenizer = self.format.tokenizer.as_deref();
                    let whole = self.prompt_log_probs.take_if(|it| it.are_whole());
                    let json = whole.map_or_else(|| b"[]".to_vec(), |it| it.json(tokenizer));
                    response.output_strings(name, &[1, 1][from..], &[json])?;
                }
                OutputKind::ContextLogits => {
                    let pieces = std::mem::take(&mut self.context_logits);
                    let num_tokens =
                        pieces.iter().map(Vec::len).sum::<usize>() / self.format.vocab_size;
                    let shape = [1, num_tokens as i64, self.format.vocab_size as i64];
                    output_logits(&mut response, name, &shape[from..], &pieces)?;
                }
                OutputKind::GenerationLogits if is_brief => {
                    output_logits(&mut response, name, &[1; 4][from..], &[[0.0f32; 0]; 0])?;
                }
                OutputKind::GenerationLogits => {
                    let logits = rows.iter().map(Row::new_generation_logits);
                    let width = logits.clone().map(Iterator::count).max();
                    let width = width.unwrap_or_default();
                    let zeros = vec![
                        0.0;
                        if num_rows > 1 {
                            self.format.vocab_size
                        } else {
                            0
                        }
                    ];
                    let pieces = padded(logits, width, &zeros[..]);
                    let shape = [1, num_rows, width as i64, self.format.vocab_size as i64];
                    output_logits(&mut response, name, &shape[from..], &pieces)?;
                    rows.iter_mut().for_each(Row::drop_generation_logits);
                }
                OutputKind::StopReason => {
                    strings(&mut response, name, from, rows, |row| row.stop_reason())?;
                }
                OutputKind::OutputIdsJson => {
                    let json = ids_json(prompt_of(echo), rows);
                    response.output_strings(name, &[1, 1][from..], &[json])?;
                }
                OutputKind::SequenceIndex => {
                    let indices: Vec<_> =
                        (first_row..).take(rows.len()).map(|i| i as i32).collect();
                    response.output(name, &[1, num_rows][from..], &indices)?;
                }
                OutputKind::Embedding => {
                    // One row, for nothing is generated.
                    let state = rows.first().map_or(&[][..], Row::pooled);
                    let embedding = self.format.embedding.of(state);
                    response.output(name, &[1, embedding.len() as i64][from..], &embedding)?;
                }
                OutputKind::Probs | OutputKind::Score => {
                    let numbers = rows.first().map_or(&[][..], Row::pooled);
                    let values = self.format.classes.of(numbers);
                    response.output(name, &[1, values.len() as i64][from..], &values)?;
                }
                OutputKind::Labels => {
                    let labels = self.format.classes.labels.clone();
                    let shape = &[1, labels.len() as i64][from..];
                    response.output_strings(name, shape, &labels)?;
                }
                OutputKind::Label => {
                    let classes = self.format.classes.clone();
                    strings(&mut response, name, from, rows, |row| {
                        classes.best(row.pooled()).to_owned()
                    })?;
                }
                // A request has one prompt, and one server computes it.
                OutputKind::BatchIndex | OutputKind::ContextPhaseParams => {}
                // These are known at the end.
                _ if completion == Completion::Partial => {}
                OutputKind::KvCacheAllocNewBlocks => {
                    response.output(name, &[1, 1][from..], &[kv_blocks.num_new.0 as i32])?;
                }
                OutputKind::KvCacheReusedBlocks => {
                    response.output(name, &[1, 1][from..], &[kv_blocks.num_reused.0 as i32])?;
                }
                OutputKind::KvCacheAllocTotalBlocks => {
                    let total = kv_blocks.num_new + kv_blocks.num_reused;
                    response.output(name, &[1, 1][from..], &[total.0 as i32])?;
                }
                OutputKind::ArrivalTimeNs => {
                    response.output(name, &[1, 1][from..], &[ns(Some(self.times.arrival))])?;
                }
                OutputKind::FirstScheduledTimeNs => {
                    response.output(name, &[1, 1][from..], &[ns(self.times.admission)])?;
                }
                OutputKind::FirstTokenTimeNs => {
                    response.output(name, &[1, 1][from..], &[ns(first_token)])?;
                }
                OutputKind::LastTokenTimeNs => {
                    response.output(name, &[1, 1][from..], &[ns(last_token)])?;
                }
                OutputKind::AcceptanceRate => {
                    response.output(name, &[1, 1][from..], &[drafts.acceptance_rate() as f32])?;
                }
                OutputKind::TotalAcceptedDraftTokens => {
                    response.output(name, &[1, 1][from..], &[drafts.num_accepted as i32])?;
                }
                OutputKind::TotalDraftTokens => {
                    response.output(name, &[1, 1][from..], &[drafts.num_drafted as i32])?;
                }
            }
        }
        rows.iter_mut().for_each(Row::answered);
        Ok(response)
    }

    /// The KV blocks of all rows, with those that are not returned.
    fn kv_blocks(&self) -> KvBlocks {
        let blocks = self.rows.iter().map(Row::kv_blocks);
        blocks.fold(KvBlocks::default(), |sum, row| KvBlocks {
            num_new: sum.num_new + row.num_new,
            num_reused: sum.num_reused + row.num_reused,
        })
    }

    /// The counts of tokens that a response has, if requested: the first one what is known then, and the last all.
    fn usage_text(&mut self, completion: Completion) -> Option<String> {
        let drafts = self.drafts();
        let usage = self.usage.as_mut()?;
        match completion {
            Completion::Partial => usage.begin(),
            Completion::Final => {
                let rows = self.rows[..self.num_returned].iter_mut();
                let num_reasoning_tokens = rows.map(Row::num_reasoning_tokens).sum();
                Some(usage.end(num_reasoning_tokens, drafts))
            }
        }
    }

    /// The drafts of all rows, with those that are not returned.
    fn drafts(&self) -> DraftTotals {
        let drafts = self.rows.iter().map(Row::drafts);
        drafts.fold(DraftTotals::default(), DraftTotals::plus)
    }
}

/// Adds a number for each row, with the shape `[1, rows][from..]`. One row, the common case, allocates nothing.
fn numbers<T: Element>(
    response: &mut UnsentResponse,
    name: &CStr,
    from: usize,
    rows: &[Row],
    number: impl Fn(&Row) -> T,
) -> Result<(), Error> {
    match rows {
        [row] => response.output(name, &[1, 1][from..], &[number(row)]),
        rows => {
            let numbers: Vec<T> = rows.iter().map(number).collect();
            response.output(name, &[1, rows.len() as i64][from..], &numbers)
        }
    }
}

/// Adds a text for each row, as [`numbers`] does.
fn strings<S: AsRef<[u8]>>(
    response: &mut UnsentResponse,
    name: &CStr,
    from: usize,
    rows: &mut [Row],
    mut string: impl FnMut(&mut Row) -> S,
) -> Result<(), Error> {
    match rows {
        [row] => response.output_strings(name, &[1, 1][from..], &[string(row)]),
        rows => {
            let strings: Vec<S> = rows.iter_mut().map(string).collect();
            response.output_strings(name, &[1, rows.len() as i64][from..], &strings)
        }
    }
}

/// Concatenates the rows, each padded to `width`.
fn padded<T: Copy>(
    rows: impl ExactSizeIterator<Item = impl Iterator<Item = T>>,
    width: usize,
    padding: T,
) -> Vec<T> {
    let mut elements = Vec::with_capacity(rows.len() * width);
    for (i, row) in rows.enumerate() {
        elements.extend(row.take(width));
        elements.resize((i + 1) * width, padding);
    }
    elements
}

/// One moment on two clocks, to convert others to Triton's clock.
struct SteadyClock {
    instant: Instant,
    ns: u64,
}

impl SteadyClock {
    fn now() -> Self {
        Self {
            instant: Instant::now(),
            ns: now_ns(),
        }
    }

    /// A moment in the past, in nanoseconds; 0 for `None`.
    fn ns(&self, moment: Option<Instant>) -> i64 {
        let age = |moment| self.instant.duration_since(moment).as_nanos() as u64;
        moment.map_or(0, |moment| self.ns.saturating_sub(age(moment)) as i64)
    }
}

/// Adds logits, or a dummy of one zero if there are none, as TensorRT-LLM's backend does.
fn output_logits(
    response: &mut UnsentResponse,
    name: &CStr,
    shape: &[i64],
    pieces: &[impl AsRef<[f32]>],
) -> Result<(), Error> {
    match pieces {
        [] => response.output(name, &vec![1; shape.len()], &[0.0f32]),
        pieces => response.output_pieces(name, shape, pieces),
    }
}

/// The tokens of a prompt that the answer repeats.
fn prompt_of(echo: Option<&Echo>) -> &[TokenId] {
    echo.map_or(&[], |echo| &echo.ids)
}

/// `[[1,2],[3]]`: the new ids of each row, behind the prompt.
fn ids_json(prompt: &[TokenId], rows: &[Row]) -> String {
    let mut json = String::from("[");
    for (i, row) in rows.iter().enumerate() {
        json.push_str(if i == 0 { "[" } else { ",[" });
        for (i, id) in prompt.iter().chain(row.new_tokens()).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            // Writing to a String cannot fail.
            let _ = write!(json, "{comma}{id}");
        }
        json.push(']');
    }
    json.push(']');
    json
}

/// The reason as a client reads it; a running sequence has none.
fn reason_name(
    reason: Option<FinishReason>,
    has_calls: bool,
    compatibility: ClientCompatibility,
) -> &'static str {
    let is_short = compatibility.uses_short_finish_reasons();
    match reason {
        Some(FinishReason::EndId | FinishReason::StopWords) if has_calls => "tool_calls",
        None if is_short => "None",
        None => "",
        Some(FinishReason::EndId | FinishReason::StopWords) if is_short => "stop",
        Some(FinishReason::TimedOut) if is_short => "timeout",
        Some(FinishReason::Cancelled) if compatibility == ClientCompatibility::Vllm => "abort",
        Some(FinishReason::EndId) => "end_id",
        Some(FinishReason::StopWords) => "stop_words",
        Some(FinishReason::Length) => "length",
        Some(FinishReason::Pooled) => "pooled",
        Some(FinishReason::TimedOut) => "timed_out",
        Some(FinishReason::Cancelled) => "cancelled",
        Some(FinishReason::Error(_)) => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_filled_up_to_the_longest() {
        let rows: [&[i32]; 3] = [&[1, 2], &[], &[3, 4, 5]];
        let rows = || rows.iter().map(|row| row.iter().copied());
        assert_eq!(padded(rows(), 3, -1), [1, 2, -1, -1, -1, -1, 3, 4, 5]);
        assert_eq!(padded(rows().take(1), 2, 0), [1, 2]);
        assert_eq!(padded(rows().skip(1).take(1), 0, 0), [0; 0]);
    }

    #[test]
    fn ids_as_json_are_a_list_for_each_row() {
        let mut rows = [3, 2].map(|n| Row::new(n, None));
        assert_eq!(ids_json(&[], &rows), "[[],[]]");
        rows[0].push(7, Instant::now());
        rows[0].push(8, Instant::now());
        assert_eq!(ids_json(&[], &rows), "[[7,8],[]]");
        assert_eq!(ids_json(&[1], &rows), "[[1,7,8],[1]]");
        assert_eq!(ids_json(&[1], &rows[1..]), "[[1]]");
    }
}
