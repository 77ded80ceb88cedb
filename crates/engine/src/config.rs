//! The configuration of the engine, all of it known at load.

use std::collections::BTreeMap;

use crate::kv::KvCacheConfig;
use crate::{
    ImageLimits, KvGroups, MAX_DRAFT_TOKENS, MAX_NGRAM, NewRequest, PromptImages, Speculation,
    StepCost,
};
use crate::{capacity, lockstep};
use inflight_base::{BlockSize, Blocks, LoadError, RequestError, Tokens};
pub use inflight_config::{BatchingScheme, CapacityPolicy, ContextChunkPolicy};

/// The configuration of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// How requests become batches.
    pub scheme: BatchingScheme,
    /// The most requests in one step.
    pub max_num_requests: u32,
    /// The most requests that are active at a time: running, paused, or waiting to start.
    pub max_num_active: u32,
    /// The most beams of one request; 1 is without beam search.
    pub max_beam_width: u32,
    /// The most tokens of prompt and output together.
    pub max_seq_len: Tokens,
    /// The token budget: the most tokens in one step. In lockstep (V1) it does not bound the batch: its contexts take
    /// as many steps as they need.
    pub max_num_tokens: Tokens,
    /// Tokens per KV block.
    pub block_size: BlockSize,
    /// Blocks in the KV pool.
    pub num_blocks: Blocks,
    /// Blocks in host memory, for content that the pool gives up. They are of no use without [`EngineConfig::reuse`].
    pub num_host_blocks: Blocks,
    /// Which sequences may run, given the KV blocks.
    pub policy: CapacityPolicy,
    /// Whether a context may be spread over several steps. In lockstep (V1) it always may.
    pub enable_chunked_context: bool,
    /// Which contexts get the tokens that are left.
    pub chunk_policy: ContextChunkPolicy,
    /// Chunks end at multiples of this.
    pub chunk_unit: BlockSize,
    /// The number of micro-batches, 1 or 2. With 2 the host works on one while the other is computed.
    pub num_micro_batches: usize,
    /// Whether the next step is planned before the results of the last one are known: its sequences go on from tokens
    /// that only the runner knows.
    pub plan_ahead: bool,
    /// Which blocks of the KV cache sequences share.
    pub reuse: BlockReuse,
    /// Snapshots of recurrent states, without which no prefix is reused where sequences have states; 0 where they have
    /// none.
    pub num_state_snapshots: u32,
    /// Snapshots in host memory, for those that the device gives up.
    pub num_host_state_snapshots: u32,
    /// Tokens of a prompt from one snapshot to the next, besides the one at its end, rounded up to whole blocks; 0 if
    /// there are none.
    pub state_snapshot_interval: Tokens,
    /// What layers see. Those of a group have blocks of their own, which are freed behind the window of the group.
    pub groups: KvGroups,
    /// Whether the KV cache is paged; if not, a block holds a whole sequence.
    pub paged_kv: bool,
    /// Speculation with draft tokens; `None` is off.
    pub speculation: Option<Speculation>,
    /// What steps cost, by which sequences have only the drafts that are worth it; `None`: as many as there may be.
    pub step_cost: Option<StepCost>,
    /// What a pass of the draft model costs, if there is one and it is known.
    pub draft_cost: Option<StepCost>,
    /// The most pages that the adapters of sequences in flight take together; `None` if they are not limited.
    pub num_adapter_pages: Option<u32>,
    /// Limits of the image encoder and its cache; `None` for a model without images.
    pub images: Option<ImageLimits>,
    /// Whether nothing is generated: a request ends when its prompt is computed, with the state that stands for it.
    pub pools: bool,
    /// Whether each token sees all others of its prompt, so that a prompt is computed in one step, and nothing of it is
    /// reused.
    pub whole_prompts: bool,
    /// Whether [`Engine::request_stages`](crate::Engine::request_stages) is kept.
    pub record_requests: bool,
}

/// Which blocks of the KV cache sequences share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockReuse {
    /// No blocks.
    Off,
    /// Whole blocks with equal tokens from the beginning.
    WholeBlocks,
    /// Whole blocks, and a copy of the common beginning of the block in which they differ.
    PartialBlocks,
}

