//! One request's answer in the making: tokens in, responses out.
//!
//! Whoever holds the answer may send. The driver lends it to the responder only while the request
//! itself is with us: Triton may end a request that it has back (a cancelled one) at any moment, and a
//! response after that end would reach into memory that the frontend has freed.

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::log_probs;
use crate::backend::logits_memory::SetAside;
use crate::backend::text_stream::TextStream;
use crate::base::{RequestError, TokenId};
use crate::config::OutputKind;
use crate::engine::{DraftTotals, Gathered, KvBlocks};
use crate::sampling::{FinishReason, LogitsProcessor, SampleError, TokenLogProbs};
use crate::text::Tokenizer;
use crate::triton::{Completion, Error, Response, ResponseFactory, now_ns};

/// The answer to one request.
pub struct Answer {
    /// Makes its responses, and knows whether it was cancelled.
    pub factory: ResponseFactory,
    /// Whether there is an answer before the last.
    pub stream: bool,
    /// Tokens of a stream's responses; the first has one, and the last what is left.
    pub stream_interval: usize,
    /// The outputs that the client wants.
    pub outputs: Vec<OutputKind>,
    /// The prompt, where the answer repeats it.
    pub echo: Option<Echo>,
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// The text of the answer; `None` where only ids are wanted.
    pub text: Option<TextStream>,
    /// Names the tokens in `logprobs`, where there are names.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// What changes its logits, and may have to say why it could not.
    pub processor: Option<LogitsProcessor>,
    /// When what happened.
    pub times: Times,
    /// What its logits may take.
    pub logits_memory: Option<SetAside>,
    tokens: Vec<TokenId>,
    /// Of each token, if they are wanted.
    log_probs: Vec<TokenLogProbs>,
    cum_log_prob: f64,
    /// Logits that no response has carried, in the pieces that steps brought; each is whole rows.
    context_logits: Vec<Vec<f32>>,
    /// The same; each is one row.
    generation_logits: Vec<Vec<f32>>,
    vocab_size: usize,
    kv_blocks: KvBlocks,
    drafts: DraftTotals,
    num_decoded: usize,
    num_answered: usize,
    /// Why a response could not be sent: the answer has a gap, and ends with this.
    failure: Option<Error>,
}

/// A prompt to be repeated before the first token.
pub struct Echo {
    /// Its text, where the request brought one.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<TokenId>,
}

/// The moments of a request's life in the backend.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// First seen.
    pub arrival: Instant,
    /// First planned.
    pub admission: Option<Instant>,
    /// First token there.
    pub first_token: Option<Instant>,
    /// Last token there.
    pub last_token: Option<Instant>,
}

impl Times {
    /// A request first seen now.
    pub fn starting(arrival: Instant) -> Self {
        Self {
            arrival,
            admission: None,
            first_token: None,
            last_token: None,
        }
    }
}

impl Answer {
    /// An answer without tokens yet; `max_new_tokens` are reserved for, so that steps take no memory.
    pub fn new(
        factory: ResponseFactory,
        times: Times,
        max_new_tokens: usize,
        vocab_size: u32,
    ) -> Self {
        let vocab_size = vocab_size as usize;
        Self {
            factory,
            stream: false,
            stream_interval: 1,
            outputs: Vec::new(),
            echo: None,
            num_prompt_tokens: 0,
            text: None,
            tokenizer: None,
            processor: None,
            times,
            log_probs: Vec::new(),
            cum_log_prob: 0.0,
            logits_memory: None,
            context_logits: Vec::new(),
            generation_logits: Vec::new(),
            vocab_size,
            kv_blocks: KvBlocks::default(),
            drafts: DraftTotals::default(),
            tokens: Vec::with_capacity(max_new_tokens),
            num_decoded: 0,
            num_answered: 0,
            failure: None,
        }
    }

