//! Metrics of our own on the server's Prometheus page.
//!
//! A family is a name with a help text; a metric is one line of it, identified by its labels.
//! A metric keeps its family alive, so Triton always sees metrics deleted first.
//!
//! The caller must share metrics: two metrics with the same name and labels are one line, even in different families,
//! and deleting one frees the line under the other (server 2.51).

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::error::{check, get_object, to_c_string};
use super::{Error, ErrorCode, sys};

/// A family of metrics of one kind: [`Counter`], [`Gauge`] or [`Histogram`].
#[derive(Debug)]
pub struct MetricFamily<M> {
    family: Arc<Family>,
    metric: PhantomData<fn() -> M>,
}

/// A number that goes up.
#[derive(Debug)]
pub struct Counter(Metric);

/// A number that goes up and down.
#[derive(Debug)]
pub struct Gauge(Metric);

/// Counts of values by bucket.
#[derive(Debug)]
pub struct Histogram(Metric);

impl MetricFamily<Counter> {
    /// A family of counters; `None` if the server was built without metrics.
    pub fn counters(name: &CStr, help: &CStr) -> Result<Option<Self>, Error> {
        Self::new(
            sys::TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_COUNTER,
            name,
            help,
        )
    }

    /// The counter with these labels.
    pub fn counter(&self, labels: &[(&str, &str)]) -> Result<Counter, Error> {
        Metric::new(&self.family, labels, None).map(Counter)
    }
}

impl MetricFamily<Gauge> {
    /// A family of gauges; `None` if the server was built without metrics.
    pub fn gauges(name: &CStr, help: &CStr) -> Result<Option<Self>, Error> {
        Self::new(
            sys::TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_GAUGE,
            name,
            help,
        )
    }

    /// The gauge with these labels.
    pub fn gauge(&self, labels: &[(&str, &str)]) -> Result<Gauge, Error> {
        Metric::new(&self.family, labels, None).map(Gauge)
    }
}

impl MetricFamily<Histogram> {
    /// A family of histograms; `None` if the server was built without metrics.
    pub fn histograms(name: &CStr, help: &CStr) -> Result<Option<Self>, Error> {
        Self::new(
            sys::TRITONSERVER_MetricKind::TRITONSERVER_METRIC_KIND_HISTOGRAM,
            name,
            help,
        )
    }

    /// The histogram with these labels; `buckets` are upper bounds, rising, without infinity.
    pub fn histogram(&self, labels: &[(&str, &str)], buckets: &[f64]) -> Result<Histogram, Error> {
        Metric::new(&self.family, labels, Some(buckets)).map(Histogram)
    }
}

impl Counter {
    /// Adds to the number.
    pub fn add(&self, more: u64) {
        // SAFETY: the metric is alive.
        ignore(unsafe {
            check(sys::TRITONSERVER_MetricIncrement(
                self.0.as_ptr(),
                more as f64,
            ))
        });
    }
}

impl Gauge {
    /// Replaces the number.
    pub fn set(&self, value: f64) {
        // SAFETY: the metric is alive.
        ignore(unsafe { check(sys::TRITONSERVER_MetricSet(self.0.as_ptr(), value)) });
    }
}

impl Histogram {
    /// Counts `value` into its bucket.
    pub fn observe(&self, value: f64) {
        // SAFETY: the metric is alive.
        ignore(unsafe { check(sys::TRITONSERVER_MetricObserve(self.0.as_ptr(), value)) });
    }
}