impl Default for EngineConfig {
    /// In-flight fused batching with the defaults of config.pbtxt, for up to 8 requests of 512 tokens.
    fn default() -> Self {
        let block_size = BlockSize::new(32).expect("not zero");
        Self {
            scheme: BatchingScheme::InflightFused,
            max_num_requests: 8,
            max_num_active: 1 << 20,
            max_beam_width: 1,
            max_seq_len: Tokens(512),
            max_num_tokens: Tokens(512),
            block_size,
            num_blocks: Blocks(128),
            num_host_blocks: Blocks::ZERO,
            policy: CapacityPolicy::GuaranteedNoEvict,
            enable_chunked_context: true,
            chunk_policy: ContextChunkPolicy::FirstComeFirstServed,
            chunk_unit: block_size,
            num_micro_batches: 1,
            plan_ahead: false,
            reuse: BlockReuse::PartialBlocks,
            num_state_snapshots: 0,
            num_host_state_snapshots: 0,
            state_snapshot_interval: Tokens::ZERO,
            groups: KvGroups::one(None),
            paged_kv: true,
            speculation: None,
            step_cost: None,
            draft_cost: None,
            num_adapter_pages: None,
            images: None,
            pools: false,
            whole_prompts: false,
            record_requests: false,
        }
    }
}

