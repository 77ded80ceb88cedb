//! The memory that logits in answers may take: what a request could gather at most is set aside before
//! it starts, and given back when its answer is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::RequestError;
use crate::triton::{Error, ErrorCode};

/// How much of it there is for an instance, and how much is taken.
#[derive(Debug)]
pub struct LogitsMemory {
    max_bytes: u64,
    bytes_per_row: u64,
    /// Only this value adds to it, from one thread.
    taken: Arc<AtomicU64>,
}

/// What is set aside for one answer.
#[derive(Debug)]
pub struct SetAside {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl LogitsMemory {
    /// `max_bytes` for rows of `vocab_size` logits.
    pub fn new(max_bytes: u64, vocab_size: u32) -> Self {
        Self {
            max_bytes,
            bytes_per_row: u64::from(vocab_size) * size_of::<f32>() as u64,
            taken: Arc::default(),
        }
    }

    /// Sets memory aside for `num_rows` rows of logits.
    ///
    /// # Errors
    /// There never is as much, or other requests have it now.
    pub fn set_aside(&mut self, num_rows: usize) -> Result<SetAside, Error> {
        let Self {
            max_bytes,
            bytes_per_row,
            ..
        } = *self;
        let bytes = bytes_per_row.saturating_mul(num_rows as u64);
        let needs =
            format!("up to {num_rows} rows of logits of {bytes_per_row} bytes are asked for");
        if bytes > max_bytes {
            return Err(RequestError::Invalid(format!(
                "{needs}, and logits_memory_bytes is {max_bytes}; lower max_tokens, shorten the prompt, or \
                 have logits_memory_bytes raised"
            ))
            .into());
        }
        let taken = self.taken.load(Ordering::Relaxed);
        if bytes > max_bytes - taken {
            return Err(Error::new(
                ErrorCode::Unavailable,
                format!(
                    "{needs}, and the requests in flight have {taken} of logits_memory_bytes = \
                     {max_bytes}; try again when some are done"
                ),
            ));
        }
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        Ok(SetAside {
            bytes,
            taken: self.taken.clone(),
        })
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

    #[test]
    fn what_is_set_aside_is_there_again_when_the_answer_is_gone() {
        let mut memory = LogitsMemory::new(1000, 10);
        let first = memory.set_aside(15).expect("600 of 1000");
        let _second = memory.set_aside(10).expect("400 of 400");
        let error = memory.set_aside(1).expect_err("none is left");
        assert_eq!(error.code(), ErrorCode::Unavailable);
        assert!(error.message().contains("1000 of"), "{error}");
        drop(first);
        memory.set_aside(15).expect("600 are back");
        memory.set_aside(15).expect("and nobody has kept them");
    }

    #[test]
    fn what_there_never_is_is_the_requests_own_fault() {
        let mut memory = LogitsMemory::new(1000, 10);
        for num_rows in [26, usize::MAX] {
            let error = memory.set_aside(num_rows).expect_err("too many");
            assert_eq!(error.code(), ErrorCode::InvalidArg);
            assert!(
                error.message().contains("logits_memory_bytes is 1000"),
                "{error}"
            );
        }
        memory.set_aside(25).expect("all");
    }
}
