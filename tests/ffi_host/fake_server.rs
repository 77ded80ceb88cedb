//! The fake server itself: its checks must be able to fail a test.

use std::panic::{AssertUnwindSafe, catch_unwind};

use inflight_triton::{MetricFamily, sys};

use crate::fake_triton::{Host, Spec};
use crate::take;

#[test]
fn leaked_objects_fail_the_test() {
    let forgetting: [fn(&Host); 3] = [
        |host| std::mem::forget(take(host.request(Spec::default()))),
        |host| {
            let mut request = take(host.request(Spec::default()));
            std::mem::forget(request.response_factory());
            request.dismiss();
        },
        |host| {
            let mut request = take(host.request(Spec::default()));
            let factory = request.response_factory().expect("a factory");
            std::mem::forget(factory.new_response());
            request.dismiss();
        },
    ];
    for forget in forgetting {
        let host = Host::start();
        forget(&host);
        assert!(catch_unwind(AssertUnwindSafe(|| drop(host))).is_err());
    }
}

#[test]
fn calls_that_would_crash_the_real_server_are_recorded() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    request.release();
    factory.send_final().expect("sent");
    let all = sys::TRITONSERVER_RequestReleaseFlag::TRITONSERVER_REQUEST_RELEASE_ALL;
    // SAFETY: the fake server does not dereference pointers; this test is about the second release.
    unsafe { sys::TRITONBACKEND_RequestRelease(raw, all.0) };
    assert_eq!(
        host.take_violations().len(),
        2,
        "of the call and of its effect"
    );
}

#[test]
fn two_metrics_with_the_same_name_and_labels_are_recorded() {
    let host = Host::start();
    let make = || {
        let family = MetricFamily::gauges(c"used", c"Blocks used").expect("made");
        let family = family.expect("metrics are on");
        family.gauge(&[("model", "m")]).expect("made")
    };
    let first = make();
    drop(make());
    assert_eq!(host.take_violations().len(), 1);
    drop(first);
    drop(make());
}
