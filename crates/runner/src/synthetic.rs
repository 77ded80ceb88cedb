//! A runner without weights: the next token is a hash of all tokens so far, and the time of a step is linear in its
//! tokens. For load tests, scheduler work and capacity planning.
//!
//! The hash chain is kept *in the KV blocks*: the entry of position `p` is computed from the entry of `p - 1`, which
//! is looked up through the block table. A wrong table, a block freed too early, a misplaced chunk or a bad resume
//! changes the stream, and [`next_token`] tells what it should have been. With an attention window, the chain needs
//! only the last position, but a step that lacks a block that one of its queries sees is an error.
//!
//! ```text
//! entry(-1) = 0
//! entry(p)  = mix(entry(p - 1) + 0x9e3779b97f4a7c15 * (token[p] + 1))      modulo 2^64
//! next      = entry(last) modulo vocab_size
//! mix(x): x ^= x >> 30; x *= 0xbf58476d1ce4e5b9; x ^= x >> 27; x *= 0x94d049bb133111eb; x ^= x >> 31
//! ```
//! The candidates of a beam are, for each rank from 0 up, `(entry(last) + rank) modulo vocab_size`, with a
//! log-probability of `-(rank + 1) * (1 + entry(last) / 2^32 modulo 7) / 8`: see [`candidates`].
//!
//! `mix` is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
//! generators", 2014).

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use bytemuck::allocation::try_zeroed_vec;

use super::gate::Gate;
use super::limits::{AttentionWindows, RunnerLimits};
use inflight_base::{BlockId, Blocks, HostBlockId, LoadError, StepError, TokenId, Tokens};
use inflight_engine::{BeamCandidates, BlockMove, PlannedSequence, Sampled, StepOutput, StepPlan};
use inflight_sampling::BeamCandidate;

/// How much longer than requested a thread may sleep: the end of a wait is spent spinning.
const SLEEP_SLACK: Duration = Duration::from_micros(150);

/// The model that a synthetic runner simulates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SyntheticOptions {
    /// Token ids are below it; not zero.
    pub vocab_size: u32,
    /// Microseconds that every step takes.
    pub step_base_us: f64,
    /// Further microseconds for each token of a step.
    pub step_per_token_us: f64,
}

/// The token that follows `tokens`.
///
/// # Panics
/// If `vocab_size` is zero.
pub fn next_token(tokens: &[TokenId], vocab_size: u32) -> TokenId {
    token_of(tokens.iter().copied().fold(0, chain), vocab_size)
}

/// The `num` most likely tokens to follow `tokens` in a beam; fewer if the vocabulary is smaller.
///
/// # Panics
/// If `vocab_size` is zero.
pub fn candidates(tokens: &[TokenId], vocab_size: u32, num: usize) -> Vec<BeamCandidate> {
    candidates_of(tokens.iter().copied().fold(0, chain), vocab_size, num)
}

/// A runner without weights.
pub struct SyntheticRunner {
    options: SyntheticOptions,
    /// The chain, an entry for each position of each block, `[num_blocks, block_size]`.
    entries: Vec<u64>,
    /// The same in host memory, `[num_host_blocks, block_size]`.
    host_entries: Vec<u64>,
    block_size: u32,
    /// The last positions that a sequence must keep; `None` for all. It keeps the sinks as well.
    window: Option<Tokens>,
    num_sinks: Tokens,
    /// Runs before it fails, if it is to fail.
    runs_left: Option<u32>,
    gate: Option<Gate>,
}

impl SyntheticRunner {
    /// A runner with a pool of `limits.num_blocks` blocks.
    ///
    /// # Errors
    /// Memory for the pool is short.
    ///
    /// # Panics
    /// If the vocabulary is empty.
    pub fn new(options: SyntheticOptions, limits: &RunnerLimits) -> Result<Self, LoadError> {
        assert!(options.vocab_size > 0, "a vocabulary to choose from");
        let block_size = limits.block_size.tokens().index();
        let entries = |num_blocks: Blocks| {
            try_zeroed_vec(num_blocks.index() * block_size).map_err(|()| {
                LoadError::Resource(format!(
                    "no memory for {num_blocks} synthetic KV blocks; lower the number of blocks"
                ))
            })
        };
        let attention = &limits.attention;
        Ok(Self {
            options,
            entries: entries(limits.num_blocks)?,
            host_entries: entries(limits.num_host_blocks)?,
            block_size: block_size as u32,
            window: Self::largest_window(attention, limits.max_seq_len),
            num_sinks: attention.num_sinks,
            runs_left: None,
            gate: None,
        })
    }

