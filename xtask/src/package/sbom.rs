//! The bill of materials: SPDX 2.3 as JSON (<https://spdx.github.io/spdx-spec/v2.3/>).

use serde_json::{Value, json};

use super::date::Date;
use super::dependencies::{Crate, Dependencies};
use super::{NAME, VERSION, sha256};
use crate::Result;

const PACKAGE: &str = "SPDXRef-Package";
const STANDARD_LIBRARY: &str = "SPDXRef-Rust";

/// The package, the crates in it, and what each of these depends on.
pub fn document(dependencies: &Dependencies, date: Date) -> Result<String> {
    let mut packages = vec![package(), standard_library(&dependencies.rust)];
    packages.extend(dependencies.crates.values().map(of_crate));
    let mut relationships = vec![
        relationship("SPDXRef-DOCUMENT", "DESCRIBES", PACKAGE),
        relationship(PACKAGE, "CONTAINS", STANDARD_LIBRARY),
    ];
    let packed = dependencies.packed.iter();
    relationships.extend(packed.map(|id| relationship(PACKAGE, "CONTAINS", &reference(id))));
    for (id, found) in &dependencies.crates {
        let needed = found.dependencies.iter();
        relationships.extend(
            needed.map(|other| relationship(&reference(id), "DEPENDS_ON", &reference(other))),
        );
    }
    // The namespace is a name that no other document has.
    let content = sha256(serde_json::to_string(&[&packages, &relationships])?.as_bytes());
    let name = format!("{NAME}-{VERSION}-{}-linux", std::env::consts::ARCH);
    let document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": format!("https://spdx.org/spdxdocs/{name}-{content}"),
        "creationInfo": { "created": date.iso_8601(), "creators": [format!("Tool: inflight-xtask-{VERSION}")] },
        "packages": packages,
        "relationships": relationships,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn package() -> Value {
    json!({
        "SPDXID": PACKAGE,
        "name": NAME,
        "versionInfo": VERSION,
        "primaryPackagePurpose": "INSTALL",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "Apache-2.0",
        "licenseDeclared": "Apache-2.0",
        "copyrightText": "NOASSERTION",
    })
}

fn standard_library(version: &str) -> Value {
    json!({
        "SPDXID": STANDARD_LIBRARY,
        "name": "rust-std",
        "versionInfo": version,
        "primaryPackagePurpose": "LIBRARY",
        "downloadLocation": "https://www.rust-lang.org/",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "MIT OR Apache-2.0",
        "copyrightText": "NOASSERTION",
    })
}

fn of_crate(found: &Crate) -> Value {
    let Crate { name, version, .. } = found;
    let mut package = json!({
        "SPDXID": reference(&found.id()),
        "name": name,
        "versionInfo": version,
        "primaryPackagePurpose": "LIBRARY",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": found.licence,
        "copyrightText": "NOASSERTION",
    });
    // The others belong to this repository.
    if let Some(checksum) = &found.checksum {
        package["downloadLocation"] =
            format!("https://static.crates.io/crates/{name}/{name}-{version}.crate").into();
        package["checksums"] = json!([{ "algorithm": "SHA256", "checksumValue": checksum }]);
        package["externalRefs"] = json!([{
            "referenceCategory": "PACKAGE-MANAGER",
            "referenceType": "purl",
            // A plus sign of a version means a space in a URL.
            "referenceLocator": format!("pkg:cargo/{name}@{}", version.replace('+', "%2B")),
        }]);
    }
    package
}

fn relationship(from: &str, kind: &str, to: &str) -> Value {
    json!({ "spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to })
}

/// The identifier of a crate: letters, digits, dots and dashes.
fn reference(id: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '.';
    format!("SPDXRef-Crate-{}", id.replace(|c| !is_allowed(c), "-"))
}