impl EngineConfig {
    /// Refuses a configuration under which a request that [`Engine::add`] accepts could never run.
    ///
    /// - A step has a token for every sequence, so that generation never stalls.
    /// - A step has room for one block or, without chunking, for all that a sequence may have to compute at once, so
    ///   that every context progresses. That is a prompt, which `add` compares with the budget; and where sequences are
    ///   paused, a prompt with all generated tokens.
    /// - The pool holds one sequence of the largest length, so that the first to start can always end.
    ///
    /// # Errors
    /// The value that is too small, with what to write instead.
    ///
    /// [`Engine::add`]: crate::Engine::add
    pub fn check(&self) -> Result<(), LoadError> {
        let Self {
            max_num_requests,
            max_seq_len,
            max_num_tokens,
            block_size,
            num_blocks,
            ..
        } = *self;
        let block = block_size.tokens();
        let unit = self.chunk_unit.tokens();
        lockstep::check(
            self.scheme,
            self.policy,
            self.num_micro_batches,
            self.speculation.is_some(),
        )?;
        self.check_speculation()?;
        self.check_pooling()?;
        if let Some(images) = &self.images {
            images.check()?;
        }
        if !(1..=2).contains(&self.num_micro_batches) {
            return refuse(
                format!("num_micro_batches is {}", self.num_micro_batches),
                "set it to 1, or to 2 to overlap the host's work with the model's".into(),
            );
        }
        if self.plan_ahead
            && (self.scheme != BatchingScheme::InflightFused || self.num_micro_batches != 1)
        {
            return refuse(
                format!(
                    "plan_ahead is true, gpt_model_type is not inflight_fused_batching or num_micro_batches is {}",
                    self.num_micro_batches
                ),
                "plan fused steps of one micro-batch ahead, or none".into(),
            );
        }
        if max_num_requests == 0 {
            return refuse(
                "max_num_requests is 0".into(),
                "set it to at least 1".into(),
            );
        }
        if self.max_num_active == 0 {
            // Requests would wait forever.
            return refuse(
                "max_num_active is 0".into(),
                format!("set it to at least max_num_requests, which is {max_num_requests}"),
            );
        }
        if max_seq_len < Tokens(2) {
            return refuse(
                format!("max_seq_len is {max_seq_len}"),
                "set it to at least 2: a token of prompt and one of output".into(),
            );
        }
        if max_num_tokens < Tokens(max_num_requests) {
            return refuse(
                format!(
                    "max_num_tokens is {max_num_tokens}, too few for one token of each of \
                     max_num_requests = {max_num_requests} requests"
                ),
                format!(
                    "raise max_num_tokens to at least {max_num_requests}, or lower max_num_requests"
                ),
            );
        }
        let max_beam_width = self.max_beam_width;
        if max_beam_width == 0 || max_num_tokens < Tokens(max_beam_width) {
            return refuse(
                format!(
                    "max_num_tokens is {max_num_tokens}, too few for one token of each of \
                     max_beam_width = {max_beam_width} beams"
                ),
                format!(
                    "raise max_num_tokens to at least {max_beam_width}, or lower max_beam_width"
                ),
            );
        }
        if self.is_context_chunked() && max_num_tokens < unit {
            return refuse(
                format!(
                    "max_num_tokens is {max_num_tokens}, less than a block of tokens_per_block = \
                     {unit}, the smallest chunk of a context"
                ),
                format!("raise max_num_tokens to at least {unit}, or lower tokens_per_block"),
            );
        }
        if !self.is_context_chunked()
            && capacity::pauses(self.policy)
            && max_num_tokens < max_seq_len
        {
            return refuse(
                format!(
                    "max_num_tokens is {max_num_tokens}, too few to compute a paused sequence of up \
                     to max_seq_len = {max_seq_len} tokens again in one step"
                ),
                format!(
                    "set enable_chunked_context to true, or batch_scheduler_policy to \
                     guaranteed_no_evict, or raise max_num_tokens to at least {max_seq_len}"
                ),
            );
        }
        let max_beams = u64::from(self.max_rows()) * u64::from(max_beam_width);
        if max_beams.saturating_mul(u64::from(self.max_table_len().0)) > u64::from(u32::MAX) {
            return refuse(
                format!(
                    "the block tables of max_num_requests = {max_num_requests} requests with \
                     max_beam_width = {max_beam_width} and max_seq_len = {max_seq_len} have 2^32 \
                     places or more"
                ),
                "lower one of these, or raise tokens_per_block".into(),
            );
        }
        let at_once = self.min_num_blocks();
        if num_blocks < at_once {
            return refuse(
                format!(
                    "the KV cache has {num_blocks} blocks of {block} tokens, which do not hold one \
                     sequence of max_seq_len = {max_seq_len}"
                ),
                self.room_for_one(at_once),
            );
        }
        let num_host_blocks = self.num_host_blocks;
        let has_host_memory = num_host_blocks > Blocks::ZERO || self.num_host_state_snapshots > 0;
        if has_host_memory && self.reuse == BlockReuse::Off {
            return refuse(
                "the KV cache has blocks in host memory, and nothing is reused".into(),
                "set kv_cache_host_memory_bytes to 0, or enable_kv_cache_reuse to true with a paged cache, and \
                 max_state_snapshots above 0 where sequences have recurrent states"
                    .into(),
            );
        }
        if self.num_host_state_snapshots > 0 && self.num_state_snapshots == 0 {
            return refuse(
                "there are snapshots of recurrent states in host memory, and none of the device"
                    .into(),
                "set max_state_snapshots above 0, or kv_cache_host_memory_bytes to 0".into(),
            );
        }
        // A step that is planned ahead may save the states behind a token that turns out to be another one.
        let is_exact = self.reuse == BlockReuse::WholeBlocks && !self.plan_ahead;
        if self.num_state_snapshots > 0 && !is_exact {
            return refuse(
                "there are snapshots of recurrent states, and parts of blocks are reused or steps planned ahead"
                    .into(),
                "reuse whole blocks, and plan no step ahead".into(),
            );
        }
        if u64::from(num_blocks.0) + u64::from(num_host_blocks.0) >= u64::from(u32::MAX) {
            return refuse(
                format!(
                    "the KV cache has {num_blocks} blocks, and {num_host_blocks} in host memory: 2^32 or more"
                ),
                "lower kv_cache_host_memory_bytes, or raise tokens_per_block".into(),
            );
        }
        Ok(())
    }

