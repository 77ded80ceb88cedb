//! The GPU of each rank.

use inflight_base::LoadError;
use inflight_config::{RankTransportKind, Settings};
use inflight_machines::{GpuChoice, RankConnections, RankGpu};

/// The GPUs of all ranks. That of the instance, `gpu`, is rank 0's.
///
/// # Errors
/// `gpu_device_ids` names other numbers of GPUs or another one for rank 0, a rank cannot have its GPU, or two have the
/// same.
pub(super) fn rank_gpus(
    settings: &Settings,
    gpu: usize,
    ranks: Option<&mut RankConnections>,
) -> Result<Vec<RankGpu>, LoadError> {
    let by_host = ranks
        .as_ref()
        .map_or(vec![gpu], |ranks| ranks.gpus_by_host(gpu));
    let choices = choices(settings, &by_host)?;
    let mut gpus = vec![RankGpu::of(GpuChoice::Given(gpu))?];
    if let Some(ranks) = ranks {
        gpus.extend(ranks.gpus(&choices[1..])?);
    }
    check_different(&gpus)?;
    Ok(gpus)
}

/// The GPUs that ranks are to have, given those that they have by default. Rank 0 has this one in any case.
fn choices(settings: &Settings, by_host: &[usize]) -> Result<Vec<GpuChoice>, LoadError> {
    let num_ranks = by_host.len();
    let given = settings.gpu_device_ids.iter().map(|gpu| *gpu as usize);
    let choices: Vec<_> = match (given.len(), settings.rank_transport) {
        (0 | 1, RankTransportKind::Mpi) => {
            by_host.iter().map(|gpu| GpuChoice::Wrapped(*gpu)).collect()
        }
        (0 | 1, RankTransportKind::Processes) => {
            by_host.iter().map(|gpu| GpuChoice::Given(*gpu)).collect()
        }
        _ => given.clone().map(GpuChoice::Given).collect(),
    };
    let ids = || {
        let ids: Vec<_> = given.clone().map(|gpu| gpu.to_string()).collect();
        ids.join(",")
    };
    let wrong = |problem: String| {
        Err(LoadError::Config {
            problem,
            remedy: remedy(num_ranks),
        })
    };
    if choices.len() != num_ranks {
        return wrong(format!(
            "gpu_device_ids is {}, which is {} GPUs, and the model has {num_ranks} ranks",
            ids(),
            choices.len()
        ));
    }
    match choices[0] {
        GpuChoice::Given(first) if first != by_host[0] => wrong(format!(
            "gpu_device_ids is {}, and the instance, which is rank 0, is on GPU {}",
            ids(),
            by_host[0]
        )),
        _ => Ok(choices),
    }
}

/// Refuses a GPU that two ranks would have.
fn check_different(gpus: &[RankGpu]) -> Result<(), LoadError> {
    for (rank, gpu) in gpus.iter().enumerate() {
        let Some(other) = gpus[..rank].iter().position(|it| it.uuid == gpu.uuid) else {
            continue;
        };
        return Err(LoadError::Config {
            problem: format!(
                "ranks {other} and {rank} would both have GPU {} of their host, {}",
                gpu.gpu, gpu.uuid
            ),
            remedy: remedy(gpus.len()),
        });
    }
    Ok(())
}

fn remedy(num_ranks: usize) -> String {
    format!(
        "set gpu_device_ids to {num_ranks} different GPUs, one for each rank, or lower tensor_parallel_size or \
         pipeline_parallel_size"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(parameters: &[(&str, &str)], by_host: &[usize]) -> Result<Vec<GpuChoice>, String> {
        let settings = Settings::parse(parameters.iter().copied()).expect("valid");
        choices(&settings, by_host).map_err(|error| error.to_string())
    }

    fn given<const N: usize>(gpus: [usize; N]) -> Result<Vec<GpuChoice>, String> {
        Ok(gpus.map(GpuChoice::Given).to_vec())
    }

    #[test]
    fn each_rank_has_a_gpu_of_its_own() {
        assert_eq!(chosen(&[], &[0]), given([0]));
        assert_eq!(chosen(&[("gpu_device_ids", "2")], &[2]), given([2]));
        assert_eq!(chosen(&[], &[1, 2]), given([1, 2]));
        assert_eq!(chosen(&[("gpu_device_ids", "2")], &[2, 3]), given([2, 3]));
        assert_eq!(
            chosen(&[("gpu_device_ids", "3,0,1")], &[3, 4, 5]),
            given([3, 0, 1])
        );
        for (ids, by_host, part) in [
            (
                "0,1,2",
                &[0, 1][..],
                "which is 3 GPUs, and the model has 2 ranks",
            ),
            ("0,1", &[0], "which is 2 GPUs, and the model has 1 ranks"),
            ("1,0", &[0, 1], "rank 0, is on GPU 0"),
        ] {
            let error = chosen(&[("gpu_device_ids", ids)], by_host).expect_err(part);
            assert!(
                error.contains(part) && error.contains("gpu_device_ids"),
                "{error}"
            );
        }
    }

    #[test]
    fn ranks_of_several_hosts_may_have_gpus_of_the_same_number() {
        let mpi = ("rank_transport", "mpi");
        assert_eq!(
            chosen(&[mpi, ("gpu_device_ids", "1,0,0")], &[1, 2, 0]),
            given([1, 0, 0])
        );
        let wrapped = [1, 2, 0].map(GpuChoice::Wrapped).to_vec();
        assert_eq!(chosen(&[mpi], &[1, 2, 0]), Ok(wrapped));
    }

    #[test]
    fn a_gpu_that_two_ranks_have_is_named() {
        let gpu = |gpu, uuid: &str| RankGpu {
            gpu,
            uuid: uuid.to_owned(),
            free_bytes: 1,
        };
        assert_eq!(
            check_different(&[gpu(0, "a"), gpu(0, "b"), gpu(1, "c")]).ok(),
            Some(())
        );
        let same = [gpu(0, "a"), gpu(1, "b"), gpu(1, "b")];
        let error = check_different(&same).expect_err("the same").to_string();
        assert!(
            error.contains("ranks 1 and 2 would both have GPU 1 of their host, b"),
            "{error}"
        );
        assert!(
            error.contains("set gpu_device_ids to 3 different GPUs"),
            "{error}"
        );
    }
}
