//! The contents of a request.

use std::borrow::Cow;
use std::ffi::CString;

use inflight_triton::{
    CorrelationId, DataType, Error, ErrorCode, ParameterValue, Request, strings,
};

use crate::fake_triton::{Correlation, Host, Input, Parameter, START, Spec};
use crate::take;

#[test]
fn ids_flags_and_limits_are_read() {
    let host = Host::start();
    let raw = host.request(Spec {
        client_id: c"mine".to_owned(),
        correlation: Correlation::Number(7),
        flags: START,
        timeout_us: 250,
        outputs: vec![c"text_output".to_owned(), c"finish_reason".to_owned()],
        ..Spec::default()
    });
    let request = take(raw);
    assert_eq!(request.client_id(), Ok(Some("mine")));
    assert_eq!(request.correlation_id(), Ok(CorrelationId::Number(7)));
    assert_eq!(request.timeout_us(), Ok(250));
    let outputs = request.requested_outputs();
    assert_eq!(outputs, Ok(vec!["text_output", "finish_reason"]));
    request.dismiss();

    let named = host.request(Spec {
        correlation: Correlation::Text(c"chat 1".to_owned()),
        flags: 0,
        ..Spec::default()
    });
    let request = take(named);
    let id = request.correlation_id().expect("an id");
    assert_eq!(id, CorrelationId::Text(c"chat 1"));
    assert!(!id.is_none());
    assert_eq!(request.client_id(), Ok(None));
    assert!(!request.flags().expect("flags").is_end());
    request.dismiss();
    assert!(CorrelationId::Number(0).is_none());
}

#[test]
fn parameters_keep_their_types() {
    let host = Host::start();
    let raw = host.request(Spec {
        parameters: vec![
            (c"stream".to_owned(), Parameter::Bool(true)),
            (c"max_tokens".to_owned(), Parameter::Int(-3)),
            (c"temperature".to_owned(), Parameter::Double(0.5)),
            (
                c"stop".to_owned(),
                Parameter::String(c"\xc3\xa9".to_owned()),
            ),
        ],
        ..Spec::default()
    });
    let request = take(raw);
    assert_eq!(
        parameters(&request, 2),
        Ok(vec![
            ("stream", ParameterValue::Bool(true)),
            ("max_tokens", ParameterValue::Int(-3)),
            ("temperature", ParameterValue::Double(0.5)),
            ("stop", ParameterValue::String("é")),
        ])
    );
    request.dismiss();
}

fn parameters(
    request: &Request,
    max_bytes: usize,
) -> Result<Vec<(&str, ParameterValue<'_>)>, Error> {
    request.parameters(|_| max_bytes)?.collect()
}

#[test]
fn only_the_requested_part_of_a_text_is_read() {
    let host = Host::start();
    let text = |length| CString::new(vec![b'a'; length]).expect("no NUL");
    let request = take(host.request(Spec {
        // The long text is not valid UTF-8 after the part that is read.
        parameters: vec![
            (
                c"stop".to_owned(),
                Parameter::String(
                    CString::new([&[b'a'; 9][..], &[0xff]].concat()).expect("no NUL"),
                ),
            ),
            (c"stop".to_owned(), Parameter::String(text(8))),
        ],
        ..Spec::default()
    }));
    assert_eq!(
        parameters(&request, 8),
        Ok(vec![
            ("stop", ParameterValue::TooLong),
            ("stop", ParameterValue::String("aaaaaaaa")),
        ])
    );
    request.dismiss();

    let request = take(host.request(Spec {
        client_id: text(4097),
        parameters: vec![(text(4097), Parameter::Bool(true))],
        ..Spec::default()
    }));
    for error in [
        request.client_id().expect_err("too long"),
        parameters(&request, 8).expect_err("too long"),
    ] {
        assert_eq!(error.code(), ErrorCode::InvalidArg);
        assert!(error.message().contains("more than 4096 bytes"), "{error}");
    }
    request.dismiss();
}

