//! One sequence's guide: the tokens that may follow its output so far.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use llguidance::api::StopReason;
use llguidance::earley::ParserStats;
use llguidance::panic_utils::catch_unwind;
use llguidance::{CancellationHandle, TokenParser};
use parking_lot::Mutex;

use crate::masks::{Mask, Masks, forbid_others, is_set, set};
use crate::memory::{GuideMemory, MemoryShare};
use crate::work::Work;
use inflight_base::TokenId;
use inflight_sampling::{Guide, GuideCost, GuideTokens, SampleError};

/// Upper bound of a grammar's memory per byte of a guide's text, without its lexer. All guides of `tests/memory.rs`
/// stay below it.
const BYTES_OF_GRAMMAR: usize = 192;

/// Likewise, each parser.
const BYTES_OF_PARSER: usize = 32;

/// A compiled grammar, shared by the guides that use it.
pub(super) struct Compiled {
    /// A parser that has consumed nothing.
    start: Mutex<TokenParser>,
    /// The tokens allowed first.
    first: Mask,
    /// The bit of the end of the output.
    end: usize,
    /// Of the guide's text.
    num_text_bytes: usize,
    /// Why its output can be derived in many ways, if that is known.
    ambiguity: Option<String>,
    share: MemoryShare,
}

impl Compiled {
    /// A grammar for token ids below `vocab_size`. `parser` must be unused.
    ///
    /// # Errors
    /// No token is allowed first, or the first mask cannot be computed.
    pub(super) fn new(
        mut parser: TokenParser,
        vocab_size: u32,
        memory: &Arc<GuideMemory>,
        num_text_bytes: usize,
        ambiguity: Option<String>,
    ) -> Result<Self, SampleError> {
        parser.start_without_prompt();
        let end = vocab_size as usize;
        let first = mask_of(&mut parser, end)?;
        if first.iter().all(|word| *word == 0) {
            return Err(SampleError::NoneAllowed);
        }
        let num_bytes = lexer_bytes(&parser) + num_text_bytes * BYTES_OF_GRAMMAR;
        let share = MemoryShare::new(memory, num_bytes);
        Ok(Self {
            start: Mutex::new(parser),
            first,
            end,
            num_text_bytes,
            ambiguity,
            share,
        })
    }

    /// A new parser. A deep copy, because parsers have work limits: a shared one would let requests use up each
    /// other's.
    fn start(&self) -> TokenParser {
        self.start.lock().deep_clone()
    }
}

/// A sequence's guide (`llguidance`).
pub struct GrammarGuide {
    compiled: Arc<Compiled>,
    end_ids: Arc<[TokenId]>,
    /// Held by the thread that computes.
    parsing: Mutex<Parsing>,
    /// What has been computed. Held for moments only.
    masks: Mutex<Masks>,
    control: Mutex<Control>,
}

/// A sequence's parser, and what it has cost.
struct Parsing {
    /// None before first use, and where memory is short.
    followed: Option<Followed>,
    work: Work,
    share: MemoryShare,
}

/// A parser and the tokens that it has consumed.
struct Followed {
    parser: TokenParser,
    tokens: Vec<TokenId>,
    /// The error of a failed guide, which stays failed.
    error: Option<SampleError>,
    /// Items that it has added to its table.
    num_items: usize,
}

/// What others may ask or tell while the guide computes.
#[derive(Default)]
struct Control {
    cost: GuideCost,
    is_given_up: bool,
    /// Of the parser.
    cancellation: Option<CancellationHandle>,
}

impl GrammarGuide {
    /// A guide for a sequence that ends with any of `end_ids`.
    pub(super) fn new(compiled: Arc<Compiled>, end_ids: Arc<[TokenId]>) -> Self {
        let first = with_end_ids(&end_ids, compiled.first.clone(), compiled.end);
        let parsing = Parsing {
            followed: None,
            work: Work::default(),
            share: MemoryShare::new(compiled.share.memory(), 0),
        };
        Self {
            parsing: Mutex::new(parsing),
            masks: Mutex::new(Masks::new(first)),
            control: Mutex::default(),
            compiled,
            end_ids,
        }
    }

    /// The look-ups of the token that has cost most, at most [`MAX_LOOKUPS`](crate::MAX_LOOKUPS).
    pub fn max_lookups(&self) -> u64 {
        self.parsing.lock().work.largest()
    }

