//! A GPU as one of the ranks of a model.
//!
//! ```text
//! GPU 0    | ... o | sum | ... down | sum | ...        sums and logits by NCCL, in the stream, and in graphs
//! GPU 1    | ... o | sum | ... down | sum | ...
//! hosts    | launch | come together | wait for the GPU with a time limit |
//! ```
//!
//! NCCL's operations wait for the other GPUs without end. So when the hosts have launched a step, they say so to each
//! other with a hash of its plan, as ranks on CPUs do: a rank that is dead, late or elsewhere is noticed there. Then
//! all that the GPU waits for has been launched. It is still given no longer than the time limit.
//!
//! The ranks of a stage do that among themselves. What stages exchange goes through their hosts (`stages.rs`).

use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaEvent, CudaStream, PushKernelArg};

use super::Cuda;
use super::gpu::load_error;
use super::kernels::{launch, shared_row_grid};
use super::memory::DeviceMemory;
use super::nccl::{self, Communicator, ID_WORDS};
use super::rows::Rows;
use super::stages::StageRows;
use super::summed_products::SumStream;
use inflight_base::{LoadError, StepError};
use inflight_device::RankHost;

/// Memory that the parts of all ranks are collected in, some rows at a time.
pub(super) const GATHERED_BYTES: usize = 64 << 20;
/// What NCCL takes of the GPU's memory for its channels, at most: to be confirmed on GPUs.
pub(super) const NCCL_BYTES: usize = 512 << 20;
/// How long the host asks again and again whether the GPU is done, before it sleeps in between.
const SPIN: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(50);
/// How often it looks whether the other ranks live.
const CHECK_PERIOD: Duration = Duration::from_millis(20);
/// How long after the end of another rank the GPU may still finish: that rank may have ended after its part.
const GRACE: Duration = Duration::from_millis(500);

/// The NCCL communicator of a GPU and its buffers for sums over all ranks. Hosts exchange messages through a
/// [`RankHost`].
pub(super) struct GpuRanks {
    rank: usize,
    num_ranks: usize,
    gets_logits: bool,
    /// `None` after a failure: operations that wait for other ranks have been ended. And where it is alone in its
    /// stage.
    communicator: Option<Communicator>,
    /// Where it is not alone in its stage.
    gathered: Option<DeviceMemory>,
    /// Where it is not alone in its stage.
    sums: Option<SumStream>,
    /// Where there are several stages.
    pub(super) stage_rows: Option<StageRows>,
    reached: CudaEvent,
}

impl GpuRanks {
    /// Waits for the stream's work, which needs the other ranks.
    fn wait(&self, host: &mut RankHost, stream: &CudaStream) -> Result<(), String> {
        host.come_together().map_err(|error| error.0)?;
        let time_limit = host.time_limit();
        self.wait_for_stream(stream, time_limit, || host.check_others())
    }

    fn wait_for_stream(
        &self,
        stream: &CudaStream,
        time_limit: Duration,
        mut check_others: impl FnMut() -> Result<(), StepError>,
    ) -> Result<(), String> {
        let started = Instant::now();
        let (mut checked, mut ended) = (started, None);
        self.reached
            .record(stream)
            .map_err(|error| error.to_string())?;
        // A poll tells of failures of the GPU, too.
        while !self
            .reached
            .try_is_complete()
            .map_err(|error| error.to_string())?
        {
            let now = Instant::now();
            if now - checked >= CHECK_PERIOD {
                checked = now;
                self.check_communicator()?;
                if let Err(error) = check_others() {
                    let (since, error) = ended.get_or_insert((now, error.0));
                    if now - *since > GRACE {
                        return Err(error.clone());
                    }
                }
            }
            if now - started > time_limit {
                return Err(format!(
                    "rank {} has waited for its GPU and those of the other ranks for {time_limit:?}, though all ranks have \
                     launched the step",
                    self.rank
                ));
            }
            match now - started < SPIN {
                true => thread::yield_now(),
                false => thread::sleep(NAP),
            }
        }
        self.check_communicator()
    }

    fn check_communicator(&self) -> Result<(), String> {
        match &self.communicator {
            None if self.num_ranks == 1 => Ok(()),
            Some(communicator) => communicator
                .check()
                .map_err(|error| format!("NCCL: {error}")),
            None => Err("NCCL has been ended".to_owned()),
        }
    }

