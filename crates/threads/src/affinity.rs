//! The CPUs that a thread may use, and its priority.

use std::thread::{self, ThreadId};

use inflight_base::CpuSet;

/// The CPUs that the calling thread may use. Empty if the system does not tell.
pub(super) fn cpus_of_caller() -> CpuSet {
    let Some(mask) = Mask::of_caller() else {
        return CpuSet::default();
    };
    (0..libc::CPU_SETSIZE as usize)
        .filter(|&cpu| mask.contains(cpu))
        .collect()
}

/// Lets the calling thread use these CPUs only, if the system permits it.
pub(super) fn bind(cpus: &[usize]) {
    Mask::of(cpus).set();
}

/// The calling thread uses some CPUs only, until this is dropped.
pub(super) struct Binding {
    thread: ThreadId,
    before: Option<Mask>,
}

impl Binding {
    /// Lets the calling thread use these CPUs only, if the system permits it.
    pub(super) fn of_caller(cpus: &[usize]) -> Self {
        let before = Mask::of_caller();
        bind(cpus);
        Self {
            thread: thread::current().id(),
            before,
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && thread::current().id() == self.thread
        {
            before.set();
        }
    }
}

/// Lowers the priority of the calling thread below the default, if the system permits it.
pub fn yield_to_others() {
    #[cfg(target_os = "linux")]
    {
        /// A tenth of the time of a thread with the default priority, if both want the same CPU.
        const NICENESS: libc::c_int = 10;
        // SAFETY: the call accesses no memory; on Linux, 0 means the calling thread alone.
        if unsafe { libc::setpriority(libc::PRIO_PROCESS as _, 0, NICENESS) } != 0 {
            log::debug!(
                "a thread keeps its priority: {}",
                std::io::Error::last_os_error()
            );
        }
    }
}

/// CPUs as the system has them. Making one takes no memory, as it happens in every step.
struct Mask(libc::cpu_set_t);

impl Mask {
    fn of(cpus: &[usize]) -> Self {
        // SAFETY: a set is an array of bits; every pattern is valid.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for &cpu in cpus {
            assert!(cpu < libc::CPU_SETSIZE as usize, "a CPU of a set");
            // SAFETY: the CPU is below the size of the set.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        Self(set)
    }

    fn of_caller() -> Option<Self> {
        let mut mask = Self::of(&[]);
        // SAFETY: the size is the set's; 0 means the calling thread.
        let status = unsafe { libc::sched_getaffinity(0, size_of_val(&mask.0), &mut mask.0) };
        (status == 0).then_some(mask)
    }

    fn contains(&self, cpu: usize) -> bool {
        // SAFETY: callers ask for CPUs below the size of the set.
        unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    fn set(&self) {
        // SAFETY: the size is the set's; 0 means the calling thread.
        let status = unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &self.0) };
        if status != 0 {
            log::debug!(
                "a thread keeps its CPUs: {}",
                std::io::Error::last_os_error()
            );
        }
    }
}
