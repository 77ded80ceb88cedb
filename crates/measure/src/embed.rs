//! `cargo xtask bench embed`: how many texts a model embeds in a second.

use std::fmt::{self, Display, Write};
use std::str::FromStr;
use std::time::Instant;

use clap::Args;
use inflight_base::{SequenceId, TokenId, Tokens};
use inflight_engine::{Engine, EngineConfig, NewRequest, StepOutput};
use inflight_runner::{CpuRunner, ModelSource};
use serde_json::json;

use crate::Result;
use crate::figures::{median, round};
use crate::load::{Load, step};
use crate::model;

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    model: model::Options,
    /// Texts of each round, all of which are there from the start
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    texts: u32,
    /// Texts in a step at most
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    /// Tokens per text, one row for each; with `16-128`, texts of that row have all lengths from 16 to 128, in a mixed
    /// order
    #[arg(
        long,
        value_name = "TOKENS,...",
        default_value = "16,128",
        value_delimiter = ','
    )]
    input: Vec<Lengths>,
    /// Rounds; each figure is the median over the rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
}

/// How many tokens the texts of a row have: one number, or evenly spread from the first to the last.
#[derive(Clone, Copy, Debug)]
struct Lengths {
    first: u32,
    last: u32,
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(written: &str) -> std::result::Result<Self, String> {
        let (first, last) = written.split_once('-').unwrap_or((written, written));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(Self { first, last }),
            _ => Err("this is neither a number of tokens, nor two such as 16-128".to_owned()),
        }
    }
}

impl Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

impl Lengths {
    /// Tokens of a text. Texts do not come in the order of their lengths.
    fn of_text(self, index: u32, num_texts: u32) -> u32 {
        let [index, num_texts] = [index, num_texts].map(u64::from);
        let place = index * 7919 % num_texts;
        let more = u64::from(self.last - self.first) * place / (num_texts - 1).max(1);
        self.first + more as u32
    }
}

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If the model cannot be loaded, memory is short, or a step fails.
pub fn run(options: &Options) -> Result<String> {
    let source = ModelSource::open_embedder(&options.model.model, None, None)?;
    let loads = options.input.iter().map(|&input| Load {
        concurrency: options.concurrency,
        input: input.last,
        output: 1,
    });
    let mut model = options
        .model
        .load(&source, &loads.collect::<Vec<_>>(), ())?;
    let config = EngineConfig {
        pools: true,
        whole_prompts: source.spec().is_bidirectional,
        max_num_active: options.texts.max(options.concurrency),
        ..model.config.clone()
    };
    config.check()?;
    let vocab_size = source.spec().vocab_size as u32;
    let mut text = String::new();
    if !options.json {
        let _ = writeln!(
            text,
            "{} texts, {} in a step at most, {}\n\n| tokens | texts/s | tokens/s |\n|---|---|---|",
            options.texts,
            options.concurrency,
            model.runner.description()
        );
    }
    for &input in &options.input {
        let prompts: Vec<_> = (0..options.texts)
            .map(|index| prompt(index, input.of_text(index, options.texts), vocab_size))
            .collect();
        // The first round touches all memory.
        embed(&mut model.runner, &config, &prompts)?;
        let rounds = (0..options.rounds).map(|_| embed(&mut model.runner, &config, &prompts));
        let seconds = median(rounds.collect::<Result<_>>()?);
        let texts = f64::from(options.texts) / seconds;
        let tokens = prompts.iter().map(Vec::len).sum::<usize>() as f64 / seconds;
        let _ = match options.json {
            true => writeln!(
                text,
                "{}",
                json!({
                    "row": "embed",
                    "texts": options.texts,
                    "concurrency": options.concurrency,
                    "input": input.to_string(),
                    "texts_per_s": round(texts),
                    "tokens_per_s": round(tokens),
                    "rounds": options.rounds,
                })
            ),
            false => writeln!(text, "| {input} | {texts:.1} | {tokens:.0} |"),
        };
    }
    Ok(text)
}

/// The seconds that it takes to embed all prompts.
fn embed(runner: &mut CpuRunner, config: &EngineConfig, prompts: &[Vec<TokenId>]) -> Result<f64> {
    let started = Instant::now();
    let mut engine = Engine::new(config.clone());
    for (id, prompt) in (0..).zip(prompts) {
        engine.add(NewRequest::new(SequenceId(id), prompt.clone(), Tokens(1)))?;
    }
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    while !engine.is_idle() {
        events.clear();
        step(&mut engine, &mut output, &mut events, |plan, output| {
            runner.run(plan, output)
        })?;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// A text of its own: no two begin alike.
fn prompt(index: u32, num_tokens: u32, vocab_size: u32) -> Vec<TokenId> {
    let tokens = 0..num_tokens;
    tokens
        .map(|place| (index + 1).wrapping_mul(7919).wrapping_add(place * 31) % vocab_size)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_all_lengths_of_their_row_in_a_mixed_order() {
        let lengths: Lengths = "16-128".parse().expect("two lengths");
        let found: Vec<_> = (0..113).map(|index| lengths.of_text(index, 113)).collect();
        assert!(!found.is_sorted());
        let mut sorted = found;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(16..=128));
        let one: Lengths = "16".parse().expect("one length");
        assert!([0, 1, 6].map(|index| one.of_text(index, 7)) == [16; 3]);
        assert_eq!(lengths.of_text(0, 1), 16);
    }

    #[test]
    fn lengths_are_one_number_or_two() {
        for written in [
            "", "0", "16-", "-16", "128-16", "0-16", "16-32-64", "sixteen",
        ] {
            assert!(written.parse::<Lengths>().is_err(), "{written}");
        }
        for written in ["1", "16-128"] {
            let read: Lengths = written.parse().expect("lengths");
            assert_eq!(read.to_string(), written);
        }
    }
}
