//! The backend, as Triton's entry points call it.

use std::sync::Arc;

use crate::driver::watched::WatchedDriver;
use crate::instance::load_instance;
use crate::model::Model;
use inflight_machines::has_gpus;
use inflight_triton::lifecycle::Implementation;
use inflight_triton::{BackendAttributes, Error, Health, Instance, Request};

/// The backend `inflight`.
pub struct Inflight;

impl Implementation for Inflight {
    type Model = Arc<Model>;
    type Instance = WatchedDriver;

    fn initialize() -> Result<(), Error> {
        inflight_triton::install_logger();
        inflight_triton::check_api_version()?;
        log::info!("inflight {}", env!("CARGO_PKG_VERSION"));
        Ok(())
    }

    fn attributes(attributes: BackendAttributes) -> Result<(), Error> {
        match has_gpus() {
            true => attributes.prefer_gpu_instances(1),
            false => attributes.prefer_cpu_instances(1),
        }
    }

    fn load_model(model: inflight_triton::Model) -> Result<Arc<Model>, Error> {
        Model::load(&model).map(Arc::new)
    }

    fn load_instance(
        model: &Arc<Model>,
        instance: Instance,
        health: Health,
    ) -> Result<WatchedDriver, Error> {
        load_instance(model, instance, health)
    }

    fn execute(instance: &mut WatchedDriver, requests: &mut Vec<Request>) -> Result<(), Error> {
        instance.execute(requests);
        Ok(())
    }

    fn begin_batch(model: &Arc<Model>) {
        model.batching.begin();
    }

    fn joins_batch(model: &Arc<Model>, request: &Request) -> Result<bool, Error> {
        Ok(model.batching.includes(request))
    }
}
