//! Whether a model takes images: its vision tower, and the processor of its checkpoint.

use std::sync::Arc;

use inflight_base::LoadError;
use inflight_config::{Settings, Task};
use inflight_images::ImageProcessor;
use inflight_runner::ModelSource;

/// Opens the vision tower of a checkpoint and the processor of its images, if the model takes images: because
/// `max_num_image_tokens` says so, or because nothing is said and both can be read. A model on GPUs or on several ranks
/// takes none unless it is said.
///
/// # Errors
/// The model is to take images, and its tower or its processor cannot be read.
pub fn open_images(
    name: &str,
    source: ModelSource,
    settings: &Settings,
    is_on_gpu: bool,
) -> Result<(ModelSource, Option<Arc<ImageProcessor>>), LoadError> {
    let is_wanted = match settings.max_num_image_tokens {
        Some(0) => return Ok((source, None)),
        Some(_) => true,
        None => false,
    };
    if settings.task != Task::Generate {
        return match is_wanted {
            true => Err(LoadError::Config {
                problem: format!(
                    "max_num_image_tokens is set, and task is {}",
                    settings.task.name()
                ),
                remedy: "leave it out: only models that generate take images".to_owned(),
            }),
            false => Ok((source, None)),
        };
    }
    let num_ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size;
    if is_wanted && num_ranks > 1 {
        return Err(LoadError::Config {
            problem: format!(
                "max_num_image_tokens is set, and the model has {num_ranks} ranks; images are encoded by one process"
            ),
            remedy: "leave out tensor_parallel_size and pipeline_parallel_size, or set max_num_image_tokens to 0"
                .to_owned(),
        });
    }
    if !is_wanted && !source.has_known_tower() {
        return Ok((source, None));
    }
    if !is_wanted && (is_on_gpu || num_ranks > 1) {
        log::info!("{name}: takes no images: vision towers are computed by one rank on CPUs");
        return Ok((source, None));
    }
    let max_tokens = max_image_tokens(settings);
    let found = source.find_tower().and_then(|tower| {
        let processor = ImageProcessor::open(source.folder())?;
        let tower = tower.with_max_tokens(max_tokens);
        Ok((tower, processor.with_max_tokens(max_tokens)))
    });
    match found {
        Ok((tower, processor)) => Ok((source.with_tower(tower), Some(Arc::new(processor)))),
        Err(error) if is_wanted => Err(error),
        Err(error) => {
            log::warn!(
                "{name}: takes no images, because {error}; set max_num_image_tokens to 0 if it is to take none"
            );
            Ok((source, None))
        }
    }
}

/// The most tokens of an image of any size, whose rows have to be kept.
fn max_image_tokens(settings: &Settings) -> usize {
    let max_cached = settings.max_cached_image_tokens.unwrap_or(u32::MAX);
    settings.max_image_tokens.min(max_cached) as usize
}
