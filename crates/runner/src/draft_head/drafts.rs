//! The drafts of a step.

use super::head_layer::HeadLayer;
use super::head_step::{HeadOutputs, HeadStep};
use super::shared::SharedWeights;
use super::source::HeadSource;
use super::state_store::StateStore;
use crate::block_moves::move_device_blocks;
use crate::draft_model::{most_likely, places_of};
use crate::layer_attention::kv_layouts;
use crate::limits::RunnerLimits;
use inflight_base::{BlockId, LoadError, StepError, TokenId, Tokens};
use inflight_device::{AdapterCapacity, Device, KvSpan, LayerGroups, StepCapacity, StepInputs};
use inflight_engine::{DraftsToMake, Step};

/// A head on a device, with a KV cache of one layer, and the states of the model.
pub(crate) struct DraftHead<D: Device> {
    device: D,
    layer: HeadLayer<D>,
    width: usize,
    limits: RunnerLimits,
    cache: D::KvCache,
    host_blocks: D::HostBlocks,
    states: StateStore,
    /// Of the step that the model computes.
    new_states: Vec<f32>,
    /// `[max_num_requests, draft_vocab_size]`.
    logits: D::Logits,
    pass: Pass,
    /// The drafts of a step, one sequence after the other.
    drafts: Vec<TokenId>,
    /// For each sequence of a step, the state that its layer gave last, `[num_sequences, width]`.
    own_states: Vec<f32>,
    /// The rows of the pass, `[num_wanted, width]`.
    out_states: Vec<f32>,
}

/// Tokens that are computed together.
#[derive(Default)]
struct Pass {
    token_ids: Vec<TokenId>,
    /// The states that they follow, `[num_tokens, width]`.
    states: Vec<f32>,
    spans: Vec<KvSpan>,
    /// The blocks of their keys and values.
    written: Vec<BlockId>,
    /// The tokens that drafts follow.
    kept_rows: Vec<u32>,
    /// For each of them, its sequence, by its place in the step, and the place of the draft.
    wanted: Vec<(usize, usize)>,
}

impl<D: Device> DraftHead<D> {
    /// Loads a head for a model with these limits.
    pub(crate) fn new(
        source: &HeadSource,
        limits: &RunnerLimits,
        options: &D::Options,
        ops: D::States,
    ) -> Result<Self, LoadError> {
        let spec = source.spec();
        let mut device = D::open(options)?;
        let layer = HeadLayer::load(source, limits, &mut device, ops)?;
        let layouts = kv_layouts(spec, limits.block_size, limits.kv_dtype);
        let groups = LayerGroups::one(1);
        let cache = device.alloc_kv_cache(&layouts, &groups, limits.num_blocks.index())?;
        let host_blocks = device.alloc_host_blocks(&cache, limits.num_host_blocks.index())?;
        let max_rows = limits.max_num_tokens.index();
        let max_sequences = limits.max_num_requests as usize;
        device.reserve(
            &cache,
            &StepCapacity {
                max_num_tokens: max_rows,
                max_num_sequences: max_sequences,
                max_seq_len: limits.max_seq_len.index(),
                max_blocks_per_sequence: limits.max_seq_len.blocks_ceil(limits.block_size).index(),
                num_q_heads: spec.num_heads,
                has_slopes: false,
                adapters: AdapterCapacity::default(),
                num_layer_groups: 1,
            },
        )?;
        let width = spec.hidden_size;
        let num_logits = max_sequences.min(max_rows);
        Ok(Self {
            logits: device.alloc_logits(num_logits, source.draft_vocab_size())?,
            layer,
            width,
            states: StateStore::new(width, limits)?,
            new_states: Vec::new(),
            limits: limits.clone(),
            cache,
            host_blocks,
            pass: Pass::default(),
            drafts: Vec::new(),
            own_states: Vec::new(),
            out_states: Vec::new(),
            device,
        })
    }

    /// Keeps the states of the tokens of a step that the model has computed; `read` writes them.
    pub(crate) fn keep_states(&mut self, inputs: StepInputs<'_>, read: impl FnOnce(&mut Vec<f32>)) {
        read(&mut self.new_states);
        self.states
            .store(inputs.spans, inputs.block_tables, &self.new_states);
    }

