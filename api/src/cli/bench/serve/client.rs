//! An HTTP/1.1 client that keeps its connections. Owner: one measured server. Invariant: a request is sent at most once,
//! unless the connection it was put on had been closed before a byte of an answer came; nothing is followed or retried
//! beyond that.

use super::super::super::CliError;
use super::stream::{Answer, Events, Watch};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Longest answer that is read as a whole.
const WHOLE_BYTES_MAX: usize = 16 << 20;
/// Characters that are kept of what a server said.
const SAID_MAX: usize = 200;

/// The reason of a request to a server that is not there.
const ABSENT: &str = "cannot connect";

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// In few words, the same for all of a kind: `HTTP 503`, `cannot connect`.
    pub reason: String,
    /// What was said about this one.
    pub said: String,
}

impl Trouble {
    /// A failure of this kind.
    pub fn new(reason: &str, said: &str) -> Trouble {
        Trouble { reason: reason.to_owned(), said: said.chars().take(SAID_MAX).collect() }
    }

    /// Whether nobody was there to ask.
    pub fn is_absence(&self) -> bool {
        self.reason == ABSENT
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason, self.said)
    }
}

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    secure: bool,
    host: String,
    port: u16,
    authority: String,
    /// Path before `/chat/completions`.
    api: String,
}

impl Address {
    /// Reads `http://HOST:PORT[/PATH]`.
    ///
    /// # Errors
    /// What is wrong, and how it should look.
    pub fn read(url: &str) -> Result<Address, String> {
        let wrong = |problem: &str| format!("{url}: {problem}; write http://HOST:PORT or https://HOST/v1");
        let uri: Uri = url.parse().map_err(|error| wrong(&format!("no address ({error})")))?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("neither http nor https")),
        };
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong("no host"))?;
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        if authority.contains('@') {
            return Err(wrong("a name and password mean nothing here"));
        }
        let path = uri.path().trim_end_matches('/');
        let api = if path.is_empty() { "/v1".to_owned() } else { path.to_owned() };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Address { secure, host, port, authority, api })
    }

    /// The path of something in the API, such as `/models`.
    pub fn api(&self, path: &str) -> String {
        format!("{}{path}", self.api)
    }

    /// The path of something beside the API, such as `/tokenize`.
    pub fn beside(&self, path: &str) -> String {
        format!("{}{path}", self.api.strip_suffix("/v1").unwrap_or(&self.api))
    }
}

type Sender = SendRequest<Full<Bytes>>;

/// A client of one server.
pub struct Client {
    /// Where the server is.
    pub address: Address,
    tls: Option<TlsConnector>,
    key: Option<HeaderValue>,
    patience: Duration,
    /// Connections that wait for a request; never more than there were requests at once.
    idle: RefCell<Vec<Sender>>,
}

impl Client {
    /// A client without connections yet.
    ///
    /// # Errors
    /// An address or a key that is none.
    pub fn new(url: &str, (key, ca): (Option<&str>, Option<&Path>), patience: Duration) -> Result<Client, CliError> {
        let address = Address::read(url).map_err(CliError::Usage)?;
        let tls = if address.secure { Some(connector(ca)?) } else { None };
        let key = key.map(|key| HeaderValue::from_str(&format!("Bearer {key}"))).transpose();
        let key = key.map_err(|_| CliError::Usage("the API key holds characters that no header can".to_owned()))?;
        Ok(Client { address, tls, key, patience, idle: RefCell::new(Vec::new()) })
    }

    /// Asks and reads the whole answer: status and JSON (null if it is none).
    ///
    /// # Errors
    /// Whatever keeps it from being answered.
    pub async fn whole(&self, path: &str, body: Option<&Value>) -> Result<(u16, Value), Trouble> {
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let asked = async {
            let (sender, response) = self.send((method, path), bytes).await?;
            let status = response.status().as_u16();
            let bytes = read_whole(response).await?;
            self.idle.borrow_mut().push(sender);
            Ok((status, serde_json::from_slice(&bytes).unwrap_or(Value::Null)))
        };
        self.patiently(asked).await
    }

