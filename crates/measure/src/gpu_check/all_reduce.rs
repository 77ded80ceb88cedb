//! Sums over several GPUs, as each layer of a model has two: whether they are right, and what one takes by the size of
//! the message, beside a copy from one GPU to another.

use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use inflight_collective::Local;
use inflight_device::{Device, Load, RankHost, RankOps, StepIo};
use inflight_device_cuda::{Cuda, CudaOptions, num_gpus};
use serde_json::{Value, json};

use super::budget::Budget;
use super::check::Check;
use super::checked_sums::CheckedSums;
use super::machine::best_of;
use super::report::Report;
use crate::Result;
use crate::figures::four_digits;

/// How long a GPU waits for the others.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// The most ranks of a stage.
const MAX_RANKS: usize = 16;

/// Checks and measures sums over 2, 4, and so on up to all GPUs.
pub fn run(check: &Check, budget: &Budget, report: &mut Report) -> Result<()> {
    let num_gpus = num_gpus();
    if num_gpus < 2 {
        return report.skipped(&format!(
            "a sum needs several GPUs, and the machine has {num_gpus}"
        ));
    }
    let is_quick = check.options.quick;
    let bytes_per_s = copy_bytes_per_s(is_quick)?;
    report.figures(
        "copy from GPU 0 to GPU 1",
        json!({ "gb_per_s": four_digits(bytes_per_s / 1e9) }),
    )?;
    let counts = (1..).map(|doublings| 1 << doublings);
    for num_ranks in counts.take_while(|&n| n <= num_gpus.min(MAX_RANKS)) {
        for is_deterministic in [false, true] {
            let sums = Sums {
                num_ranks,
                is_deterministic,
                is_quick,
            };
            for sum in sums.measure(budget)? {
                let name = sums.name(sum.num_bytes);
                match &sum.wrong {
                    Some(wrong) => report.failed(&name, wrong)?,
                    None => report.figures(&name, sums.figures(&sum, bytes_per_s))?,
                }
            }
            if budget.is_over() {
                return report.skipped("no time is left");
            }
        }
    }
    Ok(())
}

/// Bytes that a copy takes from one GPU to another in a second.
fn copy_bytes_per_s(is_quick: bool) -> Result<f64> {
    let num_bytes = if is_quick { 1 << 16 } else { 256 << 20 };
    let [first, second] = [0, 1].map(CudaContext::new);
    let (from, to) = (first?.new_stream()?, second?.new_stream()?);
    let source = from.alloc_zeros::<u8>(num_bytes)?;
    let mut target = to.alloc_zeros::<u8>(num_bytes)?;
    from.synchronize()?;
    let seconds = best_of(&mut || {
        to.memcpy_dtod(&source, &mut target)?;
        Ok(to.synchronize()?)
    })?;
    Ok(num_bytes as f64 / seconds)
}

/// The sums over some GPUs.
struct Sums {
    num_ranks: usize,
    /// Whether every GPU collects the parts of all and adds them in pairs, as with `deterministic: true`.
    is_deterministic: bool,
    is_quick: bool,
}

/// One that was measured.
struct Sum {
    num_bytes: usize,
    seconds: f64,
    /// What the host took to launch it.
    launch_seconds: f64,
    /// A sum that is not what it should be, if there is one.
    wrong: Option<String>,
}

impl Sums {
    /// Elements of a row, and the numbers of rows: of one token of Llama 3.1 8B, up to a long prompt.
    fn sizes(&self) -> (usize, &'static [usize]) {
        match self.is_quick {
            true => (64, &[1, 3]),
            false => (4096, &[1, 8, 64, 256, 1024, 8192]),
        }
    }