    /// Ends what waits for other ranks, if anything does, so that the stream can be waited for.
    pub(super) fn end(&mut self, stream: &CudaStream) {
        let is_done =
            self.communicator.is_some() && self.wait_for_stream(stream, GRACE, || Ok(())).is_ok();
        if !is_done {
            self.communicator = None;
        }
        // Sums of many rows, whose memory is freed next.
        if let Some(Err(error)) = self.sums.as_ref().map(|sums| sums.stream.synchronize()) {
            log::debug!("ending sums over ranks: {error}");
        }
    }
}

impl Cuda {
    /// Makes it one of several.
    pub(super) fn join(&mut self, host: &mut RankHost) -> Result<(), LoadError> {
        let reached = self.stream.context().new_event(None);
        let reached = reached.map_err(|error| load_error("creating an event", &error))?;
        let ranks = GpuRanks {
            rank: host.rank(),
            num_ranks: host.num_ranks(),
            gets_logits: host.gets_logits(),
            communicator: None,
            gathered: None,
            sums: None,
            stage_rows: None,
            reached,
        };
        if host.num_ranks() == 1 {
            self.ranks = Some(ranks);
            return Ok(());
        }
        // Before another rank waits for this one.
        nccl::check()?;
        let mut id = match host.rank() {
            0 => nccl::unique_id()?,
            _ => [0; ID_WORDS],
        };
        let told = host.take_first(&mut id);
        told.map_err(|error| LoadError::Resource(error.0))?;
        let mut gathered = DeviceMemory::new(&self.stream, GATHERED_BYTES)?;
        gathered.write(&self.stream, 0, &vec![0; 4 * host.num_ranks()])?;
        let communicator = Communicator::new(
            &self.stream,
            id,
            host.rank(),
            host.num_ranks(),
            gathered.address(),
            host.time_limit(),
        )?;
        self.ranks = Some(GpuRanks {
            communicator: Some(communicator),
            gathered: Some(gathered),
            sums: Some(SumStream::new(&self.stream)?),
            ..ranks
        });
        Ok(())
    }

    /// Refuses a GPU of another kind than that of the first rank of the stage: its products may round to other experts.
    pub(super) fn check_kind_of_ranks(&self, host: &mut RankHost) -> Result<(), LoadError> {
        let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let count = self.stream.context().attribute(count);
        let count = count.map_err(|error| load_error("asking for the multiprocessors", &error))?;
        let capability = self.kernels.capability();
        let describe = |kind: u32| {
            let (capability, count) = (kind >> 16, kind & 0xffff);
            let (major, minor) = (capability / 10, capability % 10);
            format!("a GPU of compute capability {major}.{minor} with {count} multiprocessors")
        };
        host.check_alike(
            capability << 16 | count.unsigned_abs() & 0xffff,
            describe,
            "set gpu_device_ids to GPUs of one kind, or pipeline_parallel_size in place of tensor_parallel_size",
        )
    }

    /// Waits for the stream's work, if other ranks take part in it: no longer than the time limit.
    ///
    /// # Errors
    ///
    /// An operation has failed, here or on another rank.
    pub(super) fn wait_for_ranks(&mut self, host: &mut RankHost) -> Result<(), StepError> {
        let Some(ranks) = &mut self.ranks else {
            return Ok(());
        };
        let waited = match &self.failure {
            None => ranks.wait(host, &self.stream),
            Some(failure) => Err(failure.0.clone()),
        };
        let Err(reason) = waited else {
            return Ok(());
        };
        let failure = self
            .failure
            .get_or_insert_with(|| StepError(format!("GPU {}: {reason}", self.gpu)));
        host.abort(&failure.0);
        // Operations that wait for other ranks end with it.
        ranks.communicator = None;
        Err(failure.clone())
    }

    /// Whether this rank samples.
    pub(super) fn gets_logits(&self) -> bool {
        self.ranks.as_ref().is_none_or(|ranks| ranks.gets_logits)
    }

    /// Whether other ranks compute the same layers.
    pub(super) fn is_one_of_several(&self) -> bool {
        let ranks = self.ranks.as_ref();
        ranks.is_some_and(|ranks| ranks.num_ranks > 1)
    }

    /// Sums `len` f32 over all ranks in the stream of sums, after what the device's stream has been given so far.
    pub(super) fn begin_sum(&mut self, address: u64, len: usize) {
        self.with_sum_stream("a sum over ranks", |communicator, stream, sums| {
            sums.order(stream, &sums.stream)?;
            // SAFETY: the rows are there as long as the device, and nothing else uses these until its stream has waited
            // for the sum.
            unsafe { communicator.all_reduce(&sums.stream, address, len) }
        });
    }

    /// Has what follows in the device's stream wait for the sums that have begun.
    pub(super) fn await_sums(&mut self) {
        self.with_sum_stream("waiting for sums", |_, stream, sums| {
            sums.order(&sums.stream, stream)
        });
    }

