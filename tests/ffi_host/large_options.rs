//! Options that are too large: rejected without parsing the rest, and without effect on other requests.

use std::ffi::{CStr, CString};

use inflight_triton::DataType;

use crate::fake_triton::{Input, Parameter};
use crate::served::{ClientRequest, Server, error_code, output_ids};
use crate::{INVALID, RawRequest};

/// A request with an additional parameter.
fn with_parameter(server: &mut Server, name: &CStr, text: String) -> RawRequest {
    let mut spec = server.spec(&ClientRequest::of_lengths(4, 6, true));
    let text = CString::new(text).expect("no NUL");
    spec.parameters
        .push((name.to_owned(), Parameter::String(text)));
    server.host.request(spec)
}

/// A request with an additional input.
fn with_tensor(server: &mut Server, name: &CStr, data: Vec<u8>) -> RawRequest {
    let mut spec = server.spec(&ClientRequest::of_lengths(4, 6, true));
    spec.inputs.push(Input {
        name: name.to_owned(),
        data_type: DataType::Bytes,
        shape: vec![1, 1],
        buffers: vec![data],
        on_gpu: false,
    });
    server.host.request(spec)
}

fn encoded(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

#[test]
fn an_option_has_one_limit_as_a_parameter_and_as_a_tensor() {
    let mut server = Server::load(&[]);
    let content = ClientRequest::of_lengths(4, 6, true);
    for (name, limit) in [
        (c"messages", 1 << 20),
        (c"guided_json", 1 << 20),
        (c"sampling_parameters", 1 << 20),
        (c"stop_words", 128 << 10),
        (c"temperature", 4 << 10),
    ] {
        // The inner part is not valid JSON, but it is never parsed.
        let text = "[".repeat(limit + 1);
        let neighbour = server.request(&content);
        let parameter = with_parameter(&mut server, name, text.clone());
        let tensor = with_tensor(&mut server, name, encoded(&text));
        assert_eq!(server.execute(&[parameter, neighbour, tensor]), Ok(()));
        for (request, size) in [
            (parameter, format!("more than {limit} bytes")),
            (tensor, format!("{} bytes", limit + 5)),
        ] {
            let sent = server.host.sent(request);
            assert_eq!(error_code(&sent), Some(INVALID), "{name:?}");
            let (_, message) = sent[0].error.clone().expect("an error");
            let name = name.to_str().expect("ASCII");
            for words in [
                format!("option '{name}'"),
                size,
                format!("at most {limit};"),
            ] {
                assert!(message.contains(&words), "'{message}' lacks '{words}'");
            }
        }
        server.finish(&[neighbour]);
    }
    server.unload();
}

#[test]
fn an_unknown_option_is_rejected_by_name_whatever_its_size() {
    let mut server = Server::load(&[]);
    let request = with_parameter(&mut server, c"mesages", "a".repeat(2 << 20));
    server.finish(&[request]);
    let sent = server.host.sent(request);
    let (_, message) = sent[0].error.clone().expect("an error");
    assert!(message.contains("did you mean 'messages'"), "{message}");
    // Ignored options are ignored whatever their size.
    let ignored = with_parameter(&mut server, c"draft_logits", "a".repeat(2 << 20));
    server.finish(&[ignored]);
    server.unload();
    assert_eq!(
        output_ids(&server.host.sent(ignored)),
        ClientRequest::of_lengths(4, 6, true).expected()
    );
}

#[test]
fn a_request_with_too_many_options_is_rejected() {
    let mut server = Server::load(&[]);
    let mut spec = server.spec(&ClientRequest::of_lengths(4, 6, true));
    for _ in 0..300 {
        spec.parameters
            .push((c"seed".to_owned(), Parameter::Int(1)));
    }
    let request = server.host.request(spec);
    server.finish(&[request]);
    server.unload();
    let sent = server.host.sent(request);
    let (_, message) = sent[0].error.clone().expect("an error");
    assert!(message.contains("more than 256 parameters"), "{message}");
}
