//! One upload of everything that a step needs from the host.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use super::attention_tiles::{TileLists, WorkLists};
use super::logits::{SAMPLING_ROW_WORDS, SamplingRow};
use super::memory::UploadBuffer;
use crate::base::{BlockId, LoadError};
use crate::device::{KvBatch, StepCapacity, StepInputs};

/// A slot of a token whose key and value are not stored, and a block that is not read: `NOWHERE` of the kernels.
const NOWHERE: u32 = u32::MAX;

/// Lists begin at multiples of 16 bytes.
const WORDS_PER_UNIT: usize = 4;

/// The memory that steps are uploaded through, `u32` words.
///
/// ```text
/// | token ids | positions | slots | kept rows | sampled rows | sampling of these | block tables | lists of attention tiles |
/// ```
pub(super) struct StepBuffer {
    upload: UploadBuffer,
    lists: TileLists,
    /// Whether the device samples from each of the sampled rows.
    is_sampled: Vec<bool>,
}

/// A step on a GPU: the addresses of its arrays. The default is that of a step that could not be uploaded.
#[derive(Default)]
pub struct CudaStep {
    pub(super) num_rows: usize,
    pub(super) num_kept: usize,
    pub(super) num_sampled: usize,
    /// Whether every row is kept, so that none has to move.
    pub(super) keeps_all: bool,
    /// Whether every kept row is sampled.
    pub(super) samples_all: bool,
    pub(super) token_ids: u64,
    pub(super) positions: u64,
    pub(super) slots: u64,
    pub(super) kept_rows: u64,
    pub(super) sampled_rows: u64,
    /// How tokens are sampled; 0 if the host samples all.
    pub(super) sampling: u64,
    pub(super) block_tables: u64,
    pub(super) lists: WorkLists,
}

/// Writes words one after the other.
struct Writer<'a> {
    words: &'a mut [u32],
    len: usize,
}

impl StepBuffer {
    /// Reserves memory for the largest step.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn new(
        stream: &Arc<CudaStream>,
        capacity: &StepCapacity,
        lists: TileLists,
    ) -> Result<Self, LoadError> {
        let tables = capacity
            .max_num_sequences
            .saturating_mul(capacity.max_blocks_per_sequence);
        let num_words = ((5 + SAMPLING_ROW_WORDS) * capacity.max_num_tokens)
            .saturating_add(tables)
            .saturating_add(lists.max_words())
            .saturating_add(9 * WORDS_PER_UNIT);
        Ok(Self {
            upload: UploadBuffer::new(stream, num_words)?,
            lists,
            is_sampled: Vec::with_capacity(capacity.max_num_tokens),
        })
    }

    /// Uploads a step, once the last one has been read.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    ///
    /// # Panics
    ///
    /// The step is larger than the memory was reserved for.
    pub fn upload(
        &mut self,
        stream: &CudaStream,
        batch: &KvBatch<'_>,
        inputs: &StepInputs<'_>,
    ) -> Result<CudaStep, DriverError> {
        let mut writer = Writer {
            words: self.upload.staging()?,
            len: 0,
        };
        let num_rows = inputs.token_ids.len();
        let token_ids = writer.list(inputs.token_ids.iter().copied());
        let positions = writer.list(batch.spans().iter().flat_map(|span| {
            let start = span.kv_len - span.tokens.len() as u32;
            start..span.kv_len
        }));
        let block_size = batch.block_size().tokens().0;
        let slots = writer.list(batch.spans().iter().flat_map(|span| {
            let table = batch.block_table(span);
            let start = span.kv_len - span.tokens.len() as u32;
            (start..span.kv_len).map(move |position| slot(table, position, block_size))
        }));
        let kept_rows = writer.list(inputs.kept_rows.iter().copied());
        let sampled_rows = writer.list(inputs.sampled_rows.iter().copied());
        self.is_sampled.clear();
        self.is_sampled
            .extend(inputs.sampling.iter().map(Option::is_some));
        let samples = self.is_sampled.contains(&true);
        let sampling = inputs.sampling.iter().filter(|_| samples);
        let sampling = sampling.map(|&row| SamplingRow::new(row));
        let sampling = writer
            .list(sampling.flat_map(|row| bytemuck::cast::<_, [u32; SAMPLING_ROW_WORDS]>(row)));
        let tables = batch
            .spans()
            .iter()
            .flat_map(|span| batch.block_table(span));
        let block_tables = writer.list(tables.map(|&block| word(block)));
        self.lists.set(batch);
        let [generation, context] = self.lists.words().map(|words| writer.list(words));
        let num_words = writer.len;
        self.upload.upload(stream, num_words)?;
        let address = |word| self.upload.address(word);
        Ok(CudaStep {
            num_rows,
            num_kept: inputs.kept_rows.len(),
            num_sampled: inputs.sampled_rows.len(),
            keeps_all: inputs.kept_rows.len() == num_rows,
            samples_all: inputs.sampled_rows.len() == inputs.kept_rows.len(),
            token_ids: address(token_ids),
            positions: address(positions),
            slots: address(slots),
            kept_rows: address(kept_rows),
            sampled_rows: address(sampled_rows),
            sampling: if samples { address(sampling) } else { 0 },
            block_tables: address(block_tables),
            lists: self.lists.at(address(generation), address(context)),
        })
    }

    /// Whether the device samples from each of the last step's sampled rows. Empty: from none.
    pub fn is_sampled(&self) -> &[bool] {
        &self.is_sampled
    }
}

impl Writer<'_> {
    /// Writes a list; returns the index of its first word.
    fn list(&mut self, words: impl IntoIterator<Item = u32>) -> usize {
        let start = self.len.next_multiple_of(WORDS_PER_UNIT);
        self.len = start;
        for word in words {
            self.words[self.len] = word;
            self.len += 1;
        }
        start
    }
}

/// Where the key and the value at a position are stored.
fn slot(table: &[BlockId], position: u32, block_size: u32) -> u32 {
    match table[(position / block_size) as usize] {
        BlockId::NONE => NOWHERE,
        block => block.index() as u32 * block_size + position % block_size,
    }
}

fn word(block: BlockId) -> u32 {
    match block {
        BlockId::NONE => NOWHERE,
        block => block.index() as u32,
    }
}
