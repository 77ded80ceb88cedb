//! Sets of CPUs.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

/// One more than the largest number of a CPU: the size of Linux' `cpu_set_t`.
const MAX_CPUS: usize = 1024;

/// Some CPUs by the numbers of the system, ascending. As text it is a list as Linux writes them: `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(Vec<usize>);

/// A text is not a list of CPUs.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a list of CPUs below {MAX_CPUS}, such as 0-3,8")]
pub struct NotCpus;

impl CpuSet {
    /// The CPUs, ascending.
    pub fn cpus(&self) -> &[usize] {
        &self.0
    }

    /// Whether a CPU is one of them.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl FromStr for CpuSet {
    type Err = NotCpus;

    fn from_str(text: &str) -> Result<Self, NotCpus> {
        let number = |text: &str| {
            let cpu = text.trim().parse::<usize>().ok();
            cpu.filter(|&cpu| cpu < MAX_CPUS).ok_or(NotCpus)
        };
        let mut cpus = Vec::new();
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(NotCpus);
            }
            // So a long text cannot name one CPU any number of times.
            if cpus.len() + (last - first) >= MAX_CPUS {
                return Err(NotCpus);
            }
            cpus.extend(first..=last);
        }
        Ok(cpus.into_iter().collect())
    }
}

impl Display for CpuSet {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ranges = self.0.chunk_by(|cpu, next| cpu + 1 == *next);
        for (index, range) in ranges.enumerate() {
            let separator = if index == 0 { "" } else { "," };
            match *range {
                [cpu] => write!(f, "{separator}{cpu}")?,
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_linux_has_them() {
        for (text, cpus, written) in [
            ("0", &[0][..], "0"),
            ("0-3,8", &[0, 1, 2, 3, 8], "0-3,8"),
            (" 4 , 2-3", &[2, 3, 4], "2-4"),
            ("7-7,7", &[7], "7"),
            ("1023", &[1023], "1023"),
        ] {
            let set: CpuSet = text.parse().expect(text);
            assert_eq!(set.cpus(), cpus, "{text}");
            assert_eq!(set.to_string(), written, "{text}");
            assert!(set.contains(cpus[0]) && !set.contains(512), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let often = ["0-1023"; 2].join(",");
        for text in ["", ",", "1,", "3-1", "-1", "1-", "1024", "a", "0x1", &often] {
            assert_eq!(text.parse::<CpuSet>(), Err(NotCpus), "{text}");
        }
    }
}
