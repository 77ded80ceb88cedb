//! The CPUs of each rank.

use inflight_base::{CpuSet, LoadError};
use inflight_config::{RankCpus, RankTransportKind, Settings};
use inflight_threads::Topology;

/// The CPUs of each of `num_ranks` ranks of a machine; none if each may use all. `topology` is read only if it decides.
///
/// # Errors
///
/// `rank_cpus` does not fit the ranks or the machine.
pub(super) fn rank_cpus(
    settings: &Settings,
    num_ranks: usize,
    topology: impl FnOnce() -> Topology,
) -> Result<Vec<CpuSet>, LoadError> {
    let is_of_one_host = num_ranks > 1 && settings.rank_transport == RankTransportKind::Processes;
    let sets = match &settings.rank_cpus {
        RankCpus::Any => return Ok(Vec::new()),
        RankCpus::Auto if !is_of_one_host => return Ok(Vec::new()),
        RankCpus::Auto => {
            let topology = topology();
            let shares = match topology.num_nodes() {
                1 => None,
                _ => topology.shares(num_ranks),
            };
            return Ok(shares.unwrap_or_default());
        }
        RankCpus::Sets(sets) => sets,
    };
    let wrong = |problem: &str, remedy: &str| {
        Err(LoadError::Config {
            problem: format!("rank_cpus is {}, {problem}", settings.rank_cpus),
            remedy: remedy.to_owned(),
        })
    };
    if settings.rank_transport == RankTransportKind::Mpi {
        return wrong(
            "and mpirun has started the ranks",
            "leave rank_cpus out, and bind the processes with mpirun (--map-by numa --bind-to numa)",
        );
    }
    if sets.len() != num_ranks {
        return wrong(
            &format!(
                "which is {} lists, and there are {num_ranks} ranks",
                sets.len()
            ),
            "write one list for each rank, or auto",
        );
    }
    let topology = topology();
    let mut all = sets.iter().flat_map(CpuSet::cpus);
    match all.find(|cpu| !topology.contains(**cpu)) {
        Some(cpu) => wrong(
            &format!("and the server may not use CPU {cpu}"),
            "name CPUs of its affinity (taskset -cp, the container's cpuset), or write auto",
        ),
        None => Ok(sets.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        given: &[(&str, &str)],
        num_ranks: usize,
        nodes: &[&str],
    ) -> Result<Vec<String>, String> {
        let settings = Settings::parse(given.iter().copied()).expect("valid");
        let nodes = nodes.iter().map(|node| node.parse().expect("CPUs"));
        let topology = Topology::of_nodes(nodes);
        let sets = rank_cpus(&settings, num_ranks, || topology);
        let sets = sets.map_err(|error| error.to_string())?;
        Ok(sets.iter().map(CpuSet::to_string).collect())
    }

    fn texts<const N: usize>(texts: [&str; N]) -> Result<Vec<String>, String> {
        Ok(texts.map(str::to_owned).to_vec())
    }

    #[test]
    fn ranks_have_a_node_each_where_there_are_several() {
        let two = ["0-3", "4-7"];
        assert_eq!(chosen(&[], 2, &two), texts(["0-3", "4-7"]));
        assert_eq!(chosen(&[], 4, &two), texts(["0-1", "2-3", "4-5", "6-7"]));
        assert_eq!(chosen(&[], 1, &two), texts([]));
        assert_eq!(chosen(&[], 2, &["0-7"]), texts([]));
        assert_eq!(chosen(&[], 4, &["0", "1"]), texts([]));
        assert_eq!(chosen(&[("rank_cpus", "any")], 2, &two), texts([]));
        assert_eq!(chosen(&[("rank_transport", "mpi")], 2, &two), texts([]));
    }

    #[test]
    fn lists_are_taken_or_refused_with_the_reason() {
        let given = |lists| [("rank_cpus", lists)];
        assert_eq!(chosen(&given("1;0"), 2, &["0-1"]), texts(["1", "0"]));
        assert_eq!(chosen(&given("1"), 1, &["0-1"]), texts(["1"]));
        let mpi = [("rank_cpus", "0;1"), ("rank_transport", "mpi")];
        for (given, part) in [
            (&given("0-1")[..], "1 lists, and there are 2 ranks"),
            (&given("0;2"), "may not use CPU 2"),
            (&mpi, "bind the processes with mpirun"),
        ] {
            let error = chosen(given, 2, &["0-1"]).expect_err("it is wrong");
            let is_named = error.contains("rank_cpus is ");
            assert!(error.contains(part) && is_named, "{error}");
        }
    }
}
