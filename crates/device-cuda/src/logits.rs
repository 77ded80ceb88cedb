//! Rows of logits: on the device, where tokens are sampled from them, and on the host for what is not sampled there.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaEvent, CudaFunction, CudaStream, DriverError, LaunchConfig};

use super::gemm;
use super::gpu::load_error;
use super::kernels::{Kernels, row_grid};
use super::memory::{DeviceMemory, PinnedMemory};
use super::rows::Rows;
use inflight_base::LoadError;
use inflight_device::{DeviceSample, StepResults};
use inflight_sampling::{DeviceSampling, SampleError};

/// Threads that sample a row, at most.
const MAX_SAMPLE_THREADS: usize = 1024;
/// Tokens whose masses the kernel adds up first: `MASS_BLOCK` of sample.cu.
const MASS_BLOCK: usize = 64;
/// Threads that change a row.
const CHANGE_THREADS: u32 = 512;
/// Rows that are changed at a time, each with counts of its own.
const MAX_CHANGED_ROWS: usize = 32;
/// Shared memory that the kernel has besides the masses, rounded up.
const OTHER_SHARED_BYTES: usize = 26 << 10;

/// `u32` words of a [`SamplingRow`].
pub(super) const SAMPLING_ROW_WORDS: usize = size_of::<SamplingRow>() / 4;

// What the kernel writes instead of a token.
const NOT_FINITE: u32 = u32::MAX;
const NONE_ALLOWED: u32 = u32::MAX - 1;
const ASK_HOST: u32 = u32::MAX - 2;

/// `SamplingRow` of sampling.cuh: how a token is sampled from a row.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct SamplingRow {
    seed: u64,
    num_generated: u64,
    log_min_p: f64,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    is_skipped: u32,
    lists: u32,
    num_biases: u32,
    num_forbidden: u32,
    num_ignored: u32,
    num_counted: u32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
}

/// Bytes of device memory that counts of tokens take.
pub(super) fn num_count_bytes(max_rows: usize, width: usize) -> usize {
    4 * max_rows.clamp(1, MAX_CHANGED_ROWS) * width
}

/// Rows of logits, and where the host reads them and what was sampled from them.
pub struct Logits {
    pub(super) rows: Rows<f32>,
    /// `None` if the vocabulary is too large for it.
    pub(super) sample: Option<SampleKernel>,
    /// What the kernel has written: a token, or a code.
    pub(super) tokens: Arc<DeviceMemory>,
    host_rows: PinnedMemory<f32>,
    /// What was sampled in the last two steps, by the parity of their numbers.
    kept: [KeptSamples; 2],
    /// The step that the rest is about.
    step: u64,
    is_on_host: Vec<bool>,
    samples: Vec<DeviceSample>,
}

/// What was sampled in a step, on the host.
struct KeptSamples {
    step: u64,
    tokens: PinnedMemory<u32>,
    /// Whether the device was to sample from each row. Empty: from none.
    is_sampled: Vec<bool>,
    /// The tokens are there.
    copied: CudaEvent,
}

/// The kernels that change and sample, for a vocabulary.
pub(super) struct SampleKernel {
    pub change: CudaFunction,
    /// Zeros for the tokens of as many rows as are changed at a time.
    pub counts: DeviceMemory,
    pub function: CudaFunction,
    pub num_threads: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
}

impl SamplingRow {
    /// The numbers of a row, with lists that are counted from a word; `None`: the row is skipped.
    pub fn new(sampling: Option<DeviceSampling>, change_lists: u32) -> Self {
        match sampling {
            None => Self {
                is_skipped: 1,
                ..bytemuck::Zeroable::zeroed()
            },
            Some(DeviceSampling { changes, plain }) => Self {
                seed: plain.seed,
                num_generated: plain.num_generated,
                log_min_p: f64::from(plain.min_p).ln(),
                temperature: plain.temperature,
                top_p: plain.top_p,
                top_k: plain.top_k,
                is_skipped: 0,
                lists: change_lists + changes.start,
                num_biases: changes.num_biases,
                num_forbidden: changes.num_forbidden,
                num_ignored: changes.num_ignored,
                num_counted: changes.num_counted,
                repetition_penalty: changes.repetition_penalty,
                presence_penalty: changes.presence_penalty,
                frequency_penalty: changes.frequency_penalty,
            },
        }
    }
}

