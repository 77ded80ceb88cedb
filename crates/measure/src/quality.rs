//! `cargo xtask bench quality`: the quality that quantised weights lose, measured on a text.
//!
//! The reference is the checkpoint with bf16 weights. It is compared with the same checkpoint rounded while
//! it is loaded, and with other forms of it; the same kernels read all of them.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use inflight_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::Result;
use crate::divergence::{Divergence, log_prob};
use crate::text::{Pieces, Reader};

/// Roundings of the reference; 8 bits in groups of 32 is the group size of other engines' formats.
const ROUNDINGS: [WeightPrecision; 3] = [
    WeightPrecision::new(CodeBits::Eight),
    WeightPrecision {
        bits: CodeBits::Eight,
        group_size: 32,
    },
    WeightPrecision::new(CodeBits::Four),
];

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The checkpoint's folder: floating-point weights and a tokenizer
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The text files
    #[arg(long, value_name = "FILE,...", value_delimiter = ',', required = true)]
    text: Vec<PathBuf>,
    /// Another form of the same model: its name in the table, and its folder
    #[arg(long, value_name = "NAME=DIR", value_parser = named_folder)]
    beside: Vec<(String, PathBuf)>,
    /// Tokens per piece of the text; the second half of each piece counts
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..=8192))]
    context: u32,
    /// Maximum number of pieces. The reference's logits of all pieces are kept in memory
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pieces: u32,
    /// Number of threads that compute [default: all that the process may use]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
}

fn named_folder(text: &str) -> std::result::Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, dir) = parts.ok_or("write NAME=DIR")?;
    Ok((name.to_owned(), dir.into()))
}

/// Runs the comparison and returns the text to print.
///
/// # Errors
/// If a model cannot be loaded, a step fails, or the text is too short.
pub fn run(options: &Options) -> Result<String> {
    let source = ModelSource::open(&options.model)?;
    let spec = source.spec();
    let tokenizer = Tokenizer::load(&options.model)?;
    let piece_len = spec
        .max_seq_len()
        .saturating_sub(1)
        .min(options.context as usize);
    let pieces = Pieces::read(
        &options.text,
        &tokenizer,
        piece_len,
        options.pieces as usize,
    )?;
    // bf16 weights take two bytes each.
    let num_weights = spec.num_weight_bytes() as f64 / 2.0;
    let bits = |source: &ModelSource, weights| -> Result<f64> {
        Ok(source.num_weight_bytes(weights)? as f64 * 8.0 / num_weights)
    };
    let load = |source: &ModelSource, weights| {
        Reader::load(source, weights, pieces.len(), options.threads)
    };

    let reference = Reference::read(&mut load(&source, None)?, pieces.clone())?;
    let mut rows = vec![reference.row("bf16", bits(&source, None)?)];
    for precision in ROUNDINGS {
        let WeightPrecision {
            bits: code,
            group_size,
        } = precision;
        let name = format!("int{}, groups of {group_size}", code.count());
        let measured = reference.compare(&mut load(&source, Some(precision))?)?;
        rows.push(measured.row(&name, bits(&source, Some(precision))?));
    }
    for (name, dir) in &options.beside {
        let other = ModelSource::open(dir)?;
        let measured = reference.compare(&mut load(&other, None)?)?;
        rows.push(measured.row(name, bits(&other, None)?));
    }
    Ok(match options.json {
        true => rows.iter().fold(String::new(), |lines, row| {
            lines + &json!(row).to_string() + "\n"
        }),
        false => table(&rows),
    })
}

/// The reference's results on a text.
struct Reference {
    pieces: Pieces,
    vocab_size: usize,
    /// The logits that count, for each piece.
    logits: Vec<Vec<f32>>,
    log_probs: Sum,
}

/// Sum and spread of a figure over the tokens that count.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    num: u32,
    sum: f64,
    squares: f64,
    largest: f64,
}

/// The results of another form of the model, compared with the reference.
struct Compared {
    log_probs: Sum,
    divergences: Sum,
    num_same_top: u32,
}