    /// Refuses speculation without drafts, or with too many.
    fn check_speculation(&self) -> Result<(), LoadError> {
        let Some(speculation) = self.speculation else {
            return Ok(());
        };
        let max_draft_tokens = speculation.max_draft_tokens;
        if !(1..=MAX_DRAFT_TOKENS).contains(&max_draft_tokens) {
            return refuse(
                format!("max_draft_tokens is {max_draft_tokens}"),
                format!("set it to 1 to {MAX_DRAFT_TOKENS}, or set speculation to none"),
            );
        }
        if speculation.has_draft_model
            && (self.groups.num_groups() > 1 || self.groups.any_windows())
        {
            return refuse(
                "the model has attention windows, behind which its KV cache gives blocks back, and a draft model needs them"
                    .into(),
                "set speculation to prompt_lookup or none".into(),
            );
        }
        match speculation.prompt_lookup {
            Some(lookup) if !(1 <= lookup.min && lookup.min <= lookup.max) => refuse(
                format!(
                    "prompt_lookup_min is {} and prompt_lookup_max is {}",
                    lookup.min, lookup.max
                ),
                "set prompt_lookup_min to at least 1, and at most prompt_lookup_max".into(),
            ),
            Some(lookup) if lookup.max > MAX_NGRAM => refuse(
                format!("prompt_lookup_max is {}", lookup.max),
                format!("set it to at most {MAX_NGRAM}"),
            ),
            _ => Ok(()),
        }
    }

    /// Refuses what only sequences that generate have.
    fn check_pooling(&self) -> Result<(), LoadError> {
        if self.whole_prompts && (!self.pools || self.reuse != BlockReuse::Off) {
            return refuse(
                "each token of the model sees all others, so that it can neither generate nor reuse blocks of other prompts"
                    .to_owned(),
                "set enable_kv_cache_reuse to false, and task to embed, classify or score".to_owned(),
            );
        }
        let (problem, remedy) = match self {
            Self { pools: false, .. } => return Ok(()),
            _ if self.scheme.is_lockstep() => (
                "gpt_model_type is V1, whose requests end together",
                "set gpt_model_type to inflight_fused_batching",
            ),
            _ if self.speculation.is_some() => ("speculation is on", "set speculation to none"),
            _ if self.max_beam_width > 1 => ("max_beam_width is above 1", "leave it out"),
            _ => return Ok(()),
        };
        refuse(
            format!("this is a pooling model, and {problem}"),
            remedy.to_owned(),
        )
    }

    /// The most rows of logits that a step samples: one for each sequence, and one for each draft.
    pub fn max_sampled_rows(&self) -> Tokens {
        let with_drafts = 1 + self.speculation.map_or(0, |it| it.max_draft_tokens);
        let each = with_drafts.max(self.max_beam_width);
        Tokens(self.max_rows().saturating_mul(each)).min(self.max_num_tokens)
    }

    /// Places in the block table of the longest sequence, of all groups of layers.
    pub(super) fn max_table_len(&self) -> Blocks {
        let num_places = self.max_seq_len.blocks_ceil(self.block_size);
        Blocks(num_places.0.saturating_mul(self.groups.num_groups() as u32))
    }

    /// Rows of recurrent states: one for each sequence, or for each beam that each may have.
    pub fn num_state_rows(&self) -> u32 {
        self.max_num_requests.saturating_mul(self.max_beam_width)
    }

    /// Rows of recurrent states, where it is known that sequences have states: there are snapshots of these.
    pub(super) fn num_state_slots(&self) -> u32 {
        match self.num_state_snapshots {
            0 => 0,
            _ => self.num_state_rows(),
        }
    }

    /// The most planned sequences in one step, where each beam is one.
    pub fn max_sequences(&self) -> u32 {
        let max_beams = self.max_num_requests.saturating_mul(self.max_beam_width);
        max_beams
            .min(self.max_num_tokens.0)
            .max(self.max_num_requests)
    }

    /// How to get a pool of `num_blocks`.
    fn room_for_one(&self, num_blocks: Blocks) -> String {
        let num_groups = self.groups.num_groups() as u32;
        let holds = Blocks(self.num_blocks.0 / num_groups).tokens(self.block_size);
        let shorter = match holds >= Tokens(2) {
            true => format!("lower max_seq_len to at most {holds}"),
            false => "lower max_seq_len".to_owned(),
        };
        format!(
            "{shorter}, or let the KV cache have at least {} tokens: by max_tokens_in_paged_kv_cache, \
             where it is written, or else by more memory (kv_cache_free_gpu_mem_fraction)",
            Blocks(num_blocks.0.div_ceil(num_groups)).tokens(self.block_size)
        )
    }