    /// The same runner, which panics after `num_runs` runs as if it had lost its device; never, if there is none.
    pub fn failing_after(mut self, num_runs: Option<u32>) -> Self {
        self.runs_left = num_runs;
        self
    }

    /// The same runner, which runs only as often as `file` allows while it exists: tests hold requests in flight with
    /// it.
    pub fn gated_by(mut self, file: Option<PathBuf>) -> Self {
        self.gate = file.map(Gate::new);
        self
    }

    /// The largest of the configured attention windows, as [`ModelSpec::largest_window`].
    ///
    /// [`ModelSpec::largest_window`]: super::ModelSpec::largest_window
    pub fn largest_window(attention: &AttentionWindows, max_seq_len: Tokens) -> Option<Tokens> {
        let num_layers = attention.windows.len().max(1);
        attention.largest(
            (0..num_layers).map(|layer| attention.window(layer)),
            max_seq_len,
        )
    }

    /// Token ids are below it.
    pub fn vocab_size(&self) -> u32 {
        self.options.vocab_size
    }

    /// Computes a step or a part of one, appends to `output`, and takes the configured time.
    ///
    /// # Errors
    /// A block that a query of the step sees has been freed.
    ///
    /// # Panics
    /// The configured number of runs before a failure is over.
    pub fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        if let Some(gate) = &mut self.gate {
            gate.pass();
        }
        let started = Instant::now();
        if let Some(runs_left) = &mut self.runs_left {
            *runs_left = runs_left
                .checked_sub(1)
                .expect("the synthetic runner was told to fail now");
        }
        self.move_blocks(plan.moves);
        for (index, sequence) in plan.sequences.iter().enumerate() {
            let table = plan.block_table(sequence);
            let chunk = plan.chunk(sequence);
            let first = sequence.kv_len - chunk.len() as u32;
            self.check_table(sequence, table, first)?;
            for (position, &token) in (first..).zip(chunk) {
                let previous = match position.checked_sub(1) {
                    Some(previous) => self.entries[self.entry_index(table, previous)],
                    None => 0,
                };
                let index = self.entry_index(table, position);
                self.entries[index] = chain(previous, token);
            }
            if sequence.samples {
                let last = sequence.kv_len - 1 - sequence.num_drafts;
                let vocab_size = self.options.vocab_size;
                if let Some(num) = plan.num_candidates(index) {
                    let entry = self.entries[self.entry_index(table, last)];
                    output.beam_candidates.push(BeamCandidates {
                        candidates: candidates_of(entry, vocab_size, num),
                        ..BeamCandidates::default()
                    });
                    output.sampled.push((sequence.slot, Sampled::Candidates));
                    continue;
                }
                let drafts = plan.drafts(sequence);
                for position in last..sequence.kv_len {
                    let entry = self.entries[self.entry_index(table, position)];
                    let token = token_of(entry, vocab_size);
                    output.sampled.push((sequence.slot, Sampled::Token(token)));
                    if drafts.get((position - last) as usize) != Some(&token) {
                        break;
                    }
                }
            }
        }
        let num_tokens = plan.token_ids.len() + plan.num_padding_tokens.index();
        let per_token_us = self.options.step_per_token_us * num_tokens as f64;
        wait_until(started, self.options.step_base_us + per_token_us);
        Ok(())
    }

    /// The bytes of a block in host memory.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn host_block(&mut self, block: HostBlockId) -> &mut [u8] {
        let len = self.block_size as usize;
        bytemuck::cast_slice_mut(&mut self.host_entries[block.index() * len..][..len])
    }

    /// Makes moves of blocks, one after the other.
    pub fn move_blocks(&mut self, moves: &[BlockMove]) {
        for one in moves {
            self.move_block(one);
        }
    }

    fn move_block(&mut self, one: &BlockMove) {
        let len = self.block_size as usize;
        let start_of = |index: usize| index * len;
        match *one {
            BlockMove::Copy(copy) => {
                let from = start_of(copy.source.index());
                let copied = from..from + copy.num_positions as usize;
                self.entries
                    .copy_within(copied, start_of(copy.target.index()));
            }
            BlockMove::Offload { source, target } => {
                let source = &self.entries[start_of(source.index())..][..len];
                self.host_entries[start_of(target.index())..][..len].copy_from_slice(source);
            }
            BlockMove::Onboard { source, target } => {
                let source = &self.host_entries[start_of(source.index())..][..len];
                self.entries[start_of(target.index())..][..len].copy_from_slice(source);
            }
        }
    }

    /// Finds a block that is missing although the query at `first` sees it. Later queries see no earlier positions.
    fn check_table(
        &self,
        sequence: &PlannedSequence,
        table: &[BlockId],
        first: u32,
    ) -> Result<(), StepError> {
        let seen_from = match self.window {
            Some(window) => (first + 1).saturating_sub(window.0),
            None => 0,
        };
        for (index, _) in table
            .iter()
            .enumerate()
            .filter(|&(_, &block)| block == BlockId::NONE)
        {
            let start = index as u32 * self.block_size;
            if start < self.num_sinks.0 || start.saturating_add(self.block_size) > seen_from {
                return Err(StepError(format!(
                    "request {}: the block of positions {start} on was given back, and position \
                     {first} sees it",
                    sequence.id
                )));
            }
        }
        Ok(())
    }

    fn entry_index(&self, table: &[BlockId], position: u32) -> usize {
        let block = table[(position / self.block_size) as usize];
        self.entry(block, position % self.block_size)
    }

    fn entry(&self, block: BlockId, offset: u32) -> usize {
        block.index() * self.block_size as usize + offset as usize
    }
}

