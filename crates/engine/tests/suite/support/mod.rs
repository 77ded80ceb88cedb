//! A world around the engine for its tests: a runner with predictable tokens, and checks of every plan and every
//! event.
//!
//! The runner's "keys and values" are one hash per position, chained over all previous tokens, in a pool that is
//! addressed only by (block, offset). Every position that a token would attend to is looked up there and must hold
//! the hash of this sequence's own tokens. So a stream is correct only if each of its tokens was computed, or
//! shared with a sequence of the same prefix, in blocks that no other sequence wrote to, whatever was
//! chunked, paused, reused, freed or cancelled in between.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use inflight_base::{
    BlockId, BlockSize, Blocks, RequestError, SeqSlot, SequenceId, TokenId, Tokens,
};
use inflight_engine::{
    Adapter, BatchingScheme, BeamCandidates, BlockMove, BlockReuse, CapacityPolicy, DraftOptions,
    DraftTotals, Engine, EngineConfig, Event, ExtraOutputs, Image, ImageMove, ImageSlot, ImageSpan,
    KvBlocks, NewRequest, OutputOptions, PlannedSequence, PromptImages, ReuseOptions, Sampled,
    Stage, StateCopy, StateMove, StateSnapshot, Step, StepOutput, StepPlan,
};
use inflight_sampling::{
    BeamCandidate, BeamSearch, Continuation, EarlyStopping, FinishReason, Hypotheses, Hypothesis,
    ReadText, SampleError, SamplingParams, StopRule, StopText, TokenLogProb, TokenLogProbs,
};

/// Token ids are below this. The last one is the end id.
pub const VOCAB_SIZE: TokenId = 16;
pub const END_ID: TokenId = VOCAB_SIZE - 1;
/// The placeholder token of images.
pub const IMAGE_TOKEN: TokenId = 1;

/// A test request.
#[derive(Clone, Debug)]
pub struct TestRequest {
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: u32,
    /// Whether `END_ID` ends its output.
    pub has_end_id: bool,
    /// Whether it has a guide, which is not always ready.
    pub is_guided: bool,
    /// The number of tokens after which its logits are NaN.
    pub fails_after: Option<usize>,
    /// Smaller numbers go first.
    pub priority: i32,
    /// Which blocks it may share.
    pub reuse: ReuseOptions,
    /// The extra outputs that it requests.
    pub outputs: OutputOptions,
    /// Its draft tokens.
    pub drafts: DraftOptions,
    /// Its beam search, if any.
    pub beam_search: Option<BeamSearch>,
    /// Whether two consecutive tokens whose sum is a multiple of 7 are a stop word of its beams.
    pub has_stop_text: bool,
    /// The number of its adapter, if it has one.
    pub adapter: Option<u32>,
    /// The positions of its images, and their hashes.
    pub images: Vec<(u32, u128)>,
}

/// The pages that an adapter takes.
pub fn num_pages(adapter: u32) -> u32 {
    adapter % 4 + 1
}

/// The tokens of the image with this hash.
pub fn num_image_tokens(hash: u128) -> u32 {
    [1, 4, 7, 3][hash as usize % 4]
}

/// The rows of the image with this hash in front of a token of text, if its rows are in two spans.
pub fn num_rows_of_first_span(hash: u128) -> Option<u32> {
    [None, None, Some(3), None][hash as usize % 4].filter(|_| hash >= 4)
}

/// The tokens from the first one of an image to its last one.
pub fn num_spanned_tokens(hash: u128) -> u32 {
    num_image_tokens(hash) + u32::from(num_rows_of_first_span(hash).is_some())
}

fn image_spans(&(position, hash): &(u32, u128)) -> Vec<ImageSpan> {
    let num_tokens = num_image_tokens(hash);
    let image = Image::new(hash, Tokens(num_tokens), Arc::new(hash));
    let span = ImageSpan::of(Tokens(position), image);
    let Some(num_rows) = num_rows_of_first_span(hash) else {
        return vec![span];
    };
    let second = ImageSpan {
        position: Tokens(position + num_rows + 1),
        first_row: Tokens(num_rows),
        num_tokens: Tokens(num_tokens - num_rows),
        ..span.clone()
    };
    let first = ImageSpan {
        num_tokens: Tokens(num_rows),
        ..span
    };
    vec![first, second]
}

/// Finds that stop word.
#[derive(Clone, Default)]
struct StopsAtSevens {
    last: Option<TokenId>,
}

impl ReadText for StopsAtSevens {
    fn push(&mut self, token: TokenId) -> bool {
        let last = self.last.replace(token);
        last.is_some_and(|last| (last + token).is_multiple_of(7))
    }

    fn fork(&self) -> Box<dyn ReadText> {
        Box::new(self.clone())
    }
}

impl TestRequest {
    /// A request with `num_prompt_tokens` arbitrary tokens, which generates `max_new_tokens`.
    pub fn of_lengths(num_prompt_tokens: u32, max_new_tokens: u32) -> Self {
        Self {
            prompt: (0..num_prompt_tokens)
                .map(|position| position % VOCAB_SIZE)
                .collect(),
            max_new_tokens,
            has_end_id: false,
            is_guided: false,
            fails_after: None,
            priority: 0,
            reuse: ReuseOptions::default(),
            outputs: OutputOptions::default(),
            drafts: DraftOptions::default(),
            beam_search: None,
            has_stop_text: false,
            adapter: None,
            images: Vec::new(),
        }
    }

    /// The same with an adapter.
    pub fn with_adapter(self, adapter: u32) -> Self {
        Self {
            adapter: Some(adapter),
            ..self
        }
    }

    /// The same with `width` beams, all of which are returned.
    pub fn with_beams(self, width: u32) -> Self {
        Self {
            beam_search: Some(BeamSearch {
                width,
                num_returned: width,
                length_penalty: 1.0,
                early_stopping: EarlyStopping::Likely,
                diversity_rate: 0.0,
            }),
            ..self
        }
    }

    pub fn width(&self) -> u32 {
        self.beam_search.map_or(1, |search| search.width)
    }

    pub fn to_request(&self, id: SequenceId) -> NewRequest {
        NewRequest {
            images: PromptImages::new(self.images.iter().flat_map(image_spans).collect()),
            client_id: None,
            id,
            prompt: self.prompt.as_slice().into(),
            second_text: None,
            stop: StopRule::at_length(Tokens(self.max_new_tokens)),
            sampling: Arc::new(SamplingParams {
                end_ids: if self.has_end_id {
                    vec![END_ID]
                } else {
                    vec![]
                },
                beam_search: self.beam_search,
                stop_text: self
                    .has_stop_text
                    .then(|| StopText(Arc::new(StopsAtSevens::default()))),
                ..SamplingParams::default()
            }),
            adapter: None,
            priority: self.priority,
            reuse: self.reuse.clone(),
            outputs: self.outputs,
            drafts: self.drafts.clone(),
        }
    }

    /// Adds images as far as they fit into the prompt, each behind so many further tokens.
    pub fn place_images(&mut self, images: &[(u32, u128)]) {
        let mut end = 0;
        for &(num_before, hash) in images {
            let start = end + num_before;
            end = start + num_spanned_tokens(hash);
            if end as usize > self.prompt.len() {
                return;
            }
            self.images.push((start, hash));
            for position in start as usize..end as usize {
                if self.row_at(position).is_some() {
                    self.prompt[position] = IMAGE_TOKEN;
                }
            }
        }
    }

