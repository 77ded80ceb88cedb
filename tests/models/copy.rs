//! A copy of a fixture that tests can damage.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use inflight_base::LoadError;
use inflight_device_cpu::CpuOptions;
use inflight_machines::load_on_cpus;
use inflight_runner::{ModelSource, Runner};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::Value;

use crate::support::{Setup, fixture};

/// A copy of a fixture; deleted when dropped.
pub struct Copy(PathBuf);

impl Copy {
    pub fn of(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let dir = std::env::temp_dir().join(format!(
            "inflight-bad-checkpoint-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        copy_folder(&fixture(name), &dir);
        Self(dir)
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    /// Sets keys of config.json; null removes one.
    pub fn config(self, changes: Value) -> Self {
        self.json("config.json", changes)
    }

    pub fn json(self, file: &str, changes: Value) -> Self {
        let path = self.path(file);
        let text = fs::read_to_string(&path).expect("the file");
        let mut object: Value = serde_json::from_str(&text).expect("JSON");
        for (key, value) in changes.as_object().expect("an object") {
            object[key] = value.clone();
        }
        fs::write(path, object.to_string()).expect("written");
        self
    }

    /// Rewrites model.safetensors with one tensor changed or removed.
    pub fn tensor(
        self,
        name: &str,
        change: impl FnOnce(TensorView<'_>) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
    ) -> Self {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).expect("the file");
        let old = SafeTensors::deserialize(&bytes).expect("whole");
        let mut tensors = old.tensors();
        let index = tensors
            .iter()
            .position(|(at, _)| at == name)
            .expect("there");
        let (_, view) = tensors.remove(index);
        let changed = change(view);
        if let Some((dtype, shape, data)) = &changed {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("consistent");
            tensors.push((name.to_owned(), view));
        }
        serialize_to_file(tensors, None, &path).expect("written");
        self
    }

    /// Rewrites model.safetensors with other values of its bf16 tensors, of which `change` gets the name and the shape.
    pub fn values(self, change: impl Fn(&str, &[usize], &mut [bf16])) -> Self {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).expect("the file");
        let old = SafeTensors::deserialize(&bytes).expect("whole");
        let changed = old.tensors().into_iter().map(|(name, view)| {
            let mut data = view.data().to_vec();
            if view.dtype() == Dtype::BF16 {
                let values = data.as_chunks::<2>().0.iter();
                let mut values: Vec<_> = values.map(|&bytes| bf16::from_le_bytes(bytes)).collect();
                change(&name, view.shape(), &mut values);
                data = values.iter().flat_map(|it| it.to_le_bytes()).collect();
            }
            (name, view.dtype(), view.shape().to_vec(), data)
        });
        let changed: Vec<_> = changed.collect();
        let views = changed.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("consistent");
            (name, view)
        });
        serialize_to_file(views, None, &path).expect("written");
        self
    }

    /// Rewrites model.safetensors with other names of its tensors.
    pub fn renamed(self, name: impl Fn(&str) -> String) -> Self {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).expect("the file");
        let old = SafeTensors::deserialize(&bytes).expect("whole");
        let tensors = old.tensors().into_iter();
        let tensors: Vec<_> = tensors.map(|(old, view)| (name(&old), view)).collect();
        serialize_to_file(tensors, None, &path).expect("written");
        self
    }

    /// Replaces model.safetensors by two files, each with every second tensor, and an index.
    pub fn in_two_files(self) -> Self {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).expect("the file");
        let all = SafeTensors::deserialize(&bytes).expect("whole");
        let mut index = serde_json::Map::new();
        for part in 0..2 {
            let file = format!("model-0000{}-of-00002.safetensors", part + 1);
            let tensors = all.tensors().into_iter().skip(part).step_by(2);
            let tensors: Vec<_> = tensors.collect();
            index.extend(
                tensors
                    .iter()
                    .map(|(name, _)| (name.clone(), file.clone().into())),
            );
            serialize_to_file(tensors, None, &self.path(&file)).expect("written");
        }
        let index = serde_json::json!({ "weight_map": index }).to_string();
        fs::write(self.path("model.safetensors.index.json"), index).expect("written");
        fs::remove_file(path).expect("the file");
        self
    }

    /// Rewrites model.safetensors with this header followed by `num_data_bytes` bytes.
    pub fn header(self, header: &str, num_data_bytes: usize) -> Self {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + num_data_bytes, 0);
        fs::write(self.path("model.safetensors"), bytes).expect("written");
        self
    }

    pub fn load(&self) -> Result<Box<dyn Runner>, LoadError> {
        self.load_with(&Setup::default())
    }

    pub fn load_with(&self, setup: &Setup) -> Result<Box<dyn Runner>, LoadError> {
        let source = ModelSource::open(&self.0)?;
        load_on_cpus(&source, setup.runner_limits(), &CpuOptions::default())
    }

    /// Asserts that the load fails with an error that contains all of these parts.
    pub fn refused(&self, parts: &[&str]) {
        let error = match self.load() {
            Ok(_) => panic!("it loads; expected an error with {parts:?}"),
            Err(error) => error.to_string(),
        };
        for part in parts {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    for entry in fs::read_dir(from).expect("the fixture") {
        let path = entry.expect("the fixture").path();
        let copy = to.join(path.file_name().expect("a name"));
        match path.is_dir() {
            true => copy_folder(&path, &copy),
            false => drop(fs::copy(&path, &copy).expect("a copy")),
        }
    }
}
