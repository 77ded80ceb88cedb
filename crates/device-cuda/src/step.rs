//! One upload of everything that a step needs from the host.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use super::adapters::{AdapterTile, AdapterTiles, NUM_KINDS, TILE_WORDS};
use super::attention_tiles::{TileLists, WorkLists};
use super::gemm::{MAX_ROUNDING, rounded_rows};
use super::graphs::GraphShape;
use super::logits::{SAMPLING_ROW_WORDS, SamplingRow};
use super::memory::UploadBuffer;
use super::recurrent_spans::{SAVED_WORDS, SPAN_WORDS, span_words};
use inflight_base::{BlockId, LoadError};
use inflight_device::{GroupBlocks, KvBatch, KvSpan, StepCapacity, StepInputs};
use inflight_sampling::ChangeLists;

/// A slot of a token whose key and value are not stored, and a block that is not read: `NOWHERE` of the kernels.
const NOWHERE: u32 = u32::MAX;

/// Marks a word of the token ids that is not a token but a row of what the step before has sampled: `IN_FLIGHT` of the
/// kernels.
const IN_FLIGHT: u32 = 1 << 31;

/// Lists begin at multiples of 16 bytes.
const WORDS_PER_UNIT: usize = 4;

/// The memory that steps are uploaded through, `u32` words.
///
/// ```text
/// | number of tokens | token ids | positions | slots, by group of layers | kept rows | sampled rows |
/// | sequences with recurrent states | sampling of the sampled rows | lists of attention tiles | block tables |
/// | changes of logits | tiles of adapters: of all rows, kept rows, sampled rows | recurrent states that are saved |
/// ```
///
/// Lists up to those of the tiles begin at places that only the numbers of rows decide, and tiles say where their block
/// tables begin, sampling where its changes do, sequences where their saved states do: so steps of one [`GraphShape`]
/// have the same addresses.
pub(super) struct StepBuffer {
    upload: UploadBuffer,
    lists: TileLists,
    /// Whether the device samples from each of the sampled rows.
    is_sampled: Vec<bool>,
    max_seq_len: usize,
    /// Whether layers have recurrent states.
    has_states: bool,
}

