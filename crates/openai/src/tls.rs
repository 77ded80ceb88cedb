//! TLS: the certificate that clients see, and the one that tritonserver is known by.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The largest file of certificates, or of a key.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Acceptor of TLS 1.2 and 1.3 connections, with the certificate chain and the private key from two PEM files. The
/// server's own certificate comes first in the chain.
///
/// # Errors
/// A file cannot be read, has no certificate or key, or they do not belong together.
pub fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, String> {
    let pem = read(certificate)?;
    let problem =
        |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let chain = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| problem(certificate, &error))?;
    if chain.is_empty() {
        return Err(problem(certificate, &"has no certificate in PEM"));
    }
    let private = PrivateKeyDer::from_pem_slice(&read(key)?);
    let private = private.map_err(|error| problem(key, &error))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| problem(certificate, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Connects with TLS 1.2 and 1.3 to servers whose certificates the system trusts.
///
/// # Errors
/// The versions of TLS are not supported.
pub fn connector() -> Result<TlsConnector, String> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// The bytes of a file of certificates, or of a key.
///
/// # Errors
/// It cannot be read, or is larger than 1 MiB.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    match bytes.len() as u64 > MAX_FILE_BYTES {
        true => Err(format!(
            "{} is larger than {MAX_FILE_BYTES} bytes",
            path.display()
        )),
        false => Ok(bytes),
    }
}
