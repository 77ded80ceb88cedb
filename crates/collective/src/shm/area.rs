//! The shared memory of ranks.
//!
//! ```text
//! | head | control of rank 0 | control of rank 1 | ... | buffers of rank 0 | buffers of rank 1 | ... | outbox of rank 0 | ...
//!                                                      | even  | odd round |                       | even  | odd    |
//! ```
//!
//! There are outboxes for messages to the next stage if there are several stages.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::super::error::CollectiveError;
use super::super::grid::Grid;
use super::super::label::{Label, Operation};
use super::awaited::{Awaited, Kind};
use super::counter::Counter;

/// The most words of a message in a round: what fits in half of a core's L2 cache.
pub(super) const MAX_WORDS: usize = 64 * 1024;
/// The most words of a message to the next stage: 1024 rows of 4096. Only what is written takes physical memory.
pub(super) const MAX_SENT_WORDS: usize = 4 * 1024 * 1024;
/// The most bytes of the text of a failure.
const MAX_REASON: usize = 480;
/// Tells this memory, and this version of it, from anything else.
const MAGIC: u32 = 0x696e_6602;
const NAME: &CStr = c"inflight-ranks";
/// Seals: the memory keeps its size, so reading it cannot end a process.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The shared memory, mapped.
pub(super) struct Area {
    map: MmapRaw,
    grid: Grid,
}

// SAFETY: all that several threads or processes write at once are atomics; see `message` and `write` for the rest.
unsafe impl Send for Area {}

#[repr(C, align(64))]
struct Head {
    magic: AtomicU32,
    num_stages: AtomicU32,
    ranks_per_stage: AtomicU32,
}

/// What a rank tells the others.
#[repr(C, align(128))]
pub(super) struct Control {
    /// The rounds in which it has published.
    pub(super) published: Counter,
    /// The messages that it has sent to the next stage.
    pub(super) sent: Counter,
    /// The messages that it has received from the previous stage.
    pub(super) received: Counter,
    /// What it waits for, see [`Awaited::to_word`]; 0: for nothing.
    waiting_for: AtomicU64,
    /// One of the constants below.
    state: AtomicU32,
    reason_len: AtomicU32,
    /// Written once, before the state becomes [`FAILED`].
    reason: UnsafeCell<[u8; MAX_REASON]>,
}

/// No process has been this rank.
const FREE: u32 = 0;
const ATTACHED: u32 = 1;
const FAILED: u32 = 2;

/// What a message belongs to.
#[repr(C, align(64))]
struct Header {
    step: AtomicU64,
    len: AtomicU64,
    operation: AtomicU32,
    num_words: AtomicU32,
}

#[repr(C, align(64))]
struct Slot<const N: usize> {
    header: Header,
    words: UnsafeCell<[u32; N]>,
}

/// A message of a rank in a round.
type Published = Slot<MAX_WORDS>;
/// A message to the next stage.
type Sent = Slot<MAX_SENT_WORDS>;

/// A place for a message.
pub(super) struct Buffer<'a> {
    header: &'a Header,
    words: *mut u32,
    max_words: usize,
}

