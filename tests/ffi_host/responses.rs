//! Responses: clients get what is written, and nothing leaks.

use inflight_triton::{Completion, DataType, ErrorCode};

use crate::fake_triton::{Host, Spec};
use crate::take;

#[test]
fn a_response_contains_its_outputs() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    let mut response = factory.new_response().expect("a response");
    response
        .output(c"output_ids", &[1, 2], &[258i32, -1])
        .expect("written");
    response
        .output(c"cum_log_probs", &[1], &[-0.5f32])
        .expect("written");
    response
        .output_strings(c"text_output", &[2], &["hé", ""])
        .expect("written");
    response
        .output::<i32>(c"nothing", &[0], &[])
        .expect("written");
    response.send(Completion::Partial).expect("sent");
    request.release();
    factory.send_final().expect("sent");

    let sent = host.sent(raw);
    let output = |name: &str, data_type, shape: &[i64], bytes: &[u8]| {
        (name.to_owned(), data_type, shape.to_vec(), bytes.to_vec())
    };
    assert_eq!(
        sent[0].outputs,
        [
            output(
                "output_ids",
                DataType::Int32,
                &[1, 2],
                &[2, 1, 0, 0, 255, 255, 255, 255]
            ),
            output(
                "cum_log_probs",
                DataType::Fp32,
                &[1],
                &(-0.5f32).to_le_bytes()
            ),
            output(
                "text_output",
                DataType::Bytes,
                &[2],
                b"\x03\0\0\0h\xc3\xa9\0\0\0\0"
            ),
            output("nothing", DataType::Int32, &[0], &[]),
        ]
    );
    assert!(!sent[0].is_final && sent[1].is_final);
}

#[test]
fn an_output_with_an_inconsistent_shape_is_rejected_before_triton_sees_it() {
    let host = Host::start();
    let mut request = take(host.request(Spec::default()));
    let factory = request.response_factory().expect("a factory");
    let mut response = factory.new_response().expect("a response");
    for shape in [&[3][..], &[-2], &[i64::MAX, 2], &[]] {
        let error = response
            .output(c"output_ids", shape, &[1i32, 2])
            .expect_err("refused");
        assert!(error.message().contains("output_ids"), "{error}");
    }
    response
        .send(Completion::Partial)
        .expect("sent without outputs");
    request.dismiss();
}

#[test]
fn an_output_without_system_memory_is_rejected() {
    let host = Host::start();
    host.give_gpu_buffers();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    let mut response = factory.new_response().expect("a response");
    let error = response
        .output(c"output_ids", &[1], &[1i32])
        .expect_err("refused");
    assert_eq!(error.code(), ErrorCode::Unsupported);
    request.release();
    response.send_error(error).expect("sent");
    let sent = host.sent(raw);
    assert!(sent[0].is_final && sent[0].error.is_some());
}

#[test]
fn a_dropped_response_is_deleted() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    let mut response = factory.new_response().expect("a response");
    response
        .output(c"output_ids", &[1], &[1i32])
        .expect("written");
    drop(response);
    assert_eq!(host.sent(raw), []);
    request.dismiss();
}