/// A step on a GPU: the addresses of its arrays. The default is that of a step that could not be uploaded.
#[derive(Default)]
pub struct CudaStep {
    /// What a graph for it depends on, if there may be one: then numbers of rows are rounded up.
    pub(super) shape: Option<GraphShape>,
    /// With a shape: entries of attention's list that a step of this shape has at most.
    pub(super) max_entries: usize,
    pub(super) num_rows: usize,
    pub(super) num_kept: usize,
    pub(super) num_sampled: usize,
    /// Whether every row is kept, so that none has to move.
    pub(super) keeps_all: bool,
    /// Whether every kept row is sampled.
    pub(super) samples_all: bool,
    /// The number of tokens.
    pub(super) num_tokens: u64,
    pub(super) token_ids: u64,
    pub(super) positions: u64,
    slots: u64,
    pub(super) kept_rows: u64,
    pub(super) sampled_rows: u64,
    /// How tokens are sampled; 0 if the host samples all.
    pub(super) sampling: u64,
    /// The words that sampling and sequences count their lists from.
    pub(super) words: u64,
    /// The sequences in layers with recurrent states.
    pub(super) recurrent_spans: u64,
    /// Sequences there, without content behind those of the step; 0 if no layer has a state.
    pub(super) num_recurrent_spans: usize,
    block_tables: u64,
    pub(super) lists: WorkLists,
    /// Of all rows, of kept rows, and of sampled rows.
    pub(super) adapters: [AdapterTiles; NUM_KINDS],
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
        num_state_slots: usize,
    ) -> Result<Self, LoadError> {
        let tables = capacity
            .max_num_sequences
            .saturating_mul(capacity.max_blocks_per_sequence);
        let num_words = ((4 + capacity.num_layer_groups + SAMPLING_ROW_WORDS)
            * (capacity.max_num_tokens + MAX_ROUNDING))
            .saturating_add(tables)
            .saturating_add(lists.max_words())
            .saturating_add(ChangeLists::max_words(
                capacity.max_num_sequences,
                capacity.max_seq_len,
            ))
            .saturating_add(max_adapter_words(capacity))
            .saturating_add(max_state_words(capacity, num_state_slots))
            .saturating_add(16 * WORDS_PER_UNIT);
        Ok(Self {
            upload: UploadBuffer::new(stream, num_words)?,
            lists,
            is_sampled: Vec::with_capacity(capacity.max_num_tokens),
            max_seq_len: capacity.max_seq_len,
            has_states: num_state_slots > 0,
        })
    }

    /// Uploads a step, for a graph if it is a generation step without adapters and `may_have_graph`.
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
        adapters: [&[AdapterTile]; NUM_KINDS],
        may_have_graph: bool,
    ) -> Result<CudaStep, DriverError> {
        self.lists.set(batch);
        let shape = may_have_graph.then(|| self.shape(inputs)).flatten();
        let num_tokens = inputs.token_ids.len();
        let num_rows = shape.map_or(num_tokens, |shape| shape.num_rows);
        let padding = num_rows - num_tokens;
        let mut writer = Writer {
            words: self.upload.staging()?,
            len: 0,
        };
        let padded = |word| std::iter::repeat_n(word, padding);
        let num_tokens_word = writer.list([num_tokens as u32]);
        let mut in_flight = inputs.in_flight.iter().peekable();
        let token_ids = (0..).zip(inputs.token_ids).map(|(index, &token)| {
            let source = in_flight.next_if(|it| it.token == index);
            source.map_or(token, |it| IN_FLIGHT | it.sampled_row)
        });
        let token_ids = writer.list(token_ids.chain(padded(0)));
        let positions = batch.spans().iter().flat_map(|span| {
            let start = span.kv_len - span.tokens.len() as u32;
            start..span.kv_len
        });
        let positions = writer.list(positions.chain(padded(0)));
        let block_size = batch.block_size().tokens().0;
        let slots = (0..batch.num_groups()).flat_map(|group| {
            let slots = batch.spans().iter().flat_map(move |span| {
                let table = batch.block_table(span, group);
                let start = span.kv_len - span.tokens.len() as u32;
                (start..span.kv_len).map(move |position| slot(table, position, block_size))
            });
            slots.chain(padded(NOWHERE))
        });
        let slots = writer.list(slots);
        let kept_rows = writer.list(inputs.kept_rows.iter().copied().chain(padded(0)));
        let sampled_rows = writer.list(inputs.sampled_rows.iter().copied().chain(padded(0)));
        self.is_sampled.clear();
        self.is_sampled
            .extend(inputs.sampling.iter().map(Option::is_some));
        let samples = self.is_sampled.contains(&true) || shape.is_some();
        let sampling = inputs.sampling.iter().copied();
        let sampling = sampling.chain(std::iter::repeat(None));
        let num_sampled = inputs.sampled_rows.len() + padding;
        let num_sampling_rows = if samples { num_sampled } else { 0 };
        let sampling = sampling.take(num_sampling_rows);
        // Where lists will be, for what says so: block tables follow the lists of attention, then come changes of
        // logits, tiles of adapters and saved states.
        let num_recurrent_spans = match self.has_states {
            true => shape.map_or(batch.spans().len(), |shape| shape.num_rows),
            false => 0,
        };
        let num_sampling_words = num_sampling_rows * SAMPLING_ROW_WORDS;
        let sampling_list = next_list(writer.next_list() + num_recurrent_spans * SPAN_WORDS);
        let start = next_list(sampling_list + num_sampling_words) + self.lists.num_words();
        let spans = batch.spans().iter();
        let num_table_words: usize = spans.map(|span| span.block_table.len()).sum();
        let change_lists = next_list(start + num_table_words);
        let saved_states = adapters.iter().fold(
            next_list(change_lists + inputs.change_lists.len()),
            |at, tiles| next_list(at + TILE_WORDS * tiles.len()),
        );
        let recurrent_spans = (0..num_recurrent_spans).flat_map(|index| {
            let span = batch.spans().get(index);
            let first_saved = saved_states / SAVED_WORDS;
            span.map_or([0; SPAN_WORDS], |span| {
                span_words(inputs, index, span, first_saved)
            })
        });
        let recurrent_spans = writer.list(recurrent_spans);
        let sampling = sampling.map(|it| SamplingRow::new(it, change_lists as u32));
        let sampling =
            writer.list(sampling.flat_map(bytemuck::cast::<_, [u32; SAMPLING_ROW_WORDS]>));
        let table_of = |span: &KvSpan| {
            let blocks = span.block_table.start as usize..span.block_table.end as usize;
            &inputs.block_tables[blocks]
        };
        let tables = batch.spans().iter().flat_map(table_of).copied();
        // Tiles are whole units, so nothing comes between the lists.
        self.lists.move_block_tables(start as u32);
        let [generation, context] = self.lists.words().map(|words| writer.list(words));
        let tables = writer.list(tables.map(word));
        assert_eq!(tables, start, "the block tables follow the lists");
        let changes = writer.words(inputs.change_lists);
        assert_eq!(changes, change_lists, "the changes follow the block tables");
        let adapter_tiles = adapters.map(|tiles| writer.words(bytemuck::cast_slice(tiles)));
        let saved = inputs.saved_states.iter();
        let saved = writer.list(saved.flat_map(|saved| [saved.token, saved.slot]));
        assert_eq!(saved, saved_states, "saved states follow the adapters");
        let num_words = writer.len;
        self.upload.upload(stream, num_words)?;
        let address = |word| self.upload.address(word);
        Ok(CudaStep {
            shape,
            max_entries: self.lists.max_entries(num_rows, self.max_seq_len),
            num_rows,
            num_kept: inputs.kept_rows.len() + padding,
            num_sampled,
            keeps_all: inputs.kept_rows.len() == num_tokens,
            samples_all: inputs.sampled_rows.len() == inputs.kept_rows.len(),
            num_tokens: address(num_tokens_word),
            token_ids: address(token_ids),
            positions: address(positions),
            slots: address(slots),
            kept_rows: address(kept_rows),
            sampled_rows: address(sampled_rows),
            sampling: if samples { address(sampling) } else { 0 },
            words: address(0),
            recurrent_spans: address(recurrent_spans),
            num_recurrent_spans,
            block_tables: address(0),
            lists: self.lists.at(address(generation), address(context)),
            adapters: [
                (inputs.token_ids.len(), adapter_tiles[0], adapters[0]),
                (inputs.kept_rows.len(), adapter_tiles[1], adapters[1]),
                (inputs.sampled_rows.len(), adapter_tiles[2], adapters[2]),
            ]
            .map(|(num_rows, word, tiles)| AdapterTiles {
                num_rows,
                address: address(word),
                num_tiles: tiles.len(),
            }),
        })
    }

    /// The shape of the graph for a step whose lists are set, if it is a generation step.
    fn shape(&self, inputs: &StepInputs<'_>) -> Option<GraphShape> {
        let num_rows = inputs.token_ids.len();
        let is_generation = self.lists.is_generation()
            && inputs.spans.len() == num_rows
            && inputs.kept_rows.len() == num_rows
            && inputs.sampled_rows.len() == num_rows
            && inputs.adapters.is_empty()
            && !inputs.has_context_logits;
        (is_generation && num_rows > 0).then(|| GraphShape {
            num_rows: rounded_rows(num_rows),
            has_several_splits: self.lists.has_several_splits(),
        })
    }

    /// Whether the device samples from each of the last step's sampled rows. Empty: from none.
    pub fn is_sampled(&self) -> &[bool] {
        &self.is_sampled
    }
}

