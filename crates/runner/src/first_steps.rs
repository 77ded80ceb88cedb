//! Steps before the first request, which prepare a device: they have no content.

use std::time::{Duration, Instant};

use super::decoder::Decoder;
use super::limits::RunnerLimits;
use super::pass::PassOn;
use inflight_base::{BlockId, LoadError, StepError};
use inflight_device::{Device, FirstStep, KvSpan, RankHost, StepInputs};

/// When no further step begins: what is not prepared then is when a request first needs it.
const MAX_DURATION: Duration = Duration::from_secs(5);

/// Computes the steps that the device wants.
///
/// # Errors
/// The device fails.
pub(super) fn compute<D: Device>(
    device: &mut D,
    host: &mut RankHost,
    decoder: &mut Decoder<D>,
    cache: &mut D::KvCache,
    limits: &RunnerLimits,
    logits: &mut D::Logits,
) -> Result<(), LoadError> {
    let steps = device.first_steps();
    let started = Instant::now();
    let failed = |error: StepError| LoadError::Resource(format!("{error}, in a step at load"));
    let mut num_computed = 0;
    for step in &steps {
        let is_in_time = started.elapsed() < MAX_DURATION;
        if !host.agree(is_in_time).map_err(failed)? {
            break;
        }
        compute_one(device, host, decoder, cache, limits, logits, *step);
        decoder.wait_for_ranks(device, host).map_err(failed)?;
        device.results(logits, step.num_sequences).map_err(failed)?;
        num_computed += 1;
    }
    if num_computed > 0 {
        log::info!(
            "computed {num_computed} of {} first steps in {:.1} s",
            steps.len(),
            started.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn compute_one<D: Device>(
    device: &mut D,
    host: &mut RankHost,
    decoder: &mut Decoder<D>,
    cache: &mut D::KvCache,
    limits: &RunnerLimits,
    logits: &mut D::Logits,
    step: FirstStep,
) {
    let FirstStep {
        num_sequences,
        kv_len,
    } = step;
    let block_size = limits.block_size.tokens().index();
    let num_blocks = (kv_len.div_ceil(block_size) * limits.num_groups()) as u32;
    let rows: Vec<_> = (0..num_sequences as u32).collect();
    // All of them have the same blocks, which are none.
    let spans = rows.iter().map(|&row| KvSpan {
        tokens: row..row + 1,
        kv_len: kv_len as u32,
        block_table: 0..num_blocks,
    });
    let inputs = StepInputs {
        token_ids: &vec![0; num_sequences],
        spans: &spans.collect::<Vec<_>>(),
        block_tables: &vec![BlockId::NONE; num_blocks as usize],
        kept_rows: &rows,
        sampled_rows: &rows,
        sampling: &vec![None; num_sequences],
        ..StepInputs::default()
    };
    let pass = PassOn {
        device,
        host,
        decoder,
        cache,
        logits,
        probe: &mut (),
    };
    pass.compute_rows(inputs);
}