    /// Memory of this guide alone, without the shared grammar, in bytes.
    pub fn num_bytes(&self) -> usize {
        self.parsing.lock().share.num_bytes()
    }

    /// Computes what may follow `generated`, and what may follow with the drafts behind it, unless that is known.
    fn compute(&self, generated: &[TokenId], drafts: &[TokenId]) {
        let mut parsing = self.parsing.lock();
        if drafts.is_empty() && self.is_ready(generated) {
            return;
        }
        let since = Instant::now();
        let follow = AssertUnwindSafe(|| self.follow(&mut parsing, generated, drafts));
        if std::panic::catch_unwind(follow).is_err() {
            parsing.followed = None;
            let failed = Err(SampleError::GuideFailed);
            self.masks.lock().begin(generated, failed);
        }
        let took = since.elapsed();
        let Parsing {
            followed, share, ..
        } = &mut *parsing;
        let own_bytes = self.compiled.num_text_bytes * BYTES_OF_PARSER;
        let of_parser = |it: &Followed| it.num_bytes() + own_bytes;
        share.set(followed.as_ref().map_or(0, of_parser));
        if share.memory().is_over() {
            *followed = None;
            share.set(0);
        }
        let mut control = self.control.lock();
        control.cost.total += took;
        control.cost.last = took / (1 + drafts.len() as u32);
    }

    fn follow(&self, parsing: &mut Parsing, generated: &[TokenId], drafts: &[TokenId]) {
        let Parsing { followed, work, .. } = parsing;
        let kept = followed.take().and_then(|it| it.rewound_to(generated));
        let followed = followed.insert(kept.unwrap_or_else(|| self.start()));
        work.truncate(self.masks.lock().num_common(generated));
        let mut spent = 0;
        while followed.tokens.len() < generated.len() {
            spent = followed.consume(generated[followed.tokens.len()]);
        }
        let mask = self.mask(followed, work, spent);
        self.masks.lock().begin(generated, mask.clone());
        let mut before = mask;
        for &draft in drafts {
            let is_allowed =
                |mask: &Mask| (draft as usize) < self.compiled.end && is_set(mask, draft as usize);
            if !before.as_ref().is_ok_and(is_allowed) || self.end_ids.contains(&draft) {
                return;
            }
            let spent = followed.consume(draft);
            before = self.mask(followed, work, spent);
            self.masks.lock().push(draft, before.clone());
        }
    }

    fn start(&self) -> Followed {
        let mut parser = self.compiled.start();
        let handle = parser.enable_cancellation();
        let mut control = self.control.lock();
        if control.is_given_up {
            handle.cancel();
        }
        control.cancellation = Some(handle);
        Followed {
            parser,
            tokens: Vec::new(),
            error: None,
            num_items: 0,
        }
    }

    /// Mask of the tokens allowed after those of `followed`, the last of which has cost `spent`. The request's end ids
    /// stand for the end of the output.
    fn mask(
        &self,
        followed: &mut Followed,
        work: &mut Work,
        spent: u64,
    ) -> Result<Mask, SampleError> {
        if let Some(error) = followed.error {
            return Err(error);
        }
        let end = self.compiled.end;
        let before = followed.parser.parser_stats().clone();
        let mask = mask_of(&mut followed.parser, end);
        let spent = spent + Work::between(&before, followed.parser.parser_stats());
        let is_within = work.add(followed.tokens.len(), spent);
        let mask = mask.and_then(|mask| {
            is_within?;
            Ok(with_end_ids(&self.end_ids, mask, end))
        });
        followed.error = mask.as_ref().err().copied();
        mask
    }
}

impl Followed {
    /// The same with no more tokens than `generated` has in common with it. `None` if it cannot go back.
    fn rewound_to(mut self, generated: &[TokenId]) -> Option<Self> {
        let pairs = self.tokens.iter().zip(generated);
        let num_common = pairs.take_while(|(kept, token)| kept == token).count();
        let num_behind = self.tokens.len() - num_common;
        if num_behind > 0 {
            if self.error.is_some() || self.parser.stopped() {
                return None;
            }
            let parser = &mut self.parser;
            let rewind = AssertUnwindSafe(|| parser.rollback(num_behind));
            catch_unwind(rewind).ok()?;
            self.tokens.truncate(num_common);
        }
        Some(self)
    }