/// Makes the memory for ranks, all zeros but for its head. It takes no physical memory until it is written.
///
/// # Errors
///
/// The system refuses it.
pub(super) fn create(grid: Grid) -> Result<File, CollectiveError> {
    let failed = |what: &str, error: io::Error| {
        CollectiveError::Memory(format!("{what} of {} bytes: {error}", num_bytes(grid)))
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), flags) };
    if descriptor == -1 {
        return Err(failed("memfd_create", io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is open, and nobody else has it.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(num_bytes(grid) as u64)
        .map_err(|error| failed("ftruncate", error))?;
    // SAFETY: a call without pointers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } == -1 {
        return Err(failed("seals", io::Error::last_os_error()));
    }
    let map = map(&file, num_bytes(grid))?;
    let head = head(&map);
    let [num_stages, ranks_per_stage] = [grid.num_stages, grid.ranks_per_stage];
    head.num_stages.store(num_stages as u32, Ordering::Relaxed);
    head.ranks_per_stage
        .store(ranks_per_stage as u32, Ordering::Relaxed);
    head.magic.store(MAGIC, Ordering::Release);
    Ok(file)
}

impl Area {
    /// Maps the memory that [`create`] has made.
    ///
    /// # Errors
    ///
    /// It is something else.
    pub(super) fn map(file: &File) -> Result<Self, CollectiveError> {
        let wrong = || CollectiveError::Memory("not memory of this version's ranks".to_owned());
        // SAFETY: a call without pointers.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        if seals == -1 || seals & SEALS != SEALS {
            return Err(wrong());
        }
        let len = usize::try_from(len).map_err(|_| wrong())?;
        if len < size_of::<Head>() {
            return Err(wrong());
        }
        let map = map(file, len)?;
        let head = head(&map);
        let stored = [&head.magic, &head.num_stages, &head.ranks_per_stage];
        let [magic, num_stages, ranks_per_stage] =
            stored.map(|word| word.load(Ordering::Acquire) as usize);
        let grid = Grid {
            num_stages,
            ranks_per_stage,
        };
        let is_ours =
            magic == MAGIC as usize && grid.checked_num_ranks().is_some() && num_bytes(grid) == len;
        match is_ours {
            true => Ok(Self { map, grid }),
            false => Err(wrong()),
        }
    }

    pub(super) fn grid(&self) -> Grid {
        self.grid
    }

    pub(super) fn num_ranks(&self) -> usize {
        self.grid.num_ranks()
    }

    pub(super) fn control(&self, rank: usize) -> &Control {
        assert!(rank < self.num_ranks(), "rank {rank}");
        let start = size_of::<Head>().next_multiple_of(align_of::<Control>());
        let offset = start + rank * size_of::<Control>();
        // SAFETY: it is inside of the map, aligned as a page is, zero at first, and changed by atomics only, but for
        // the reason, which has its own rule.
        unsafe { &*self.map.as_mut_ptr().add(offset).cast::<Control>() }
    }

    /// The buffer of a rank for the messages of even or odd rounds.
    pub(super) fn published(&self, rank: usize, parity: usize) -> Buffer<'_> {
        assert!(rank < self.num_ranks() && parity < 2, "rank {rank}");
        self.buffer::<MAX_WORDS>(first_slot(self.num_ranks()), 2 * rank + parity)
    }

    /// The buffer of a rank for even or odd messages to the next stage, of which there are several.
    pub(super) fn sent(&self, rank: usize, parity: usize) -> Buffer<'_> {
        assert!(rank < self.num_ranks() && parity < 2, "rank {rank}");
        assert!(self.grid.num_stages > 1, "one stage sends nothing");
        self.buffer::<MAX_SENT_WORDS>(first_sent(self.num_ranks()), 2 * rank + parity)
    }

    /// The slot of this index of those from `first` on.
    fn buffer<const N: usize>(&self, first: usize, index: usize) -> Buffer<'_> {
        let offset = first + index * size_of::<Slot<N>>();
        let slot = self.map.as_ptr().wrapping_add(offset).cast::<Slot<N>>();
        // SAFETY: the caller has checked that the slot is inside of the map, and the header has only atomics.
        let (header, words) = unsafe { (&(*slot).header, (*slot).words.get()) };
        Buffer {
            header,
            words: words.cast(),
            max_words: N,
        }
    }
}

impl<'a> Buffer<'a> {
    /// What its message belongs to; `None` if that is nothing.
    pub(super) fn label(&self) -> Option<Label> {
        Some(Label {
            operation: Operation::from_number(self.header.operation.load(Ordering::Relaxed))?,
            step: self.header.step.load(Ordering::Relaxed),
            len: self.header.len.load(Ordering::Relaxed) as usize,
        })
    }