    /// Adds a token. Returns whether the text now ends with a stop word; the text of requests without
    /// stop words is left to the responder.
    pub fn push(&mut self, token: TokenId, now: Instant) -> bool {
        self.times.first_token.get_or_insert(now);
        self.times.last_token = Some(now);
        self.tokens.push(token);
        self.text.as_ref().is_some_and(TextStream::has_stop_words) && self.decode()
    }

    /// Takes in what the request wanted to know besides the token that follows.
    pub fn gather(&mut self, gathered: Gathered) {
        if let Some(log_probs) = gathered.log_probs {
            self.cum_log_prob += f64::from(log_probs.chosen.log_prob);
            self.log_probs.push(log_probs);
        }
        let has_rows = |logits: &Vec<f32>| !logits.is_empty();
        self.context_logits
            .extend(Some(gathered.context_logits).filter(has_rows));
        self.generation_logits
            .extend(Some(gathered.generation_logits).filter(has_rows));
        if let Some(kv_blocks) = gathered.kv_blocks {
            self.kv_blocks = kv_blocks;
        }
        if let Some(drafts) = gathered.drafts {
            self.drafts = drafts;
        }
    }

    /// Whether a stream has enough tokens for its next response.
    pub fn is_due(&self) -> bool {
        let num_new = self.tokens.len() - self.num_answered;
        let is_first = self.num_answered == 0;
        num_new > 0 && (is_first || num_new >= self.stream_interval)
    }

    /// Tokens generated so far.
    pub fn num_output_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Whether a response could not be sent, so that the request must end.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Marks the answer as failed.
    pub fn fail(&mut self, error: Error) {
        self.failure = Some(error);
    }

    /// Sends what is new, with more to come.
    ///
    /// # Errors
    /// Triton's, if it cannot make or take the response.
    pub fn send_news(&mut self) -> Result<(), Error> {
        self.decode();
        let response = self.response(None)?;
        response.send(Completion::Partial)
    }

    /// Sends the final response: what is new of a stream, or everything.
    ///
    /// # Errors
    /// As [`Answer::send_news`].
    pub fn send_final(mut self, reason: FinishReason) -> Result<(), Error> {
        if let Some(error) = self.failure.take() {
            return self.factory.send_error(error);
        }
        if let FinishReason::Error(error) = reason {
            let text = error.to_string();
            let error = match error {
                SampleError::NotFinite | SampleError::GuideFailed => RequestError::Internal(text),
                SampleError::ProcessorFailed => {
                    let failure = self.processor.and_then(|processor| processor.0.failure());
                    RequestError::Internal(failure.unwrap_or(text))
                }
                SampleError::NoneAllowed | SampleError::GuideTooComplex => {
                    RequestError::Invalid(text)
                }
            };
            return self.factory.send_error(error.into());
        }
        self.decode();
        if let Some(text) = &mut self.text {
            text.finish();
        }
        match self.response(Some(reason)) {
            Ok(response) => {
                // Before the client can ask again.
                self.logits_memory = None;
                response.send(Completion::Final)
            }
            // The client must not wait for ever.
            Err(error) => self.factory.send_error(error),
        }
    }

    /// Turns the tokens that are not text yet into text. Returns whether a stop word is complete.
    fn decode(&mut self) -> bool {
        let Some(text) = &mut self.text else {
            return false;
        };
        let mut stopped = false;
        for &token in &self.tokens[self.num_decoded..] {
            stopped |= text.push(token);
        }
        self.num_decoded = self.tokens.len();
        stopped
    }