impl Reference {
    fn read(reader: &mut Reader, pieces: Pieces) -> Result<Self> {
        let vocab_size = reader.vocab_size();
        let mut logits = Vec::new();
        let mut log_probs = Sum::default();
        for piece in pieces.iter() {
            let counted = pieces.counted();
            let read = reader.read(piece)?;
            let read = read[counted.start * vocab_size..counted.end * vocab_size].to_vec();
            for (position, logits) in counted.zip(read.chunks_exact(vocab_size)) {
                log_probs.add(log_prob(logits, piece[position + 1]));
            }
            logits.push(read);
        }
        Ok(Self {
            pieces,
            vocab_size,
            logits,
            log_probs,
        })
    }

    fn compare(&self, reader: &mut Reader) -> Result<Compared> {
        let vocab_size = self.vocab_size;
        if reader.vocab_size() != vocab_size {
            return Err(format!(
                "the vocabulary has {} tokens, the reference's {vocab_size}",
                reader.vocab_size()
            )
            .into());
        }
        let mut compared = Compared {
            log_probs: Sum::default(),
            divergences: Sum::default(),
            num_same_top: 0,
        };
        for (piece, expected) in self.pieces.iter().zip(&self.logits) {
            let read = reader.read(piece)?;
            let rows = read.chunks_exact(vocab_size).enumerate();
            let rows = rows.skip(self.pieces.counted().start);
            for (expected, (position, got)) in expected.chunks_exact(vocab_size).zip(rows) {
                let divergence = Divergence::of(expected, got);
                compared.log_probs.add(log_prob(got, piece[position + 1]));
                compared.divergences.add(divergence.nats);
                compared.num_same_top += u32::from(divergence.same_top);
            }
        }
        Ok(compared)
    }

    fn row(&self, name: &str, bits_per_weight: f64) -> Map<String, Value> {
        row(name, bits_per_weight, &self.log_probs)
    }
}

impl Compared {
    fn row(&self, name: &str, bits_per_weight: f64) -> Map<String, Value> {
        let mut row = row(name, bits_per_weight, &self.log_probs);
        let mut set = |name: &str, value: f64| row.insert(name.to_owned(), significant(value));
        set("kl_mean", self.divergences.mean());
        set("kl_error", self.divergences.standard_error());
        set("kl_largest", self.divergences.largest);
        let share = f64::from(self.num_same_top) / f64::from(self.divergences.num);
        set("same_top_share", share);
        row
    }
}

impl Sum {
    fn add(&mut self, value: f64) {
        self.num += 1;
        self.sum += value;
        self.squares += value * value;
        self.largest = self.largest.max(value);
    }

    fn mean(&self) -> f64 {
        self.sum / f64::from(self.num)
    }

    /// Standard error of the mean, treating tokens as independent.
    fn standard_error(&self) -> f64 {
        let num = f64::from(self.num);
        let variance = (self.squares / num - self.mean() * self.mean()).max(0.0);
        (variance / num).sqrt()
    }
}

fn row(name: &str, bits_per_weight: f64, log_probs: &Sum) -> Map<String, Value> {
    let mut row = Map::new();
    let mut set = |name: &str, value: Value| row.insert(name.to_owned(), value);
    set("row", "quality".into());
    set("weights", name.into());
    set("bits_per_weight", significant(bits_per_weight));
    set("tokens", log_probs.num.into());
    set("perplexity", significant((-log_probs.mean()).exp()));
    row
}

/// Rounds to four significant digits, whatever the magnitude.
fn significant(value: f64) -> Value {
    format!("{value:.3e}")
        .parse::<f64>()
        .map_or(Value::Null, |value| json!(value))
}

fn table(rows: &[Map<String, Value>]) -> String {
    let mut table = String::from(
        "| weights | bits a weight | perplexity | mean KL, nats | standard error | largest | same top token |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let of = |name: &str| {
            row.get(name).map_or_else(String::new, |value| match value {
                Value::String(text) => text.clone(),
                number => number.to_string(),
            })
        };
        let _ = writeln!(
            table,
            "| {} | {} | {} | {} | {} | {} | {} |",
            of("weights"),
            of("bits_per_weight"),
            of("perplexity"),
            of("kl_mean"),
            of("kl_error"),
            of("kl_largest"),
            of("same_top_share"),
        );
    }
    table
}
