//! The backend, as Triton's entry points call it.

use crate::backend::driver::watched::WatchedDriver;
use crate::backend::instance::load_instance;
use crate::backend::model::Model;
use crate::device::cuda::{has_kernels, num_gpus};
use crate::triton::lifecycle::Implementation;
use crate::triton::{self, BackendAttributes, Error, Health, Instance, Request};

/// The backend `inflight`.
pub struct Inflight;

impl Implementation for Inflight {
    type Model = Model;
    type Instance = WatchedDriver;

    fn initialize() -> Result<(), Error> {
        triton::install_logger();
        triton::check_api_version()?;
        log::info!("inflight {}", env!("CARGO_PKG_VERSION"));
        Ok(())
    }

    fn attributes(attributes: BackendAttributes) -> Result<(), Error> {
        match has_kernels() && num_gpus() > 0 {
            true => attributes.prefer_gpu_instances(1),
            false => attributes.prefer_cpu_instances(1),
        }
    }

    fn load_model(model: triton::Model) -> Result<Model, Error> {
        Model::load(&model)
    }

    fn load_instance(
        model: &Model,
        instance: Instance,
        health: Health,
    ) -> Result<WatchedDriver, Error> {
        load_instance(model, instance, health)
    }

    fn execute(instance: &mut WatchedDriver, requests: &mut Vec<Request>) -> Result<(), Error> {
        Ok(instance.execute(requests)?)
    }

    fn begin_batch(model: &Model) {
        model.batching.begin();
    }

    fn joins_batch(model: &Model, request: &Request) -> Result<bool, Error> {
        Ok(model.batching.includes(request))
    }
}
