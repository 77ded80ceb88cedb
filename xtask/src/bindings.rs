//! `cargo xtask bindings`: generates `crates/triton/src/sys.rs` from Triton's own headers.
//!
//! The headers come from a pinned package of the registry that cargo fetches, or from the include folder of a
//! Triton install named by `TRITON_INCLUDE`. The result is committed, so that a build needs neither libclang
//! nor Triton. Only the functions in [`FUNCTIONS`] are bound: the library is linked with BIND_NOW, so a
//! single function that an older server lacks would make the whole load fail.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindgen::{Builder, EnumVariation, Formatter, RustEdition, RustTarget};

/// The package with the headers, and its version.
const HEADERS: (&str, &str) = ("tritonserver-rs", "0.4.1");

/// Every function that `crates/triton/src/` calls. Server 2.51.0 (r24.10) exports all of them.
const FUNCTIONS: &[&str] = &[
    // Errors, messages, logs.
    "TRITONSERVER_ErrorCode",
    "TRITONSERVER_ErrorDelete",
    "TRITONSERVER_ErrorMessage",
    "TRITONSERVER_ErrorNew",
    "TRITONSERVER_LogIsEnabled",
    "TRITONSERVER_LogMessage",
    "TRITONSERVER_MessageDelete",
    "TRITONSERVER_MessageNewFromSerializedJson",
    "TRITONSERVER_MessageSerializeToJson",
    // Metrics and their labels, memory reports.
    "TRITONSERVER_BufferAttributesDelete",
    "TRITONSERVER_BufferAttributesNew",
    "TRITONSERVER_BufferAttributesSetByteSize",
    "TRITONSERVER_BufferAttributesSetMemoryType",
    "TRITONSERVER_BufferAttributesSetMemoryTypeId",
    "TRITONSERVER_MetricArgsDelete",
    "TRITONSERVER_MetricArgsNew",
    "TRITONSERVER_MetricArgsSetHistogram",
    "TRITONSERVER_MetricDelete",
    "TRITONSERVER_MetricFamilyDelete",
    "TRITONSERVER_MetricFamilyNew",
    "TRITONSERVER_MetricIncrement",
    "TRITONSERVER_MetricNewWithArgs",
    "TRITONSERVER_MetricObserve",
    "TRITONSERVER_MetricSet",
    "TRITONSERVER_ParameterDelete",
    "TRITONSERVER_ParameterNew",
    // Backend, model, instance.
    "TRITONBACKEND_ApiVersion",
    "TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup",
    "TRITONBACKEND_ModelAutoCompleteConfig",
    "TRITONBACKEND_ModelConfig",
    "TRITONBACKEND_ModelInstanceModel",
    "TRITONBACKEND_ModelInstanceName",
    "TRITONBACKEND_ModelInstanceKind",
    "TRITONBACKEND_ModelInstanceDeviceId",
    "TRITONBACKEND_ModelInstanceReportBatchStatistics",
    "TRITONBACKEND_ModelInstanceReportMemoryUsage",
    "TRITONBACKEND_ModelInstanceReportStatistics",
    "TRITONBACKEND_ModelInstanceSetState",
    "TRITONBACKEND_ModelInstanceState",
    "TRITONBACKEND_ModelName",
    "TRITONBACKEND_ModelRepository",
    "TRITONBACKEND_ModelServer",
    "TRITONBACKEND_ModelSetConfig",
    "TRITONBACKEND_ModelSetState",
    "TRITONBACKEND_ModelState",
    "TRITONBACKEND_ModelVersion",
    // The server, and requests that the backend sends itself.
    "TRITONSERVER_InferenceRequestAddInput",
    "TRITONSERVER_InferenceRequestAppendInputData",
    "TRITONSERVER_InferenceRequestDelete",
    "TRITONSERVER_InferenceRequestNew",
    "TRITONSERVER_InferenceRequestSetCorrelationId",
    "TRITONSERVER_InferenceRequestSetCorrelationIdString",
    "TRITONSERVER_InferenceRequestSetFlags",
    "TRITONSERVER_InferenceRequestSetId",
    "TRITONSERVER_InferenceRequestSetReleaseCallback",
    "TRITONSERVER_InferenceRequestSetResponseCallback",
    "TRITONSERVER_InferenceResponseDelete",
    "TRITONSERVER_ResponseAllocatorNew",
    "TRITONSERVER_ServerInferAsync",
    "TRITONSERVER_ServerMetadata",
    "TRITONSERVER_ServerModelIsReady",
    // Requests and their inputs.
    "TRITONSERVER_InferenceRequestCancel",
    "TRITONBACKEND_InferenceRequestTimeoutMicroseconds",
    "TRITONBACKEND_InputBuffer",
    "TRITONBACKEND_InputProperties",
    "TRITONBACKEND_RequestCorrelationId",
    "TRITONBACKEND_RequestCorrelationIdString",
    "TRITONBACKEND_RequestFlags",
    "TRITONBACKEND_RequestId",
    "TRITONBACKEND_RequestInputByIndex",
    "TRITONBACKEND_RequestInputCount",
    "TRITONBACKEND_RequestIsCancelled",
    "TRITONBACKEND_RequestOutputCount",
    "TRITONBACKEND_RequestOutputName",
    "TRITONBACKEND_RequestParameter",
    "TRITONBACKEND_RequestParameterCount",
    "TRITONBACKEND_RequestRelease",
    // Responses and their outputs.
    "TRITONBACKEND_OutputBuffer",
    "TRITONBACKEND_ResponseDelete",
    "TRITONBACKEND_ResponseFactoryDelete",
    "TRITONBACKEND_ResponseFactoryIsCancelled",
    "TRITONBACKEND_ResponseFactoryNew",
    "TRITONBACKEND_ResponseFactorySendFlags",
    "TRITONBACKEND_ResponseNewFromFactory",
    "TRITONBACKEND_ResponseOutput",
    "TRITONBACKEND_ResponseSend",
    "TRITONBACKEND_ResponseSetStringParameter",
];