    /// Sums the first rows over all ranks.
    pub(super) fn sum_over_ranks(&mut self, num_rows: usize, rows: &Rows<f32>) {
        let len = self.padded(num_rows) * rows.width();
        let address = rows.address();
        if !self.is_one_of_several() {
            return;
        }
        if !self.gemm.is_deterministic() {
            return self.communicate("a sum over ranks", |communicator, stream| {
                // SAFETY: the rows are there as long as the device, whose graphs end with it.
                unsafe { communicator.all_reduce(stream, address, len) }
            });
        }
        let Some(num_ranks) = self.ranks.as_ref().map(|ranks| ranks.num_ranks) else {
            return;
        };
        // In the order of the ranks, whatever NCCL makes of so many rows.
        let max_len = GATHERED_BYTES / 4 / num_ranks;
        for first in (0..len).step_by(max_len) {
            let part_len = max_len.min(len - first);
            let part = address + 4 * first as u64;
            let gathered = self.gather_part(part, part_len, part_len);
            launch!(
                self,
                self.kernels.sum_ranks,
                "sum_ranks",
                shared_row_grid(1, part_len),
                part,
                gathered,
                part_len as i32,
                num_ranks as i32
            );
        }
    }

    /// Collects the columns of rows from all ranks: `widths` are the numbers of their columns, `part` has this one's.
    /// On a rank that does not sample, `out` is left as it is.
    pub(super) fn gather_parts(
        &mut self,
        num_rows: usize,
        widths: &[usize],
        part: u64,
        out: &Rows<f32>,
    ) {
        let Some(rank) = self.ranks.as_ref().map(|ranks| ranks.rank) else {
            return;
        };
        let num_rows = self.padded(num_rows);
        let widest = widths.iter().copied().max().unwrap_or(0);
        let max_rows = GATHERED_BYTES / (4 * widest * widths.len());
        assert!(
            max_rows > 0,
            "a row of logits is below {GATHERED_BYTES} bytes"
        );
        for first in (0..num_rows).step_by(max_rows) {
            let num_rows = max_rows.min(num_rows - first);
            let own = part + (4 * first * widths[rank]) as u64;
            let gathered = self.gather_part(own, num_rows * widths[rank], num_rows * widest);
            if !self.gets_logits() {
                continue;
            }
            let mut target = out.row_address(first);
            for (index, &width) in widths.iter().enumerate() {
                launch!(
                    self,
                    self.kernels.place_columns,
                    "place_columns",
                    shared_row_grid(num_rows, width),
                    target,
                    gathered + (4 * index * num_rows * widest) as u64,
                    width as i32,
                    out.width() as i32
                );
                target += 4 * width as u64;
            }
        }
    }

    /// Collects what all ranks have at an address, `len` f32 on this one and at most `max_len` on any. Returns where
    /// they are, `max_len` after the other.
    fn gather_part(&mut self, part: u64, len: usize, max_len: usize) -> u64 {
        let Some((ranks, gathered)) = self
            .ranks
            .as_ref()
            .and_then(|ranks| Some((ranks, ranks.gathered.as_ref()?)))
        else {
            return 0;
        };
        let gathered = gathered.address();
        let own = gathered + (4 * ranks.rank * max_len) as u64;
        self.copy(own, part, 4 * len);
        self.communicate("collecting from all ranks", |communicator, stream| {
            // SAFETY: the memory has room for all, and is there as long as the device, whose graphs end with it.
            unsafe { communicator.all_gather(stream, gathered, max_len) }
        });
        gathered
    }

    /// Launches something in the stream of sums.
    fn with_sum_stream(
        &mut self,
        what: &str,
        launch: impl FnOnce(&Communicator, &CudaStream, &SumStream) -> Result<(), String>,
    ) {
        if !self.is_launching() {
            return;
        }
        let ranks = self.ranks.as_ref();
        let streams = ranks.and_then(|it| it.communicator.as_ref().zip(it.sums.as_ref()));
        if let Some((communicator, sums)) = streams {
            let launched = launch(communicator, &self.stream, sums);
            self.record(what, launched);
        }
    }

    /// Launches an operation of all ranks.
    fn communicate(
        &mut self,
        what: &str,
        launch: impl FnOnce(&Communicator, &CudaStream) -> Result<(), String>,
    ) {
        if !self.is_launching() {
            return;
        }
        let communicator = self.ranks.as_ref().and_then(|it| it.communicator.as_ref());
        if let Some(communicator) = communicator {
            let launched = launch(communicator, &self.stream);
            self.record(what, launched);
        }
    }
}
