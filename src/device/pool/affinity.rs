//! The CPUs that a thread may use, and its priority.

/// CPUs by the numbers of the system, ascending. Empty if the system does not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CpuSet(Vec<usize>);

impl CpuSet {
    /// The CPUs that the calling thread may use.
    pub(super) fn of_caller() -> Self {
        #[cfg(target_os = "linux")]
        {
            // SAFETY: a set is an array of bits; every pattern is valid.
            let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            // SAFETY: the size is that of the set; 0 means the calling thread.
            let status = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
            if status == 0 {
                let all = 0..libc::CPU_SETSIZE as usize;
                // SAFETY: the CPU is below the size of the set.
                return Self(
                    all.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
                        .collect(),
                );
            }
        }
        Self::default()
    }

    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The CPU at an index.
    pub(super) fn get(&self, index: usize) -> usize {
        self.0[index]
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

/// Pins the calling thread to a CPU, if the system permits it.
pub(super) fn pin(cpu: usize) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a set is an array of bits; every pattern is valid.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the CPU comes from a set of the same size.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        // SAFETY: the size is that of the set; 0 means the calling thread.
        let status = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
        if status != 0 {
            log::debug!(
                "a thread stays unpinned: {}",
                std::io::Error::last_os_error()
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = cpu;
}
