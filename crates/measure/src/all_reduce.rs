//! `cargo xtask bench all-reduce`: sums over the ranks of one host by size, beside the memory's bandwidth.

use std::fmt::Write;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use inflight_collective::{Collective, CollectiveError, Shm, ShmWorld};
use inflight_device_cpu::Simd;
use serde_json::{Value, json};

use crate::Result;
use crate::figures::{median, round};
use crate::limits::MachineLimits;

/// Longer than any sum takes.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Values that all sums of a round add up to, but there are enough of them to be timed.
const VALUES_OF_ROUND: usize = 16 << 20;
const NUM_SUMS: [usize; 2] = [20, 5000];

/// The command's arguments.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Ranks, each in a thread
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=16))]
    ranks: u32,
    /// Numbers of f32 values
    #[arg(
        long,
        value_name = "N,...",
        default_value = "256,1024,4096,16384,65536,262144,1048576",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=16 << 20)
    )]
    values: Vec<u32>,
    /// Rounds, in which all sizes take turns; each figure is the median over the rounds
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One JSON object per row on standard output, instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the measurement and returns the text to print.
///
/// # Errors
/// If there is no memory to share, or a sum fails.
pub fn run(options: &Options) -> Result<String> {
    let num_ranks = options.ranks as usize;
    let limits = MachineLimits::measure(num_ranks, Simd::detect());
    let world = ShmWorld::new(num_ranks)?;
    let ranks = (0..num_ranks).map(|rank| world.attach(rank, TIME_LIMIT));
    let mut ranks: Vec<_> = ranks.collect::<std::result::Result<_, _>>()?;
    let mut seconds = vec![Vec::new(); options.values.len()];
    // The first round touches all memory.
    for round in 0..=options.rounds {
        for (num_values, seconds) in options.values.iter().zip(&mut seconds) {
            let taken = time_of_sum(&mut ranks, *num_values as usize)?;
            if round > 0 {
                seconds.push(taken);
            }
        }
    }
    let rows = options.values.iter().zip(seconds).map(|(values, seconds)| {
        let seconds = median(seconds);
        // A rank reads its own values, writes them to the shared memory, reads everybody's, and writes the sums.
        let bytes = num_ranks * (num_ranks + 3) * size_of::<f32>() * *values as usize;
        let least_seconds = bytes as f64 / limits.read_bytes_per_s;
        json!({
            "values": values,
            "us": round(seconds * 1e6),
            "memory_us": round(least_seconds * 1e6),
            "ratio": round(seconds / least_seconds),
        })
    });
    let rows: Vec<_> = rows.collect();
    Ok(match options.json {
        true => rows.iter().map(|row| format!("{row}\n")).collect(),
        false => table(num_ranks, &limits, &rows),
    })
}

/// The seconds of a sum over all ranks, the mean of many.
fn time_of_sum(ranks: &mut [Shm], num_values: usize) -> std::result::Result<f64, CollectiveError> {
    let [least, most] = NUM_SUMS;
    let num_sums = (VALUES_OF_ROUND / num_values).clamp(least, most);
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter_mut()
            .map(|rank| scope.spawn(move || sum_many(rank, num_values, num_sums)))
            .collect();
        let times = threads.into_iter().map(|thread| {
            let joined = thread.join();
            joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        times
            .reduce(|first, other| other.and(first))
            .expect("some ranks")
    })
}

fn sum_many(
    rank: &mut Shm,
    num_values: usize,
    num_sums: usize,
) -> std::result::Result<f64, CollectiveError> {
    let mut values = vec![0.5_f32; num_values];
    // All begin together.
    rank.all_reduce(0, &mut values)?;
    let since = Instant::now();
    for step in 0..num_sums as u64 {
        rank.all_reduce(step, black_box(&mut values))?;
    }
    Ok(since.elapsed().as_secs_f64() / num_sums as f64)
}

fn table(num_ranks: usize, limits: &MachineLimits, rows: &[Value]) -> String {
    let mut text = format!(
        "Sums over {num_ranks} ranks; {:.1} GB/s read by {num_ranks} threads.\n\n\
         | f32 values | us | bytes at that bandwidth, us | ratio |\n|--:|--:|--:|--:|\n",
        limits.read_bytes_per_s / 1e9
    );
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            row["values"], row["us"], row["memory_us"], row["ratio"]
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_has_a_row() {
        let options = Options {
            ranks: 2,
            values: vec![1, 4096],
            rounds: 1,
            json: false,
        };
        let text = run(&options).expect("sums");
        assert!(
            text.contains("\n| 1 | ") && text.contains("\n| 4096 | "),
            "{text}"
        );
        let rows = run(&Options {
            json: true,
            ..options
        })
        .expect("sums");
        let row: Value = serde_json::from_str(rows.lines().next().expect("a row")).expect("JSON");
        assert!(row["us"].as_f64().is_some_and(|us| us > 0.0), "{rows}");
    }
}
