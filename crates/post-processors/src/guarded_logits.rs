//! A copy of one token's logits that detects writes outside of them.

/// Number of guard values on either side: 256 bytes.
const NUM_GUARDS: usize = 64;
/// The guard value, which no processor writes by accident.
const GUARD: f32 = f32::from_bits(0x5ca1_ab1e);
/// The alignment of the logits, in bytes.
const ALIGNMENT: usize = 64;

/// ```text
/// | .. | guards | logits, [vocab_size] | guards | .. |
///               ^ aligned to 64 bytes
/// ```
pub(super) struct GuardedLogits {
    memory: Vec<f32>,
    start: usize,
    vocab_size: usize,
}

impl GuardedLogits {
    pub(super) fn new(vocab_size: usize) -> Self {
        let slack = ALIGNMENT / size_of::<f32>();
        let memory = vec![GUARD; vocab_size + 2 * NUM_GUARDS + slack];
        let offset = memory[NUM_GUARDS..].as_ptr().align_offset(ALIGNMENT);
        Self {
            start: NUM_GUARDS + offset.min(slack),
            vocab_size,
            memory,
        }
    }

    /// The logits.
    pub(super) fn get(&self) -> &[f32] {
        &self.memory[self.start..][..self.vocab_size]
    }

    /// The memory that holds the logits, including the guards, and the index of the first logit.
    pub(super) fn memory_mut(&mut self) -> (&mut [f32], usize) {
        (&mut self.memory, self.start)
    }

    pub(super) fn copy_from(&mut self, logits: &[f32]) {
        self.memory[self.start..][..self.vocab_size].copy_from_slice(logits);
    }

    /// Whether all guards are unchanged.
    pub(super) fn is_intact(&self) -> bool {
        let (before, rest) = self.memory.split_at(self.start);
        let behind = &rest[self.vocab_size..];
        let mut guards = before.iter().chain(behind);
        guards.all(|guard| guard.to_bits() == GUARD.to_bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_writes_outside_the_logits_only() {
        for vocab_size in [1, 15, 16, 1000] {
            let logits = vec![1.0; vocab_size];
            let guarded = || {
                let mut guarded = GuardedLogits::new(vocab_size);
                guarded.copy_from(&logits);
                guarded
            };
            for index in 0..guarded().memory.len() {
                let mut guarded = guarded();
                assert!(guarded.is_intact() && guarded.get() == logits);
                assert_eq!(guarded.get().as_ptr().align_offset(ALIGNMENT), 0);
                let end = guarded.start + vocab_size;
                assert!(guarded.start >= NUM_GUARDS && guarded.memory.len() - end >= NUM_GUARDS);
                guarded.memory_mut().0[index] = 0.0;
                let is_inside = (guarded.start..end).contains(&index);
                assert_eq!(guarded.is_intact(), is_inside, "{index}");
            }
        }
    }
}