    /// The fewest blocks that the pool must have: as many as one sequence of the largest length holds at once.
    pub fn min_num_blocks(&self) -> Blocks {
        self.groups
            .max_blocks(self.max_seq_len, self.max_chunk(), self.block_size)
    }

    /// The most steps that are planned and have not been applied.
    pub fn max_steps_out(&self) -> usize {
        match self.plan_ahead {
            true => 2,
            false => self.num_micro_batches,
        }
    }

    /// The most positions of a sequence that are computed by steps which have not been applied.
    pub(super) fn max_chunk(&self) -> Tokens {
        self.max_num_tokens + Tokens(self.plan_ahead.into())
    }

    /// The most sequences that run or are paused. Each that runs holds a block, so more than `num_blocks` would only
    /// cost memory.
    pub(super) fn max_rows(&self) -> u32 {
        self.max_num_requests.min(self.num_blocks.0)
    }

    /// The configuration of the KV cache.
    pub(super) fn kv_cache(&self) -> KvCacheConfig {
        KvCacheConfig {
            num_blocks: self.num_blocks,
            num_host_blocks: self.num_host_blocks,
            block_size: self.block_size,
            groups: self.groups,
            max_chunk: self.max_chunk(),
            enable_reuse: self.reuse != BlockReuse::Off,
            enable_partial_reuse: self.reuse == BlockReuse::PartialBlocks,
            num_snapshots: self.num_state_snapshots,
            num_host_snapshots: self.num_host_state_snapshots,
            snapshot_interval: self.state_snapshot_interval,
        }
    }

    /// Whether a context may be spread over several steps.
    pub(super) fn is_context_chunked(&self) -> bool {
        let is_enabled = self.enable_chunked_context && !self.whole_prompts;
        lockstep::is_context_chunked(self.scheme, is_enabled)
    }

    /// Which contexts get the tokens that are left.
    pub(super) fn chunk_policy(&self) -> ContextChunkPolicy {
        lockstep::chunk_policy(self.scheme, self.chunk_policy)
    }

    /// Whether batches run in lockstep (V1), which has no logits post-processors.
    pub fn is_lockstep(&self) -> bool {
        self.scheme.is_lockstep()
    }

    /// Refuses more beams than the model has, or than the KV cache could ever hold.
    ///
    /// # Errors
    /// The number that is too large.
    pub(super) fn check_beams(&self, width: u32, num_blocks: Blocks) -> Result<(), RequestError> {
        if width > self.max_beam_width {
            return Err(RequestError::Invalid(format!(
                "beam_width is {width}, and the model's max_beam_width is {}: ask for fewer beams, or \
                 load the model with a larger max_beam_width",
                self.max_beam_width
            )));
        }
        if num_blocks > self.num_blocks {
            return Err(RequestError::Invalid(format!(
                "{width} beams of the request could need {num_blocks} blocks of the KV cache, which has \
                 {}: lower beam_width or max_tokens",
                self.num_blocks
            )));
        }
        Ok(())
    }

