//! The OpenAI API over HTTP/1.1: routes, limits, errors. Owner: one `App` shared by all workers of a server. Invariant:
//! only this folder knows HTTP, and it knows nothing of actors and models: it turns requests into jobs and events into
//! answers.
//!
//! Half-closed connections: a client that shuts down its sending side is taken for gone and its request is aborted. It
//! looks the same as a client that closed, and a closed client must free its memory within one step.
//!
//! Heads that are not HTTP, too long or too slow are answered by the HTTP library (400, 431, 408) without a body, and their
//! connection is closed: the only answers that are not the error object.

mod actor_metrics;
mod admin;
mod answer;
mod body;
mod calls;
mod chat;
mod choices;
mod completions;
mod dashboard;
mod dialect;
pub mod engine;
mod engine_metrics;
pub mod errors;
mod exposition;
mod health;
pub mod keys;
mod latency;
pub mod meter;
pub mod metrics;
mod models;
mod observe;
mod openapi;
mod operations;
mod process_metrics;
mod prompts;
mod routers;
mod sse;
#[cfg(test)]
pub(crate) mod testing;
mod tokens;
mod trace;
pub mod types;
mod version;

use crate::telemetry::Tracer;
use crate::text::tools::ToolDialect;
use actix_web::dev::Server;
use actix_web::{HttpRequest, HttpServer, middleware, web};
pub use admin::Reload;
use dashboard::Dashboard;
use dialect::Detail;
use engine::Engine;
use errors::ApiError;
use keys::Keys;
use metrics::Metrics;
use prompts::Tokenising;
pub use routers::Router;
use rustls::ServerConfig;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokenrouter_core::job::{Prompt, Target};
use tokenrouter_core::text::TextCodec;
use types::chat::Conversation;
use types::generation::{Generation, SamplingDefaults};

/// How long a connection may take to close; then it is cut.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Writes a conversation as a prompt.
pub trait ChatTemplate: Send + Sync {
    /// The prompt for the assistant's next turn; nothing the client wrote becomes a control token.
    ///
    /// # Errors
    /// What the template says against this conversation; it is shown to the client.
    fn prompt(&self, conversation: &Conversation) -> Result<Prompt, String>;

    /// How its models call tools.
    fn tools(&self) -> ToolDialect {
        ToolDialect::default()
    }

    /// How it is written and which tokens it names, for `/tokenizer_info`.
    fn facts(&self) -> TemplateFacts {
        TemplateFacts::default()
    }
}

/// What is known of a chat template; nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateFacts {
    /// Its text.
    pub source: Option<String>,
    /// Name of the token that begins a text.
    pub bos: Option<String>,
    /// Name of the token that ends a text.
    pub eos: Option<String>,
}

/// A name clients can ask for.
#[derive(Clone)]
pub struct Served {
    /// The name.
    pub id: String,
    /// Who generates under it.
    pub target: Target,
    /// Longest prompt plus answer, in tokens.
    pub context_len: u32,
    /// What its model does where a request is silent.
    pub defaults: SamplingDefaults,
    /// Its chat template; `None` refuses chat.
    pub chat: Option<Arc<dyn ChatTemplate>>,
}

/// Bounds of one server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// How long work may wait without any step of its model before `/health` says so.
    pub stall: Duration,
    /// How long a client may take to send a body, or leave a stream unread.
    pub client: Duration,
    /// Longest silence on a stream before a comment is sent.
    pub silence_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body_bytes: 8 << 20,
            stall: Duration::from_secs(60),
            client: Duration::from_secs(60),
            silence_max: Duration::from_secs(10),
        }
    }
}

/// What a server is made of.
pub struct Parts {
    /// Who generates.
    pub engine: Arc<dyn Engine>,
    /// The vocabulary shared by all models.
    pub codec: Arc<dyn TextCodec>,
    /// The served names: the routed one first, then each model.
    pub served: Vec<Served>,
    /// Names of the models by index.
    pub model_names: Vec<String>,
    /// How requests are routed.
    pub router: Router,
    /// Bounds of this server.
    pub limits: Limits,
}

/// What all requests of a server share.
pub struct App {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) codec: Arc<dyn TextCodec>,
    pub(crate) tokenising: Tokenising,
    pub(crate) served: Vec<Served>,
    pub(crate) model_names: Arc<[String]>,
    pub(crate) router: Router,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) dashboard: Dashboard,
    pub(crate) keys: Keys,
    pub(crate) started_unix: u64,
    pub(crate) reload: Option<Reload>,
    pub(crate) tracer: Option<Tracer>,
}

