//! TRITONBACKEND_* of the backend, models and instances.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use inflight_triton::sys::{self, *};

use super::server::export;
use super::world::{handle, id, world};

/// A reply to the library: success.
const OK: *mut TRITONSERVER_Error = ptr::null_mut();

export! {
    fn TRITONBACKEND_ApiVersion(major: *mut u32, minor: *mut u32) -> *mut TRITONSERVER_Error {
        major.write(TRITONBACKEND_API_VERSION_MAJOR);
        minor.write(TRITONBACKEND_API_VERSION_MINOR);
        OK
    }

    fn TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
        _attributes: *mut TRITONBACKEND_BackendAttribute,
        kind: TRITONSERVER_InstanceGroupKind,
        count: u64,
        _device_ids: *const u64,
        _id_count: u64,
    ) -> *mut TRITONSERVER_Error {
        world().preferred_groups.push((kind.0, count));
        OK
    }

    fn TRITONBACKEND_ModelName(
        model: *mut TRITONBACKEND_Model,
        name: *mut *const c_char,
    ) -> *mut TRITONSERVER_Error {
        name.write(world().models[&id(model)].name.as_ptr());
        OK
    }

    fn TRITONBACKEND_ModelVersion(
        _model: *mut TRITONBACKEND_Model,
        version: *mut u64,
    ) -> *mut TRITONSERVER_Error {
        version.write(1);
        OK
    }

    fn TRITONBACKEND_ModelRepository(
        _model: *mut TRITONBACKEND_Model,
        artifact: *mut TRITONBACKEND_ArtifactType,
        location: *mut *const c_char,
    ) -> *mut TRITONSERVER_Error {
        artifact.write(TRITONBACKEND_ArtifactType::TRITONBACKEND_ARTIFACT_FILESYSTEM);
        location.write(c"/models/m".as_ptr());
        OK
    }

    fn TRITONBACKEND_ModelConfig(
        model: *mut TRITONBACKEND_Model,
        _version: u32,
        config: *mut *mut TRITONSERVER_Message,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let json = CString::new(world.models[&id(model)].config.clone()).expect("no NUL");
        let message = world.new_id();
        world.messages.insert(message, json);
        config.write(handle(message));
        OK
    }

    fn TRITONBACKEND_ModelAutoCompleteConfig(
        _model: *mut TRITONBACKEND_Model,
        auto_complete: *mut bool,
    ) -> *mut TRITONSERVER_Error {
        auto_complete.write(true);
        OK
    }

    fn TRITONBACKEND_ModelSetConfig(
        model: *mut TRITONBACKEND_Model,
        _version: u32,
        config: *mut TRITONSERVER_Message,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let json = world.messages[&id(config)].to_str().expect("JSON is UTF-8").to_owned();
        world.models.get_mut(&id(model)).expect("a model").config = json;
        OK
    }

    fn TRITONBACKEND_ModelState(
        model: *mut TRITONBACKEND_Model,
        state: *mut *mut c_void,
    ) -> *mut TRITONSERVER_Error {
        state.write(world().models[&id(model)].state);
        OK
    }

    fn TRITONBACKEND_ModelSetState(
        model: *mut TRITONBACKEND_Model,
        state: *mut c_void,
    ) -> *mut TRITONSERVER_Error {
        world().models.get_mut(&id(model)).expect("a model").state = state;
        OK
    }

    fn TRITONBACKEND_ModelInstanceName(
        _instance: *mut TRITONBACKEND_ModelInstance,
        name: *mut *const c_char,
    ) -> *mut TRITONSERVER_Error {
        name.write(c"m_0_0".as_ptr());
        OK
    }

    fn TRITONBACKEND_ModelInstanceKind(
        instance: *mut TRITONBACKEND_ModelInstance,
        kind: *mut TRITONSERVER_InstanceGroupKind,
    ) -> *mut TRITONSERVER_Error {
        kind.write(match world().instances[&id(instance)].gpu {
            Some(_) => TRITONSERVER_InstanceGroupKind::TRITONSERVER_INSTANCEGROUPKIND_GPU,
            None => TRITONSERVER_InstanceGroupKind::TRITONSERVER_INSTANCEGROUPKIND_CPU,
        });
        OK
    }

    fn TRITONBACKEND_ModelInstanceDeviceId(
        instance: *mut TRITONBACKEND_ModelInstance,
        device_id: *mut i32,
    ) -> *mut TRITONSERVER_Error {
        device_id.write(world().instances[&id(instance)].gpu.unwrap_or(0));
        OK
    }

    fn TRITONBACKEND_ModelInstanceModel(
        instance: *mut TRITONBACKEND_ModelInstance,
        model: *mut *mut TRITONBACKEND_Model,
    ) -> *mut TRITONSERVER_Error {
        model.write(handle(world().instances[&id(instance)].model));
        OK
    }

    fn TRITONBACKEND_ModelInstanceState(
        instance: *mut TRITONBACKEND_ModelInstance,
        state: *mut *mut c_void,
    ) -> *mut TRITONSERVER_Error {
        state.write(world().instances[&id(instance)].state);
        OK
    }

    fn TRITONBACKEND_ModelInstanceSetState(
        instance: *mut TRITONBACKEND_ModelInstance,
        state: *mut c_void,
    ) -> *mut TRITONSERVER_Error {
        world().instances.get_mut(&id(instance)).expect("an instance").state = state;
        OK
    }

    fn TRITONBACKEND_ModelInstanceReportMemoryUsage(
        _instance: *mut TRITONBACKEND_ModelInstance,
        usage: *mut *mut TRITONSERVER_BufferAttributes,
        count: u32,
    ) -> *mut TRITONSERVER_Error {
        let usage = std::slice::from_raw_parts(usage, count as usize);
        let mut world = world();
        world.memory = usage.iter().map(|entry| world.buffer_attributes[&id(*entry)]).collect();
        OK
    }

    fn TRITONBACKEND_ModelInstanceReportStatistics(
        _instance: *mut TRITONBACKEND_ModelInstance,
        request: *mut TRITONBACKEND_Request,
        success: bool,
        exec_start: u64,
        compute_start: u64,
        compute_end: u64,
        exec_end: u64,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        world.request(request, "statistics");
        let times = [exec_start, compute_start, compute_end, exec_end];
        world.request_statistics.push((id(request), success, times));
        OK
    }

    fn TRITONBACKEND_ModelInstanceReportBatchStatistics(
        _instance: *mut TRITONBACKEND_ModelInstance,
        batch_size: u64,
        exec_start: u64,
        compute_start: u64,
        compute_end: u64,
        exec_end: u64,
    ) -> *mut TRITONSERVER_Error {
        let batch = [batch_size, exec_start, compute_start, compute_end, exec_end];
        world().batch_statistics.push(batch);
        OK
    }
}
