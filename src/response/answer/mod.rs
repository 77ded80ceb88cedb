//! The answer to one request while it is generated: tokens in, responses out.
//!
//! ```text
//! answer         rows, one for each sequence       the outputs of each sequence
//!                outputs, times, echo              the outputs of the whole request
//! embedding.rs   the form of an embedding
//! classes.rs     the form of classes and scores
//! prompt_log_probs.rs the log-probabilities of the prompt
//! row.rs         one sequence: tokens, text, log-probabilities, why it ended
//! tensors.rs     a response: the rows, filled up to one length
//! tool_calls.rs  calls of functions as JSON
//! usage.rs       counts of tokens
//! ```
//!
//! The thread that holds the answer may send. The driver passes it to the responder only while the backend owns the
//! request: Triton may end a rescheduled request at any moment if it is cancelled, and a later response would use
//! memory that the frontend has freed.

mod classes;
mod embedding;
mod prompt_log_probs;
mod row;
mod tensors;
mod tool_calls;
mod usage;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::response::answer_memory::SetAside;
use inflight_base::{TokenId, Tokens, catch_panic};
use inflight_config::{ClientCompatibility, OutputKind};
use inflight_engine::ExtraOutputs;
use inflight_sampling::{FinishReason, Guide, Hypothesis, LogitsProcessor};
use inflight_text::Tokenizer;
use inflight_triton::{Completion, Error, ResponseFactory};

pub use classes::ClassForm;
pub use embedding::EmbeddingForm;
pub use prompt_log_probs::PromptLogProbs;
pub use row::Row;
pub use tool_calls::CallIds;
pub use usage::Usage;

/// The most that a response may cost while others wait for it: less than a millisecond.
const MAX_LIGHT_COST: usize = 600;

/// The limit for the texts of a beam search, which are sent whole or not at all: eight of 600 tokens.
const MAX_SEARCH_COST: usize = 4 * MAX_LIGHT_COST;

/// The form of an answer, before it has any content.
pub struct AnswerPlan {
    /// Its form.
    pub format: AnswerFormat,
    /// Its sequences, at least one.
    pub rows: Vec<Row>,
    /// How many of its sequences are returned; if not all, the most likely ones.
    pub num_returned: usize,
    /// The prompt, where the answer repeats it.
    pub echo: Option<Echo>,
    /// The log-probabilities of the prompt, if requested.
    pub prompt_log_probs: Option<PromptLogProbs>,
    /// The memory set aside for its logits and log-probabilities.
    pub memory: Option<SetAside>,
    /// Its counts of tokens, if requested.
    pub usage: Option<Usage>,
}

/// The form of an answer, as the request asks for it and the model's clients expect it.
pub struct AnswerFormat {
    /// Whether there are responses before the last.
    pub stream: bool,
    /// Tokens of a stream's responses, of one of its rows at least; the first has one, and the last what is
    /// left.
    pub stream_interval: usize,
    /// The requested outputs.
    pub outputs: Vec<OutputKind>,
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// Names the tokens in `logprobs`, where there are names.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Whether its sequences are the hypotheses of a beam search. They are in order then, and each response of a
    /// stream has all of them whole.
    pub searches: bool,
    /// The padding of the ids of shorter rows.
    pub pad_id: i32,
    /// The backend whose clients read it.
    pub compatibility: ClientCompatibility,
    /// Whether its tensors have a batch dimension.
    pub has_batch_dim: bool,
    /// Whether each of its sequences has separate responses.
    pub is_split: bool,
    /// Whether `logprobs` is null, because the request does not say how many.
    pub has_null_logprobs: bool,
    /// The warning of the first response.
    pub warning: Option<String>,
    /// The ids of the functions' calls.
    pub call_ids: CallIds,
    /// Logits of one row.
    pub vocab_size: usize,
    /// The form of the embedding, if there is one.
    pub embedding: EmbeddingForm,
    /// The form of classes, if there are some.
    pub classes: ClassForm,
}

/// The answer to one request.
pub struct Answer {
    /// Makes its responses, and knows whether it was cancelled.
    pub factory: ResponseFactory,
    /// Its form.
    pub format: AnswerFormat,
    /// The times of its request.
    pub times: Times,
    /// Whether it belongs to a warm-up, whose times do not concern clients.
    pub is_warm_up: bool,
    num_returned: usize,
    echo: Option<Echo>,
    memory: Option<SetAside>,
    /// Its sequences, at least one.
    rows: Vec<Row>,
    /// Logits of the prompt that no response has carried, in the pieces that steps brought; each is whole
    /// rows.
    context_logits: Vec<Vec<f32>>,
    /// The log-probabilities of the prompt, if requested, that no response has carried.
    prompt_log_probs: Option<PromptLogProbs>,
    usage: Option<Usage>,
    /// Why a response could not be sent. The answer is then incomplete, and ends with this error.
    failure: Option<Error>,
}