    /// The most tokens that `request` may generate, by the configuration.
    ///
    /// # Errors
    /// The request could never run.
    pub(super) fn room_for_output(&self, request: &NewRequest) -> Result<Tokens, RequestError> {
        let max_seq_len = self.max_seq_len;
        let num_prompt_tokens = request.prompt.len();
        let invalid = |reason: String| Err(RequestError::Invalid(reason));
        if num_prompt_tokens == 0 {
            return invalid("the prompt is empty: it must have at least one token".into());
        }
        if request.stop.max_new_tokens == Tokens::ZERO {
            return invalid("a request for no new tokens: ask for at least 1".into());
        }
        if self.pools {
            self.check_pooled(request)?;
        } else if num_prompt_tokens >= max_seq_len.index() {
            return invalid(format!(
                "the prompt has {num_prompt_tokens} tokens and one of output makes {}, more than \
                 max_seq_len = {max_seq_len}: shorten the prompt",
                num_prompt_tokens + 1
            ));
        }
        if self.whole_prompts && num_prompt_tokens > self.max_num_tokens.index() {
            return invalid(format!(
                "the prompt has {num_prompt_tokens} tokens, and each sees all others, so that a step computes all; \
                 max_num_tokens = {} is less: shorten the prompt",
                self.max_num_tokens
            ));
        }
        if !self.is_context_chunked() && num_prompt_tokens > self.max_num_tokens.index() {
            return invalid(format!(
                "the prompt has {num_prompt_tokens} tokens, more than a step can carry \
                 (max_num_tokens = {}) and enable_chunked_context is false: shorten the prompt",
                self.max_num_tokens
            ));
        }
        Ok(match self.pools {
            true => Tokens(1),
            false => max_seq_len - Tokens(num_prompt_tokens as u32),
        })
    }

    /// Refuses images that could never be encoded.
    pub(super) fn check_images(&self, request: &NewRequest) -> Result<(), RequestError> {
        let images = &request.images;
        if images.is_empty() {
            return Ok(());
        }
        let invalid = |reason: String| Err(RequestError::Invalid(reason));
        let Some(limits) = &self.images else {
            return invalid("the prompt has images, and the model was loaded for text only".into());
        };
        images.check(request.num_prompt_tokens())?;
        let max = limits.max_cached_tokens;
        let mut sizes = images.spans().iter().map(|span| span.image.num_tokens());
        if let Some(size) = sizes.find(|&size| size > max) {
            return invalid(format!(
                "an image of {size} tokens, more than the {max} that are kept: send a smaller one"
            ));
        }
        if limits.has_whole_images {
            self.check_whole_images(images)?;
        }
        if self.is_context_chunked() {
            return Ok(());
        }
        let distinct: BTreeMap<_, _> = images
            .spans()
            .iter()
            .map(|span| {
                let image = &span.image;
                (image.hash(), image.num_tokens())
            })
            .collect();
        let num_tokens: Tokens = distinct.into_values().sum();
        match num_tokens > max {
            true => invalid(format!(
                "images of {num_tokens} tokens, which a step needs all as enable_chunked_context is false; {max} are \
                 kept: send fewer"
            )),
            false => Ok(()),
        }
    }

    /// Refuses images whose tokens could not be in one step, or would not be what reuse takes them for.
    fn check_whole_images(&self, images: &PromptImages) -> Result<(), RequestError> {
        let max = self.max_num_tokens;
        for span in images.spans() {
            let (size, len) = (span.image.num_tokens(), span.num_tokens);
            // Its first tokens are reused by all prompts that begin with these, however many follow.
            if len < size {
                return Err(RequestError::Invalid(format!(
                    "{len} tokens of an image of {size} and text behind them: its tokens see each other, and have to \
                     follow one another"
                )));
            }
            if len > max {
                return Err(RequestError::Invalid(format!(
                    "an image of {len} tokens that see each other, so that a step computes all; max_num_tokens = \
                     {max} is less: load the model with a larger one"
                )));
            }
        }
        Ok(())
    }

    /// Refuses what cannot be pooled: a prompt that is too long, or a request for several outputs.
    fn check_pooled(&self, request: &NewRequest) -> Result<(), RequestError> {
        let (len, max_len) = (request.prompt.len(), self.max_seq_len.index());
        if len > max_len {
            return Err(RequestError::Invalid(format!(
                "the prompt has {len} tokens, more than max_seq_len = {max_len}: shorten the prompt"
            )));
        }
        match request.sampling.beam_search {
            None => Ok(()),
            Some(_) => Err(RequestError::Invalid(
                "a beam search, and this is a pooling model: leave out beam_width".to_owned(),
            )),
        }
    }
}

fn refuse(problem: String, remedy: String) -> Result<(), LoadError> {
    Err(LoadError::Config { problem, remedy })
}
