//! TLS as `[server.tls]` asks for it. Owner: the serve command. Invariant: a certificate and a key are in use together or
//! not at all; files that are wrong change nothing for a running server.

use super::LaunchError;
use rustls::crypto::ring::{default_provider, sign::any_supported_type};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error, ServerConfig};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tokenrouter_config::{LaunchFile, Tls};

/// What a server shows of itself; new connections get what was read last.
#[derive(Debug)]
pub struct Certificate {
    files: Tls,
    current: Mutex<Arc<CertifiedKey>>,
}

/// What is wrong with which of the two files.
struct Fault {
    key: &'static str,
    message: String,
}

impl Certificate {
    /// Reads the files a launch file names; none without `[server.tls]`.
    ///
    /// # Errors
    /// [`LaunchError::Config`] naming the file.
    pub fn read(file: &LaunchFile) -> Result<Option<Arc<Certificate>>, LaunchError> {
        let Some(files) = file.server.tls.clone() else { return Ok(None) };
        let current = load(&files).map_err(|fault| file.error_at(fault.key, fault.message))?;
        Ok(Some(Arc::new(Certificate { files, current: Mutex::new(current) })))
    }

    /// Reads the same files again; new connections get what they hold now.
    ///
    /// # Errors
    /// One line; what was in use stays.
    pub fn reload(&self) -> Result<(), String> {
        let new = load(&self.files).map_err(|fault| format!("{}: {}", fault.key, fault.message))?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// TLS 1.2 and 1.3 with this certificate, and no certificates of clients.
    ///
    /// # Errors
    /// [`LaunchError::Server`] when the provider knows no version of TLS.
    pub fn config(self: &Arc<Self>) -> Result<ServerConfig, LaunchError> {
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| LaunchError::Server(format!("TLS cannot be set up: {error}")))?;
        Ok(builder.with_no_client_auth().with_cert_resolver(Arc::clone(self) as _))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn load(files: &Tls) -> Result<Arc<CertifiedKey>, Fault> {
    let fault =
        |key: &'static str, path: &Path, what: String| Fault { key, message: format!("{}: {what}", path.display()) };
    let of_cert = |what: String| fault("server.tls.cert", &files.cert, what);
    let of_key = |what: String| fault("server.tls.key", &files.key, what);
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect)
        .map_err(|error| of_cert(format!("cannot be read as PEM: {error}")))?;
    if chain.is_empty() {
        return Err(of_cert("holds no certificate; give a PEM file with one".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key);
    let key = key.map_err(|error| of_key(format!("holds no private key that can be read as PEM: {error}")))?;
    let key = any_supported_type(&key).map_err(|error| of_key(format!("is of no kind that is known: {error}")))?;
    let pair = CertifiedKey::new(chain, key);
    match pair.keys_match() {
        // Of a kind of key that cannot tell its public half, the handshake will.
        Ok(()) | Err(Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => Ok(Arc::new(pair)),
        Err(error) => Err(of_key(format!("is not the key of {}: {error}", files.cert.display()))),
    }
}