    /// The image at a position of the prompt, and the row of the image there.
    fn row_at(&self, position: usize) -> Option<(u128, u32)> {
        let images = self.images.iter();
        let mut at = images.filter_map(|&(start, hash)| {
            let token = (position as u32).checked_sub(start)?;
            let row = match num_rows_of_first_span(hash) {
                Some(num_rows) if token == num_rows => return None,
                Some(num_rows) if token > num_rows => token - 1,
                _ => token,
            };
            (row < num_image_tokens(hash)).then_some((hash, row))
        });
        at.next()
    }

    /// The entry behind the one of a position.
    fn chain_at(&self, entry: u64, position: usize, token: TokenId) -> u64 {
        match self.row_at(position) {
            Some((hash, row)) => chain(chain(entry, 1000 + hash as TokenId), row),
            None => chain(entry, token),
        }
    }

    /// Its output when it runs alone, computed from the tokens without an engine.
    pub fn answer_alone(&self, max_seq_len: Tokens) -> (Vec<TokenId>, FinishReason) {
        let mut entry = self
            .prompt
            .iter()
            .enumerate()
            .fold(FIRST_ENTRY, |entry, (position, &token)| {
                self.chain_at(entry, position, token)
            });
        let mut tokens = Vec::new();
        loop {
            if self.fails_after == Some(tokens.len()) {
                return (tokens, FinishReason::Error(SampleError::NotFinite));
            }
            let token = next_token(entry);
            entry = chain(entry, token);
            tokens.push(token);
            if self.has_end_id && token == END_ID {
                return (tokens, FinishReason::EndId);
            }
            let len = self.prompt.len() + tokens.len();
            if tokens.len() == self.max_new_tokens as usize || len == max_seq_len.index() {
                return (tokens, FinishReason::Length);
            }
        }
    }
}

/// The results of a beam search that runs alone.
pub struct Searched {
    /// The best hypotheses after each token but the last.
    pub so_far: Vec<Vec<Hypothesis>>,
    /// The final hypotheses; empty if the search fails.
    pub found: Vec<Hypothesis>,
    pub finish_reason: FinishReason,
}

pub fn search_alone(request: &TestRequest, search: BeamSearch, max_seq_len: Tokens) -> Searched {
    let params = request.to_request(SequenceId(0)).sampling.as_ref().clone();
    let max_new_tokens = request
        .max_new_tokens
        .min(max_seq_len.0 - request.prompt.len() as u32);
    let stop = StopRule::at_length(Tokens(max_new_tokens));
    let entry = |text: &[TokenId]| {
        let all = request.prompt.iter().chain(text).enumerate();
        all.fold(FIRST_ENTRY, |entry, (position, &token)| {
            request.chain_at(entry, position, token)
        })
    };
    let mut hypotheses = Hypotheses::new(search, max_new_tokens);
    let chosen_from = |tokens: &[TokenId]| {
        let prefixes = (0..tokens.len()).map(|len| Arc::new(logits(entry(&tokens[..len]))));
        let are_wanted = request.outputs.generation_logits;
        prefixes.filter(|_| are_wanted).collect()
    };
    let mut beams: Vec<(f64, Vec<TokenId>, Vec<f32>)> = vec![(0.0, vec![], vec![])];
    let mut so_far = Vec::new();
    let mut has_exhausted = false;
    for len in 1.. {
        if request.fails_after == Some(len - 1) {
            return Searched {
                so_far,
                found: vec![],
                finish_reason: FinishReason::Error(SampleError::NotFinite),
            };
        }
        let named = beams.iter().map(|(_, text, _)| {
            let num = params.num_candidates(&search);
            candidates(entry(text), num)
        });
        let results: Vec<_> = named.collect();
        let only_repeats = |beam: usize| results[beam] == Err(SampleError::OnlyRepeats);
        let exhausted: Vec<_> = (0..beams.len())
            .filter(|&beam| only_repeats(beam))
            .collect();
        let named = results.into_iter().map(Result::unwrap_or_default);
        let named: Vec<_> = named.collect();
        let scores: Vec<_> = beams.iter().map(|(score, ..)| *score).collect();
        let end = |it: &Continuation| {
            let token = it.candidate.token;
            let last = beams[it.beam].1.last();
            let is_seven = last.is_some_and(|last| (last + token).is_multiple_of(7));
            let by_text = (request.has_stop_text && is_seven).then_some(FinishReason::StopWords);
            stop.after(&params, &beams[it.beam].1, token).or(by_text)
        };
        let selection = search.select(&scores, &named, end);
        let child = |it: &Continuation| {
            let (_, text, log_probs) = &beams[it.beam];
            let text = [&text[..], &[it.candidate.token]].concat();
            let log_probs = [&log_probs[..], &[it.candidate.log_prob]].concat();
            (it.score, text, log_probs)
        };
        for &beam in exhausted.iter().filter(|_| len > 1) {
            let (score, tokens, log_probs) = beams[beam].clone();
            let hypothesis = Hypothesis {
                generation_logits: chosen_from(&tokens),
                model_log_probs: vec![],
                tokens,
                log_probs,
                cum_log_prob: score as f32,
                finish_reason: Some(FinishReason::Length),
            };
            hypotheses.offer(score, len as u32 - 1, hypothesis);
        }
        has_exhausted = !exhausted.is_empty();
        for (it, finish_reason) in &selection.ended {
            let (score, tokens, log_probs) = child(it);
            let hypothesis = Hypothesis {
                generation_logits: chosen_from(&tokens),
                model_log_probs: vec![],
                tokens,
                log_probs,
                cum_log_prob: score as f32,
                finish_reason: Some(*finish_reason),
            };
            hypotheses.offer(score, len as u32, hypothesis);
        }
        beams = selection.alive.iter().map(child).collect();
        let best = beams.first().map(|(score, ..)| *score);
        if hypotheses.is_over(best, len as u32) {
            break;
        }
        let scores: Vec<_> = beams.iter().map(|(score, ..)| *score).collect();
        let beam = |beam: usize| {
            let (score, tokens, log_probs) = &beams[beam];
            Hypothesis {
                generation_logits: chosen_from(tokens),
                tokens: tokens.clone(),
                log_probs: log_probs.clone(),
                cum_log_prob: *score as f32,
                ..Hypothesis::default()
            }
        };
        so_far.push(hypotheses.best_so_far(&scores, len as u32, beam).into_vec());
    }
    let found = hypotheses.take_best().into_vec();
    let reason = found.first().and_then(|best| best.finish_reason);
    let none = match has_exhausted {
        true => FinishReason::Length,
        false => FinishReason::Error(SampleError::NoneAllowed),
    };
    Searched {
        so_far,
        found,
        finish_reason: reason.unwrap_or(none),
    }
}

const FIRST_ENTRY: u64 = 0x9e37_79b9_7f4a_7c15;

