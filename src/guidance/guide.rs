//! One sequence's guide: the tokens that may follow its output so far.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use parking_lot::Mutex;

use crate::base::TokenId;
use crate::sampling::{Guide, GuideTokens, SampleError};

/// One bit per token, `[ceil((vocab_size + 1) / 32)]`; the last bit is the end of the output.
type Mask = Vec<u32>;

/// A compiled grammar, shared by the guides that use it.
pub(super) struct Compiled {
    /// A parser that has consumed nothing.
    start: Mutex<TokenParser>,
    /// The tokens allowed first.
    first: Mask,
    /// The bit of the end of the output.
    end: usize,
}

impl Compiled {
    /// A grammar for token ids below `vocab_size`. `parser` must be unused.
    ///
    /// # Errors
    /// No token is allowed first, or the first mask cannot be computed.
    pub(super) fn new(mut parser: TokenParser, vocab_size: u32) -> Result<Self, SampleError> {
        parser.start_without_prompt();
        let end = vocab_size as usize;
        let first = mask_of(&mut parser, end)?;
        if first.iter().all(|word| *word == 0) {
            return Err(SampleError::NoneAllowed);
        }
        Ok(Self {
            start: Mutex::new(parser),
            first,
            end,
        })
    }

    /// A new parser. A deep copy, because parsers have work limits: a shared one would let requests use up each other's.
    fn start(&self) -> TokenParser {
        self.start.lock().deep_clone()
    }
}

/// A sequence's guide (`llguidance`).
pub struct GrammarGuide {
    compiled: Arc<Compiled>,
    end_ids: Arc<[TokenId]>,
    /// None before first use.
    state: Mutex<Option<State>>,
}

/// A parser and the tokens that it has consumed.
struct State {
    parser: TokenParser,
    tokens: Vec<TokenId>,
    /// The tokens allowed next, with the request's end ids in place of the end of the output. None if not computed yet.
    mask: Option<Result<Mask, SampleError>>,
}

impl GrammarGuide {
    /// A guide for a sequence that ends with any of `end_ids`.
    pub(super) fn new(compiled: Arc<Compiled>, end_ids: Arc<[TokenId]>) -> Self {
        Self {
            compiled,
            end_ids,
            state: Mutex::new(None),
        }
    }

    /// Advances the parser to `generated`, restarting it if necessary, and computes the mask.
    fn follow<'a>(&self, kept: &'a mut Option<State>, generated: &[TokenId]) -> &'a State {
        let state = kept
            .take()
            .filter(|state| generated.starts_with(&state.tokens));
        let state = kept.insert(state.unwrap_or_else(|| self.start()));
        state.follow(generated);
        self.update_mask(state);
        state
    }

    fn start(&self) -> State {
        State {
            parser: self.compiled.start(),
            tokens: Vec::new(),
            mask: Some(Ok(self.with_end_ids(self.compiled.first.clone()))),
        }
    }

    /// Allows the request's end ids if the output may end.
    fn with_end_ids(&self, mut mask: Mask) -> Mask {
        let may_end = is_set(&mask, self.compiled.end);
        for &id in self
            .end_ids
            .iter()
            .filter(|&&id| (id as usize) < self.compiled.end)
        {
            set(&mut mask, id as usize, may_end);
        }
        mask
    }

    fn update_mask(&self, state: &mut State) {
        if state.mask.is_none() {
            let mask = mask_of(&mut state.parser, self.compiled.end);
            state.mask = Some(mask.map(|mask| self.with_end_ids(mask)));
        }
    }
}

impl State {
    /// Consumes the tokens of `generated` that are new.
    fn follow(&mut self, generated: &[TokenId]) {
        for &token in &generated[self.tokens.len()..] {
            self.tokens.push(token);
            // A failed parser stays failed.
            if !matches!(self.mask, Some(Err(_))) {
                self.mask = consume(&mut self.parser, token).err().map(Err);
            }
        }
    }
}

impl GuideTokens for GrammarGuide {
    fn fresh(&self) -> Guide {
        let guide = Self::new(Arc::clone(&self.compiled), Arc::clone(&self.end_ids));
        Guide(Arc::new(guide))
    }

    fn prepare(&self, generated: &[TokenId]) {
        let mut state = self.state.lock();
        let is_ahead = |state: &State| {
            state.tokens.len() > generated.len() && state.tokens.starts_with(generated)
        };
        if !state.as_ref().is_some_and(is_ahead) {
            self.follow(&mut state, generated);
        }
    }

    fn restrict(&self, logits: &mut [f32], generated: &[TokenId]) -> Result<(), SampleError> {
        let mut state = self.state.lock();
        match &self.follow(&mut state, generated).mask {
            Some(Ok(mask)) => {
                forbid_others(logits, mask);
                Ok(())
            }
            Some(Err(error)) => Err(*error),
            None => Err(SampleError::GuideFailed),
        }
    }
}

/// Masks the tokens whose bits are not set. Like every processor, keeps NaN and `+inf`, so that the sampler detects them.
fn forbid_others(logits: &mut [f32], mask: &[u32]) {
    for (logits, &word) in logits.chunks_mut(32).zip(mask) {
        if word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 && *logit < f32::INFINITY {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
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
        StopReason::LexerTooComplex | StopReason::ParserTooComplex => SampleError::GuideTooComplex,
        _ => SampleError::GuideFailed,
    }
}

fn is_set(mask: &[u32], bit: usize) -> bool {
    mask[bit / 32] >> (bit % 32) & 1 == 1
}

fn set(mask: &mut [u32], bit: usize, value: bool) {
    let word = &mut mask[bit / 32];
    *word = *word & !(1 << (bit % 32)) | u32::from(value) << (bit % 32);
}