/// Types that no bound function refers to, but our entry points or flags need.
const TYPES: &[&str] = &[
    "TRITONBACKEND_Backend",
    "TRITONBACKEND_Batcher",
    "TRITONSERVER_RequestFlag",
    "TRITONSERVER_RequestReleaseFlag",
    "TRITONSERVER_ResponseCompleteFlag",
];

/// The API version that the headers describe.
const CONSTANTS: &[&str] = &[
    "TRITONBACKEND_API_VERSION_MAJOR",
    "TRITONBACKEND_API_VERSION_MINOR",
];

/// Generates the bindings and writes them to `crates/triton/src/sys.rs`.
pub fn run() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace");
    let include = match env::var_os("TRITON_INCLUDE") {
        Some(folder) => PathBuf::from(folder),
        None => fetch_headers(root)?,
    };
    let file = root.join("crates/triton/src/sys.rs");
    fs::write(&file, generate(root, &include)?)
        .map_err(|error| format!("{}: {error}", file.display()))
}

/// The bindings as text, formatted as by `cargo fmt`.
fn generate(root: &Path, include: &Path) -> Result<String, String> {
    const HEADER: &str = "triton/core/tritonbackend.h";
    let header = include.join(HEADER);
    if !header.is_file() {
        return Err(format!(
            "{}: no such file; set TRITON_INCLUDE to the folder that contains triton/core/",
            header.display()
        ));
    }
    let mut builder = Builder::default()
        .header_contents("inflight.h", &format!("#include <{HEADER}>\n"))
        .clang_arg(format!("-I{}", include.display()))
        // Triton's headers rely on typedefs that only C++ declares.
        .clang_args(["-x", "c++"])
        .raw_line("//! Triton's C API as its headers declare it. Generated by `cargo xtask bindings`: do not edit.")
        .raw_line("")
        .raw_line("#![allow(missing_docs, non_camel_case_types, non_upper_case_globals)]")
        .disable_header_comment()
        .use_core()
        .generate_comments(false)
        .layout_tests(false)
        .merge_extern_blocks(true)
        .sort_semantically(true)
        .default_enum_style(EnumVariation::NewType {
            is_bitfield: false,
            is_global: false,
        })
        .rust_edition(RustEdition::Edition2024)
        .rust_target(RustTarget::stable(85, 0).map_err(|error| error.to_string())?)
        .formatter(Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(root.join("rustfmt.toml")));
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function);
    }
    for name in TYPES {
        builder = builder.allowlist_type(name);
    }
    for name in CONSTANTS {
        builder = builder.allowlist_var(name);
    }
    let bindings = builder
        .generate()
        .map_err(|error| format!("{}: {error}", header.display()))?
        .to_string();
    match FUNCTIONS
        .iter()
        .find(|name| !bindings.contains(&format!("fn {name}(")))
    {
        Some(missing) => Err(format!("{}: {missing} is not declared", header.display())),
        None => Ok(bindings),
    }
}

/// Makes cargo fetch the package with the headers; returns its include folder.
///
/// A temporary crate depends on the package: as a dependency of this crate it would be built, and building it
/// needs an installed Triton.
fn fetch_headers(root: &Path) -> Result<PathBuf, String> {
    let (package, version) = HEADERS;
    let folder = root.join("target/triton-headers");
    let manifest = folder.join("Cargo.toml");
    let text = format!(
        "[package]\nname = \"triton-headers\"\nedition = \"2024\"\n\n[lib]\npath = \"lib.rs\"\n\n\
         [dependencies]\n{package} = \"={version}\"\n\n[workspace]\n"
    );
    fs::create_dir_all(&folder)
        .and_then(|()| fs::write(folder.join("lib.rs"), ""))
        .and_then(|()| fs::write(&manifest, text))
        .map_err(|error| format!("{}: {error}", folder.display()))?;

    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version", "1", "--manifest-path"])
        .arg(&manifest)
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|candidate| candidate["name"] == package)
        .and_then(|found| Path::new(found["manifest_path"].as_str()?).parent())
        .map(|sources| sources.join("core/include"))
        .ok_or_else(|| format!("cargo metadata: package {package} is missing"))
}