    /// A response with all that is new.
    fn response(&mut self, reason: Option<FinishReason>) -> Result<Response, Error> {
        let mut response = self.factory.new_response()?;
        let mut clock = None;
        let mut ns = |moment| clock.get_or_insert_with(SteadyClock::now).ns(moment);
        let echo = self.echo.take();
        let news = &self.tokens[self.num_answered..];
        let new_log_probs = self.log_probs.get(self.num_answered..).unwrap_or_default();
        for output in &self.outputs {
            let name = c_name(*output);
            match output {
                OutputKind::TextOutput => {
                    let new = self
                        .text
                        .as_mut()
                        .map(TextStream::take_ready)
                        .unwrap_or_default();
                    let text = match &echo {
                        Some(echo) => echo.text.clone() + &new,
                        None => new,
                    };
                    response.output_strings(name, &[1, 1], &[text])?;
                }
                OutputKind::OutputIds => {
                    let prompt = echo.iter().flat_map(|echo| &echo.ids);
                    let ids: Vec<i32> = prompt.chain(news).map(|id| *id as i32).collect();
                    response.output(name, &[1, ids.len() as i64], &ids)?;
                }
                OutputKind::SequenceLength => {
                    let length = self.num_prompt_tokens + self.tokens.len();
                    response.output(name, &[1, 1], &[length as i32])?;
                }
                OutputKind::FinishReason => {
                    let reason = reason.map(reason_name).unwrap_or_default();
                    response.output_strings(name, &[1, 1], &[reason])?;
                }
                OutputKind::NumInputTokens => {
                    response.output(name, &[1, 1], &[self.num_prompt_tokens as i32])?;
                }
                OutputKind::NumOutputTokens => {
                    response.output(name, &[1, 1], &[self.tokens.len() as i32])?;
                }
                OutputKind::OutputLogProbs => {
                    let chosen = new_log_probs.iter().map(|it| it.chosen.log_prob);
                    let chosen: Vec<f32> = chosen.collect();
                    // [batch, beam, token]
                    response.output(name, &[1, 1, chosen.len() as i64], &chosen)?;
                }
                OutputKind::CumLogProbs | OutputKind::CumulativeLogprob => {
                    response.output(name, &[1, 1], &[self.cum_log_prob as f32])?;
                }
                OutputKind::Logprobs => {
                    let json = log_probs::json(new_log_probs, self.tokenizer.as_deref());
                    response.output_strings(name, &[1, 1], &[json])?;
                }
                OutputKind::ContextLogits => {
                    let pieces = std::mem::take(&mut self.context_logits);
                    output_logits(&mut response, name, &[1], &pieces, self.vocab_size)?;
                }
                OutputKind::GenerationLogits => {
                    let pieces = std::mem::take(&mut self.generation_logits);
                    // [batch, beam, token, vocabulary]
                    output_logits(&mut response, name, &[1, 1], &pieces, self.vocab_size)?;
                }
                OutputKind::StopReason => {
                    let stopped_by = match reason {
                        Some(FinishReason::EndId) => self.tokens.last().map(TokenId::to_string),
                        Some(FinishReason::StopWords) => {
                            let word = self.text.as_ref().and_then(TextStream::stop_word);
                            // Without one, it was a stop id.
                            word.map(str::to_owned)
                                .or_else(|| self.tokens.last().map(TokenId::to_string))
                        }
                        _ => None,
                    };
                    response.output_strings(name, &[1, 1], &[stopped_by.unwrap_or_default()])?;
                }
                // What these say is known at the end.
                _ if reason.is_none() => {}
                OutputKind::KvCacheAllocNewBlocks => {
                    response.output(name, &[1, 1], &[self.kv_blocks.num_new.0 as i32])?;
                }
                OutputKind::KvCacheReusedBlocks => {
                    response.output(name, &[1, 1], &[self.kv_blocks.num_reused.0 as i32])?;
                }
                OutputKind::KvCacheAllocTotalBlocks => {
                    let total = self.kv_blocks.num_new + self.kv_blocks.num_reused;
                    response.output(name, &[1, 1], &[total.0 as i32])?;
                }
                OutputKind::ArrivalTimeNs => {
                    response.output(name, &[1, 1], &[ns(Some(self.times.arrival))])?;
                }
                OutputKind::FirstScheduledTimeNs => {
                    response.output(name, &[1, 1], &[ns(self.times.admission)])?;
                }
                OutputKind::FirstTokenTimeNs => {
                    response.output(name, &[1, 1], &[ns(self.times.first_token)])?;
                }
                OutputKind::LastTokenTimeNs => {
                    response.output(name, &[1, 1], &[ns(self.times.last_token)])?;
                }
                OutputKind::AcceptanceRate => {
                    response.output(name, &[1, 1], &[self.drafts.acceptance_rate() as f32])?;
                }
                OutputKind::TotalAcceptedDraftTokens => {
                    response.output(name, &[1, 1], &[self.drafts.num_accepted as i32])?;
                }
                OutputKind::TotalDraftTokens => {
                    response.output(name, &[1, 1], &[self.drafts.num_drafted as i32])?;
                }
            }
        }
        self.num_answered = self.tokens.len();
        Ok(response)
    }
}