    fn measure(&self, budget: &Budget) -> Result<Vec<Sum>> {
        let ranks = Local::world(self.num_ranks, TIME_LIMIT);
        let outcomes: Vec<_> = thread::scope(|scope| {
            let ranks = ranks.into_iter().enumerate();
            let threads: Vec<_> = ranks
                .map(|(gpu, rank)| {
                    scope.spawn(move || {
                        let measured = self.on_gpu(gpu, rank, budget);
                        measured.map_err(|error| error.to_string())
                    })
                })
                .collect();
            let ended = threads.into_iter().map(|thread| thread.join());
            ended
                .map(|outcome| {
                    outcome.unwrap_or_else(|_| Err("its thread has panicked".to_owned()))
                })
                .collect()
        });
        // All end with the same sums, at about the same time.
        let mut sums: Vec<Sum> = Vec::new();
        for (gpu, outcome) in outcomes.into_iter().enumerate() {
            let of_gpu =
                outcome.map_err(|error| format!("GPU {gpu} of {}: {error}", self.num_ranks))?;
            for (index, mut sum) in of_gpu.into_iter().enumerate() {
                sum.wrong = sum.wrong.map(|wrong| format!("GPU {gpu}: {wrong}"));
                match sums.get_mut(index) {
                    Some(first) => first.wrong = first.wrong.take().or(sum.wrong),
                    None => sums.push(sum),
                }
            }
        }
        Ok(sums)
    }

    /// All sums, on one of the GPUs.
    fn on_gpu(&self, gpu: usize, rank: Local, budget: &Budget) -> Result<Vec<Sum>> {
        let mut device = Cuda::open(&CudaOptions {
            gpu,
            deterministic: self.is_deterministic,
            max_graphs: 0,
            ..CudaOptions::default()
        })?;
        let mut host = RankHost::new(Box::new(rank));
        let ranks = device.join_ranks(&mut host)?;
        host.meet(TIME_LIMIT)?;
        let (width, sizes) = self.sizes();
        let max_rows = sizes.iter().copied().max().unwrap_or(1);
        let mut rows = device.alloc_sums(max_rows, width)?;
        let mut logits = device.alloc_logits(1, width)?;
        let place = (gpu, self.num_ranks);
        let mut checked = CheckedSums::new(&mut device, place, max_rows, width)?;
        let mut sums = Vec::new();
        for &num_rows in sizes {
            // The first GPU says for all whether there is time.
            if !host.agree(!budget.is_over())? {
                break;
            }
            let num_calls = match self.is_quick {
                true => 3,
                // 2 GiB, or as many as give a mean.
                false => (2_usize << 30)
                    .div_ceil(4 * num_rows * width)
                    .clamp(20, 200),
            };
            let wrong = checked.check(&mut device, (ranks, &mut host), num_rows, &mut rows)?;
            ranks.all_reduce(&mut device, &mut host, num_rows, &mut rows);
            ranks.wait(&mut device, &mut host)?;
            device.results(&mut logits, 0)?;
            let start = Instant::now();
            for _ in 0..num_calls {
                ranks.all_reduce(&mut device, &mut host, num_rows, &mut rows);
            }
            let launched = start.elapsed();
            ranks.wait(&mut device, &mut host)?;
            device.results(&mut logits, 0)?;
            sums.push(Sum {
                num_bytes: 4 * num_rows * width,
                seconds: start.elapsed().as_secs_f64() / num_calls as f64,
                launch_seconds: launched.as_secs_f64() / num_calls as f64,
                wrong,
            });
        }
        Ok(sums)
    }

    fn name(&self, num_bytes: usize) -> String {
        let order = match self.is_deterministic {
            true => "in pairs",
            false => "by NCCL",
        };
        format!("{num_bytes} bytes of {} GPUs, {order}", self.num_ranks)
    }

    /// `bus_gb_per_s` is what a GPU sends in a second, at least: 2 (n - 1) / n of the message where parts are summed
    /// and then distributed, and all of it to each other GPU where each collects all.
    fn figures(&self, sum: &Sum, copy_bytes_per_s: f64) -> Value {
        let (n, num_bytes) = (self.num_ranks as f64, sum.num_bytes as f64);
        let sent = match self.is_deterministic {
            true => (n - 1.0) * num_bytes,
            false => 2.0 * (n - 1.0) / n * num_bytes,
        };
        json!({
            "us": four_digits(1e6 * sum.seconds),
            "launch_us": four_digits(1e6 * sum.launch_seconds),
            "bus_gb_per_s": four_digits(sent / sum.seconds / 1e9),
            "share_of_copy": four_digits(sent / sum.seconds / copy_bytes_per_s),
        })
    }
}
