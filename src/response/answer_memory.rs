//! The memory for logits and log-probabilities in answers. Each request reserves the most that it can need before it
//! starts; the reservation is released when its answer is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use inflight_base::RequestError;
use inflight_sampling::{TokenLogProb, TokenLogProbs};
use inflight_triton::{Error, ErrorCode};

/// Bytes that the allocator adds to each list.
const LIST_OVERHEAD: u64 = 16;

/// An instance's budget, and how much of it is reserved.
#[derive(Debug)]
pub struct AnswerMemory {
    max_bytes: u64,
    bytes_per_row: u64,
    /// The most bytes of one JSON entry.
    max_entry_bytes: u64,
    taken: Arc<AtomicU64>,
}

/// The most that an answer can hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs {
    /// Rows of logits.
    pub num_logits: usize,
    /// Tokens with log-probabilities.
    pub num_tokens: usize,
    /// The most likely alternatives that are listed for each token.
    pub num_top: u32,
    /// Whether the log-probabilities are also written as JSON.
    pub as_json: bool,
    /// Tokens of the prompt with log-probabilities, which are written as JSON.
    pub num_prompt_tokens: usize,
    /// The most likely alternatives that are listed for each of them.
    pub num_prompt_top: u32,
}

/// The reservation of one answer, released on drop.
#[derive(Debug)]
pub struct SetAside {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl AnswerMemory {
    /// A budget of `max_bytes`. A row has `vocab_size` logits; a JSON entry has at most `max_entry_bytes`.
    pub fn new(max_bytes: u64, vocab_size: u32, max_entry_bytes: usize) -> Self {
        Self {
            max_bytes,
            bytes_per_row: u64::from(vocab_size) * size_of::<f32>() as u64,
            max_entry_bytes: max_entry_bytes as u64,
            taken: Arc::default(),
        }
    }

    /// Reserves memory; `None` for an answer that needs none. May be called from several threads.
    ///
    /// # Errors
    /// The answer can exceed the whole budget, or what other requests have left of it.
    pub fn set_aside(&self, needs: Needs) -> Result<Option<SetAside>, Error> {
        let max_bytes = self.max_bytes;
        let (rows, per_row) = (needs.num_logits as u64, self.bytes_per_row);
        let of_tokens = [
            (needs.num_tokens, needs.num_top, needs.as_json),
            (needs.num_prompt_tokens, needs.num_prompt_top, true),
        ];
        let of_tokens = of_tokens.map(|(num_tokens, num_top, as_json)| {
            (num_tokens as u64, self.bytes_per_token(num_top, as_json))
        });
        let of_tokens = of_tokens.into_iter().filter(|(tokens, _)| *tokens > 0);
        let bytes = of_tokens.clone().fold(
            rows.saturating_mul(per_row),
            |bytes, (tokens, per_token)| bytes.saturating_add(tokens.saturating_mul(per_token)),
        );
        if bytes == 0 {
            return Ok(None);
        }
        let mut parts = Vec::new();
        if rows > 0 {
            parts.push(format!("{rows} rows of logits of {per_row} bytes"));
        }
        parts.extend(of_tokens.map(|(tokens, per_token)| {
            format!("the log-probabilities of {tokens} tokens, {per_token} bytes each,")
        }));
        let needs = format!("up to {} are asked for", parts.join(" and "));
        if bytes > max_bytes {
            return Err(RequestError::Invalid(format!(
                "{needs}, and logits_memory_bytes is {max_bytes}; lower max_tokens, shorten the prompt, or \
                 ask for a larger logits_memory_bytes"
            ))
            .into());
        }
        let fits = |taken: u64| (bytes <= max_bytes - taken).then(|| taken + bytes);
        let taken = self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        if let Err(taken) = taken {
            return Err(Error::new(
                ErrorCode::Unavailable,
                format!(
                    "{needs}, and the requests in flight have {taken} of logits_memory_bytes = \
                     {max_bytes}; try again when some are done"
                ),
            ));
        }
        Ok(Some(SetAside {
            bytes,
            taken: self.taken.clone(),
        }))
    }

    /// Bytes of one token's log-probabilities, as the engine returns them and as they are written.
    fn bytes_per_token(&self, num_top: u32, as_json: bool) -> u64 {
        let num_top = u64::from(num_top);
        let extra_outputs = size_of::<TokenLogProbs>() as u64
            + LIST_OVERHEAD
            + num_top * size_of::<TokenLogProb>() as u64;
        let written = match as_json {
            // And a bracket on either side.
            true => (num_top + 1) * self.max_entry_bytes + 2,
            false => size_of::<f32>() as u64,
        };
        extra_outputs + written
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(num_logits: usize) -> Needs {
        Needs {
            num_logits,
            ..Needs::default()
        }
    }

    #[test]
    fn what_is_set_aside_is_there_again_when_the_answer_is_gone() {
        let memory = AnswerMemory::new(1000, 10, 100);
        let first = memory.set_aside(rows(15)).expect("600 of 1000");
        let _second = memory.set_aside(rows(10)).expect("400 of 400");
        let error = memory.set_aside(rows(1)).expect_err("none is left");
        assert_eq!(error.code(), ErrorCode::Unavailable);
        assert!(error.message().contains("1000 of"), "{error}");
        assert!(memory.set_aside(rows(0)).expect("nothing").is_none());
        drop(first);
        drop(memory.set_aside(rows(15)).expect("600 are back"));
        memory
            .set_aside(rows(15))
            .expect("and nobody has kept them");
    }

    #[test]
    fn what_there_never_is_is_the_requests_own_fault() {
        let memory = AnswerMemory::new(1000, 10, 100);
        for num_logits in [26, usize::MAX] {
            let error = memory.set_aside(rows(num_logits)).expect_err("too many");
            assert_eq!(error.code(), ErrorCode::InvalidArg);
            assert!(
                error.message().contains("logits_memory_bytes is 1000"),
                "{error}"
            );
        }
        memory.set_aside(rows(25)).expect("all");
    }

    #[test]
    fn log_probabilities_count_as_they_are_gathered_and_as_they_are_written() {
        let extra_outputs =
            (size_of::<TokenLogProbs>() + 16 + 3 * size_of::<TokenLogProb>()) as u64;
        for (as_json, written) in [(false, 4), (true, 402)] {
            let needs = |num_tokens| Needs {
                num_tokens,
                num_top: 3,
                as_json,
                ..Needs::default()
            };
            let bytes = extra_outputs + written;
            let memory = AnswerMemory::new(10 * bytes, 10, 100);
            let error = memory.set_aside(needs(11)).expect_err("one too many");
            assert!(
                error
                    .message()
                    .contains(&format!("11 tokens, {bytes} bytes each")),
                "{error}"
            );
            memory.set_aside(needs(10)).expect("all of it");
        }
        let of_prompt = |num_prompt_tokens| Needs {
            num_prompt_tokens,
            num_prompt_top: 3,
            ..Needs::default()
        };
        let memory = AnswerMemory::new(10 * (extra_outputs + 402), 10, 100);
        memory.set_aside(of_prompt(11)).expect_err("one too many");
        memory.set_aside(of_prompt(10)).expect("all of it");
    }
}
