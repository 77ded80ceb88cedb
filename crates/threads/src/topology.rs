//! Which CPUs share memory.

use std::fs;
use std::path::Path;

use crate::affinity::cpus_of_caller;
use inflight_base::CpuSet;

/// Where Linux describes the machine.
const SYSTEM: &str = "/sys/devices/system";

/// The CPUs that a thread may use, by the nodes of the memory (NUMA).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The CPUs of each node, a core's one after the other. Nodes without any are left out.
    nodes: Vec<Vec<usize>>,
}

impl Topology {
    /// The topology of the calling thread. One node if the system does not tell of several.
    pub fn of_caller() -> Self {
        let read = |file: &str| fs::read_to_string(Path::new(SYSTEM).join(file)).ok();
        Self::read(read, &cpus_of_caller())
    }

    /// The topology of `cpus`, from the contents of the files below [`SYSTEM`].
    fn read(file: impl Fn(&str) -> Option<String>, cpus: &CpuSet) -> Self {
        let list = |name: &str| file(name)?.trim().parse::<CpuSet>().ok();
        // A core is known by the first of its CPUs.
        let core = |cpu: usize| {
            let siblings = list(&format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
            siblings.map_or(cpu, |siblings| siblings.cpus()[0])
        };
        let online = list("node/online").unwrap_or_default();
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for node in online.cpus() {
            let of_node = list(&format!("node/node{node}/cpulist")).unwrap_or_default();
            let own = of_node.cpus().iter().filter(|&&cpu| cpus.contains(cpu));
            nodes.push(own.copied().collect());
        }
        if nodes.iter().map(Vec::len).sum::<usize>() != cpus.cpus().len() {
            nodes = vec![cpus.cpus().to_vec()];
        }
        nodes.retain(|node| !node.is_empty());
        for node in &mut nodes {
            node.sort_by_cached_key(|&cpu| (core(cpu), cpu));
        }
        Self { nodes }
    }

    /// A machine whose nodes have these CPUs.
    pub fn of_nodes(nodes: impl Iterator<Item = CpuSet>) -> Self {
        Self {
            nodes: nodes.map(|node| node.cpus().to_vec()).collect(),
        }
    }

    /// The number of nodes with CPUs.
    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Whether a CPU may be used.
    pub fn contains(&self, cpu: usize) -> bool {
        self.nodes.iter().any(|node| node.contains(&cpu))
    }

    /// The CPUs cut into shares, in the order of the nodes. `None` if there are fewer CPUs than shares.
    ///
    /// ```text
    /// CPUs     node 0: 0 1 2 3      node 1: 4 5 6 7
    /// 2 shares        |-------|            |-------|
    /// 4 shares        |---|---|            |---|---|
    /// 3 shares        |---|-----------------|  |----|     as equal as can be, though one has CPUs of both nodes
    /// ```
    pub fn shares(&self, num_shares: usize) -> Option<Vec<CpuSet>> {
        let cpus: Vec<usize> = self.nodes.iter().flatten().copied().collect();
        let bound = |share: usize| cpus.len() * share / num_shares;
        let share = |share: usize| cpus[bound(share)..bound(share + 1)].iter().copied();
        (cpus.len() >= num_shares).then(|| (0..num_shares).map(|it| share(it).collect()).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// The files of a machine of nodes with these CPUs, some of a core.
    fn machine(nodes: &[&str], cores: &[&str]) -> impl Fn(&str) -> Option<String> {
        let mut files = HashMap::new();
        for (node, cpus) in nodes.iter().enumerate() {
            files.insert(format!("node/node{node}/cpulist"), format!("{cpus}\n"));
        }
        let online = format!("0-{}\n", nodes.len() - 1);
        files.insert("node/online".to_owned(), online);
        for core in cores {
            for cpu in core.parse::<CpuSet>().expect("CPUs").cpus() {
                let siblings = format!("cpu/cpu{cpu}/topology/thread_siblings_list");
                files.insert(siblings, format!("{core}\n"));
            }
        }
        move |name| files.get(name).cloned()
    }

    fn shares(topology: &Topology, num_shares: usize) -> Option<Vec<String>> {
        let shares = topology.shares(num_shares)?;
        Some(shares.iter().map(CpuSet::to_string).collect())
    }

    fn texts<const N: usize>(texts: [&str; N]) -> Option<Vec<String>> {
        Some(texts.map(str::to_owned).to_vec())
    }

    #[test]
    fn a_share_is_a_node_or_whole_cores_of_one() {
        let files = machine(&["0-1,4-5", "2-3,6-7"], &["0,4", "1,5", "2,6", "3,7"]);
        let topology = Topology::read(&files, &"0-7".parse().expect("CPUs"));
        assert_eq!(topology.num_nodes(), 2);
        assert_eq!(shares(&topology, 1), texts(["0-7"]));
        assert_eq!(shares(&topology, 2), texts(["0-1,4-5", "2-3,6-7"]));
        assert_eq!(shares(&topology, 4), texts(["0,4", "1,5", "2,6", "3,7"]));
        assert_eq!(shares(&topology, 3), texts(["0,4", "1-2,5", "3,6-7"]));
        assert_eq!(shares(&topology, 9), None);
        assert!(topology.contains(7) && !topology.contains(8));
    }

    #[test]
    fn cpus_of_others_are_left_out() {
        let files = machine(&["0-3", "4-7", ""], &[]);
        let topology = Topology::read(&files, &"2-4".parse().expect("CPUs"));
        assert_eq!(topology.num_nodes(), 2);
        assert_eq!(shares(&topology, 3), texts(["2", "3", "4"]));
        let topology = Topology::read(&files, &"4-5".parse().expect("CPUs"));
        assert_eq!(topology.num_nodes(), 1);
    }

    #[test]
    fn a_system_that_does_not_tell_has_one_node() {
        let files = machine(&["0-1"], &[]);
        // It tells of fewer CPUs than there are.
        let topology = Topology::read(&files, &"0-3".parse().expect("CPUs"));
        assert_eq!(
            (topology.num_nodes(), shares(&topology, 2)),
            (1, texts(["0-1", "2-3"]))
        );
        let topology = Topology::read(|_| None, &"1,3".parse().expect("CPUs"));
        assert_eq!(
            (topology.num_nodes(), shares(&topology, 2)),
            (1, texts(["1", "3"]))
        );
    }
}