/// A prompt to be repeated before the first token of each row.
pub struct Echo {
    /// Its text, where the request brought one.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<TokenId>,
}

/// When a request was first seen and first scheduled.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// First seen.
    pub arrival: Instant,
    /// First scheduled.
    pub admission: Option<Instant>,
}

impl Answer {
    /// An empty answer to a request that was first seen at `arrival`.
    pub fn new(factory: ResponseFactory, arrival: Instant, plan: AnswerPlan) -> Self {
        Self {
            factory,
            format: plan.format,
            times: Times {
                arrival,
                admission: None,
            },
            is_warm_up: false,
            num_returned: plan.num_returned,
            echo: plan.echo,
            memory: plan.memory,
            rows: plan.rows,
            context_logits: Vec::new(),
            prompt_log_probs: plan.prompt_log_probs,
            usage: plan.usage,
            failure: None,
        }
    }

    /// Says which logits processor each row has, if any has one.
    pub fn set_processors(&mut self, processors: &[LogitsProcessor]) {
        for (row, processor) in self.rows.iter_mut().zip(processors) {
            row.set_processor(processor.clone());
        }
    }

    /// Says which guide explains the errors of its rows.
    pub fn set_guide(&mut self, guide: &Guide) {
        for row in &mut self.rows {
            row.set_guide(guide.clone());
        }
    }

    /// The sequence of a row is scheduled for the first time, with `num_cached` tokens of the prompt in the KV cache.
    /// Only the first row counts: the other sequences of a request find the prompt that the first has computed.
    pub fn admit(&mut self, row: usize, num_cached: Tokens) {
        if let Some(usage) = &mut self.usage
            && row == 0
        {
            usage.admit(num_cached);
        }
    }

    /// Adds a token to a row. Returns whether its text now ends with a stop word.
    pub fn push(&mut self, row: usize, token: TokenId, now: Instant) -> bool {
        self.rows[row].push(token, now)
    }

    /// Adds the extra outputs of a row's next token.
    pub fn add_extra_outputs(&mut self, row: usize, mut extra_outputs: ExtraOutputs) {
        let context_logits = std::mem::take(&mut extra_outputs.context_logits);
        if !context_logits.is_empty() {
            self.context_logits.push(context_logits);
        }
        if let Some(of_prompt) = &mut self.prompt_log_probs {
            of_prompt.add(std::mem::take(&mut extra_outputs.prompt_log_probs));
        }
        self.rows[row].add_extra_outputs(extra_outputs);
    }

    /// Replaces the rows by the best hypotheses so far, one in each.
    pub fn take_found(&mut self, found: Box<[Hypothesis]>, now: Instant) {
        self.num_returned = found.len();
        let texts = found.into_iter().map(Some).chain(std::iter::repeat(None));
        for (row, text) in self.rows.iter_mut().zip(texts) {
            row.take_found(text.unwrap_or_default(), now);
        }
    }

    /// Ends a row. Only the first reason counts.
    pub fn end_row(&mut self, row: usize, reason: FinishReason) {
        self.rows[row].end(reason);
    }

    /// Ends all rows that have not ended.
    pub fn end(&mut self, reason: FinishReason) {
        self.rows.iter_mut().for_each(|row| row.end(reason));
    }

    /// Whether all rows have ended.
    pub fn has_ended(&self) -> bool {
        self.rows.iter().all(|row| row.finish().is_some())
    }

    /// Whether a row has ended with an error.
    pub fn has_error(&self) -> bool {
        let is_error = |row: &Row| matches!(row.finish(), Some(FinishReason::Error(_)));
        self.rows.iter().any(is_error)
    }

    /// Whether a stream's next response is due: it has as many tokens as the interval says, or as much to format as a
    /// step may wait for. A beam search sends whole texts; a response that would take longer is skipped, since the next
    /// one has everything that it would have had. The first response has all log-probabilities of the prompt: a
    /// sequence that shares it may be ahead of the one that computes it.
    pub fn is_due(&self) -> bool {
        let of_prompt = self.prompt_log_probs.as_ref();
        if of_prompt.is_some_and(|it| !it.are_whole()) {
            return false;
        }
        let is_enough = |interval| self.rows.iter().any(|row| row.is_due(interval));
        if self.format.searches {
            return is_enough(self.format.stream_interval) && self.cost() <= MAX_SEARCH_COST;
        }
        is_enough(self.format.stream_interval) || self.cost() > MAX_LIGHT_COST / 2 && is_enough(1)
    }

    /// Whether its next response takes longer to format than others should wait for.
    pub fn is_heavy(&self) -> bool {
        self.cost() > MAX_LIGHT_COST
    }