impl SampleKernel {
    /// Blocks and threads that change rows.
    pub fn change_grid(&self, num_rows: usize) -> LaunchConfig {
        row_grid(num_rows.min(MAX_CHANGED_ROWS), CHANGE_THREADS)
    }
}

impl Logits {
    /// Reserves the rows on both sides.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        kernels: &Kernels,
        max_rows: usize,
        width: usize,
    ) -> Result<Self, LoadError> {
        let max_shared_bytes = stream
            .context()
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(|error| load_error("asking for the shared memory of a block", &error))?;
        let shared_bytes = size_of::<f64>() * width.div_ceil(MASS_BLOCK);
        let fits = shared_bytes + OTHER_SHARED_BYTES <= max_shared_bytes.unsigned_abs() as usize;
        let sample = || {
            let shared_bytes = shared_bytes as u32;
            Ok(SampleKernel {
                change: kernels.function("change_logits", "change_logits", 0)?,
                counts: DeviceMemory::upload(
                    stream,
                    &vec![0_u8; num_count_bytes(max_rows, width)],
                )?,
                function: kernels.function("sample", "sample", shared_bytes)?,
                num_threads: width.next_multiple_of(32).min(MAX_SAMPLE_THREADS) as u32,
                shared_bytes,
            })
        };
        Ok(Self {
            rows: Rows::new(stream, max_rows, width)?,
            sample: fits.then(sample).transpose()?,
            tokens: Arc::new(DeviceMemory::new(
                stream,
                4 * (max_rows + gemm::MAX_ROUNDING),
            )?),
            host_rows: PinnedMemory::new(stream, max_rows.saturating_mul(width))?,
            kept: [
                KeptSamples::new(stream, max_rows)?,
                KeptSamples::new(stream, max_rows)?,
            ],
            step: 0,
            is_on_host: vec![false; max_rows],
            samples: Vec::with_capacity(max_rows),
        })
    }

    /// Starts to copy what a step has sampled to the host, after the stream's other work: the next step replaces it on
    /// the device. The device has sampled from the rows where `is_sampled`; empty: from none.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub(super) fn keep(
        &mut self,
        stream: &CudaStream,
        step: u64,
        num_rows: usize,
        is_sampled: &[bool],
    ) -> Result<(), DriverError> {
        let kept = &mut self.kept[parity(step)];
        kept.step = step;
        kept.is_sampled.clear();
        if is_sampled.contains(&true) {
            kept.is_sampled.extend(&is_sampled[..num_rows]);
            let tokens = &mut kept.tokens.as_mut_slice()[..num_rows];
            self.tokens.read_later(stream, 0, tokens)?;
        }
        kept.copied.record(stream)
    }

    /// Rows on the host, to be filled by it: nothing on the device writes them.
    pub(super) fn rows_of_host(&mut self, num_rows: usize) -> &mut [f32] {
        let len = num_rows * self.rows.width();
        &mut self.host_rows.as_mut_slice()[..len]
    }

    /// Waits for the work of a step, and fetches what was sampled on the device, and the other rows of logits. It is
    /// the last one that has begun, and was [kept](Self::keep).
    ///
    /// # Errors
    ///
    /// Any of the work has failed.
    pub(super) fn results(
        &mut self,
        stream: &CudaStream,
        step: u64,
        num_rows: usize,
    ) -> Result<StepResults<'_>, DriverError> {
        let is_first = self.begin(step);
        let is_sampled = std::mem::take(&mut self.kept[parity(step)].is_sampled);
        if is_first && !is_sampled.is_empty() {
            let fetched = self.fetch(stream, num_rows, |row| !is_sampled[row]);
            self.kept[parity(step)].is_sampled = is_sampled;
            if fetched? {
                stream.synchronize()?;
            }
            self.take_kept(step)?;
        } else {
            self.kept[parity(step)].is_sampled = is_sampled;
        }
        let samples = std::mem::take(&mut self.samples);
        let has_more = self.fetch(stream, num_rows, |row| {
            !matches!(samples.get(row), Some(DeviceSample::Sampled(_)))
        })?;
        self.samples = samples;
        if has_more || is_first {
            stream.synchronize()?;
        }
        let len = num_rows * self.rows.width();
        Ok(StepResults {
            logits: &mut self.host_rows.as_mut_slice()[..len],
            samples: &self.samples,
        })
    }

    /// Waits for a step that was [kept](Self::keep), and fetches what was sampled on the device.
    ///
    /// # Errors
    ///
    /// Any of the work has failed.
    pub(super) fn earlier_samples(&mut self, step: u64) -> Result<&[DeviceSample], DriverError> {
        self.begin(step);
        self.samples.clear();
        self.take_kept(step)?;
        Ok(&self.samples)
    }

    /// Waits for what was sampled in a step.
    fn take_kept(&mut self, step: u64) -> Result<(), DriverError> {
        let kept = &self.kept[parity(step)];
        assert_eq!(kept.step, step, "at most one step is launched behind it");
        kept.copied.synchronize()?;
        let samples = kept.tokens.as_slice().iter().zip(&kept.is_sampled);
        self.samples
            .extend(samples.map(|(&token, &is_sampled)| match token {
                _ if !is_sampled => DeviceSample::Skipped,
                NOT_FINITE => DeviceSample::Sampled(Err(SampleError::NotFinite)),
                NONE_ALLOWED => DeviceSample::Sampled(Err(SampleError::NoneAllowed)),
                ASK_HOST => DeviceSample::Unclear,
                token => DeviceSample::Sampled(Ok(token)),
            }));
        Ok(())
    }

    /// Whether what a step has sampled was kept.
    pub(super) fn has_kept(&self, step: u64) -> bool {
        self.kept[parity(step)].step == step
    }

    /// Waits for the work of a step, and fetches the first rows, unless they have been fetched.
    ///
    /// # Errors
    ///
    /// Any of the work has failed.
    pub(super) fn host_rows(
        &mut self,
        stream: &CudaStream,
        step: u64,
        num_rows: usize,
    ) -> Result<&mut [f32], DriverError> {
        let is_first = self.begin(step);
        if self.fetch(stream, num_rows, |_| true)? || is_first {
            stream.synchronize()?;
        }
        let len = num_rows * self.rows.width();
        Ok(&mut self.host_rows.as_mut_slice()[..len])
    }

    /// Returns whether nobody has asked for anything of this step before.
    fn begin(&mut self, step: u64) -> bool {
        let is_first = self.step != step;
        if is_first {
            self.step = step;
            self.is_on_host.fill(false);
            self.samples.clear();
        }
        is_first
    }

    /// Copies the rows that are wanted and not on the host. Returns whether there are any: the stream has to be waited
    /// for then.
    fn fetch(
        &mut self,
        stream: &CudaStream,
        num_rows: usize,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<bool, DriverError> {
        let mut has_any = false;
        let mut row = 0;
        while row < num_rows {
            let start = row;
            while row < num_rows && is_wanted(row) && !self.is_on_host[row] {
                self.is_on_host[row] = true;
                row += 1;
            }
            if row > start {
                has_any = true;
                self.copy(stream, start..row)?;
            } else {
                row += 1;
            }
        }
        Ok(has_any)
    }

    fn copy(&mut self, stream: &CudaStream, rows: Range<usize>) -> Result<(), DriverError> {
        let width = self.rows.width();
        let target = &mut self.host_rows.as_mut_slice()[rows.start * width..rows.end * width];
        let offset = rows.start * self.rows.row_bytes();
        self.rows.memory().read_later(stream, offset, target)
    }
}

impl KeptSamples {
    fn new(stream: &Arc<CudaStream>, max_rows: usize) -> Result<Self, LoadError> {
        let event = stream.context().new_event(None);
        Ok(Self {
            step: 0,
            tokens: PinnedMemory::new(stream, max_rows)?,
            is_sampled: Vec::with_capacity(max_rows),
            copied: event.map_err(|error| load_error("creating an event", &error))?,
        })
    }
}

/// Which of two buffers a step has.
fn parity(step: u64) -> usize {
    (step % 2) as usize
}
