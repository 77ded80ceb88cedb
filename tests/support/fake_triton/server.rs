//! TRITONSERVER_*: errors, messages, the log, metrics, buffer attributes.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

use inflight_triton::sys::{self, *};

use super::world::{Family, LogRecord, Metric, handle, id, world};

/// Defines C functions, and checks each against the signature that the library declares.
macro_rules! export {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $returned:ty)? $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) $(-> $returned)? $body

            const _: [unsafe extern "C" fn($($type),*) $(-> $returned)?; 2] = [sys::$name, $name];
        )*
    };
}
pub(super) use export;

export! {
    fn TRITONSERVER_ErrorNew(
        code: TRITONSERVER_Error_Code,
        message: *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let message = text(message);
        world().error(code, &message)
    }

    fn TRITONSERVER_ErrorDelete(error: *mut TRITONSERVER_Error) {
        let mut world = world();
        if world.errors.remove(&id(error)).is_none() {
            world.violation("delete of no error");
        }
    }

    fn TRITONSERVER_ErrorCode(error: *mut TRITONSERVER_Error) -> TRITONSERVER_Error_Code {
        TRITONSERVER_errorcode_enum(world().errors[&id(error)].0)
    }

    fn TRITONSERVER_ErrorMessage(error: *mut TRITONSERVER_Error) -> *const c_char {
        world().errors[&id(error)].1.as_ptr()
    }

    fn TRITONSERVER_LogIsEnabled(level: TRITONSERVER_LogLevel) -> bool {
        level != TRITONSERVER_LogLevel::TRITONSERVER_LOG_VERBOSE || world().verbose
    }

    fn TRITONSERVER_LogMessage(
        level: TRITONSERVER_LogLevel,
        file: *const c_char,
        line: c_int,
        message: *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let (file, message) = (text(file), text(message));
        let level = level.0;
        world().log.push(LogRecord { level, file, line, message });
        ptr::null_mut()
    }

    fn TRITONSERVER_MessageNewFromSerializedJson(
        message: *mut *mut TRITONSERVER_Message,
        base: *const c_char,
        byte_size: usize,
    ) -> *mut TRITONSERVER_Error {
        let json = std::slice::from_raw_parts(base.cast::<u8>(), byte_size);
        let mut world = world();
        if serde_json::from_slice::<serde_json::Value>(json).is_err() {
            return world.invalid("failed to parse the request JSON buffer");
        }
        let made = world.new_id();
        world.messages.insert(made, CString::new(json).expect("JSON has no NUL"));
        message.write(handle(made));
        ptr::null_mut()
    }

    fn TRITONSERVER_MessageDelete(message: *mut TRITONSERVER_Message) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if world.messages.remove(&id(message)).is_none() {
            world.violation("delete of no message, or of one that the server owns");
        }
        ptr::null_mut()
    }

    fn TRITONSERVER_MessageSerializeToJson(
        message: *mut TRITONSERVER_Message,
        base: *mut *const c_char,
        byte_size: *mut usize,
    ) -> *mut TRITONSERVER_Error {
        let world = world();
        let json = &world.messages[&id(message)];
        base.write(json.as_ptr());
        byte_size.write(json.as_bytes().len());
        ptr::null_mut()
    }

    fn TRITONSERVER_ParameterNew(
        name: *const c_char,
        kind: TRITONSERVER_ParameterType,
        value: *const c_void,
    ) -> *mut TRITONSERVER_Parameter {
        if kind != TRITONSERVER_ParameterType::TRITONSERVER_PARAMETER_STRING {
            return ptr::null_mut();
        }
        let label = (text(name), text(value.cast()));
        let mut world = world();
        let made = world.new_id();
        world.labels.insert(made, label);
        handle(made)
    }

    fn TRITONSERVER_ParameterDelete(parameter: *mut TRITONSERVER_Parameter) {
        let mut world = world();
        if world.labels.remove(&id(parameter)).is_none() {
            world.violation("delete of no parameter");
        }
    }

    fn TRITONSERVER_MetricFamilyNew(
        family: *mut *mut TRITONSERVER_MetricFamily,
        kind: TRITONSERVER_MetricKind,
        name: *const c_char,
        help: *const c_char,
    ) -> *mut TRITONSERVER_Error {
        let (name, help) = (text(name), text(help));
        let mut world = world();
        if world.no_metrics {
            let code = TRITONSERVER_Error_Code::TRITONSERVER_ERROR_UNSUPPORTED;
            return world.error(code, "metrics not supported");
        }
        let made = world.new_id();
        let place = world.families_seen.len();
        world.families_seen.push(Family { kind: kind.0, name, help, metrics: Vec::new() });
        world.families.insert(made, place);
        family.write(handle(made));
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricFamilyDelete(
        family: *mut TRITONSERVER_MetricFamily,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let Some(place) = world.families.remove(&id(family)) else {
            world.violation("delete of no metric family");
            return ptr::null_mut();
        };
        if world.metrics.values().any(|(of, _)| *of == place) {
            world.violation("a metric family was deleted before its metrics");
        }
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricArgsNew(
        arguments: *mut *mut TRITONSERVER_MetricArgs,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let made = world.new_id();
        world.metric_arguments.insert(made, Vec::new());
        arguments.write(handle(made));
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricArgsSetHistogram(
        arguments: *mut TRITONSERVER_MetricArgs,
        buckets: *const f64,
        count: u64,
    ) -> *mut TRITONSERVER_Error {
        let buckets = std::slice::from_raw_parts(buckets, count as usize).to_vec();
        world().metric_arguments.insert(id(arguments), buckets);
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricArgsDelete(
        arguments: *mut TRITONSERVER_MetricArgs,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if world.metric_arguments.remove(&id(arguments)).is_none() {
            world.violation("delete of no metric arguments");
        }
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricNewWithArgs(
        metric: *mut *mut TRITONSERVER_Metric,
        family: *mut TRITONSERVER_MetricFamily,
        labels: *mut *const TRITONSERVER_Parameter,
        count: u64,
        arguments: *const TRITONSERVER_MetricArgs,
    ) -> *mut TRITONSERVER_Error {
        let labels = std::slice::from_raw_parts(labels, count as usize);
        let mut world = world();
        let labels: Vec<_> = labels.iter().map(|label| world.labels[&id(*label)].clone()).collect();
        let buckets = world.metric_arguments.get(&id(arguments)).cloned();
        let place = world.families[&id(family)];
        let histogram = TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_HISTOGRAM.0;
        if (world.families_seen[place].kind == histogram) != buckets.is_some() {
            return world.invalid("metric arguments are for histograms, and histograms need them");
        }
        let line = (&world.families_seen[place].name, &labels);
        let is_taken = world.metrics.values().any(|&(family, index)| {
            let family = &world.families_seen[family];
            line == (&family.name, &family.metrics[index].labels)
        });
        if is_taken {
            // Deleting one of two such metrics frees the memory of the other in the real server.
            world.violation("two metrics with one name and the same labels");
        }
        let made = world.new_id();
        let metrics = &mut world.families_seen[place].metrics;
        let index = metrics.len();
        metrics.push(Metric {
            labels,
            buckets: buckets.unwrap_or_default(),
            value: 0.0,
            observed: Vec::new(),
        });
        world.metrics.insert(made, (place, index));
        metric.write(handle(made));
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricDelete(metric: *mut TRITONSERVER_Metric) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if world.metrics.remove(&id(metric)).is_none() {
            world.violation("delete of no metric");
        }
        ptr::null_mut()
    }

    fn TRITONSERVER_MetricIncrement(
        metric: *mut TRITONSERVER_Metric,
        value: f64,
    ) -> *mut TRITONSERVER_Error {
        write(metric, TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_COUNTER, |metric| {
            metric.value += value;
        })
    }

    fn TRITONSERVER_MetricSet(
        metric: *mut TRITONSERVER_Metric,
        value: f64,
    ) -> *mut TRITONSERVER_Error {
        write(metric, TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_GAUGE, |metric| {
            metric.value = value;
        })
    }

    fn TRITONSERVER_MetricObserve(
        metric: *mut TRITONSERVER_Metric,
        value: f64,
    ) -> *mut TRITONSERVER_Error {
        write(metric, TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_HISTOGRAM, |metric| {
            metric.observed.push(value);
        })
    }

    fn TRITONSERVER_BufferAttributesNew(
        attributes: *mut *mut TRITONSERVER_BufferAttributes,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        let made = world.new_id();
        world.buffer_attributes.insert(made, (0, 0, 0));
        attributes.write(handle(made));
        ptr::null_mut()
    }

    fn TRITONSERVER_BufferAttributesDelete(
        attributes: *mut TRITONSERVER_BufferAttributes,
    ) -> *mut TRITONSERVER_Error {
        let mut world = world();
        if world.buffer_attributes.remove(&id(attributes)).is_none() {
            world.violation("delete of no buffer attributes");
        }
        ptr::null_mut()
    }

    fn TRITONSERVER_BufferAttributesSetMemoryType(
        attributes: *mut TRITONSERVER_BufferAttributes,
        kind: TRITONSERVER_MemoryType,
    ) -> *mut TRITONSERVER_Error {
        world().buffer_attributes.get_mut(&id(attributes)).expect("attributes").0 = kind.0;
        ptr::null_mut()
    }

    fn TRITONSERVER_BufferAttributesSetMemoryTypeId(
        attributes: *mut TRITONSERVER_BufferAttributes,
        device: i64,
    ) -> *mut TRITONSERVER_Error {
        world().buffer_attributes.get_mut(&id(attributes)).expect("attributes").1 = device;
        ptr::null_mut()
    }

    fn TRITONSERVER_BufferAttributesSetByteSize(
        attributes: *mut TRITONSERVER_BufferAttributes,
        byte_size: usize,
    ) -> *mut TRITONSERVER_Error {
        world().buffer_attributes.get_mut(&id(attributes)).expect("attributes").2 = byte_size;
        ptr::null_mut()
    }
}

fn write(
    metric: *mut TRITONSERVER_Metric,
    kind: TRITONSERVER_MetricKind,
    write: impl FnOnce(&mut Metric),
) -> *mut TRITONSERVER_Error {
    let mut world = world();
    let Some(&(family, index)) = world.metrics.get(&id(metric)) else {
        world.violation("use of no metric");
        return ptr::null_mut();
    };
    let family = &mut world.families_seen[family];
    if family.kind != kind.0 {
        return world.invalid("this kind of metric cannot do that");
    }
    write(&mut family.metrics[index]);
    ptr::null_mut()
}

/// Copies a C string of the library.
pub(super) unsafe fn text(text: *const c_char) -> String {
    CStr::from_ptr(text)
        .to_str()
        .expect("the library writes UTF-8")
        .to_owned()
}