/// The entry of the position after the one with `entry` (the finaliser of splitmix64).
fn chain(entry: u64, token: TokenId) -> u64 {
    let mut hash = entry ^ u64::from(token + 1).wrapping_mul(0xd129_0d3d_8e2f_4b5f);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

fn next_token(entry: u64) -> TokenId {
    (entry >> 32) as TokenId % VOCAB_SIZE
}

/// The logits of a beam with this entry.
fn logits(entry: u64) -> Vec<f32> {
    vec![(entry >> 40) as f32]
}

/// The candidates of a beam with this entry: sometimes few, and sometimes an error instead.
fn candidates(entry: u64, num: usize) -> Result<Vec<BeamCandidate>, SampleError> {
    let num = match entry % 64 {
        0 => return Err(SampleError::NoneAllowed),
        63 => return Err(SampleError::OnlyRepeats),
        1..5 => 1,
        _ => num,
    };
    let unit = (1 + (entry >> 16) % 5) as f32 / 8.0;
    let named = (0..VOCAB_SIZE).take(num).map(|rank| BeamCandidate {
        token: (next_token(entry) + rank) % VOCAB_SIZE,
        log_prob: -((rank + 1) as f32) * unit,
    });
    Ok(named.collect())
}

/// A request and what the engine has reported about it.
pub struct Stream {
    pub request: TestRequest,
    pub tokens: Vec<TokenId>,
    /// Positions of the context logits received so far, and of the generation logits.
    pub extra_outputs: [Vec<f32>; 3],
    /// The final hypotheses of its beam search.
    pub hypotheses: Vec<Hypothesis>,
    /// The hypotheses of each event; the last are the final ones.
    pub told: Vec<Vec<Hypothesis>>,
    /// The latest reported blocks and drafts.
    pub kv_blocks: KvBlocks,
    pub drafts: DraftTotals,
    pub slot: Option<SeqSlot>,
    /// The tokens that were sampled in steps which have not been applied; `None` if only the host can choose one.
    in_flight: VecDeque<Option<TokenId>>,
    /// How often in a row its guide was not ready.
    num_unready: u32,
    /// Whether it was in generation phase when the last step was planned.
    pub generates: bool,
    pub admitted: bool,
    /// Tokens that it found in the cache when it was admitted.
    pub num_cached: Tokens,
    pub paused: bool,
    pub ended: bool,
}

impl Stream {
    /// Its tokens, with those that were sampled in steps which have not been applied. Any token stands for one that
    /// only the host can choose.
    fn with_tokens_in_flight(&self) -> Vec<TokenId> {
        let in_flight = self.in_flight.iter();
        let in_flight = in_flight.map(|token| token.unwrap_or_default());
        let known = self.request.prompt.iter().chain(&self.tokens).copied();
        known.chain(in_flight).collect()
    }

    /// Checks that every requested row has arrived once and in order, and no other.
    fn check_gathered(&self) {
        let num_prompt_tokens = self.request.prompt.len();
        let outputs = self.request.outputs;
        for (is_wanted, rows, came) in [
            (
                outputs.context_logits,
                0..num_prompt_tokens,
                &self.extra_outputs[0],
            ),
            (
                outputs.generation_logits,
                num_prompt_tokens..num_prompt_tokens + self.tokens.len(),
                &self.extra_outputs[1],
            ),
            (
                outputs.prompt_log_probs.is_some(),
                1..num_prompt_tokens,
                &self.extra_outputs[2],
            ),
        ] {
            let wanted: Vec<_> = rows.filter(|_| is_wanted).map(|row| row as f32).collect();
            assert_eq!(*came, wanted);
        }
    }
}

/// A step that has not been applied.
struct OutStep {
    step: Step,
    output: StepOutput,
    /// Which of the results only the host can choose, from logits that the next step replaces.
    of_host: Vec<usize>,
    /// The blocks that it writes, each with the sequence that holds it.
    written: BTreeMap<BlockId, SequenceId>,
}

/// Recurrent states, each the entry of the last token that it sums up.
struct States {
    /// By row.
    of_sequences: Vec<SequenceStates>,
    snapshots: Vec<u64>,
    /// In host memory as well.
    host_snapshots: Vec<u64>,
}

/// The states that the last step of a sequence has left: before its tokens and behind each of them if some were drafts,
/// or else only behind the last.
#[derive(Clone, Default)]
struct SequenceStates {
    states: Vec<u64>,
    num_tokens: usize,
}

/// An engine, its runner, and all requests added to it.
pub struct World {
    pub config: EngineConfig,
    pub engine: Engine,
    pub streams: BTreeMap<SequenceId, Stream>,
    /// Entry of each position of each block: `[num_blocks * block_size]`.
    cache: Vec<u64>,
    /// The same in host memory.
    host_cache: Vec<u64>,
    /// The same for the draft model.
    draft_caches: [Vec<u64>; 2],
    states: States,
    /// Steps in flight, oldest first, as with a runner on another thread.
    out: VecDeque<OutStep>,
    /// Padding tokens of the last planned step.
    pub num_padding_tokens: u32,
    /// Block copies of the last planned step.
    pub num_copies: usize,
    pub events: Vec<Event>,
    adapters: BTreeMap<u32, Adapter>,
    /// The images whose rows the runner has, and those that it has encoded in the last step.
    images: BTreeMap<ImageSlot, u128>,
    pub encoded: Vec<u128>,
    pub num_encoded: u64,
    next_id: u64,
    pub num_steps: u64,
    pub num_pauses: u64,
    pub num_pauses_with_beams: u64,
    /// Sequences that were planned ahead, and results that were missed.
    pub num_ahead: u64,
    pub num_missed: u64,
}

impl World {
    pub fn new(config: EngineConfig) -> Self {
        config.check().expect("a test's limits can be served");
        Self {
            engine: Engine::new(EngineConfig {
                // The stages tell which phase each request is in.
                record_requests: true,
                ..config.clone()
            }),
            streams: BTreeMap::new(),
            cache: vec![0; config.num_blocks.tokens(config.block_size).index()],
            host_cache: vec![0; config.num_host_blocks.tokens(config.block_size).index()],
            draft_caches: [config.num_blocks, config.num_host_blocks]
                .map(|num_blocks| vec![0; num_blocks.tokens(config.block_size).index()]),
            states: States {
                of_sequences: match config.num_state_snapshots {
                    0 => Vec::new(),
                    _ => vec![SequenceStates::default(); config.num_state_rows() as usize],
                },
                snapshots: vec![0; config.num_state_snapshots as usize],
                host_snapshots: vec![0; config.num_host_state_snapshots as usize],
            },
            out: VecDeque::new(),
            num_padding_tokens: 0,
            num_copies: 0,
            events: Vec::new(),
            adapters: BTreeMap::new(),
            images: BTreeMap::new(),
            encoded: Vec::new(),
            num_encoded: 0,
            next_id: 1,
            num_steps: 0,
            num_pauses: 0,
            num_pauses_with_beams: 0,
            num_ahead: 0,
            num_missed: 0,
            config,
        }
    }

    pub fn add(&mut self, request: TestRequest) -> Result<SequenceId, RequestError> {
        let id = SequenceId(self.next_id);
        let mut new = request.to_request(id);
        if let Some(adapter) = request.adapter {
            let salt = request.reuse.salt.as_deref().unwrap_or_default();
            new.reuse.salt = Some(format!("{adapter}, {salt}").into());
            new.adapter = Some(self.adapter(adapter));
        }
        self.engine.add(new)?;
        self.next_id += 1;
        self.streams.insert(
            id,
            Stream {
                request,
                tokens: Vec::new(),
                extra_outputs: [const { Vec::new() }; 3],
                hypotheses: Vec::new(),
                told: Vec::new(),
                kv_blocks: KvBlocks::default(),
                drafts: DraftTotals::default(),
                slot: None,
                in_flight: VecDeque::new(),
                num_unready: 0,
                generates: false,
                admitted: false,
                num_cached: Tokens(0),
                paused: false,
                ended: false,
            },
        );
        Ok(id)
    }

    fn adapter(&mut self, number: u32) -> Adapter {
        let made = || Adapter::new(Arc::new(number), num_pages(number));
        self.adapters.entry(number).or_insert_with(made).clone()
    }

    /// Cancels a request, even one that has ended.
    pub fn cancel(&mut self, id: SequenceId) {
        let stream = self.streams.get_mut(&id).expect("added before");
        let was_there = self.engine.cancel(id);
        assert!(!self.engine.cancel(id), "{id:?} is gone");
        if !was_there && self.config.scheme == BatchingScheme::V1 {
            // It has ended with its batch, and its event has not been reported yet.
            return;
        }
        assert_eq!(was_there, !stream.ended, "{id:?} is there until it ends");
        stream.ended = true;
    }

    /// Requests that have not ended, in order of arrival.
    pub fn active(&self) -> impl Iterator<Item = (SequenceId, &Stream)> {
        let streams = self.streams.iter().map(|(&id, stream)| (id, stream));
        streams.filter(|(_, stream)| !stream.ended)
    }

    /// Plans, runs and applies one step, and checks everything. Returns the sequences of the plan.
    pub fn step(&mut self) -> Vec<PlannedSequence> {
        self.step_and_cancel(None)
    }

    /// One step in which `cancelled` is cancelled after the runner has run. With two micro-batches, or with steps that
    /// are planned ahead, the results of the previous step are applied.
    pub fn step_and_cancel(&mut self, cancelled: Option<SequenceId>) -> Vec<PlannedSequence> {
        self.num_steps += 1;
        let mut step = self.engine.schedule();
        if self.config.speculation.is_some_and(|it| it.has_draft_model) {
            make_drafts(&mut step, &self.config, &mut self.draft_caches);
        }
        for stage in self.engine.request_stages() {
            let stream = self.streams.get_mut(&stage.id).expect("added before");
            stream.generates = stage.stage == Stage::Generation;
        }
        check_step(&step, &self.config, &mut self.streams);
        self.move_images(&step);
        let (mut output, mut of_host) = (StepOutput::default(), Vec::new());
        for plan in step.plans() {
            if self.config.num_state_snapshots > 0 {
                self.states.run(&plan, &self.streams);
            }
            run(
                &plan,
                &self.config,
                &mut self.streams,
                &self.images,
                [&mut self.cache, &mut self.host_cache],
                &mut output,
                &mut of_host,
            );
        }
        let written = self.check_blocks_out(&step);
        let moves = step.plans().flat_map(|plan| plan.moves);
        self.num_copies = moves
            .filter(|one| matches!(one, BlockMove::Copy(_)))
            .count();
        self.num_padding_tokens = step.plans().map(|plan| plan.num_padding_tokens.0).sum();
        let planned = step.sequences().to_vec();
        let ahead = planned.iter().filter(|planned| planned.is_ahead);
        self.num_ahead += ahead.count() as u64;
        self.out.push_back(OutStep {
            step,
            output,
            of_host,
            written,
        });
        if let Some(id) = cancelled {
            self.cancel(id);
        }
        self.events.clear();
        if self.out.len() == self.config.max_steps_out() || planned.is_empty() {
            while let Some(out) = self.out.pop_front() {
                let was_empty = out.step.is_empty();
                self.apply(out);
                if !was_empty && !planned.is_empty() {
                    break;
                }
            }
            self.check_events();
        }
        self.engine.check_integrity();
        self.check_adapters(&planned);
        assert_eq!(self.engine.num_active(), self.active().count());
        planned
    }

    /// Encodes and evicts images as a step says, and checks the limits.
    fn move_images(&mut self, step: &Step) {
        self.encoded.clear();
        for one in step.plans().flat_map(|plan| plan.image_moves) {
            match one {
                ImageMove::Evict(slot) => assert!(self.images.remove(slot).is_some(), "{slot:?}"),
                ImageMove::Encode { slot, image } => {
                    let hash = *image.contents::<u128>().expect("a hash");
                    assert!(
                        self.images.values().all(|other| *other != hash),
                        "{hash} twice"
                    );
                    assert_eq!(self.images.insert(*slot, hash), None, "{slot:?} is taken");
                    self.encoded.push(hash);
                    self.num_encoded += 1;
                }
            }
            let limits = self.config.images.as_ref().expect("prompts have images");
            let sizes = self.images.values().map(|&hash| num_image_tokens(hash));
            assert!(sizes.sum::<u32>() <= limits.max_cached_tokens.0);
        }
        let is_cut = self.config.enable_chunked_context || self.config.scheme == BatchingScheme::V1;
        if let Some(limits) = self.config.images.filter(|_| is_cut) {
            let num_tokens: u32 = self
                .encoded
                .iter()
                .map(|&hash| num_image_tokens(hash))
                .sum();
            let is_one = self.encoded.len() == 1;
            assert!(
                num_tokens <= limits.max_num_tokens.0 || is_one,
                "{:?}",
                self.encoded
            );
        }
    }

    /// Checks that sequences are computed with their adapters, that these have room, and that no request has overtaken
    /// another that waits for pages.
    fn check_adapters(&self, planned: &[PlannedSequence]) {
        for planned in planned {
            let number = self.streams[&planned.id].request.adapter;
            let adapter = number.map(|number| &self.adapters[&number]);
            assert_eq!(planned.adapter.as_ref(), adapter, "{:?}", planned.id);
        }
        let Some(max_pages) = self.config.num_adapter_pages else {
            return;
        };
        let with_adapter = self
            .active()
            .filter_map(|(id, stream)| Some((id, stream, stream.request.adapter?)));
        let (started, waiting): (Vec<_>, Vec<_>) =
            with_adapter.partition(|(_, stream, _)| stream.admitted);
        let held: BTreeSet<_> = started.iter().map(|&(.., adapter)| adapter).collect();
        let num_held: u32 = held.into_iter().map(num_pages).sum();
        assert!(num_held <= max_pages, "{num_held} pages of {max_pages}");
        // With reuse, some wait for blocks that others write.
        if self.config.reuse == BlockReuse::Off {
            for (id, stream, _) in waiting {
                let priority = stream.request.priority;
                let is_behind = |(other, stream, _): &&(SequenceId, &Stream, u32)| {
                    *other > id && stream.request.priority == priority
                };
                let overtakes = started.iter().find(is_behind).map(|(other, ..)| other);
                assert_eq!(overtakes, None, "{id:?} waits for its adapter");
            }
        }
    }

    fn apply(&mut self, out: OutStep) {
        let OutStep {
            step,
            mut output,
            of_host,
            ..
        } = out;
        // The logits are gone once the next step has been computed.
        let are_gone = self.out.iter().any(|later| !later.step.is_empty());
        for index in of_host.into_iter().filter(|_| are_gone) {
            output.sampled[index].1 = Sampled::Missed;
        }
        for planned in step.sequences().iter().filter(|planned| planned.samples) {
            let stream = self.streams.get_mut(&planned.id).expect("added before");
            stream.in_flight.pop_front();
        }
        let missed = output.sampled.iter();
        let missed = missed.filter(|(_, sampled)| *sampled == Sampled::Missed);
        self.num_missed += missed.count() as u64;
        self.engine.apply(step, &mut output, &mut self.events);
    }

    /// Checks that no sequence has a block that another one writes in a step which has not been applied. Returns the
    /// blocks that the step writes.
    fn check_blocks_out(&self, step: &Step) -> BTreeMap<BlockId, SequenceId> {
        let mut written = BTreeMap::new();
        for plan in step.plans() {
            let block_size = plan.block_size.tokens().0;
            for planned in plan.sequences {
                let table = plan.block_table(planned);
                for block in table.iter().filter(|&&block| block != BlockId::NONE) {
                    for out in &self.out {
                        let writer = out.written.get(block);
                        let is_own = writer.is_none_or(|writer| *writer == planned.id);
                        assert!(is_own, "{block:?} of {:?} is still written", planned.id);
                    }
                }
                let start = planned.kv_len - planned.tokens.len() as u32;
                let blocks = &table[(start / block_size) as usize * plan.num_groups..];
                written.extend(blocks.iter().map(|block| (*block, planned.id)));
            }
        }
        written
    }

    /// Steps until nothing is active. Panics if that takes longer than running the requests one after the other: each
    /// step advances the first one by a token.
    pub fn run_to_end(&mut self) {
        let lengths = self.active().map(|(_, stream)| {
            // A guide is not ready for a token in up to two steps.
            let of_token = if stream.request.is_guided { 3 } else { 1 };
            let num_new = u64::from(stream.request.max_new_tokens);
            stream.request.prompt.len() as u64 + of_token * num_new
        });
        let mut steps_left: u64 = lengths.sum();
        // A step advances only one micro-batch, and the results of one step are late.
        // Where steps are planned ahead, a token may be missed, and the step after that is void.
        let each = match self.config.plan_ahead {
            true => 4,
            false => self.config.num_micro_batches as u64,
        };
        steps_left = steps_left * each + 2;
        while !self.engine.is_idle() {
            assert!(steps_left > 0, "requests do not end");
            steps_left -= 1;
            self.step();
        }
        // Requests cancelled meanwhile are forgotten when the results of their step arrive.
        self.step();
        assert_eq!(
            self.engine.kv_usage().num_used,
            Blocks(0),
            "blocks are lost"
        );
        assert!(self.step().is_empty());
        assert_eq!(
            self.engine.stats(),
            None,
            "no record without active requests"
        );
    }

    fn check_events(&mut self) {
        for event in &self.events {
            let id = event.sequence_id();
            let stream = self.streams.get_mut(&id).expect("events are of requests");
            assert!(!stream.ended, "{event:?} after the end");
            match *event {
                Event::Admitted(_, num_cached) => {
                    assert!(!stream.admitted, "{id:?} is admitted twice");
                    stream.admitted = true;
                    stream.num_cached = num_cached;
                }
                Event::Paused(_) => {
                    // With two micro-batches the event may be older than the plan that resumed the sequence.
                    let ran = !stream.paused || self.config.max_steps_out() > 1;
                    assert!(stream.admitted && ran, "{id:?} did not run");
                    let may_pause = self.config.policy == CapacityPolicy::MaxUtilization;
                    assert!(may_pause, "only MAX_UTILIZATION pauses");
                    stream.paused = true;
                    self.num_pauses += 1;
                    self.num_pauses_with_beams += u64::from(stream.request.width() > 1);
                }
                Event::ExtraOutputs(_, ref extra_outputs) => {
                    let [context, generation, of_prompt] = &mut stream.extra_outputs;
                    context.extend(&extra_outputs.context_logits);
                    generation.extend(&extra_outputs.generation_logits);
                    let log_probs = extra_outputs.prompt_log_probs.iter();
                    of_prompt.extend(log_probs.map(|it| it.chosen.log_prob));
                    if let Some(now) = extra_outputs.kv_blocks {
                        let before = std::mem::replace(&mut stream.kv_blocks, now);
                        assert!(stream.request.outputs.kv_blocks && before != now);
                        assert!(before.num_new <= now.num_new);
                        assert!(before.num_reused <= now.num_reused);
                    }
                    if let Some(now) = extra_outputs.drafts {
                        let before = std::mem::replace(&mut stream.drafts, now);
                        assert!(stream.request.outputs.drafts);
                        assert!(before.num_drafted < now.num_drafted);
                        assert!(before.num_accepted <= now.num_accepted);
                        assert!(now.num_accepted <= now.num_drafted);
                    }
                }
                Event::Token(_, token) => {
                    assert!(stream.admitted, "{id:?} does not run");
                    assert_eq!(stream.request.beam_search, None, "{id:?} searches");
                    stream.tokens.push(token);
                }
                Event::Hypotheses(_, ref found) => {
                    assert!(!found.is_empty());
                    stream.told.push(found.to_vec());
                }
                Event::Finished(_, reason) if let Some(search) = stream.request.beam_search => {
                    let alone = search_alone(&stream.request, search, self.config.max_seq_len);
                    if !matches!(reason, FinishReason::Error(_)) {
                        // A search without an allowed continuation of its prompt ends without hypotheses.
                        stream.hypotheses = stream.told.pop().unwrap_or_default();
                    }
                    let answer = (&stream.hypotheses, reason);
                    let expected = (&alone.found, alone.finish_reason);
                    assert_eq!(answer, expected, "{id:?} finds something else alone");
                    let every = stream
                        .request
                        .outputs
                        .beams
                        .map(|interval| interval.get() as usize);
                    let told: Vec<_> = every
                        .into_iter()
                        .flat_map(|every| alone.so_far.iter().step_by(every))
                        .collect();
                    assert!(stream.told.iter().eq(told), "{id:?} gets other beams");
                    stream.check_gathered();
                    stream.ended = true;
                }
                Event::Finished(_, reason) => {
                    let answer = (stream.tokens.clone(), reason);
                    let alone = stream.request.answer_alone(self.config.max_seq_len);
                    assert_eq!(answer, alone, "{id:?} gives something else alone");
                    if !matches!(reason, FinishReason::Error(_)) {
                        stream.check_gathered();
                    }
                    stream.ended = true;
                }
            }
        }
        let active = self.streams.iter().filter(|(_, stream)| !stream.ended);
        for (&id, _) in active {
            assert!(self.engine.is_active(id));
        }
    }
}

/// Makes the drafts of a step as a draft model would, with access only through the block tables: two of three are
/// right. It knows the positions that it has computed; those that were found in the cache may be anything.
fn make_drafts(step: &mut Step, config: &EngineConfig, caches: &mut [Vec<u64>; 2]) {
    let block_size = config.block_size.tokens().index();
    let [cache, host_cache] = caches;
    make_moves(step.moves(), block_size, cache, host_cache);
    let mut drafts = Vec::new();
    // Besides the last token of each.
    let caught_up = step.drafts_to_make().map(|it| it.tokens.len() - 1);
    assert!(caught_up.sum::<usize>() <= config.max_num_tokens.index());
    for to_make in step.drafts_to_make() {
        let table = to_make.block_table.start as usize..to_make.block_table.end as usize;
        let table = &step.block_tables()[table];
        let place = |position: usize| {
            table[position / block_size].index() * block_size + position % block_size
        };
        assert!(!to_make.tokens.is_empty() && to_make.num_drafts > 0);
        let mut position = to_make.start as usize;
        let mut compute = |token| {
            let before = position.checked_sub(1);
            let before = before.map_or(FIRST_ENTRY, |before| cache[place(before)]);
            cache[place(position)] = chain(before, token);
            position += 1;
            chain(before, token)
        };
        let tokens = to_make.tokens.iter().map(|&token| compute(token));
        let mut entry = tokens.last().expect("not empty");
        for n in 1..=to_make.num_drafts {
            let guess = (next_token(entry) + u32::from(entry % 3 == 0)) % VOCAB_SIZE;
            let draft = if to_make.is_end(guess) { 0 } else { guess };
            drafts.push(draft);
            if n < to_make.num_drafts {
                entry = compute(draft);
            }
        }
    }
    step.set_drafts(&drafts);
}

fn make_moves(moves: &[BlockMove], block_size: usize, cache: &mut [u64], host_cache: &mut [u64]) {
    let positions = |index: usize| index * block_size..(index + 1) * block_size;
    for one in moves {
        match *one {
            BlockMove::Copy(copy) => {
                assert!(copy.num_positions > 0 && (copy.num_positions as usize) < block_size + 1);
                let source = copy.source.index() * block_size;
                let target = copy.target.index() * block_size;
                cache.copy_within(source..source + copy.num_positions as usize, target);
            }
            BlockMove::Offload { source, target } => host_cache[positions(target.index())]
                .copy_from_slice(&cache[positions(source.index())]),
            BlockMove::Onboard { source, target } => cache[positions(target.index())]
                .copy_from_slice(&host_cache[positions(source.index())]),
        }
    }
}

impl States {
    /// Computes the states of a plan, one token behind the other.
    fn run(&mut self, plan: &StepPlan<'_>, streams: &BTreeMap<SequenceId, Stream>) {
        for one in plan.state_moves {
            match *one {
                StateMove::Restore(restore) => {
                    let state = match restore.snapshot {
                        StateSnapshot::Device(id) => self.snapshots[id.index()],
                        StateSnapshot::Host(id) => self.host_snapshots[id.index()],
                    };
                    self.of_sequences[restore.row.index()] = SequenceStates {
                        states: vec![state],
                        num_tokens: restore.num_tokens.index(),
                    };
                }
                StateMove::Offload { source, target } => {
                    self.host_snapshots[target.index()] = self.snapshots[source.index()];
                }
                StateMove::Onboard { source, target } => {
                    self.snapshots[target.index()] = self.host_snapshots[source.index()];
                }
            }
        }
        let copies = plan.state_copies;
        for &StateCopy { source, target } in copies {
            assert!(
                copies.iter().all(|copy| copy.source != target),
                "{copies:?}"
            );
            self.of_sequences[target.index()] = self.of_sequences[source.index()].clone();
        }
        let rows: BTreeSet<_> = plan.sequences.iter().map(|it| it.states).collect();
        assert_eq!(rows.len(), plan.sequences.len(), "a row has one state");
        for (index, planned) in plan.sequences.iter().enumerate() {
            let num_drafts = plan.drafts(planned).len();
            let tokens = plan.sampling_input_after(index, num_drafts).tokens;
            let entry = |len: usize| {
                let request = &streams[&planned.id].request;
                let tokens = tokens[..len].iter().enumerate();
                tokens.fold(FIRST_ENTRY, |entry, (position, &token)| {
                    request.chain_at(entry, position, token)
                })
            };
            let end = planned.kv_len as usize;
            let start = end - planned.tokens.len();
            let SequenceStates { states, num_tokens } =
                &mut self.of_sequences[planned.states.index()];
            let is_repeated = states.len() == 1 && start + 1 == end && *num_tokens == end;
            if start > 0 {
                let behind = if is_repeated { end } else { start };
                let first = *num_tokens + 1 - states.len();
                let state = behind.checked_sub(first).and_then(|at| states.get(at));
                let id = planned.id;
                assert_eq!(state, Some(&entry(behind)), "{id:?} behind {behind} tokens");
            }
            let saves = plan.state_saves.iter();
            for save in saves.filter(|save| planned.tokens.contains(&save.token)) {
                let len = start + (save.token - planned.tokens.start) as usize + 1;
                assert!(len.is_multiple_of(plan.block_size.tokens().index()));
                self.snapshots[save.snapshot.index()] = entry(len);
            }
            let first = if num_drafts > 0 { start } else { end };
            *states = (first..=end).map(entry).collect();
            *num_tokens = end;
        }
    }
}

/// Computes a plan as a model would, with access only through the block tables.
fn run(
    plan: &StepPlan<'_>,
    config: &EngineConfig,
    streams: &mut BTreeMap<SequenceId, Stream>,
    images: &BTreeMap<ImageSlot, u128>,
    [cache, host_cache]: [&mut [u64]; 2],
    output: &mut StepOutput,
    of_host: &mut Vec<usize>,
) {
    let block_size = plan.block_size.tokens().index();
    make_moves(plan.moves, block_size, cache, host_cache);
    for (index, planned) in plan.sequences.iter().enumerate() {
        let blocks = plan.block_table(planned);
        let place_in = |position: usize, group: usize| {
            let block = blocks[position / block_size * plan.num_groups + group];
            assert_ne!(block, BlockId::NONE, "position {position} was freed");
            block.index() * block_size + position % block_size
        };
        let place = |position: usize| place_in(position, 0);
        let drafts = plan.drafts(planned);
        let stream = streams.get_mut(&planned.id).expect("added before");
        let is_lost = planned.is_ahead && stream.in_flight.back() == Some(&None);
        let tokens = match planned.is_ahead {
            true => stream.with_tokens_in_flight(),
            false => plan.sampling_input_after(index, drafts.len()).tokens.into(),
        };
        let entries: Vec<u64> = tokens
            .iter()
            .enumerate()
            .scan(FIRST_ENTRY, |entry, (position, &token)| {
                *entry = stream.request.chain_at(*entry, position, token);
                Some(*entry)
            })
            .collect();
        let end = planned.kv_len as usize;
        let start = end - planned.tokens.len();
        for position in start..end {
            let token = planned.tokens.start + (position - start) as u32;
            let rows = plan.image_rows.iter();
            let rows = rows.filter(|rows| rows.tokens.contains(&token));
            let found = rows.map(|rows| {
                (
                    images[&rows.slot],
                    rows.first_row + token - rows.tokens.start,
                )
            });
            let expected = stream.request.row_at(position);
            assert_eq!(
                found.collect::<Vec<_>>(),
                Vec::from_iter(expected),
                "{:?}",
                planned.id
            );
            for group in 0..plan.num_groups {
                // What a group has is of no use to another.
                let content = |position: usize| entries[position].wrapping_add(group as u64);
                for seen in (0..position).filter(|&seen| sees(config, group, position, seen)) {
                    let is_own = cache[place_in(seen, group)] == content(seen);
                    assert!(is_own, "{:?} sees another's position {seen}", planned.id);
                }
                cache[place_in(position, group)] = content(position);
            }
        }
        // A row of logits is a single number here: its position.
        let first = planned.tokens.start as usize;
        let outputs = plan.outputs(index);
        let positions = plan.context_logits(index);
        let positions = positions.map(|row| row as usize - first + start);
        // And log-probabilities are the position of their token.
        let next = positions.clone().map(|position| position + 1);
        let next_tokens = plan.prompt_after(index).iter();
        let prompt_log_probs = next.zip(next_tokens).map(|(position, &token)| {
            assert_eq!(stream.request.prompt[position], token);
            TokenLogProbs {
                chosen: TokenLogProb {
                    token,
                    log_prob: position as f32,
                    rank: 1,
                },
                top: Vec::new(),
            }
        });
        let mut extra_outputs = ExtraOutputs {
            context_logits: positions
                .filter(|_| outputs.context_logits)
                .map(|position| position as f32)
                .collect(),
            prompt_log_probs: prompt_log_probs.collect(),
            ..ExtraOutputs::default()
        };
        for num_accepted in (0..=drafts.len()).take_while(|_| planned.samples) {
            let last = end - 1 - drafts.len() + num_accepted;
            if !planned.is_ahead {
                let input = plan.sampling_input_after(index, num_accepted);
                assert_eq!(input.tokens, &tokens[..last + 1]);
            }
            let num_generated = last + 1 - stream.request.prompt.len();
            let fails = stream.request.fails_after == Some(num_generated);
            let is_of_host = config.plan_ahead && cache[place(last)].is_multiple_of(8);
            // A guide is not ready for every seventh token, for one or two steps.
            let entry = cache[place(last)];
            let is_unready = stream.request.is_guided
                && num_accepted == 0
                && num_generated > 0
                && entry.is_multiple_of(7)
                && u64::from(stream.num_unready) < 1 + entry % 2;
            stream.num_unready = if is_unready {
                stream.num_unready + 1
            } else {
                0
            };
            let is_missed = is_lost || is_unready || planned.is_ahead && is_of_host;
            let sampled = if is_lost || is_missed && !fails {
                Sampled::Missed
            } else if fails {
                Sampled::Failed(SampleError::NotFinite)
            } else if let Some(num) = plan.num_candidates(index) {
                let entry = cache[place(end - 1)];
                match candidates(entry, num) {
                    Err(error) => Sampled::Failed(error),
                    Ok(candidates) => {
                        let are_wanted = plan.outputs(index).generation_logits;
                        output.beam_candidates.push(BeamCandidates {
                            candidates,
                            generation_logits: if are_wanted { logits(entry) } else { vec![] },
                            log_probs: vec![],
                        });
                        Sampled::Candidates
                    }
                }
            } else {
                if is_of_host && drafts.is_empty() {
                    of_host.push(output.sampled.len());
                }
                Sampled::Token(next_token(cache[place(last)]))
            };
            if num_accepted == 0 {
                stream.in_flight.push_back(match sampled {
                    Sampled::Token(token) if !is_of_host => Some(token),
                    _ => None,
                });
            }
            output.sampled.push((planned.slot, sampled));
            // The logits of a beam come with its candidates.
            if plan.outputs(index).generation_logits
                && plan.num_candidates(index).is_none()
                && sampled != Sampled::Missed
            {
                extra_outputs.generation_logits.push((last + 1) as f32);
                output
                    .extra_outputs
                    .push((planned.slot, std::mem::take(&mut extra_outputs)));
            }
            if drafts.get(num_accepted).map(|&draft| Sampled::Token(draft)) != Some(sampled) {
                break;
            }
        }
        if extra_outputs != ExtraOutputs::default() {
            output.extra_outputs.push((planned.slot, extra_outputs));
        }
    }
}

/// Whether the query at `position` sees the key at `seen`, which is not after it, in the layers of `group`.
fn sees(config: &EngineConfig, group: usize, position: usize, seen: usize) -> bool {
    config.groups.windows()[group].is_none_or(|window| {
        seen < window.num_sinks.index() || seen + window.size.index() > position
    })
}

/// Checks what must hold for every step.
fn check_step(step: &Step, config: &EngineConfig, streams: &mut BTreeMap<SequenceId, Stream>) {
    let plans: Vec<_> = step.plans().collect();
    let num_calls = match config.scheme {
        BatchingScheme::InflightFused => 1,
        BatchingScheme::Inflight | BatchingScheme::V1 => 2,
    };
    assert!(plans.len() <= num_calls, "{} model calls", plans.len());
    assert!(
        step.num_tokens() <= config.max_num_tokens,
        "over the budget"
    );
    let num_tokens: usize = plans.iter().map(|plan| plan.token_ids.len()).sum();
    assert_eq!(step.num_tokens().index(), num_tokens);
    // They are made before the first call.
    let moves: Vec<_> = plans.iter().flat_map(|plan| plan.moves).collect();
    assert_eq!(step.moves().iter().collect::<Vec<_>>(), moves);
    let sequences = step.sequences();
    assert!(
        step.num_requests() <= config.max_num_requests as usize,
        "too many sequences"
    );
    let is_generation = |planned: &PlannedSequence| streams[&planned.id].generates;
    assert!(
        sequences.is_sorted_by_key(is_generation),
        "contexts come first"
    );
    if config.scheme != BatchingScheme::InflightFused {
        for plan in &plans {
            let first = is_generation(&plan.sequences[0]);
            let mut all = plan.sequences.iter().map(is_generation);
            assert!(all.all(|phase| phase == first), "a call has one phase");
        }
    }
    if config.scheme == BatchingScheme::V1 {
        check_lockstep(&plans, config, streams);
    } else {
        assert!(plans.iter().all(|plan| plan.num_padding_tokens.0 == 0));
    }

    let may_overtake = config.max_steps_out() > 1
        || config.reuse != BlockReuse::Off
        || config.scheme == BatchingScheme::V1
        || config.num_adapter_pages.is_some()
        || streams.values().any(|stream| stream.request.priority != 0);
    if !may_overtake {
        let mut active = streams.iter().filter(|(_, stream)| !stream.ended);
        let first = active.next().map(|(&id, _)| id);
        let mut planned_ids = sequences.iter().map(|planned| planned.id);
        assert!(
            first.is_none_or(|first| planned_ids.any(|id| id == first)),
            "the first to arrive is in every step"
        );
    }

    let mut slots = BTreeMap::new();
    let mut last = None;
    for planned in sequences {
        let num_beams = slots.entry(planned.slot).or_insert(0);
        assert_eq!(
            planned.beam, *num_beams,
            "two sequences in {:?}",
            planned.slot
        );
        *num_beams += 1;
        assert!(
            planned.beam == 0 || last == Some(planned.slot),
            "beams are packed"
        );
        assert!(*num_beams <= streams[&planned.id].request.width());
        last = Some(planned.slot);
    }
    assert_eq!(slots.len(), step.num_requests());
    check_writes(&plans);
    for plan in &plans {
        check_plan(plan, config, streams);
    }
}

/// In lockstep a model call is a rectangle, and contexts start together.
fn check_lockstep(
    plans: &[StepPlan<'_>],
    config: &EngineConfig,
    streams: &BTreeMap<SequenceId, Stream>,
) {
    assert!(
        plans.len() <= 1,
        "contexts and generation are steps of their own"
    );
    let Some(plan) = plans.first() else { return };
    let num_tokens = plan.token_ids.len() + plan.num_padding_tokens.index();
    if !streams[&plan.sequences[0].id].generates {
        let are_whole = plan.sequences.iter().all(|planned| planned.samples);
        let num_padding = plan.num_padding_tokens.index();
        assert!(
            are_whole || num_padding == 0,
            "padding comes with the last contexts"
        );
    } else {
        let max_num_beams = config.max_num_requests * config.max_beam_width;
        assert!(num_tokens <= max_num_beams as usize);
    }
}

/// Checks that a block that is written to is in only one table.
fn check_writes(plans: &[StepPlan<'_>]) {
    let mut num_tables = BTreeMap::new();
    for plan in plans {
        for planned in plan.sequences {
            let blocks: BTreeSet<_> = plan.block_table(planned).iter().collect();
            for block in blocks {
                *num_tables.entry(*block).or_insert(0) += 1;
            }
        }
    }
    for plan in plans {
        let block_size = plan.block_size.tokens().0;
        for planned in plan.sequences {
            let start = planned.kv_len - planned.tokens.len() as u32;
            let first = (start / block_size) as usize * plan.num_groups;
            for block in &plan.block_table(planned)[first..] {
                assert_eq!(num_tables[block], 1, "{block:?} is written to and shared");
            }
        }
    }
}

/// Checks what must hold for every model call.
fn check_plan(
    plan: &StepPlan<'_>,
    config: &EngineConfig,
    streams: &mut BTreeMap<SequenceId, Stream>,
) {
    let block = config.block_size.tokens().0;
    let mut next_token = 0;
    let mut tables = BTreeMap::new();
    for (index, planned) in plan.sequences.iter().enumerate() {
        let stream = streams
            .get_mut(&planned.id)
            .expect("only added requests are planned");
        assert!(!stream.ended, "{:?} has ended", planned.id);
        stream.paused = false;
        assert!(planned.slot.0 < config.max_num_requests);
        assert_eq!(
            *stream.slot.get_or_insert(planned.slot),
            planned.slot,
            "rows are stable"
        );

        assert_eq!(planned.tokens.start, next_token, "tokens are packed");
        next_token = planned.tokens.end;
        tables.insert(planned.block_table.start, planned.block_table.end);

        let drafts = plan.drafts(planned);
        check_drafts(drafts, stream, config);
        let known = match stream.request.beam_search {
            None if planned.is_ahead => stream.with_tokens_in_flight(),
            None => [&stream.request.prompt[..], &stream.tokens].concat(),
            // Their tokens are checked at the end of the search.
            Some(_) => plan.sampling_input(index).tokens.to_vec(),
        };
        assert!(known.starts_with(&stream.request.prompt));
        let with_drafts = [&known, drafts].concat();
        let chunk = plan.chunk(planned);
        let num_chunk_tokens = planned.tokens.end - planned.tokens.start;
        let start = planned.kv_len - num_chunk_tokens;
        assert!(num_chunk_tokens > 0);
        let rows = plan.context_logits(index);
        assert!(planned.tokens.start <= rows.start && rows.end <= planned.tokens.end);
        let sampling_ahead = plan.sampling_ahead(index);
        assert_eq!(sampling_ahead.is_some(), planned.is_ahead);
        if let Some(sampling) = sampling_ahead {
            assert!(!stream.in_flight.is_empty(), "it goes on from nothing");
            assert!(!plan.outputs(index).any() && chunk == [0]);
            let num_generated = known.len() - stream.request.prompt.len();
            assert_eq!(sampling.num_generated, num_generated as u64);
        } else {
            assert!(stream.in_flight.is_empty() || config.num_micro_batches > 1);
            assert_eq!(plan.outputs(index), stream.request.outputs);
            assert_eq!(chunk, &with_drafts[start as usize..planned.kv_len as usize]);
            let input = plan.sampling_input(index);
            assert_eq!((input.tokens, input.beam), (&known[..], planned.beam));
        }
        assert_eq!(
            planned.samples,
            planned.kv_len as usize == with_drafts.len()
        );
        let chunked = config.enable_chunked_context || config.scheme == BatchingScheme::V1;
        // After a pause, beams are computed together to where they part, and from there any number of tokens each.
        let has_beams = stream.request.width() > 1 && known.len() > stream.request.prompt.len();
        let images = stream.request.images.iter().flat_map(image_spans);
        let spans: Vec<_> = images.map(|span| span.position.0..span.end().0).collect();
        let has_whole_images = config.images.is_some_and(|it| it.has_whole_images);
        let is_image = |position| {
            let mut spans = spans.iter();
            spans.any(|span| span.start == position || has_whole_images && span.end == position)
        };
        let is_bound = |position| position % block == 0 || is_image(position);
        for span in spans.iter().filter(|_| has_whole_images) {
            let is_cut = span.start < planned.kv_len && planned.kv_len < span.end;
            assert!(!is_cut, "a chunk to {} cuts {span:?}", planned.kv_len);
        }
        match stream.generates {
            true => {
                let has_generated = known.len() > stream.request.prompt.len();
                assert_eq!(num_chunk_tokens, 1 + planned.num_drafts);
                assert!(planned.samples && has_generated);
            }
            false if has_beams => {}
            false if chunked => {
                assert!(
                    planned.samples || is_bound(planned.kv_len),
                    "chunks end where blocks do, or beside images"
                );
            }
            false => assert!(planned.samples, "contexts are not cut"),
        }
        // A last chunk whose token was missed is computed again from its last position.
        let may_miss = config.plan_ahead || stream.request.is_guided;
        if config.reuse == BlockReuse::Off && !stream.generates && !may_miss && !has_beams {
            assert!(is_bound(start), "a chunk starts where one may end");
        }

        let blocks = plan.block_table(planned);
        let num_needed = planned.kv_len.div_ceil(block) as usize;
        // A step that was void may have taken the next block already.
        let num_spare = usize::from(config.plan_ahead && stream.generates);
        assert!(blocks.len().is_multiple_of(plan.num_groups));
        let num_places = blocks.len() / plan.num_groups;
        assert!((num_needed..=num_needed + num_spare).contains(&num_places));
        if stream.generates && config.max_steps_out() == 1 {
            check_freed(blocks, start.saturating_sub(block), config);
        }
        let held: Vec<_> = blocks.iter().filter(|&&id| id != BlockId::NONE).collect();
        assert!(held.iter().all(|id| id.0 < config.num_blocks.0));
        let different: BTreeSet<_> = held.iter().collect();
        assert_eq!(different.len(), held.len(), "a block is in two places");
    }
    assert_eq!(next_token as usize, plan.token_ids.len());
    assert_eq!(tables.len(), plan.sequences.len());
    let bounds = tables.into_iter().flat_map(|(start, end)| [start, end]);
    assert!(bounds.is_sorted(), "tables do not overlap");
}

/// Checks that a sequence has freed the blocks of its table that no query from `position` on sees.
fn check_freed(table: &[BlockId], position: u32, config: &EngineConfig) {
    let (position, block) = (position as usize, config.block_size.tokens().index());
    let num_groups = config.groups.num_groups();
    for (index, held) in table.iter().enumerate() {
        let (place, group) = (index / num_groups, index % num_groups);
        let mut positions = place * block..(place + 1) * block;
        let is_hidden =
            positions.end <= position && !positions.any(|seen| sees(config, group, position, seen));
        assert!(
            !is_hidden || *held == BlockId::NONE,
            "block {place} is hidden"
        );
    }
}

/// Checks what must hold for the drafts of a sequence.
fn check_drafts(drafts: &[TokenId], stream: &Stream, config: &EngineConfig) {
    if drafts.is_empty() {
        return;
    }
    assert!(stream.generates);
    let speculation = config.speculation.expect("nothing is drafted without it");
    let max_requested = stream.request.drafts.max_draft_tokens.unwrap_or(u32::MAX);
    assert!(drafts.len() as u32 <= speculation.max_draft_tokens.min(max_requested));
    // Drafts do not exceed what the sequence can still generate.
    let max_new_tokens = stream.request.max_new_tokens as usize;
    let room = config.max_seq_len.index() - stream.request.prompt.len();
    assert!(stream.tokens.len() + drafts.len() < max_new_tokens.min(room));
    assert!(!stream.request.has_end_id || !drafts.contains(&END_ID));
}

/// A configuration with room for everything, and no shared blocks. Tests narrow what they test.
pub fn wide_config() -> EngineConfig {
    let block_size = BlockSize::new(4).expect("not zero");
    EngineConfig {
        max_num_requests: 8,
        max_seq_len: Tokens(64),
        max_num_tokens: Tokens(512),
        block_size,
        chunk_unit: block_size,
        num_blocks: Blocks(128),
        reuse: BlockReuse::Off,
        ..EngineConfig::default()
    }
}