impl App {
    /// Puts a server together.
    ///
    /// # Errors
    /// When a metric could not be registered.
    pub fn new(parts: Parts) -> prometheus::Result<Self> {
        let Parts { engine, codec, served, model_names, router, limits } = parts;
        let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let metrics = Metrics::new(served.iter().map(|served| served.id.as_str()))?;
        let (model_names, keys) = (model_names.into(), Keys::default());
        let tokenising = Tokenising::new(Arc::clone(&codec));
        Ok(App {
            engine,
            codec,
            tokenising,
            served,
            model_names,
            router,
            limits,
            metrics,
            dashboard: Dashboard::default(),
            keys,
            started_unix,
            reload: None,
            tracer: None,
        })
    }

    /// The same with `POST /admin/reload`.
    pub fn with_reload(self, reload: Reload) -> Self {
        App { reload: Some(reload), ..self }
    }

    /// The same with a span for each request to generate.
    pub fn with_tracer(self, tracer: Option<Tracer>) -> Self {
        App { tracer, ..self }
    }

    /// The same for clients that have one of these keys.
    pub fn with_keys(self, keys: Keys) -> Self {
        App { keys, ..self }
    }

    /// What is counted at the HTTP side, and where other parts may register more.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    fn served(&self, name: &str) -> Result<&Served, ApiError> {
        let found = self.served.iter().find(|served| served.id == name);
        found.ok_or_else(|| {
            let valid: Vec<&str> = self.served.iter().map(|served| served.id.as_str()).collect();
            ApiError::unknown_model(&name.chars().take(128).collect::<String>(), &valid)
        })
    }

    fn detail(&self, logprobs: bool, generation: &Generation) -> Detail {
        let (codec, model_names) = (Arc::clone(&self.codec), Arc::clone(&self.model_names));
        let Generation { token_models, token_details, .. } = *generation;
        Detail { codec, model_names, logprobs, token_models, token_details }
    }
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Addresses; port 0 takes a free port.
    pub addresses: Vec<SocketAddr>,
    /// Threads that serve connections.
    pub workers: usize,
}

/// A server ready to be awaited, and the addresses it listens at. It does not handle signals: whoever runs it drains the
/// engine first and then stops it through its handle.
///
/// # Errors
/// When an address cannot be bound.
pub fn server(app: App, listen: &Listen) -> io::Result<(Server, Vec<SocketAddr>)> {
    serve(app, listen, None)
}

/// As [`server`], over TLS.
///
/// # Errors
/// As [`server`].
pub fn secure_server(app: App, listen: &Listen, tls: ServerConfig) -> io::Result<(Server, Vec<SocketAddr>)> {
    serve(app, listen, Some(tls))
}

fn serve(app: App, listen: &Listen, tls: Option<ServerConfig>) -> io::Result<(Server, Vec<SocketAddr>)> {
    let app = web::Data::new(app);
    let server = HttpServer::new(move || {
        // The last one is the outermost.
        let service = actix_web::App::new().app_data(app.clone()).wrap(middleware::from_fn(keys::guard));
        service.wrap(middleware::from_fn(observe::observe)).configure(routes)
    })
    .workers(listen.workers.max(1))
    .h1_allow_half_closed(false)
    // A token is a small write; without this the second one of an answer waits for the first one's acknowledgement, 40 ms.
    .tcp_nodelay(true)
    .client_disconnect_timeout(DISCONNECT_TIMEOUT)
    .disable_signals();
    let addresses = listen.addresses.as_slice();
    let server = match tls {
        Some(tls) => server.bind_rustls_0_23(addresses, tls)?,
        None => server.bind(addresses)?,
    };
    let bound = server.addrs();
    Ok((server.run(), bound))
}

/// All routes.
fn routes(config: &mut web::ServiceConfig) {
    for operation in operations::OPERATIONS {
        let route = (operation.handler)().method(operation.method.clone());
        let resource = web::resource(operation.path).route(route);
        config.service(resource.default_service(only(operation.method.as_str())));
    }
    dashboard::configure(config);
    config.default_service(web::to(|request: HttpRequest| async move {
        Err::<&str, _>(ApiError::unknown_route(request.method().as_str(), request.path()))
    }));
}

/// Answers every other method of a route.
fn only(allow: &'static str) -> actix_web::Route {
    web::to(move |request: HttpRequest| async move {
        Err::<&str, _>(ApiError::wrong_method(request.method().as_str(), request.path(), allow))
    })
}

#[cfg(test)]
mod tests;