/// The entry of the chain after `token`.
fn chain(previous: u64, token: TokenId) -> u64 {
    let step = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(u64::from(token) + 1);
    mix(previous.wrapping_add(step))
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn token_of(entry: u64, vocab_size: u32) -> TokenId {
    (entry % u64::from(vocab_size)) as TokenId
}

fn candidates_of(entry: u64, vocab_size: u32, num: usize) -> Vec<BeamCandidate> {
    let unit = (1 + (entry >> 32) % 7) as f32 / 8.0;
    let named = (0..vocab_size).take(num).map(|rank| BeamCandidate {
        token: token_of(entry.wrapping_add(u64::from(rank)), vocab_size),
        log_prob: -((rank + 1) as f32) * unit,
    });
    named.collect()
}

/// Returns `duration_us` after `started`: sleeps for most of that time, and spins at the end.
fn wait_until(started: Instant, duration_us: f64) {
    let duration = Duration::from_nanos((duration_us * 1e3) as u64);
    if let Some(asleep) = duration.checked_sub(started.elapsed() + SLEEP_SLACK) {
        thread::sleep(asleep);
    }
    while started.elapsed() < duration {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_hash_gives_these_tokens() {
        // Computed in Python from the four lines in the documentation of the module.
        for (tokens, small, large) in [
            (&[0][..], 15_535, 1_564_374_505),
            (&[1, 2, 3], 20_132, 3_249_525_122),
            (&[31_999; 5], 11_168, 1_221_551_158),
        ] {
            assert_eq!(next_token(tokens, 32_000), small);
            assert_eq!(next_token(tokens, u32::MAX), large);
        }
    }

    #[test]
    fn a_step_takes_its_time() {
        for duration_us in [0.0, 50.0, 2_000.0] {
            let started = Instant::now();
            wait_until(started, duration_us);
            let took_us = started.elapsed().as_secs_f64() * 1e6;
            assert!(took_us >= duration_us, "{took_us} < {duration_us}");
        }
    }
}
