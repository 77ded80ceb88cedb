//! Memory that the system refuses at load.

use inflight_base::LoadError;
use inflight_machines::load_on_cpus;
use inflight_runner::ModelSource;

use crate::support::{Setup, fixture};

#[test]
fn a_refused_kv_cache_names_its_size_and_the_parameters_that_lower_it() {
    let setup = Setup {
        block_size: 1 << 20,
        num_runner_blocks: Some(u32::MAX),
        ..Setup::default()
    };
    let source = ModelSource::open(&fixture("llama2")).expect("the checkpoint opens");
    let error = match load_on_cpus(&source, setup.runner_limits(), &Default::default()) {
        Ok(_) => panic!("more than the address space was reserved"),
        Err(error @ LoadError::Resource(_)) => error.to_string(),
        Err(error) => panic!("{error:?}"),
    };
    assert!(error.contains("cannot reserve "), "{error}");
    assert!(
        error.contains("for a KV cache of 4294967295 blocks of 1048576 tokens"),
        "{error}"
    );
    for name in [
        "max_tokens_in_paged_kv_cache",
        "kv_cache_free_gpu_mem_fraction",
        "max_num_requests",
        "max_seq_len",
    ] {
        assert!(error.contains(name), "{name}: {error}");
    }
}
