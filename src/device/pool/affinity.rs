//! Which cpus a thread may use.

/// Cpus by the system's numbers, ascending; none where the system does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CpuSet(Vec<usize>);

impl CpuSet {
    /// Those that the calling thread may use.
    pub(super) fn of_caller() -> Self {
        #[cfg(target_os = "linux")]
        {
            // SAFETY: a set is bits, of which all patterns are valid.
            let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set is as large as is said; 0 is the calling thread.
            let status = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
            if status == 0 {
                let all = 0..libc::CPU_SETSIZE as usize;
                // SAFETY: the cpu is below the size of the set.
                return Self(
                    all.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
                        .collect(),
                );
            }
        }
        Self::default()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// One of them.
    pub(super) fn get(&self, index: usize) -> usize {
        self.0[index]
    }
}

/// Lets threads of the usual priority go before the calling one. Where that cannot be, it is as they are.
pub fn yield_to_others() {
    #[cfg(target_os = "linux")]
    {
        /// A tenth of what a thread of the usual priority gets, where both want a cpu.
        const NICENESS: libc::c_int = 10;
        // SAFETY: it touches no memory; 0 is, on Linux, the calling thread alone.
        if unsafe { libc::setpriority(libc::PRIO_PROCESS as _, 0, NICENESS) } != 0 {
            log::debug!(
                "a thread keeps its priority: {}",
                std::io::Error::last_os_error()
            );
        }
    }
}

/// Keeps the calling thread on a cpu. Where that cannot be, it runs wherever the system lets it.
pub(super) fn pin(cpu: usize) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a set is bits, of which all patterns are valid.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the cpu comes from such a set, so it is below its size.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        // SAFETY: the set is as large as is said; 0 is the calling thread.
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
