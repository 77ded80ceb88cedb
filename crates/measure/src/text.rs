//! A text split into pieces, and a model's logits for them.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;

use inflight_base::{SequenceId, TokenId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{Engine, EngineConfig, Event, NewRequest, OutputOptions, StepOutput};
use inflight_runner::{CpuRunner, ModelSource, RunnerLimits, WeightPrecision};
use inflight_text::Tokenizer;

use crate::Result;
use crate::load::{Load, step};
use crate::model::engine_config;

/// Pieces of a text, of equal length; each is read on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces(Vec<Vec<TokenId>>);

impl Pieces {
    /// Up to `max_num_pieces` pieces of the concatenated `files`, `num_tokens` each. Every piece starts with
    /// the tokens that the tokenizer puts before every text.
    ///
    /// # Errors
    /// If a file cannot be read, or the text has fewer tokens than one piece.
    pub fn read(
        files: &[PathBuf],
        tokenizer: &Tokenizer,
        num_tokens: usize,
        max_num_pieces: usize,
    ) -> Result<Self> {
        let mut text = String::new();
        for file in files {
            let part = std::fs::read_to_string(file);
            text += &part.map_err(|error| format!("{}: {error}", file.display()))?;
        }
        let begin = tokenizer.encode("", true)?;
        let tokens = tokenizer.encode(&text, false)?;
        let num_own = num_tokens.saturating_sub(begin.len()).max(1);
        let pieces: Vec<_> = tokens
            .chunks_exact(num_own)
            .take(max_num_pieces)
            .map(|piece| [&begin, piece].concat())
            .collect();
        match pieces.is_empty() {
            true => Err(format!(
                "the text has {} tokens, and one piece needs {num_own}",
                tokens.len()
            )
            .into()),
            false => Ok(Self(pieces)),
        }
    }

    /// The pieces.
    pub fn iter(&self) -> impl Iterator<Item = &[TokenId]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// Tokens per piece.
    pub fn len(&self) -> usize {
        self.0[0].len()
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The positions of a piece whose logits count: the second half, for which the first half is context,
    /// without the last position, which has no next token. The same positions as llama.cpp's
    /// `llama-perplexity`.
    pub fn counted(&self) -> Range<usize> {
        self.len() / 2..self.len() - 1
    }
}

/// A model that computes the logits of pieces.
pub struct Reader {
    runner: CpuRunner,
    config: EngineConfig,
}

impl Reader {
    /// Loads a model for pieces of `piece_len` tokens, with its floating-point weights rounded to `weights`.
    ///
    /// # Errors
    /// If the checkpoint is bad, or the machine lacks the instructions or the memory.
    pub fn load(
        source: &ModelSource,
        weights: Option<WeightPrecision>,
        piece_len: usize,
        num_threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        // One token is sampled after the piece.
        let load = Load {
            concurrency: 1,
            input: piece_len as u32,
            output: 1,
        };
        let config = engine_config(&[load], load.num_tokens().0)?;
        let limits = RunnerLimits {
            weights,
            ..RunnerLimits::of(&config)
        };
        let options = CpuOptions {
            num_threads,
            simd: None,
            ..CpuOptions::default()
        };
        Ok(Self {
            runner: CpuRunner::new(source, limits, &options)?,
            config,
        })
    }

    /// Size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.runner.vocab_size()
    }

    /// The logits at every position of a piece, `[piece_len, vocab_size]`.
    ///
    /// # Errors
    /// If a step fails, or the piece has a token outside the vocabulary.
    pub fn read(&mut self, piece: &[TokenId]) -> Result<Vec<f32>> {
        let mut engine = Engine::new(self.config.clone());
        engine.add(NewRequest {
            outputs: OutputOptions {
                context_logits: true,
                ..OutputOptions::default()
            },
            ..NewRequest::new(SequenceId(0), piece.to_vec(), Tokens(1))
        })?;
        let mut logits = Vec::new();
        let mut output = StepOutput::default();
        let mut events = Vec::new();
        while !engine.is_idle() {
            step(&mut engine, &mut output, &mut events, |plan, output| {
                self.runner.run(plan, output)
            })?;
            for event in events.drain(..) {
                if let Event::ExtraOutputs(_, extra_outputs) = event {
                    logits.extend(extra_outputs.context_logits);
                }
            }
        }
        match logits.len() == piece.len() * self.vocab_size() {
            true => Ok(logits),
            false => Err(format!("got {} logits for {} tokens", logits.len(), piece.len()).into()),
        }
    }
}