impl<M> MetricFamily<M> {
    fn new(
        kind: sys::TRITONSERVER_MetricKind,
        name: &CStr,
        help: &CStr,
    ) -> Result<Option<Self>, Error> {
        // SAFETY: both strings outlive the call, which copies them; the family is ours.
        let family = unsafe {
            get_object(|out| {
                sys::TRITONSERVER_MetricFamilyNew(out, kind, name.as_ptr(), help.as_ptr())
            })
        };
        match family {
            Ok(family) => Ok(Some(Self {
                family: Arc::new(Family(family)),
                metric: PhantomData,
            })),
            Err(error) if error.code() == ErrorCode::Unsupported => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A metric that cannot be written must not fail a request, and a warning at every step would fill the log. The types
/// above rule out failures in any case.
fn ignore(_: Result<(), Error>) {}

#[derive(Debug)]
struct Family(NonNull<sys::TRITONSERVER_MetricFamily>);

// SAFETY: Triton guards a family with a lock.
unsafe impl Send for Family {}
// SAFETY: as above.
unsafe impl Sync for Family {}

impl Drop for Family {
    fn drop(&mut self) {
        // SAFETY: the family is ours, and every metric of it is gone: each holds an Arc of it.
        let _ = unsafe { check(sys::TRITONSERVER_MetricFamilyDelete(self.0.as_ptr())) };
    }
}

#[derive(Debug)]
struct Metric {
    raw: NonNull<sys::TRITONSERVER_Metric>,
    /// Deleted after the metric, because `Drop` runs before the fields go.
    _family: Arc<Family>,
}

// SAFETY: the Prometheus library's counters and gauges are atomic, its histograms take a lock.
unsafe impl Send for Metric {}
// SAFETY: as above.
unsafe impl Sync for Metric {}

impl Metric {
    fn new(
        family: &Arc<Family>,
        labels: &[(&str, &str)],
        buckets: Option<&[f64]>,
    ) -> Result<Self, Error> {
        let labels = labels
            .iter()
            .map(|(name, value)| Label::new(name, value))
            .collect::<Result<Vec<_>, _>>()?;
        let mut list: Vec<_> = labels
            .iter()
            .map(|label| label.0.as_ptr().cast_const())
            .collect();
        let arguments = buckets.map(MetricArguments::new).transpose()?;
        // SAFETY: family, labels and arguments outlive the call, which copies what it keeps; the
        // metric is ours.
        let raw = unsafe {
            get_object(|out| {
                sys::TRITONSERVER_MetricNewWithArgs(
                    out,
                    family.0.as_ptr(),
                    list.as_mut_ptr(),
                    list.len() as u64,
                    arguments
                        .as_ref()
                        .map_or(ptr::null(), |arguments| arguments.0.as_ptr()),
                )
            })
        }?;
        Ok(Self {
            raw,
            _family: Arc::clone(family),
        })
    }

    fn as_ptr(&self) -> *mut sys::TRITONSERVER_Metric {
        self.raw.as_ptr()
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        // SAFETY: the metric is ours and its family is alive. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONSERVER_MetricDelete(self.raw.as_ptr())) };
    }
}

struct Label(NonNull<sys::TRITONSERVER_Parameter>);

impl Label {
    fn new(name: &str, value: &str) -> Result<Self, Error> {
        use sys::TRITONSERVER_ParameterType as Kind;
        let (name, value) = (to_c_string(name), to_c_string(value));
        let kind = Kind::TRITONSERVER_PARAMETER_STRING;
        // SAFETY: a value of this kind is a C string; Triton copies both.
        let raw =
            unsafe { sys::TRITONSERVER_ParameterNew(name.as_ptr(), kind, value.as_ptr().cast()) };
        NonNull::new(raw)
            .map(Self)
            .ok_or_else(|| Error::internal(format!("Triton refuses the metric label {name:?}")))
    }
}

impl Drop for Label {
    fn drop(&mut self) {
        // SAFETY: the parameter is ours and not used again.
        unsafe { sys::TRITONSERVER_ParameterDelete(self.0.as_ptr()) }
    }
}

struct MetricArguments(NonNull<sys::TRITONSERVER_MetricArgs>);

impl MetricArguments {
    fn new(buckets: &[f64]) -> Result<Self, Error> {
        // SAFETY: the object that is made is ours.
        let this = Self(unsafe { get_object(|out| sys::TRITONSERVER_MetricArgsNew(out)) }?);
        // SAFETY: the object is alive and the buckets are copied.
        unsafe {
            check(sys::TRITONSERVER_MetricArgsSetHistogram(
                this.0.as_ptr(),
                buckets.as_ptr(),
                buckets.len() as u64,
            ))
        }?;
        Ok(this)
    }
}

impl Drop for MetricArguments {
    fn drop(&mut self) {
        // SAFETY: the object is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONSERVER_MetricArgsDelete(self.0.as_ptr())) };
    }
}