impl CudaStep {
    /// Where the keys and values of all rows are stored in layers of a group.
    pub fn slots(&self, group: usize) -> u64 {
        self.slots + (size_of::<u32>() * group * self.num_rows) as u64
    }

    /// What tiles count the blocks of a group of layers from.
    pub fn block_tables(&self, group: usize) -> u64 {
        self.block_tables + (size_of::<u32>() * group) as u64
    }
}

impl Writer<'_> {
    /// Writes a list; returns the index of its first word.
    fn list(&mut self, words: impl IntoIterator<Item = u32>) -> usize {
        let start = self.next_list();
        self.len = start;
        for word in words {
            self.words[self.len] = word;
            self.len += 1;
        }
        start
    }

    /// The same for words that lie one behind the other.
    fn words(&mut self, words: &[u32]) -> usize {
        let start = self.next_list();
        self.len = start + words.len();
        self.words[start..self.len].copy_from_slice(words);
        start
    }

    /// The index of the first word of the next list.
    fn next_list(&self) -> usize {
        next_list(self.len)
    }
}

/// Words of the tiles of adapters: in the worst case each row has a tile of its own, is kept, and is sampled from.
fn max_adapter_words(capacity: &StepCapacity) -> usize {
    match capacity.adapters.max_rank {
        0 => 0,
        _ => NUM_KINDS * TILE_WORDS * capacity.max_num_tokens,
    }
}

/// Words of the sequences in layers with recurrent states, and of the states that are saved.
fn max_state_words(capacity: &StepCapacity, num_state_slots: usize) -> usize {
    match num_state_slots {
        0 => 0,
        num_slots => {
            SPAN_WORDS * (capacity.max_num_sequences + MAX_ROUNDING) + SAVED_WORDS * num_slots
        }
    }
}

/// Where a list begins that follows this many words.
fn next_list(num_words: usize) -> usize {
    num_words.next_multiple_of(WORDS_PER_UNIT)
}

/// Where the key and the value at a position are stored.
fn slot(table: GroupBlocks<'_>, position: u32, block_size: u32) -> u32 {
    match table.at((position / block_size) as usize) {
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
