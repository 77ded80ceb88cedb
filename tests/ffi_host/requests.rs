//! Requests: never lost, never answered twice.

use std::thread;

use inflight_triton::{Completion, Error, ErrorCode};

use crate::fake_triton::{Host, Spec, Where};
use crate::{INTERNAL, INVALID, error_codes, take};

#[test]
fn a_dropped_request_is_answered_with_an_error_and_released() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    drop(take(raw));
    assert_eq!(host.place(raw), Where::Released);
    let sent = host.sent(raw);
    assert_eq!(error_codes(&host, raw), [Some(INTERNAL)]);
    assert!(sent[0].is_final && sent[0].after_release);
}

#[test]
fn a_failed_request_gets_its_own_error() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    take(raw).fail(Error::invalid("option 'top_k': -1 is not a count"));
    let (code, message) = host.sent(raw)[0].error.clone().expect("an error");
    assert_eq!(code, INVALID);
    assert_eq!(message, "option 'top_k': -1 is not a count");
}

#[test]
fn a_dismissed_request_gets_the_final_flag_alone() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    take(raw).dismiss();
    let sent = host.sent(raw);
    assert_eq!(sent.len(), 1);
    assert!(sent[0].is_flag && sent[0].is_final);
    assert_eq!(host.place(raw), Where::Released);
}

#[test]
fn a_released_request_is_ended_by_its_factory() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    let response = factory.new_response().expect("a response");
    request.release();
    assert_eq!(host.place(raw), Where::Released);
    assert_eq!(host.sent(raw), []);
    response.send(Completion::Final).expect("sent");
    assert!(host.sent(raw)[0].is_final && host.sent(raw)[0].after_release);
}

#[test]
fn a_request_released_without_a_factory_is_still_answered() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    take(raw).release();
    assert_eq!(error_codes(&host, raw), [Some(INTERNAL)]);
}

#[test]
fn a_rescheduled_request_belongs_to_triton_and_returns() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    assert!(request.flags().expect("flags").is_start());
    request.reschedule().expect("rescheduled");
    assert_eq!(host.place(raw), Where::InQueue);
    assert_eq!(host.sent(raw), []);

    host.again(raw);
    let mut request = take(raw);
    request.answered_by(&factory);
    assert!(!request.flags().expect("flags").is_start());
    request.release();
    factory.send_final().expect("sent");
}

#[test]
fn a_rejected_reschedule_returns_the_request_with_the_reason() {
    let host = Host::start();
    host.refuse_reschedule(true);
    let raw = host.request(Spec::default());
    let (request, error) = take(raw).reschedule().expect_err("refused");
    assert_eq!(error.code(), ErrorCode::InvalidArg);
    assert!(error.message().contains("START flag"), "{error}");
    assert_eq!(host.place(raw), Where::InBackend);
    request.fail(error);
    assert_eq!(error_codes(&host, raw), [Some(INVALID)]);
}

#[test]
fn nothing_can_be_sent_after_the_final_response() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    let late = factory.new_response().expect("a response");
    assert!(!factory.is_finished());
    factory.send_final().expect("the first final");
    assert!(factory.is_finished());
    for refused in [
        late.send(Completion::Partial),
        factory.send_final(),
        factory.send_error(Error::internal("late")),
    ] {
        assert_eq!(refused.expect_err("refused").code(), ErrorCode::Internal);
    }
    drop(request);
    assert_eq!(host.sent(raw).len(), 1);
    assert_eq!(host.place(raw), Where::Released);
}

#[test]
fn a_returning_request_shares_the_final_response_of_its_first_call() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    request.reschedule().expect("rescheduled");
    host.again(raw);
    let mut request = take(raw);
    request.answered_by(&factory);
    drop(request);
    let late = factory.new_response().expect("a response");
    late.send(Completion::Partial).expect_err("after the error");
    assert_eq!(error_codes(&host, raw), [Some(INTERNAL)]);
}

#[test]
fn a_responder_thread_and_a_dropped_request_never_send_past_the_final_response() {
    let host = Host::start();
    for _ in 0..50 {
        let raw = host.request(Spec::default());
        let mut request = take(raw);
        let factory = request.response_factory().expect("a factory");
        let responder = thread::spawn(move || {
            // A limit, so that a factory that never fails makes the test fail instead of filling the memory.
            (0..100_000)
                .take_while(|_| {
                    let response = factory.new_response().expect("a response");
                    response.send(Completion::Partial).is_ok()
                })
                .count()
        });
        thread::yield_now();
        drop(request);
        let num_sent = responder.join().expect("no panic");
        let sent = host.sent(raw);
        assert_eq!(sent.len(), num_sent + 1);
        assert!(sent[num_sent].is_final);
    }
}

#[test]
fn a_cancellation_is_noticed_while_triton_holds_the_request() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    assert!(!request.is_cancelled() && !factory.is_cancelled());
    request.reschedule().expect("rescheduled");
    host.cancel(raw);
    assert!(factory.is_cancelled());
}

#[test]
fn a_request_beside_a_live_sequence_is_cancelled_before_its_release() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    take(raw).fail_beside_sequence(Error::invalid("in flight"));
    assert!(
        host.is_cancelled(raw),
        "otherwise its release would end the sequence"
    );
    assert_eq!(error_codes(&host, raw), [Some(INVALID)]);
    assert_eq!(host.place(raw), Where::Released);
}

#[test]
fn a_request_keeps_its_identity_from_one_execute_to_the_next() {
    let host = Host::start();
    let (first, second) = (host.request(Spec::default()), host.request(Spec::default()));
    let request = take(first);
    let identity = request.identity();
    request.reschedule().expect("rescheduled");
    host.again(first);
    let (first, second) = (take(first), take(second));
    assert_eq!(first.identity(), identity);
    assert_ne!(second.identity(), identity);
    first.dismiss();
    second.dismiss();
}

#[test]
fn a_released_request_whose_factory_is_dropped_is_answered_with_an_error() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    let factory = request.response_factory().expect("a factory");
    let response = factory.new_response().expect("a response");
    response.send(Completion::Partial).expect("sent");
    request.release();
    let clone = factory.clone();
    drop(factory);
    assert_eq!(host.sent(raw).len(), 1, "it can still be answered");
    drop(clone);
    let sent = host.sent(raw);
    assert!(sent[1].is_final && sent[1].after_release);
    assert_eq!(error_codes(&host, raw), [None, Some(INTERNAL)]);
}

#[test]
fn the_factory_of_a_request_that_is_not_released_can_be_dropped() {
    let host = Host::start();
    let raw = host.request(Spec::default());
    let mut request = take(raw);
    drop(request.response_factory().expect("a factory"));
    request.reschedule().expect("taken back");
    assert_eq!(host.sent(raw), []);
    host.again(raw);
    take(raw).dismiss();
}
