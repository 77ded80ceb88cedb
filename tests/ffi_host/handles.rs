//! Handles of the backend, its models and instances.

use std::ptr::NonNull;

use inflight_triton::{
    BackendAttributes, ErrorCode, Instance, Model, Timestamps, check_api_version, now_ns, sys,
};

use crate::fake_triton::{Host, Spec};
use crate::take;

#[test]
fn handles_return_tritons_values() {
    let host = Host::start();
    let raw_model = host.model("m", "{\"name\":\"m\"}");
    let raw_instance = host.instance(raw_model);
    // SAFETY: each handle is alive to the end of the test.
    let (attributes, model, instance) = unsafe {
        (
            BackendAttributes::from_raw(NonNull::new(host.attributes()).expect("not null")),
            Model::from_raw(NonNull::new(raw_model).expect("not null")),
            Instance::from_raw(NonNull::new(raw_instance).expect("not null")),
        )
    };
    assert_eq!(check_api_version(), Ok(()));
    attributes.prefer_cpu_instances(1).expect("added");
    let cpu = sys::TRITONSERVER_InstanceGroupKind::TRITONSERVER_INSTANCEGROUPKIND_CPU.0;
    attributes.prefer_gpu_instances(2).expect("added");
    let auto = sys::TRITONSERVER_InstanceGroupKind::TRITONSERVER_INSTANCEGROUPKIND_AUTO.0;
    assert_eq!(host.preferred_groups(), [(cpu, 1), (auto, 2)]);

    assert_eq!(model.name(), Ok("m"));
    assert_eq!(model.version(), Ok(1));
    assert_eq!(
        model.folder().expect("a folder").to_str(),
        Some("/models/m")
    );
    assert_eq!(model.may_auto_complete(), Ok(true));
    assert_eq!(model.config_json().as_deref(), Ok("{\"name\":\"m\"}"));
    model.set_config("{\"max_batch_size\":8}").expect("set");
    assert_eq!(host.config(raw_model), "{\"max_batch_size\":8}");
    let error = model.set_config("{").expect_err("no JSON");
    assert_eq!(error.code(), ErrorCode::InvalidArg);

    assert_eq!(instance.name(), Ok("m_0_0"));
    assert_eq!(instance.gpu(), Ok(None));
    host.give_gpu(raw_instance, 3);
    assert_eq!(instance.gpu(), Ok(Some(3)));
    instance.report_system_memory(1 << 33).expect("reported");
    assert_eq!(host.memory(), [(0, 0, 1 << 33)]);
}

#[test]
fn statistics_are_reported_with_timestamps_in_order() {
    let host = Host::start();
    let raw_instance = host.instance(host.model("m", "{}"));
    // SAFETY: the instance is alive to the end of the test.
    let instance = unsafe { Instance::from_raw(NonNull::new(raw_instance).expect("not null")) };
    let start = now_ns();
    let at = Timestamps {
        exec_start: start,
        compute_start: start + 1,
        compute_end: start + 2,
        exec_end: start + 3,
    };
    assert!(now_ns() >= start);
    let request = take(host.request(Spec::default()));
    instance
        .report_request(&request, true, &at)
        .expect("reported");
    instance.report_batch(5, &at).expect("reported");
    request.dismiss();
    let (requests, batches) = host.statistics();
    assert_eq!(requests[0].2, [start, start + 1, start + 2, start + 3]);
    assert!(requests[0].1);
    assert_eq!(batches, [[5, start, start + 1, start + 2, start + 3]]);
}
