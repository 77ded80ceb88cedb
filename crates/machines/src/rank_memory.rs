//! The memory that the ranks of a model can have.

use std::fmt::{self, Display, Formatter};

use super::task::HostMemory;

/// Memory available to all ranks of a model, in equal shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Total of all ranks.
    pub num_bytes: u64,
    limit: Limit,
}

/// The tightest memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    /// The rank that reported it.
    rank: usize,
    bytes: u64,
    kind: LimitKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitKind {
    /// Free memory of a host, shared by this number of ranks.
    Host(usize),
    /// Address space left to the rank's process.
    Process,
}

impl RankMemory {
    /// Memory of ranks on these hosts, one entry per rank. Ranks on the same host share the least free memory that any
    /// of them reports: rank 0 subtracts reservations, and another rank may run in a container. `None` if no host
    /// reports its memory.
    pub(super) fn of_hosts<'h>(
        hosts: impl Iterator<Item = &'h HostMemory> + Clone,
    ) -> Option<Self> {
        let num_ranks = hosts.clone().count();
        let num_at = |id: &str| hosts.clone().filter(|host| host.id == id).count();
        let limits = hosts.clone().enumerate().flat_map(|(rank, host)| {
            let of_host = LimitKind::Host(num_at(&host.id));
            let limit = |bytes: Option<u64>, kind| bytes.map(|bytes| Limit { rank, bytes, kind });
            [
                limit(host.available_bytes, of_host),
                limit(host.limit_bytes, LimitKind::Process),
            ]
        });
        let memory = limits.flatten().map(|limit| Self {
            num_bytes: limit.bytes_of_all(num_ranks),
            limit,
        });
        memory.min_by_key(|memory| memory.num_bytes)
    }
}

/// The reason in a load error: the limit.
impl Display for RankMemory {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let Limit { rank, bytes, kind } = self.limit;
        match kind {
            LimitKind::Process => write!(
                formatter,
                "the process of rank {rank} may take {bytes} bytes (ulimit -v), and each rank has as much"
            ),
            LimitKind::Host(1) => write!(
                formatter,
                "the host of rank {rank} has {bytes} free bytes, and each rank has as much"
            ),
            LimitKind::Host(num_ranks) => write!(
                formatter,
                "the host of rank {rank} has {bytes} free bytes for {num_ranks} ranks, and each rank has as much"
            ),
        }
    }
}

impl Limit {
    /// Total of all ranks if each gets the share of those under this limit.
    fn bytes_of_all(&self, num_ranks: usize) -> u64 {
        let num_limited = match self.kind {
            LimitKind::Host(num_ranks) => num_ranks,
            LimitKind::Process => 1,
        };
        let bytes = u128::from(self.bytes) * num_ranks as u128 / num_limited as u128;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// The share of the ranks on rank 0's host, `own_id`, in memory that is split equally among all ranks, rounded up.
pub(super) fn bytes_of_host(own_id: &str, others: &[HostMemory], bytes_of_all: u64) -> u64 {
    let num_ranks = 1 + others.len() as u128;
    let num_here = 1 + others.iter().filter(|other| other.id == own_id).count() as u128;
    let bytes = (u128::from(bytes_of_all) * num_here).div_ceil(num_ranks);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(id: &str, available_bytes: impl Into<Option<u64>>) -> HostMemory {
        HostMemory {
            id: id.to_owned(),
            available_bytes: available_bytes.into(),
            limit_bytes: None,
        }
    }

    fn limited(id: &str, available_bytes: impl Into<Option<u64>>, limit_bytes: u64) -> HostMemory {
        HostMemory {
            limit_bytes: Some(limit_bytes),
            ..host(id, available_bytes)
        }
    }

    fn memory(hosts: &[HostMemory]) -> RankMemory {
        RankMemory::of_hosts(hosts.iter()).expect("a system tells")
    }

    #[test]
    fn the_host_with_the_least_for_each_of_its_ranks_decides() {
        let bytes = |hosts: &[HostMemory]| memory(hosts).num_bytes;
        let a = || host("a", 1000);
        // Rank 0 knows of models that are reserved there.
        assert_eq!(bytes(&[a(), host("a", 4000)]), 1000);
        // A rank in a container has less.
        assert_eq!(bytes(&[a(), host("a", 300)]), 300);
        assert_eq!(bytes(&[a(), host("b", 3000)]), 2000);
        assert_eq!(bytes(&[a(), host("b", 300)]), 600);
        let two_there = [a(), host("b", 1500), host("b", 1400), host("a", 4000)];
        assert_eq!(bytes(&two_there), 2000);
        let three_there = [a(), host("b", 1200), host("b", 1200), host("b", 1200)];
        assert_eq!(bytes(&three_there), 1600);
        assert_eq!(bytes(&[a(), host("b", None)]), 2000);
        assert_eq!(bytes(&[host("a", None), host("b", 7)]), 14);
        assert_eq!(bytes(&[host("a", u64::MAX)]), u64::MAX);
        let unknown = [host("a", None), host("a", None)];
        assert_eq!(RankMemory::of_hosts(unknown.iter()), None);
    }

    #[test]
    fn the_process_with_the_least_memory_decides() {
        let bytes = |other: HostMemory| memory(&[host("a", 1000), other]).num_bytes;
        assert_eq!(bytes(limited("a", 4000, 100)), 200);
        assert_eq!(bytes(limited("a", 4000, 9000)), 1000);
        assert_eq!(bytes(limited("a", None, 3)), 6);
        // Rank 0 as well: the others have limits of their own.
        let hosts = [limited("a", 1000, 100), host("a", 1000), host("a", 1000)];
        assert_eq!(memory(&hosts).num_bytes, 300);
    }

    #[test]
    fn it_names_the_rank_that_has_the_least() {
        let of_process = |rank, bytes| {
            format!(
                "the process of rank {rank} may take {bytes} bytes (ulimit -v), and each rank has as much"
            )
        };
        let own = || host("a", 1000);
        let says = |hosts: &[HostMemory]| memory(hosts).to_string();
        let second = [own(), limited("a", 1000, 30), limited("a", 1000, 20)];
        assert_eq!(says(&second), of_process(2, 20));
        let first = [own(), limited("a", 1000, 20), limited("a", 1000, 30)];
        assert_eq!(says(&first), of_process(1, 20));
        let leader = [limited("a", 1000, 20), own(), limited("a", 1000, 20)];
        assert_eq!(says(&leader), of_process(0, 20));
        // A limit that leaves more than the share of the host is none.
        let shared = [own(), limited("a", 1000, 400), own()];
        assert_eq!(
            says(&shared),
            "the host of rank 0 has 1000 free bytes for 3 ranks, and each rank has as much"
        );
        let small_host = [own(), host("b", 400)];
        assert_eq!(
            says(&small_host),
            "the host of rank 1 has 400 free bytes, and each rank has as much"
        );
    }

    #[test]
    fn memory_of_other_hosts_is_not_reserved_here() {
        assert_eq!(bytes_of_host("a", &[], u64::MAX), u64::MAX);
        assert_eq!(bytes_of_host("a", &[host("a", 1)], 1001), 1001);
        assert_eq!(bytes_of_host("a", &[host("b", 1)], 1001), 501);
        let others = [host("b", 1), host("a", None), host("b", 2)];
        assert_eq!(bytes_of_host("a", &others, 1000), 500);
    }
}