    /// Asks for a stream and follows it to its end. Times start here.
    ///
    /// # Errors
    /// Whatever keeps it from being answered whole.
    pub async fn stream(&self, path: &str, body: Bytes) -> Result<Answer, Trouble> {
        let started = Instant::now();
        let asked = async {
            let (sender, response) = self.send((Method::POST, path), body).await?;
            if response.status().as_u16() != 200 {
                return Err(self.refusal(sender, response).await);
            }
            let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
            if !kind.starts_with("text/event-stream") {
                return Err(Trouble::new("no event stream", &format!("the content type is {kind:?}")));
            }
            let (mut body, mut events, mut watch) = (response.into_body(), Events::default(), Watch::default());
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| broken(&error))?;
                let at = started.elapsed().as_secs_f64();
                if let Some(data) = frame.data_ref() {
                    events.feed(data, |event| watch.event(event, at))?;
                }
            }
            if watch.done() {
                self.idle.borrow_mut().push(sender);
            }
            watch.finish()
        };
        self.patiently(asked).await
    }

    async fn patiently<T>(&self, asked: impl Future<Output = Result<T, Trouble>>) -> Result<T, Trouble> {
        let late = || Trouble::new("timeout", &format!("no answer within {} s", self.patience.as_secs_f64()));
        tokio::time::timeout(self.patience, asked).await.unwrap_or_else(|_| Err(late()))
    }

    async fn refusal(&self, sender: Sender, response: Response<Incoming>) -> Trouble {
        let reason = format!("HTTP {}", response.status().as_u16());
        let bytes = match read_whole(response).await {
            Ok(bytes) => bytes,
            Err(trouble) => return Trouble::new(&reason, &trouble.said),
        };
        self.idle.borrow_mut().push(sender);
        let said: Option<Value> = serde_json::from_slice(&bytes).ok();
        let said = said.as_ref().and_then(|said| said["error"]["message"].as_str().or(said["message"].as_str()));
        Trouble::new(&reason, &said.map_or_else(|| String::from_utf8_lossy(&bytes).trim().to_owned(), str::to_owned))
    }

    /// Sends over a waiting connection if there is one, else over a new one.
    async fn send(&self, (method, path): (Method, &str), body: Bytes) -> Result<(Sender, Response<Incoming>), Trouble> {
        while let Some(mut sender) = self.waiting() {
            if sender.ready().await.is_err() {
                continue;
            }
            match sender.send_request(self.request((&method, path), body.clone())?).await {
                Ok(response) => return Ok((sender, response)),
                // The server closed a connection that waited, before it read the request.
                Err(error) if error.is_canceled() || error.is_incomplete_message() => break,
                Err(error) => return Err(broken(&error)),
            }
        }
        let mut sender = self.connect().await?;
        let response =
            sender.send_request(self.request((&method, path), body)?).await.map_err(|error| broken(&error))?;
        Ok((sender, response))
    }

    fn waiting(&self) -> Option<Sender> {
        self.idle.borrow_mut().pop()
    }

    fn request(&self, (method, path): (&Method, &str), body: Bytes) -> Result<Request<Full<Bytes>>, Trouble> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, &self.address.authority);
        request = request.header(USER_AGENT, concat!("tokenrouter/", env!("CARGO_PKG_VERSION")));
        request = request.header(ACCEPT, "text/event-stream, application/json");
        if method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        request.body(Full::new(body)).map_err(|error| Trouble::new("no request", &error.to_string()))
    }

    async fn connect(&self) -> Result<Sender, Trouble> {
        let failed = |error: &dyn std::fmt::Display| Trouble::new(ABSENT, &error.to_string());
        let Address { host, port, .. } = &self.address;
        let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(|error| failed(&error))?;
        // Requests are whole in one write; waiting for more would only add to what is measured.
        stream.set_nodelay(true).map_err(|error| failed(&error))?;
        match &self.tls {
            None => open(TokioIo::new(stream)).await,
            Some(connector) => {
                let name = ServerName::try_from(host.clone()).map_err(|error| failed(&error))?;
                let stream = connector.connect(name, stream).await.map_err(|error| failed(&error))?;
                open(TokioIo::new(stream)).await
            }
        }
    }
}

async fn open<S>(stream: S) -> Result<Sender, Trouble>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(stream).await.map_err(|error| broken(&error))?;
    // Its failures show at the request that it carries.
    tokio::spawn(async move { connection.await.is_ok() });
    Ok(sender)
}

async fn read_whole(response: Response<Incoming>) -> Result<Bytes, Trouble> {
    let whole = Limited::new(response.into_body(), WHOLE_BYTES_MAX).collect().await;
    whole.map(|whole| whole.to_bytes()).map_err(|error| Trouble::new("broke off", &error.to_string()))
}

fn broken(error: &hyper::Error) -> Trouble {
    Trouble::new("broke off", &error.to_string())
}

/// TLS with the certificates that browsers trust, and those of a file.
fn connector(ca: Option<&Path>) -> Result<TlsConnector, CliError> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.into() };
    if let Some(path) = ca {
        let wrong = |reason: &dyn std::fmt::Display| CliError::Usage(format!("--ca {}: {reason}", path.display()));
        let before = roots.len();
        for certificate in CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))? {
            roots.add(certificate.map_err(|error| wrong(&error))?).map_err(|error| wrong(&error))?;
        }
        if roots.len() == before {
            return Err(wrong(&"holds no certificate; give a PEM file"));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| CliError::Usage(format!("TLS cannot be set up: {error}")))?;
    Ok(TlsConnector::from(Arc::new(builder.with_root_certificates(roots).with_no_client_auth())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_a_path() {
        let read = |url: &str| Address::read(url).expect(url);
        let address = read("http://127.0.0.1:8080");
        assert_eq!((address.api("/models"), address.beside("/tokenize")), ("/v1/models".into(), "/tokenize".into()));
        assert_eq!(address, read("http://127.0.0.1:8080/v1/"));
        let address = read("https://[::1]/openai/v1");
        assert_eq!((address.host.as_str(), address.port, address.secure), ("::1", 443, true));
        assert_eq!(address.beside("/tokenize"), "/openai/tokenize");
        for wrong in ["127.0.0.1:80", "ftp://x", "http://", "http://me:secret@host", "http://a b"] {
            let error = Address::read(wrong).expect_err(wrong);
            assert!(error.contains("http://HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn what_servers_say_is_kept_short() {
        assert_eq!(Trouble::new("HTTP 500", &"ä".repeat(1000)).said.chars().count(), SAID_MAX);
    }
}