    /// Consumes a token. Returns what it has cost.
    fn consume(&mut self, token: TokenId) -> u64 {
        self.tokens.push(token);
        if self.error.is_some() {
            return 0;
        }
        let before: ParserStats = self.parser.parser_stats().clone();
        self.error = consume(&mut self.parser, token).err();
        let after = self.parser.parser_stats();
        self.num_items += after.delta(&before).all_items;
        Work::between(&before, after)
    }

    /// What it has in memory: the states of its lexer, which are made as the output meets them, and its table.
    fn num_bytes(&self) -> usize {
        /// An item has 8 bytes, and the table may have twice the room that it needs.
        const BYTES_PER_ITEM: usize = 16;
        lexer_bytes(&self.parser) + self.num_items * BYTES_PER_ITEM
    }
}

impl GuideTokens for GrammarGuide {
    fn fresh(&self) -> Guide {
        let guide = Self::new(Arc::clone(&self.compiled), Arc::clone(&self.end_ids));
        Guide(Arc::new(guide))
    }

    fn prepare(&self, generated: &[TokenId], drafts: &[TokenId]) {
        self.compute(generated, drafts);
    }

    fn is_ready(&self, generated: &[TokenId]) -> bool {
        self.masks.lock().get(generated).is_some()
    }

    fn cost(&self) -> GuideCost {
        self.control.lock().cost
    }

    fn give_up(&self) {
        let mut control = self.control.lock();
        control.is_given_up = true;
        if let Some(cancellation) = &control.cancellation {
            cancellation.cancel();
        }
    }

    fn explain(&self, error: SampleError) -> Option<String> {
        let ambiguity = self.compiled.ambiguity.as_deref();
        ambiguity
            .filter(|_| error == SampleError::GuideTooComplex)
            .map(too_complex)
    }

    fn restrict(&self, logits: &mut [f32], generated: &[TokenId]) -> Result<(), SampleError> {
        if !self.is_ready(generated) {
            self.compute(generated, &[]);
        }
        match self.masks.lock().get(generated) {
            Some(Ok(mask)) => {
                forbid_others(logits, mask);
                Ok(())
            }
            Some(Err(error)) => Err(*error),
            None => Err(SampleError::GuideFailed),
        }
    }
}

/// The error of a guide whose output can be derived in many ways.
pub(super) fn too_complex(ambiguity: &str) -> String {
    format!("the guide has become too complex: {ambiguity}")
}

/// Allows the request's end ids if the output may end.
fn with_end_ids(end_ids: &[TokenId], mut mask: Mask, end: usize) -> Mask {
    let may_end = is_set(&mask, end);
    for &id in end_ids.iter().filter(|&&id| (id as usize) < end) {
        set(&mut mask, id as usize, may_end);
    }
    mask
}

fn consume(parser: &mut TokenParser, token: TokenId) -> Result<(), SampleError> {
    let result = catch_unwind(AssertUnwindSafe(|| {
        parser.consume_token(token)?;
        parser.check_stop()
    }));
    result.map(|_| ()).map_err(|_| error_of(parser))
}

/// The tokens that `parser` allows next. The bit `end` is set if the output may end.
fn mask_of(parser: &mut TokenParser, end: usize) -> Result<Mask, SampleError> {
    let is_complete =
        |reason| matches!(reason, StopReason::NoExtension | StopReason::EndOfSentence);
    let nothing = || vec![0; (end + 1).div_ceil(32)];
    if is_complete(parser.stop_reason()) {
        let mut mask = nothing();
        set(&mut mask, end, true);
        return Ok(mask);
    }
    match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
        Ok(mask) => Ok(mask.into()),
        Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => Ok(nothing()),
        Err(_) => Err(error_of(parser)),
    }
}

fn error_of(parser: &TokenParser) -> SampleError {
    match parser.stop_reason() {
        StopReason::LexerTooComplex | StopReason::ParserTooComplex | StopReason::Cancelled => {
            SampleError::GuideTooComplex
        }
        _ => SampleError::GuideFailed,
    }
}

/// What a parser's lexer has in memory.
fn lexer_bytes(parser: &TokenParser) -> usize {
    let statistics = catch_unwind(AssertUnwindSafe(|| Ok(parser.parser.lexer_stats())));
    statistics.map_or(0, |statistics| statistics.num_bytes)
}