    /// The cost of formatting its next response, in units of about a microsecond: two tokens to detokenise, an entry of
    /// `logprobs`, or some kilobytes to copy.
    fn cost(&self) -> usize {
        const BYTES_PER_PIECE: usize = 4096;
        let as_json = self.format.outputs.contains(&OutputKind::Logprobs);
        let rows = self.rows[..self.num_returned].iter();
        let of_rows = rows.map(|row| row.cost(as_json)).sum::<usize>();
        let logits = self.context_logits.iter().map(Vec::len).sum::<usize>();
        let of_prompt = self.prompt_log_probs.as_ref();
        let of_prompt = of_prompt.map_or(0, PromptLogProbs::num_entries);
        let echo = self.echo.as_ref().map_or(0, |echo| {
            self.num_returned * (echo.text.len() + echo.ids.len() * size_of::<TokenId>())
        });
        of_rows + of_prompt + (logits * size_of::<f32>() + echo) / BYTES_PER_PIECE
    }

    /// All its sequences, with those that are not returned; of a beam search, its current hypotheses.
    pub fn rows(&self) -> &[Row] {
        match self.format.searches {
            true => &self.rows[..self.num_returned],
            false => &self.rows,
        }
    }

    /// When its first token was generated.
    pub fn first_token(&self) -> Option<Instant> {
        self.rows.iter().filter_map(Row::first_token).min()
    }

    /// When its last token was generated.
    pub fn last_token(&self) -> Option<Instant> {
        self.rows.iter().filter_map(Row::last_token).max()
    }

    /// Whether a response could not be sent, so that the request must end.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Marks the answer as failed.
    pub fn fail(&mut self, error: Error) {
        self.failure = Some(error);
    }

    /// Sends the new tokens of a stream that continues.
    ///
    /// # Errors
    /// Triton cannot create or send the response.
    pub fn send_news(&mut self) -> Result<(), Error> {
        let echo = self.echo.take();
        for rows in self.parts() {
            let has_news = |row: &Row| !row.new_tokens().is_empty();
            if !self.format.is_split || self.rows[rows.clone()].iter().any(has_news) {
                let response = self.response(Completion::Partial, rows, echo.as_ref())?;
                response.send(Completion::Partial)?;
            }
        }
        Ok(())
    }

    /// Sends the final response: the new tokens of a stream, or the whole answer. All rows have ended. If that fails,
    /// the client gets an error. Returns its factory.
    pub fn send_last(self) -> ResponseFactory {
        let factory = self.factory.clone();
        let log_failure = |sent: Result<(), Error>| {
            if let Err(error) = sent {
                log::warn!("a response could not be sent: {error}");
            }
        };
        match catch_panic(|| self.send_final()) {
            Ok(sent) => log_failure(sent),
            Err(panic) => log_failure(factory.send_error(Error::internal(panic))),
        }
        factory
    }

    fn send_final(mut self) -> Result<(), Error> {
        if let Some(error) = self.failure.take() {
            return self.send_error(error);
        }
        if let Some(error) = self.rows.iter().find_map(Row::error) {
            return self.send_error(error.into());
        }
        if self.num_returned < self.rows.len() && !self.format.searches {
            // vLLM's rule (`ParallelSampleSequenceGroup`, 0.6): the sum, whatever the length. Ties keep their order.
            self.rows
                .sort_by(|a, b| b.cum_log_prob().total_cmp(&a.cum_log_prob()));
        }
        let echo = self.echo.take();
        let mut parts = self.parts().peekable();
        while let Some(rows) = parts.next() {
            let completion = match parts.peek() {
                Some(_) => Completion::Partial,
                None => Completion::Final,
            };
            let sent = match self.response(Completion::Final, rows, echo.as_ref()) {
                Ok(response) => {
                    if completion == Completion::Final {
                        // Before the client can ask again.
                        self.memory = None;
                    }
                    response.send(completion)
                }
                // The client must not wait forever.
                Err(error) => return self.send_error(error),
            };
            if completion == Completion::Final {
                return sent;
            }
            if let Err(error) = sent {
                return self.send_error(error);
            }
        }
        Ok(())
    }

    /// The rows of each response.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (num_parts, width) = match self.format.is_split {
            true => (self.num_returned, 1),
            false => (1, self.num_returned),
        };
        (0..num_parts).map(move |part| part * width..(part + 1) * width)
    }

    /// Ends the answer with an error. Server 2.51 crashes, more often than not, when a warm-up gets one.
    fn send_error(&self, error: Error) -> Result<(), Error> {
        if self.is_warm_up {
            log::warn!("a request of the model_warmup has failed: {error}");
            return self.factory.send_final();
        }
        self.factory.send_error(error)
    }
}
