//! Metrics and the log.

use inflight_triton::{MetricFamily, install_logger, verbose_enabled};

use crate::fake_triton::Host;

#[test]
fn metrics_carry_labels_and_values() {
    let host = Host::start();
    let labels = [("model", "m"), ("version", "1")];
    let gauges = MetricFamily::gauges(c"used", c"Blocks used").expect("made");
    let gauge = gauges
        .expect("metrics are on")
        .gauge(&labels)
        .expect("made");
    let histograms = MetricFamily::histograms(c"ttft", c"Time to first token").expect("made");
    let histograms = histograms.expect("metrics are on");
    let histogram = histograms.histogram(&labels, &[1.0, 10.0]).expect("made");
    let counters = MetricFamily::counters(c"drafted", c"Tokens guessed").expect("made");
    let counter = counters
        .expect("metrics are on")
        .counter(&labels)
        .expect("made");
    counter.add(2);
    counter.add(3);
    gauge.set(7.0);
    gauge.set(4.0);
    histogram.observe(3.0);
    let families = host.families();
    assert_eq!(families[0].metrics[0].value, 4.0);
    assert_eq!(families[0].help, "Blocks used");
    assert_eq!(families[1].metrics[0].observed, [3.0]);
    assert_eq!(families[1].metrics[0].buckets, [1.0, 10.0]);
    assert_eq!(families[2].metrics[0].value, 5.0);
    let written = labels.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert!(
        families
            .iter()
            .all(|family| family.metrics[0].labels == written)
    );
}

#[test]
fn a_family_outlives_its_metrics_whatever_the_order_of_drops() {
    let _host = Host::start();
    let family = MetricFamily::gauges(c"used", c"Blocks used")
        .expect("made")
        .expect("metrics are on");
    let first = family.gauge(&[("model", "a")]).expect("made");
    let second = family.gauge(&[("model", "b")]).expect("made");
    drop(family);
    first.set(1.0);
    drop(first);
    drop(second);
}

#[test]
fn a_server_without_metrics_is_tolerated() {
    let host = Host::start();
    host.disable_metrics();
    let family = MetricFamily::gauges(c"used", c"Blocks used").expect("no error");
    assert!(family.is_none());
}

#[test]
fn log_records_are_written_to_tritons_log_at_their_level() {
    let host = Host::start();
    install_logger();
    install_logger();
    log::info!("loaded {}", 3);
    log::debug!("not on");
    assert!(!verbose_enabled());
    host.set_verbose(true);
    assert!(verbose_enabled());
    log::debug!("a record\0of a step");
    log::trace!("never");
    log::error!("bad");
    let records = host.log();
    let seen: Vec<_> = records
        .iter()
        .map(|record| (record.level, record.message.as_str()))
        .collect();
    assert_eq!(
        seen,
        [
            (0, "loaded 3"),
            (3, "a record\u{fffd}of a step"),
            (2, "bad")
        ]
    );
    assert!(
        records
            .iter()
            .all(|record| record.file == "metrics_and_log.rs" && record.line > 0)
    );
}