    /// Its message.
    ///
    /// # Safety
    ///
    /// Its rank has told that it is there, and does not write to this buffer as long as the message is used.
    pub(super) unsafe fn message(&self) -> &'a [u32] {
        let num_words = self.header.num_words.load(Ordering::Relaxed);
        let num_words = (num_words as usize).min(self.max_words);
        // SAFETY: so many words are in the slot, and the caller promises that nobody writes them.
        unsafe { std::slice::from_raw_parts(self.words, num_words) }
    }

    /// Its message of `len` words, to be written.
    ///
    /// # Safety
    ///
    /// It belongs to this rank, and nobody else uses it as long as the message is written.
    #[allow(
        clippy::mut_from_ref,
        reason = "the buffer is a pointer to shared memory"
    )]
    pub(super) unsafe fn message_mut(&self, label: Label, len: usize) -> &'a mut [u32] {
        assert!(len <= self.max_words, "{len} words");
        let header = self.header;
        let operation = label.operation as u32;
        header.operation.store(operation, Ordering::Relaxed);
        header.step.store(label.step, Ordering::Relaxed);
        header.len.store(label.len as u64, Ordering::Relaxed);
        header.num_words.store(len as u32, Ordering::Relaxed);
        // SAFETY: the slot has so many words, and the caller promises that nobody else uses them.
        unsafe { std::slice::from_raw_parts_mut(self.words, len) }
    }
}

impl Control {
    /// Marks the rank as taken; `false` if it has been before.
    pub(super) fn attach(&self) -> bool {
        let (order, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let state = &self.state;
        state
            .compare_exchange(FREE, ATTACHED, order, failure)
            .is_ok()
    }

    /// Whether a process is or was this rank.
    pub(super) fn has_attached(&self) -> bool {
        self.state.load(Ordering::Acquire) != FREE
    }

    /// One of the rank's counters.
    pub(super) fn counter(&self, kind: Kind) -> &Counter {
        match kind {
            Kind::Published => &self.published,
            Kind::Sent => &self.sent,
            Kind::Received => &self.received,
        }
    }

    /// Tells what the rank waits for.
    pub(super) fn set_waiting_for(&self, awaited: Option<Awaited>) {
        let word = awaited.map_or(0, Awaited::to_word);
        self.waiting_for.store(word, Ordering::Release);
    }

    /// What the rank waits for.
    pub(super) fn waiting_for(&self) -> Option<Awaited> {
        Awaited::from_word(self.waiting_for.load(Ordering::Acquire))
    }

    /// Wakes all who wait for the rank.
    pub(super) fn wake(&self) {
        for counter in [&self.published, &self.sent, &self.received] {
            counter.wake();
        }
    }

    /// Why the rank has failed.
    pub(super) fn failure(&self) -> Option<String> {
        if self.state.load(Ordering::Acquire) != FAILED {
            return None;
        }
        let len = (self.reason_len.load(Ordering::Relaxed) as usize).min(MAX_REASON);
        // SAFETY: the reason was written before the state, and is not written again.
        let reason = unsafe { &*self.reason.get() };
        Some(String::from_utf8_lossy(&reason[..len]).into_owned())
    }

    /// Tells others that this rank has failed. Called by this rank alone, when it has not failed before.
    pub(super) fn fail(&self, reason: &str) {
        if self.state.load(Ordering::Acquire) == FAILED {
            return;
        }
        let len = reason.floor_char_boundary(MAX_REASON);
        // SAFETY: nobody reads it before the state says so, and only this rank writes it.
        unsafe { (&mut *self.reason.get())[..len].copy_from_slice(&reason.as_bytes()[..len]) };
        self.reason_len.store(len as u32, Ordering::Relaxed);
        self.state.store(FAILED, Ordering::Release);
    }
}

fn first_slot(num_ranks: usize) -> usize {
    let controls = size_of::<Head>().next_multiple_of(align_of::<Control>());
    (controls + num_ranks * size_of::<Control>()).next_multiple_of(4096)
}

fn first_sent(num_ranks: usize) -> usize {
    first_slot(num_ranks) + num_ranks * 2 * size_of::<Published>()
}

fn num_bytes(grid: Grid) -> usize {
    let num_ranks = grid.num_ranks();
    let num_sent = if grid.num_stages > 1 {
        2 * num_ranks
    } else {
        0
    };
    first_sent(num_ranks) + num_sent * size_of::<Sent>()
}

fn map(file: &File, len: usize) -> Result<MmapRaw, CollectiveError> {
    let map = MmapOptions::new().len(len).map_raw(file);
    map.map_err(|error| CollectiveError::Memory(format!("cannot be mapped: {error}")))
}

fn head(map: &MmapRaw) -> &Head {
    // SAFETY: the map begins with it, and it has only atomics.
    unsafe { &*map.as_mut_ptr().cast::<Head>() }
}
