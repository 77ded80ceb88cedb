//! The active sequences: who runs, is paused or waits, and the KV blocks that they hold.
//!
//! ```text
//! enqueue ---> queue ---> start: running, in order of rank ---> end
//!                ^                   |
//!                +------ pause ------+
//! ```

use std::collections::BTreeSet;
use std::ops::Range;

use crate::adapter_pages::AdapterPages;
use crate::image::PromptImages;
use crate::image_cache::ImageCache;
use crate::image_keys::ImageKeys;
use crate::kv::{BlockTable, KvCacheManager, NextBlock};
use crate::queue::{Arrival, Queue, QueueCursor, QueueEntry};
use crate::sequence::{Rank, Sequence};
use crate::sequence_table::SequenceTable;
use crate::sequence_tokens::SequenceTokens;
use crate::{EngineConfig, Event, NewRequest, ReuseOptions, Speculation};
use inflight_base::{BlockSize, Blocks, RequestError, SeqSlot, SequenceId, TokenId, Tokens};

/// All sequences that have not ended, and the KV cache that they share.
pub(super) struct ActiveSequences {
    table: SequenceTable,
    kv: KvCacheManager,
    adapters: AdapterPages,
    image_keys: ImageKeys,
    /// `None` if prompts have no images.
    images: Option<ImageCache>,
    /// In order of rank.
    running: Vec<SeqSlot>,
    queue: Queue,
    /// Cancelled while a step with them is out, or ended while one that was planned ahead is. They hold their rows and
    /// blocks until it lands.
    cancelled: Vec<SeqSlot>,
    num_admitted: u64,
    block_size: BlockSize,
    /// Groups of layers.
    num_groups: u32,
    max_beam_width: u32,
}

impl ActiveSequences {
    /// No sequences.
    pub(super) fn new(config: &EngineConfig) -> Self {
        let max_rows = config.max_rows();
        Self {
            table: SequenceTable::new(max_rows),
            kv: KvCacheManager::new(config.kv_cache()),
            adapters: AdapterPages::new(config.num_adapter_pages),
            // The prefix index can hardly hold more images than blocks, and forgetting one only loses reuse.
            image_keys: ImageKeys::new((config.num_blocks + config.num_host_blocks).index()),
            images: config.images.map(ImageCache::new),
            running: Vec::with_capacity(max_rows as usize),
            queue: Queue::new(max_rows as usize),
            cancelled: Vec::new(),
            num_admitted: 0,
            block_size: config.block_size,
            num_groups: config.groups.num_groups() as u32,
            max_beam_width: config.max_beam_width,
        }
    }

    /// Queues a request.
    pub(super) fn enqueue(&mut self, request: NewRequest) {
        self.queue.push(request);
    }

    /// Whether a sequence has not ended, and was not cancelled.
    pub(super) fn contains(&self, id: SequenceId) -> bool {
        self.is_admitted(id) || self.queue.waiting_ids().any(|waiting| waiting == id)
    }

    /// Whether a sequence runs or is paused.
    pub(super) fn is_admitted(&self, id: SequenceId) -> bool {
        self.table.find(id).is_some()
    }

    /// A sequence that runs or is paused.
    pub(super) fn find(&self, id: SequenceId) -> Option<&Sequence> {
        Some(&self.table[self.table.find(id)?])
    }

