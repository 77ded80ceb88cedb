//! A model as Triton sees it: alive from ModelInitialize to ModelFinalize.

use std::path::PathBuf;
use std::ptr::NonNull;

use super::error::{check, get, get_object, get_text, to_utf8};
use super::message::Message;
use super::{Error, ServedModel, sys};

/// The version of the model configuration's JSON form.
const CONFIG_VERSION: u32 = 1;

/// Triton's handle of a model.
#[derive(Debug)]
pub struct Model(NonNull<sys::TRITONBACKEND_Model>);

// SAFETY: the handle's getters read what does not change while the model lives; setting the
// configuration is for ModelInitialize, and the memory report takes a lock of Triton's.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

impl Model {
    /// Wraps the handle that an entry point was given.
    ///
    /// # Safety
    /// The model is alive, and the value is not used after ModelFinalize.
    pub unsafe fn from_raw(raw: NonNull<sys::TRITONBACKEND_Model>) -> Self {
        Self(raw)
    }

    /// The model's name.
    pub fn name(&self) -> Result<&str, Error> {
        // SAFETY: the model is alive, and so is its name for as long.
        let name = unsafe { get_text(|out| sys::TRITONBACKEND_ModelName(self.as_ptr(), out)) }?;
        to_utf8(name, "the model's name")
    }

    /// The model's version.
    pub fn version(&self) -> Result<u64, Error> {
        // SAFETY: the model is alive.
        unsafe { get(0, |out| sys::TRITONBACKEND_ModelVersion(self.as_ptr(), out)) }
    }

    /// The model's folder in the repository, which holds config.pbtxt and a folder per version.
    pub fn folder(&self) -> Result<PathBuf, Error> {
        let mut artifact = sys::TRITONBACKEND_ArtifactType::TRITONBACKEND_ARTIFACT_FILESYSTEM;
        // SAFETY: the model is alive, and so is the path for as long.
        let location = unsafe {
            get_text(|out| {
                sys::TRITONBACKEND_ModelRepository(self.as_ptr(), &raw mut artifact, out)
            })
        }?;
        if artifact != sys::TRITONBACKEND_ArtifactType::TRITONBACKEND_ARTIFACT_FILESYSTEM {
            return Err(Error::invalid("the model repository is not a file system"));
        }
        to_utf8(location, "the path of the model repository").map(PathBuf::from)
    }

    /// The model in the server that serves it, which outlives it.
    pub fn served(&self) -> Result<ServedModel, Error> {
        // SAFETY: the model is alive, and so is its server for longer.
        let server =
            unsafe { get_object(|out| sys::TRITONBACKEND_ModelServer(self.as_ptr(), out)) }?;
        Ok(ServedModel::new(server, self.name()?, self.version()?))
    }

    /// The version of the server, major and minor; `None` if it does not say one.
    pub fn server_version(&self) -> Result<Option<(u32, u32)>, Error> {
        // SAFETY: the model is alive, and so is its server for longer.
        let server =
            unsafe { get_object(|out| sys::TRITONBACKEND_ModelServer(self.as_ptr(), out)) }?;
        // SAFETY: as above; the message is ours.
        let message =
            unsafe { get_object(|out| sys::TRITONSERVER_ServerMetadata(server.as_ptr(), out)) }?;
        // SAFETY: Triton makes this message for the caller, who deletes it.
        let metadata = unsafe { Message::from_raw(message) }.to_json()?;
        Ok(version_in(&metadata))
    }

    /// The model's configuration (config.pbtxt with the server's defaults filled in) as JSON.
    pub fn config_json(&self) -> Result<String, Error> {
        // SAFETY: the model is alive.
        let message = unsafe {
            get_object(|out| sys::TRITONBACKEND_ModelConfig(self.as_ptr(), CONFIG_VERSION, out))
        }?;
        // SAFETY: Triton makes this message for the caller, who deletes it.
        unsafe { Message::from_raw(message) }.to_json()
    }

    /// Whether the backend may fill in what config.pbtxt leaves out.
    pub fn may_auto_complete(&self) -> Result<bool, Error> {
        // SAFETY: the model is alive.
        unsafe {
            get(false, |out| {
                sys::TRITONBACKEND_ModelAutoCompleteConfig(self.as_ptr(), out)
            })
        }
    }

    /// Replaces the configuration, in ModelInitialize only. Triton takes over max_batch_size, inputs,
    /// outputs, the scheduling choice where there was none, and model_transaction_policy; other
    /// fields it leaves as they were.
    pub fn set_config(&self, json: &str) -> Result<(), Error> {
        let message = Message::from_json(json)?;
        // SAFETY: model and message are alive; the message is only borrowed.
        unsafe {
            check(sys::TRITONBACKEND_ModelSetConfig(
                self.as_ptr(),
                CONFIG_VERSION,
                message.as_ptr(),
            ))
        }
    }

    /// The state that [`Model::set_state`] stored.
    ///
    /// # Safety
    /// `T` is the type that was stored.
    pub unsafe fn state<T>(&self) -> Result<Option<NonNull<T>>, Error> {
        // SAFETY: the model is alive.
        let state = unsafe {
            get(std::ptr::null_mut(), |out| {
                sys::TRITONBACKEND_ModelState(self.as_ptr(), out)
            })
        }?;
        Ok(NonNull::new(state.cast()))
    }

    /// Stores our state in Triton's model. `None` clears it without dropping it.
    pub fn set_state<T>(&self, state: Option<NonNull<T>>) -> Result<(), Error> {
        let state = state.map_or(std::ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the model is alive; Triton only keeps the pointer.
        unsafe {
            check(sys::TRITONBACKEND_ModelSetState(
                self.as_ptr(),
                state.cast(),
            ))
        }
    }

    fn as_ptr(&self) -> *mut sys::TRITONBACKEND_Model {
        self.0.as_ptr()
    }
}

/// The version in a server's metadata, which is JSON: this room reads no more of it.
fn version_in(metadata: &str) -> Option<(u32, u32)> {
    let (_, rest) = metadata.split_once("\"version\":")?;
    let (version, _) = rest.trim_start().strip_prefix('"')?.split_once('"')?;
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_server_is_read() {
        for (metadata, version) in [
            (
                r#"{"name":"triton","version":"2.51.0","extensions":["a"]}"#,
                Some((2, 51)),
            ),
            (r#"{"version": "2.70"}"#, Some((2, 70))),
            (r#"{"version":"main"}"#, None),
            ("{}", None),
        ] {
            assert_eq!(version_in(metadata), version, "{metadata}");
        }
    }
}