    /// Makes the block moves of a step, and the drafts that it asks for. `shared` are weights of the model.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn make<'e>(
        &mut self,
        step: &mut Step,
        shared: impl Fn() -> SharedWeights<'e, D>,
    ) -> Result<(), StepError>
    where
        D: 'e,
    {
        let moves = step.moves();
        let (cache, host_blocks) = (&mut self.cache, &mut self.host_blocks);
        move_device_blocks(&mut self.device, moves, cache, host_blocks);
        self.states.move_blocks(moves);
        let all: Vec<_> = step.drafts_to_make().collect();
        if all.is_empty() {
            return Ok(());
        }
        let places: Vec<_> = places_of(&all).collect();
        self.drafts.clear();
        self.drafts.resize(places.last().map_or(0, |it| it.end), 0);
        self.own_states.resize(all.len() * self.width, 0.0);
        let tables = step.block_tables();
        for (index, to_make) in all.iter().enumerate() {
            let table = table_of(to_make, tables);
            // The first token of a sequence follows no state.
            let num_skipped = usize::from(to_make.start == 0);
            let mut position = to_make.start as usize + num_skipped;
            let mut tokens = &to_make.tokens[num_skipped..];
            while !tokens.is_empty() {
                let room = self.limits.max_num_tokens.index() - self.pass.token_ids.len();
                let (now, later) = tokens.split_at(room.min(tokens.len()));
                if now.is_empty() || self.overlaps(table, position, now.len()) {
                    self.compute(&all, tables, shared())?;
                    continue;
                }
                for state in position - 1..position - 1 + now.len() {
                    self.states.append(table, state, &mut self.pass.states);
                }
                self.push(to_make, table, now, position);
                position += now.len();
                tokens = later;
            }
            self.pass.want((index, places[index].start));
        }
        self.compute(&all, tables, shared())?;
        let most = all.iter().map(|it| it.num_drafts).max().unwrap_or(0) as usize;
        for pass in 1..most {
            for (index, to_make) in all.iter().enumerate() {
                if pass >= to_make.num_drafts as usize {
                    continue;
                }
                let place = places[index].start + pass;
                let position = to_make.start as usize + to_make.tokens.len() + pass - 1;
                let own = &self.own_states[index * self.width..][..self.width];
                self.pass.states.extend_from_slice(own);
                let before = self.drafts[place - 1];
                self.push(to_make, table_of(to_make, tables), &[before], position);
                self.pass.want((index, place));
            }
            self.compute(&all, tables, shared())?;
        }
        step.set_drafts(&self.drafts);
        Ok(())
    }

    /// Whether the pass writes to blocks that these tokens are written to as well: those of a shared prefix.
    fn overlaps(&self, table: &[BlockId], position: usize, num_tokens: usize) -> bool {
        let written = &self.pass.written;
        let mut blocks = self.blocks_of(table, position, num_tokens).iter();
        blocks.any(|block| written.contains(block))
    }

    /// The blocks of the keys and values of tokens.
    fn blocks_of<'t>(&self, table: &'t [BlockId], position: usize, num: usize) -> &'t [BlockId] {
        let block_size = self.limits.block_size.tokens().index();
        let first = position - 1;
        &table[first / block_size..=(first + num - 1) / block_size]
    }

    /// Appends tokens of one sequence, the first of which is at `position`, and whose states are appended.
    fn push(
        &mut self,
        to_make: &DraftsToMake<'_>,
        table: &[BlockId],
        tokens: &[TokenId],
        position: usize,
    ) {
        // Entries of the KV cache have the positions of states.
        let kv_len = (position - 1 + tokens.len()) as u32;
        let num_blocks = Tokens(kv_len).blocks_ceil(self.limits.block_size);
        let written = self.blocks_of(table, position, tokens.len());
        self.pass.written.extend_from_slice(written);
        let first = self.pass.token_ids.len() as u32;
        self.pass.token_ids.extend_from_slice(tokens);
        let start = to_make.block_table.start;
        self.pass.spans.push(KvSpan {
            tokens: first..first + tokens.len() as u32,
            kv_len,
            block_table: start..start + num_blocks.0,
        });
    }

    /// Computes what was pushed, and takes the drafts and the states that are wanted.
    fn compute(
        &mut self,
        all: &[DraftsToMake<'_>],
        block_tables: &[BlockId],
        shared: SharedWeights<'_, D>,
    ) -> Result<(), StepError> {
        let num_wanted = self.forward(block_tables, shared);
        if num_wanted > 0 {
            let results = self.device.results(&mut self.logits, num_wanted)?;
            let token_of = |own: u32| self.layer.token_of(own);
            let rows = results
                .logits
                .chunks_exact(results.logits.len() / num_wanted);
            let states = self.out_states.chunks_exact(self.width);
            let wanted = self.pass.wanted.iter();
            for ((&(sequence, place), logits), state) in wanted.zip(rows).zip(states) {
                let to_make = &all[sequence];
                let draft = most_likely(logits, |own| !to_make.is_end(token_of(own)));
                self.drafts[place] = token_of(draft);
                self.own_states[sequence * self.width..][..self.width].copy_from_slice(state);
            }
        }
        self.pass.clear();
        Ok(())
    }

    /// The forward pass. Returns the number of rows of logits.
    fn forward(&mut self, block_tables: &[BlockId], shared: SharedWeights<'_, D>) -> usize {
        let Self {
            device,
            layer,
            cache,
            logits,
            pass,
            out_states,
            ..
        } = self;
        let num_wanted = pass.kept_rows.len();
        let sampled_rows: Vec<_> = (0..num_wanted as u32).collect();
        let inputs = StepInputs {
            token_ids: &pass.token_ids,
            spans: &pass.spans,
            block_tables,
            kept_rows: &pass.kept_rows,
            sampled_rows: &sampled_rows,
            ..StepInputs::default()
        };
        let step = device.begin_step(cache, inputs);
        out_states.resize(num_wanted * self.width, 0.0);
        layer.compute(
            device,
            cache,
            HeadStep {
                step: &step,
                inputs,
                states: &pass.states,
                shared,
            },
            HeadOutputs {
                logits,
                states: out_states,
            },
        );
        device.end_step(step);
        num_wanted
    }
}

impl Pass {
    /// The last token that was pushed is followed by this draft.
    fn want(&mut self, draft: (usize, usize)) {
        self.kept_rows.push(self.token_ids.len() as u32 - 1);
        self.wanted.push(draft);
    }

    fn clear(&mut self) {
        self.token_ids.clear();
        self.states.clear();
        self.spans.clear();
        self.written.clear();
        self.kept_rows.clear();
        self.wanted.clear();
    }
}

/// The blocks of a sequence.
fn table_of<'t>(to_make: &DraftsToMake<'_>, tables: &'t [BlockId]) -> &'t [BlockId] {
    &tables[to_make.block_table.start as usize..to_make.block_table.end as usize]
}
