//! The memory of adapters as pages: how large a page is, and how many there are.
//!
//! The rules come from TensorRT-LLM's cache (`peftCacheManager.cpp`). A page holds an adapter of the optimal size in
//! every linear layer, or one linear layer of the largest size if that is more. An adapter takes whole pages.

use inflight_config::Settings;
use inflight_runner::{AdapterSizes, ModelSpec};

/// How many pages there are for a model's adapters, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterPageLimits {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages in memory.
    pub num_pages: u32,
    /// The most pages of the adapters that are computed with at a time.
    pub num_running_pages: u32,
}

impl AdapterPageLimits {
    /// The pages of a model with these settings.
    pub fn new(settings: &Settings, spec: &ModelSpec) -> Self {
        let sizes = AdapterSizes::new(spec);
        let max_rank = settings.lora_cache_max_adapter_size as usize;
        let optimal = match settings.lora_cache_optimal_adapter_size {
            0 => 0,
            rank => sizes.num_bytes(rank as usize),
        };
        // A model without such layers has no adapters.
        let page_bytes = optimal.max(sizes.max_bytes_of_one(max_rank)).max(1);
        let pages_of = |num_bytes: u64| u32::try_from(num_bytes / page_bytes).unwrap_or(u32::MAX);
        let rows = |num_rows: u64| num_rows.saturating_mul(sizes.min_row_bytes());
        let num_pages = pages_of(match settings.lora_cache_num_host_module_layer {
            0 => settings.lora_cache_host_memory_bytes,
            num_rows => rows(num_rows),
        });
        let largest = sizes.num_bytes(max_rank);
        if u64::from(num_pages) * page_bytes < largest {
            log::warn!(
                "the memory for adapters has {num_pages} pages of {page_bytes} bytes, and an adapter with rank \
                 lora_cache_max_adapter_size ({max_rank}) in every module takes {largest} bytes: raise \
                 lora_cache_host_memory_bytes, or lower lora_cache_max_adapter_size"
            );
        }
        Self {
            page_bytes,
            num_pages,
            num_running_pages: match settings.lora_cache_num_device_module_layer {
                0 => num_pages,
                num_rows => pages_of(rows(num_rows)).min(num_pages),
            },
        }
    }

    /// Bytes of all pages.
    pub fn num_bytes(&self) -> u64 {
        u64::from(self.num_pages) * self.page_bytes
    }

    /// The pages of an adapter.
    pub fn pages_of(&self, num_bytes: u64) -> u32 {
        u32::try_from(num_bytes.div_ceil(self.page_bytes)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use inflight_runner::ModelSource;

    fn limits(parameters: &[(&str, &str)]) -> (AdapterPageLimits, AdapterSizes) {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/llama3");
        let source = ModelSource::open(&fixture).expect("it opens");
        let settings = Settings::parse(parameters.iter().copied()).expect("valid");
        let limits = AdapterPageLimits::new(&settings, source.spec());
        (limits, AdapterSizes::new(source.spec()))
    }

    #[test]
    fn a_page_holds_an_adapter_of_the_optimal_size_or_a_layer_of_the_largest() {
        let (limits_of_8, sizes) = limits(&[]);
        assert_eq!(
            limits_of_8.page_bytes,
            sizes.num_bytes(8).max(sizes.max_bytes_of_one(64))
        );
        let (of_64, _) = limits(&[("lora_cache_optimal_adapter_size", "64")]);
        assert_eq!(of_64.page_bytes, sizes.num_bytes(64));
        assert_eq!(of_64.pages_of(sizes.num_bytes(64)), 1);
        assert_eq!(of_64.pages_of(sizes.num_bytes(64) + 1), 2);
        let (smallest, _) = limits(&[
            ("lora_cache_optimal_adapter_size", "0"),
            ("lora_cache_max_adapter_size", "32"),
        ]);
        assert_eq!(smallest.page_bytes, sizes.max_bytes_of_one(32));
    }

    #[test]
    fn pages_are_counted_by_bytes_or_by_rows_of_the_narrowest_layer() {
        let (by_bytes, sizes) = limits(&[("lora_cache_host_memory_bytes", "9999999")]);
        let num_pages = 9_999_999 / by_bytes.page_bytes;
        assert_eq!(u64::from(by_bytes.num_pages), num_pages);
        assert_eq!(by_bytes.num_running_pages, by_bytes.num_pages);
        assert!(by_bytes.num_bytes() <= 9_999_999);

        let num_rows = 10 * by_bytes.page_bytes / sizes.min_row_bytes() + 1;
        let rows = num_rows.to_string();
        let (by_rows, _) = limits(&[
            ("lora_cache_host_memory_bytes", "1"),
            ("lora_cache_num_host_module_layer", &rows),
        ]);
        assert_eq!((by_rows.num_pages, by_rows.num_running_pages), (10, 10));
        for (bytes, expected) in [("999999999", 10), ("1", 0)] {
            let (running, _) = limits(&[
                ("lora_cache_host_memory_bytes", bytes),
                ("lora_cache_num_device_module_layer", &rows),
            ]);
            assert_eq!(running.num_running_pages, expected, "{bytes}");
        }
    }
}