/// One moment on two clocks, so that another can be told on Triton's.
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

    /// A moment that has passed, in nanoseconds; 0 if it never came.
    fn ns(&self, moment: Option<Instant>) -> i64 {
        let age = |moment| self.instant.duration_since(moment).as_nanos() as u64;
        moment.map_or(0, |moment| self.ns.saturating_sub(age(moment)) as i64)
    }
}

/// Adds rows of logits, `[.., num_rows, vocab_size]`; where there are none, a dummy of one zero, as
/// TensorRT-LLM's backend does.
fn output_logits(
    response: &mut Response,
    name: &CStr,
    leading: &[i64],
    pieces: &[Vec<f32>],
    vocab_size: usize,
) -> Result<(), Error> {
    let num_rows = pieces.iter().map(Vec::len).sum::<usize>() / vocab_size;
    let rows = match num_rows {
        0 => [1, 1],
        num_rows => [num_rows as i64, vocab_size as i64],
    };
    let shape = [leading, &rows].concat();
    match num_rows {
        0 => response.output(name, &shape, &[0.0f32]),
        _ => response.output_pieces(name, &shape, pieces),
    }
}

/// The reason as a client reads it.
fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::EndId => "end_id",
        FinishReason::StopWords => "stop_words",
        FinishReason::Length => "length",
        FinishReason::TimedOut => "timed_out",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Error(_) => "error",
    }
}

fn c_name(output: OutputKind) -> &'static CStr {
    match output {
        OutputKind::TextOutput => c"text_output",
        OutputKind::OutputIds => c"output_ids",
        OutputKind::SequenceLength => c"sequence_length",
        OutputKind::FinishReason => c"finish_reason",
        OutputKind::NumInputTokens => c"num_input_tokens",
        OutputKind::NumOutputTokens => c"num_output_tokens",
        OutputKind::OutputLogProbs => c"output_log_probs",
        OutputKind::CumLogProbs => c"cum_log_probs",
        OutputKind::CumulativeLogprob => c"cumulative_logprob",
        OutputKind::Logprobs => c"logprobs",
        OutputKind::ContextLogits => c"context_logits",
        OutputKind::GenerationLogits => c"generation_logits",
        OutputKind::StopReason => c"stop_reason",
        OutputKind::KvCacheAllocNewBlocks => c"kv_cache_alloc_new_blocks",
        OutputKind::KvCacheReusedBlocks => c"kv_cache_reused_blocks",
        OutputKind::KvCacheAllocTotalBlocks => c"kv_cache_alloc_total_blocks",
        OutputKind::ArrivalTimeNs => c"arrival_time_ns",
        OutputKind::FirstScheduledTimeNs => c"first_scheduled_time_ns",
        OutputKind::FirstTokenTimeNs => c"first_token_time_ns",
        OutputKind::LastTokenTimeNs => c"last_token_time_ns",
        OutputKind::AcceptanceRate => c"acceptance_rate",
        OutputKind::TotalAcceptedDraftTokens => c"total_accepted_draft_tokens",
        OutputKind::TotalDraftTokens => c"total_draft_tokens",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outputs_c_name_is_its_name() {
        for output in OutputKind::ALL {
            assert_eq!(c_name(output).to_str(), Ok(output.name()));
        }
    }
}