    /// The same, to be changed.
    pub(super) fn find_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        let slot = self.table.find(id)?;
        Some(&mut self.table[slot])
    }

    /// The sequence in `slot`.
    #[inline]
    pub(super) fn sequence(&self, slot: SeqSlot) -> &Sequence {
        &self.table[slot]
    }

    /// The sequence in `slot`, if there is one, and the KV cache that it takes its blocks from.
    #[inline]
    pub(super) fn get_mut(
        &mut self,
        slot: SeqSlot,
    ) -> Option<(&mut Sequence, &mut KvCacheManager)> {
        Some((self.table.get_mut(slot)?, &mut self.kv))
    }

    /// The same for a sequence that is there.
    #[inline]
    pub(super) fn sequence_mut(&mut self, slot: SeqSlot) -> (&mut Sequence, &mut KvCacheManager) {
        (&mut self.table[slot], &mut self.kv)
    }

    /// Calls `visit` with each running sequence, in order of rank.
    #[inline]
    pub(super) fn for_each_running(
        &mut self,
        mut visit: impl FnMut(SeqSlot, &mut Sequence, &mut KvCacheManager),
    ) {
        for &slot in &self.running {
            visit(slot, &mut self.table[slot], &mut self.kv);
        }
    }

    /// The running sequences, in order of rank.
    #[inline]
    pub(super) fn running(
        &self,
    ) -> impl DoubleEndedIterator<Item = (SeqSlot, &Sequence)> + ExactSizeIterator + Clone {
        self.running.iter().map(|&slot| (slot, &self.table[slot]))
    }

    /// Whether the step after the one that is out can be planned: of each sequence that is in it, the runner knows how
    /// it goes on, or it ends. And there is something to plan.
    pub(super) fn can_plan_ahead(&self) -> bool {
        let mut has_any = self.any_queued();
        for (_, sequence) in self.running() {
            if sequence.is_in_last_step() {
                continue;
            }
            if sequence.is_out() && sequence.sampling_ahead().is_none() {
                return false;
            }
            has_any = true;
        }
        has_any
    }

    /// The sequences that have ended, or were cancelled, while a step with them is out.
    pub(super) fn cancelled(&self) -> impl Iterator<Item = &Sequence> {
        self.cancelled.iter().map(|&slot| &self.table[slot])
    }

    /// The paused sequences, in order of rank.
    pub(super) fn paused(&self) -> impl Iterator<Item = &Sequence> {
        self.queue.paused().map(|(_, slot)| &self.table[slot])
    }

    /// The ids of the requests that have not started.
    pub(super) fn waiting_ids(&self) -> impl Iterator<Item = SequenceId> {
        self.queue.waiting_ids()
    }

    /// Sequences that have not ended.
    pub(super) fn len(&self) -> usize {
        self.running.len() + self.num_queued()
    }

    /// Whether no sequence is active.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty()
    }

    pub(super) fn num_running(&self) -> usize {
        self.running.len()
    }

    pub(super) fn num_paused(&self) -> usize {
        self.queue.num_paused()
    }

    /// The sequences that could have a row beside those that have one.
    pub(super) fn num_free_rows(&self) -> usize {
        self.table.num_free_rows()
    }

    /// Whether anything is paused or waits to start.
    pub(super) fn any_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// How many are paused or wait to start.
    pub(super) fn num_queued(&self) -> usize {
        self.queue.num_paused() + self.queue.num_waiting()
    }

    /// The next entry of the queue that could start and that `cursor` has not skipped.
    pub(super) fn next_queued(&self, cursor: &QueueCursor) -> Option<QueueEntry> {
        self.queue.next(cursor, self.table.has_free_row())
    }

    /// A request that has not started.
    pub(super) fn waiting(&self, arrival: Arrival) -> &NewRequest {
        self.queue.waiting(arrival)
    }

    /// The context of an entry of the queue, as prefix reuse compares it, which blocks it may share, and how many of
    /// its tokens may be reused.
    pub(super) fn context_of(&self, entry: QueueEntry) -> (&[TokenId], &ReuseOptions, Tokens) {
        match entry {
            QueueEntry::Paused(slot) => {
                let it = &self.table[slot];
                (it.stretch(), it.reuse(), it.tokens().max_reusable())
            }
            QueueEntry::Waiting(arrival) => {
                let request = self.queue.waiting(arrival);
                let keys = request.images.keys(&request.prompt);
                (keys, &request.reuse, request.max_reusable())
            }
        }
    }

    /// The KV cache.
    #[inline]
    pub(super) fn kv(&self) -> &KvCacheManager {
        &self.kv
    }

    /// The same, to be changed.
    pub(super) fn kv_mut(&mut self) -> &mut KvCacheManager {
        &mut self.kv
    }

    /// The rows of images; `None` if prompts have no images.
    pub(super) fn images(&self) -> Option<&ImageCache> {
        self.images.as_ref()
    }

    /// [`ActiveSequences::images`], to be changed.
    pub(super) fn images_mut(&mut self) -> Option<&mut ImageCache> {
        self.images.as_mut()
    }

    /// Gives the images of a prompt the numbers by which prefix reuse tells them apart.
    ///
    /// # Errors
    /// There are no more numbers.
    pub(super) fn set_keys(
        &mut self,
        prompt: &[TokenId],
        images: &mut PromptImages,
    ) -> Result<(), RequestError> {
        match images.set_keys(prompt, |hash| self.image_keys.key_of(hash)) {
            Some(()) => Ok(()),
            None => Err(RequestError::Busy(
                "the batch manager has seen too many images: load the model again".to_owned(),
            )),
        }
    }

    /// Has the step use the images at the positions `chunk` of the context in `slot`. Returns where the first image
    /// begins that it cannot have; `None`: it has all.
    pub(super) fn take_images(
        &mut self,
        slot: SeqSlot,
        chunk: Range<Tokens>,
        is_whole: bool,
    ) -> Option<Tokens> {
        let of_prompt = self.table[slot].tokens().images();
        self.images
            .as_mut()?
            .take_within(of_prompt, chunk, is_whole)
    }

    /// The images of an entry of the queue.
    pub(super) fn images_of_queued(&self, entry: QueueEntry) -> &PromptImages {
        match entry {
            QueueEntry::Paused(slot) => self.table[slot].tokens().images(),
            QueueEntry::Waiting(arrival) => &self.queue.waiting(arrival).images,
        }
    }

    /// [`ActiveSequences::take_images`] for an entry of the queue.
    pub(super) fn take_images_of_queued(
        &mut self,
        entry: QueueEntry,
        chunk: Range<Tokens>,
        is_whole: bool,
    ) -> Option<Tokens> {
        let of_prompt = match entry {
            QueueEntry::Paused(slot) => self.table[slot].tokens().images(),
            QueueEntry::Waiting(arrival) => &self.queue.waiting(arrival).images,
        };
        self.images
            .as_mut()?
            .take_within(of_prompt, chunk, is_whole)
    }

    /// The pages of adapters in flight.
    pub(super) fn adapters(&self) -> &AdapterPages {
        &self.adapters
    }

    /// Whether the pages of the adapter of an entry of the queue are there. `None` if it needs none: it has no adapter,
    /// or is paused and holds its adapter still.
    pub(super) fn has_pages(&self, entry: QueueEntry) -> Option<bool> {
        match entry {
            QueueEntry::Paused(_) => None,
            QueueEntry::Waiting(arrival) => {
                let adapter = self.queue.waiting(arrival).adapter.as_ref()?;
                Some(self.adapters.fits(adapter))
            }
        }
    }

    /// The first full block that the sequence in `slot` has still to write, if others will find it then.
    pub(super) fn next_block(&self, slot: SeqSlot) -> Option<NextBlock> {
        let sequence = &self.table[slot];
        self.kv.next_block(sequence.blocks(), sequence.stretch())
    }

    /// Forgets the moves that the planned step has taken along, see [`KvCacheManager::moves`].
    pub(super) fn clear_moves(&mut self) {
        self.kv.clear_moves();
    }

    /// Admits or resumes an entry of the queue, with the blocks of its whole context. An admission is appended to
    /// `events`.
    pub(super) fn start(
        &mut self,
        entry: QueueEntry,
        micro_batch: usize,
        speculation: Option<&Speculation>,
        events: &mut Vec<Event>,
    ) -> SeqSlot {
        let (slot, is_new) = match entry {
            QueueEntry::Paused(slot) => {
                self.queue.take_paused(slot);
                (slot, false)
            }
            QueueEntry::Waiting(arrival) => {
                let request = self.queue.take_waiting(arrival);
                (self.admit(request, speculation), true)
            }
        };
        let sequence = &mut self.table[slot];
        let states = slot.state_row(0, self.max_beam_width);
        sequence.start(states, micro_batch, &mut self.kv);
        if is_new {
            events.push(Event::Admitted(sequence.id(), sequence.computed()));
        }
        let rank = sequence.rank();
        let place = self
            .running
            .partition_point(|&other| self.table[other].rank() < rank);
        self.running.insert(place, slot);
        slot
    }

    /// Gives `request` a row.
    fn admit(&mut self, request: NewRequest, speculation: Option<&Speculation>) -> SeqSlot {
        // The only place where memory is allocated for its later tokens and blocks.
        let num_places = request.max_kv_len().blocks_ceil(self.block_size);
        let max_blocks = Blocks(num_places.0 * self.num_groups);
        if let Some(adapter) = &request.adapter {
            self.adapters.take(adapter);
        }
        let blocks = BlockTable::with_capacity(max_blocks);
        let rank = Rank {
            priority: request.priority,
            start: self.num_admitted,
        };
        self.num_admitted += 1;
        self.table
            .insert(Sequence::new(request, rank, blocks, speculation))
    }

    /// Takes the blocks of a running sequence, and queues it again.
    pub(super) fn pause(&mut self, slot: SeqSlot, events: &mut Vec<Event>) {
        self.running.retain(|&running| running != slot);
        let sequence = &mut self.table[slot];
        sequence.pause(&mut self.kv);
        events.push(Event::Paused(sequence.id()));
        self.queue.push_paused(sequence.rank(), slot);
    }

    /// Removes a sequence at once or, if a step with it is out, when [`end_cancelled`](Self::end_cancelled) sees it
    /// come back. Returns whether it was there.
    pub(super) fn cancel(&mut self, id: SequenceId) -> bool {
        let Some(slot) = self.table.find(id) else {
            return self.queue.drop_waiting(id);
        };
        self.running.retain(|&running| running != slot);
        self.queue.take_paused(slot);
        self.end(slot);
        true
    }

    /// Whether any sequence was cancelled, or has ended, while a step with it is out.
    #[inline]
    pub(super) fn any_cancelled(&self) -> bool {
        !self.cancelled.is_empty()
    }

    /// Takes a sequence back from its step, with its tokens if that has them, if it was cancelled or has ended
    /// meanwhile. Returns whether it was.
    pub(super) fn end_cancelled(
        &mut self,
        slot: SeqSlot,
        tokens: &mut Option<Box<SequenceTokens>>,
    ) -> bool {
        let Some(place) = self.cancelled.iter().position(|&it| it == slot) else {
            return false;
        };
        let sequence = &mut self.table[slot];
        sequence.come_back(tokens.take());
        if !sequence.is_out() {
            self.cancelled.swap_remove(place);
            self.end(slot);
        }
        true
    }

    /// Takes a sequence out of its row and releases its blocks; if a step with it is out, when
    /// [`end_cancelled`](Self::end_cancelled) sees it come back. If it was running, [`sweep`](Self::sweep) must follow.
    pub(super) fn end(&mut self, slot: SeqSlot) {
        if self.table[slot].is_out() {
            self.table.hide(slot);
            self.cancelled.push(slot);
            return;
        }
        let mut sequence = self.table.remove(slot);
        sequence.release(&mut self.kv);
        if let Some(adapter) = sequence.adapter() {
            self.adapters.release(adapter);
        }
    }

    /// Removes those that have ended from those that run.
    pub(super) fn sweep(&mut self) {
        let Self {
            running,
            table,
            cancelled,
            ..
        } = self;
        running.retain(|slot| table.is_taken(*slot) && !cancelled.contains(slot));
    }

    /// Ends all that run, after `visit` has seen each.
    pub(super) fn end_all_running(&mut self, mut visit: impl FnMut(&mut Sequence)) {
        let mut running = std::mem::take(&mut self.running);
        for slot in running.drain(..) {
            visit(&mut self.table[slot]);
            self.end(slot);
        }
        self.running = running;
    }

    /// Panics if the sequences or the KV cache contradict themselves, see
    /// [`Engine::check_integrity`](crate::Engine::check_integrity). It allocates, and costs a look at
    /// everything.
    pub(super) fn check_integrity(&self) {
        let tables = self
            .table
            .iter()
            .flat_map(|(_, sequence)| sequence.tables());
        self.kv.check_integrity(tables);
        if let Some(images) = &self.images {
            images.check_integrity();
        }
        let adapters = self.table.iter();
        self.adapters
            .check_integrity(adapters.filter_map(|(_, sequence)| sequence.adapter()));

        let paused = self.queue.paused().map(|(_, slot)| slot);
        let admitted: Vec<_> = self.running.iter().copied().chain(paused).collect();
        let slots: BTreeSet<_> = admitted.iter().copied().collect();
        assert_eq!(slots.len(), admitted.len(), "a row runs or is paused, once");

        let mut ids: BTreeSet<_> = self.queue.waiting_ids().collect();
        for (slot, sequence) in self.table.iter() {
            let id = sequence.id();
            let is_cancelled = self.cancelled.contains(&slot);
            assert_eq!(slots.contains(&slot), !is_cancelled, "{id:?}");
            if is_cancelled {
                assert!(sequence.is_out(), "{id:?} is in no step");
                continue;
            }
            assert!(ids.insert(id), "{id:?} is in two places");
            assert_eq!(self.table.find(id), Some(slot));
        }
        assert_eq!(ids.len(), self.len(), "ids are not used twice");

        for (rank, slot) in self.queue.paused() {
            let sequence = &self.table[slot];
            let id = sequence.id();
            assert_eq!(sequence.rank(), rank, "{id:?} is queued by its rank");
            for table in sequence.tables() {
                assert!(table.blocks().is_empty(), "{id:?} holds blocks");
            }
            assert_eq!(sequence.computed().0, 0, "{id:?} is paused");
        }
        for (_, sequence) in self.running() {
            let needed = sequence.computed().blocks_ceil(self.block_size);
            let (with_blocks, without) = (sequence.num_beams() as usize, sequence.tables());
            for table in sequence.tables().take(with_blocks) {
                assert!(table.len() >= needed, "{:?} lacks blocks", sequence.id());
            }
            for table in without.skip(with_blocks) {
                assert!(
                    table.blocks().is_empty(),
                    "{:?} begins later",
                    sequence.id()
                );
            }
        }
        let running = self.running().map(|(_, sequence)| sequence.rank());
        assert!(
            running.is_sorted(),
            "running sequences are in order of rank"
        );
        let paused = self.queue.paused().map(|(rank, _)| rank);
        assert!(paused.is_sorted(), "paused sequences are in order of rank");
    }
}
