//! The shared memory of ranks.
//!
//! ```text
//! | head | control of rank 0 | control of rank 1 | ... | buffers of rank 0 | buffers of rank 1 | ...
//!                                                      | even  | odd round |
//! ```

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::super::error::CollectiveError;
use super::super::exchange::MAX_RANKS;

/// The most words of a message: what fits in half of a core's L2 cache.
pub(super) const MAX_WORDS: usize = 64 * 1024;
/// The most bytes of the text of a failure.
const MAX_REASON: usize = 480;
/// Tells this memory, and this version of it, from anything else.
const MAGIC: u32 = 0x696e_6601;
const NAME: &CStr = c"inflight-ranks";
/// Seals: the memory keeps its size, so reading it cannot end a process.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The shared memory, mapped.
pub(super) struct Area {
    map: MmapRaw,
    num_ranks: usize,
}

// SAFETY: all that several threads or processes write at once are atomics; see `message` and `write` for the rest.
unsafe impl Send for Area {}

#[repr(C, align(64))]
struct Head {
    magic: AtomicU32,
    num_ranks: AtomicU32,
}

/// What a rank tells the others.
#[repr(C, align(128))]
pub(super) struct Control {
    /// The rounds in which it has published, modulo 2^32. Others sleep until it changes.
    pub(super) num_published: AtomicU32,
    /// How many sleep, or are about to.
    pub(super) num_waiting: AtomicU32,
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

/// A message, and what it belongs to.
#[repr(C, align(64))]
pub(super) struct Header {
    pub(super) step: AtomicU64,
    pub(super) len: AtomicU64,
    pub(super) operation: AtomicU32,
    num_words: AtomicU32,
}

#[repr(C, align(64))]
struct Slot {
    header: Header,
    words: UnsafeCell<[u32; MAX_WORDS]>,
}

/// Makes the memory for ranks, all zeros but for its head. It takes no physical memory until it is written.
///
/// # Errors
///
/// The system refuses it.
pub(super) fn create(num_ranks: usize) -> Result<File, CollectiveError> {
    let failed = |what: &str, error: io::Error| {
        CollectiveError::Memory(format!("{what} of {} bytes: {error}", num_bytes(num_ranks)))
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), flags) };
    if descriptor == -1 {
        return Err(failed("memfd_create", io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is open, and nobody else has it.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(num_bytes(num_ranks) as u64)
        .map_err(|error| failed("ftruncate", error))?;
    // SAFETY: a call without pointers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } == -1 {
        return Err(failed("seals", io::Error::last_os_error()));
    }
    let map = map(&file, num_bytes(num_ranks))?;
    let head = head(&map);
    head.num_ranks.store(num_ranks as u32, Ordering::Relaxed);
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
        let num_ranks = (1..=MAX_RANKS).find(|&num_ranks| num_bytes(num_ranks) as u64 == len);
        let num_ranks = num_ranks.ok_or_else(wrong)?;
        let map = map(file, num_bytes(num_ranks))?;
        let head = head(&map);
        let stored = [&head.magic, &head.num_ranks].map(|word| word.load(Ordering::Acquire));
        match stored == [MAGIC, num_ranks as u32] {
            true => Ok(Self { map, num_ranks }),
            false => Err(wrong()),
        }
    }

    pub(super) fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    pub(super) fn control(&self, rank: usize) -> &Control {
        assert!(rank < self.num_ranks, "rank {rank}");
        let start = size_of::<Head>().next_multiple_of(align_of::<Control>());
        let offset = start + rank * size_of::<Control>();
        // SAFETY: it is inside of the map, aligned as a page is, zero at first, and changed by atomics only, but for the
        // reason, which has its own rule.
        unsafe { &*self.map.as_mut_ptr().add(offset).cast::<Control>() }
    }

    pub(super) fn header(&self, rank: usize, parity: usize) -> &Header {
        // SAFETY: the slot is inside of the map, and the header has only atomics.
        unsafe { &(*self.slot(rank, parity)).header }
    }

    /// The message of a rank.
    ///
    /// # Safety
    ///
    /// The rank has published it, and does not write to this buffer as long as the message is used.
    pub(super) unsafe fn message(&self, rank: usize, parity: usize) -> &[u32] {
        let num_words = self.header(rank, parity).num_words.load(Ordering::Relaxed);
        // SAFETY: the slot is inside of the map.
        let words = unsafe { (*self.slot(rank, parity)).words.get() };
        let num_words = (num_words as usize).min(MAX_WORDS);
        // SAFETY: so many words are in the slot, and the caller promises that nobody writes them.
        unsafe { std::slice::from_raw_parts(words.cast::<u32>(), num_words) }
    }

    /// Writes the message of a rank.
    ///
    /// # Safety
    ///
    /// Nobody else uses this buffer.
    pub(super) unsafe fn write(&self, rank: usize, parity: usize, words: &[u32]) {
        assert!(words.len() <= MAX_WORDS, "{} words", words.len());
        let header = self.header(rank, parity);
        header
            .num_words
            .store(words.len() as u32, Ordering::Relaxed);
        // SAFETY: the slot is inside of the map, has so many words, and the caller promises that nobody else uses them.
        unsafe {
            let target = (*self.slot(rank, parity)).words.get().cast::<u32>();
            target.copy_from_nonoverlapping(words.as_ptr(), words.len());
        }
    }

    fn slot(&self, rank: usize, parity: usize) -> *const Slot {
        assert!(rank < self.num_ranks && parity < 2, "rank {rank}");
        let offset = first_slot(self.num_ranks) + (2 * rank + parity) * size_of::<Slot>();
        self.map.as_ptr().wrapping_add(offset).cast()
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

fn num_bytes(num_ranks: usize) -> usize {
    first_slot(num_ranks) + num_ranks * 2 * size_of::<Slot>()
}

fn map(file: &File, len: usize) -> Result<MmapRaw, CollectiveError> {
    let map = MmapOptions::new().len(len).map_raw(file);
    map.map_err(|error| CollectiveError::Memory(format!("cannot be mapped: {error}")))
}

fn head(map: &MmapRaw) -> &Head {
    // SAFETY: the map begins with it, and it has only atomics.
    unsafe { &*map.as_mut_ptr().cast::<Head>() }
}