#[test]
fn a_parameter_that_cannot_be_read_is_named() {
    let host = Host::start();
    for (parameter, code) in [
        (
            Parameter::String(CString::new([0xff]).expect("no NUL")),
            ErrorCode::InvalidArg,
        ),
        (Parameter::Bytes, ErrorCode::Unsupported),
    ] {
        let request = take(host.request(Spec {
            parameters: vec![(c"stop".to_owned(), parameter)],
            ..Spec::default()
        }));
        let error = parameters(&request, 8).expect_err("unreadable");
        assert_eq!(error.code(), code);
        assert!(error.message().contains("'stop'"), "{error}");
        request.dismiss();
    }
}

fn input(data_type: DataType, shape: &[i64], buffers: &[&[u8]]) -> Input {
    Input {
        name: c"input_ids".to_owned(),
        data_type,
        shape: shape.to_vec(),
        buffers: buffers.iter().map(|buffer| buffer.to_vec()).collect(),
        on_gpu: false,
    }
}

fn with_input(host: &Host, input: Input) -> Request {
    take(host.request(Spec {
        inputs: vec![input],
        ..Spec::default()
    }))
}

/// The elements of a copy of an input.
fn elements(input: &inflight_triton::Input<'_>) -> Result<Vec<i32>, Error> {
    input.to_owned()?.elements::<i32>()
}

#[test]
fn an_input_is_gathered_from_all_its_buffers() {
    let host = Host::start();
    let buffers: [&[u8]; 4] = [&[1, 0, 0, 0, 2], &[], &[0, 0, 0, 0xff, 0xff], &[0xff, 0xff]];
    let request = with_input(&host, input(DataType::Int32, &[1, 3], &buffers));
    let inputs = request.inputs().expect("inputs");
    assert_eq!(inputs[0].name(), "input_ids");
    assert_eq!(elements(&inputs[0]), Ok(vec![1, 2, -1]));
    assert_eq!(inputs[0].elements_in::<i32>(1..3), Ok(vec![2, -1]));
    drop(inputs);
    request.dismiss();
}

#[test]
fn an_input_of_text_is_borrowed_from_its_only_buffer() {
    let host = Host::start();
    let text: &[u8] = b"\x05\0\0\0hello";
    let request = with_input(&host, input(DataType::Bytes, &[1], &[text]));
    let inputs = request.inputs().expect("inputs");
    let bytes = inputs[0].bytes().expect("bytes");
    assert!(matches!(bytes, Cow::Borrowed(_)));
    assert_eq!(strings::decode(&bytes), Ok(vec![&b"hello"[..]]));
    drop(inputs);
    request.dismiss();
}

#[test]
fn an_inconsistent_input_is_rejected() {
    let host = Host::start();
    let mut on_gpu = input(DataType::Int32, &[1], &[&[0; 4]]);
    on_gpu.on_gpu = true;
    for (input, says) in [
        (input(DataType::Int64, &[1], &[&[0; 8]]), "INT64, not INT32"),
        (input(DataType::Int32, &[2], &[&[0; 4]]), "has 4 bytes"),
        (input(DataType::Int32, &[-1], &[&[0; 4]]), "has 4 bytes"),
        (
            input(DataType::Int32, &[i64::MAX, 4], &[&[0; 4]]),
            "has 4 bytes",
        ),
        (on_gpu, "GPU 0"),
    ] {
        let request = with_input(&host, input);
        let inputs = request.inputs().expect("inputs");
        let error = elements(&inputs[0]).expect_err("refused");
        assert_eq!(error.code(), ErrorCode::InvalidArg);
        assert!(error.message().contains(says), "{error}");
        assert!(error.message().contains("'input_ids'"), "{error}");
        drop(inputs);
        request.dismiss();
    }
}

#[test]
fn an_empty_input_has_no_elements() {
    let host = Host::start();
    let request = with_input(&host, input(DataType::Int32, &[0], &[]));
    let inputs = request.inputs().expect("inputs");
    assert_eq!(elements(&inputs[0]), Ok(vec![]));
    drop(inputs);
    request.dismiss();
}
