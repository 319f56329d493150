//! `tokenrouter serve`: the OpenAI API until a signal says stop. Owner: the process. Invariant: on the first signal no new
//! request is taken and running ones may end within `drain_ms`; on the second everything ends at once. Whatever clients do
//! with their connections, the process ends within a second after that. SIGHUP reads the routing algorithm, the keys and
//! the certificate again. Other machines are let in only with API keys, or when the user says that everybody may ask.

use super::logs::{self, Talk};
use super::{CliError, Context};
use crate::http::keys::Keys;
use crate::http::{self, App, Listen};
use crate::launch::{self, Certificate, LaunchError, Loaded, Reloader};
use crate::telemetry::Tracer;
use actix_web::dev::{Server, ServerHandle};
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_config::{Bytes, Device, LaunchFile};
use tokenrouter_core::executor::PAGE_TOKENS;
use tokio::signal::unix::{SignalKind, signal};

/// Time that connections get to take their last bytes when all requests have ended; then they are cut.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// Options of `serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address to listen on, instead of server.host
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on, instead of server.port; 0 takes any free one
    #[arg(long, short)]
    port: Option<u16>,
    /// Let other machines in although there are no API keys
    #[arg(long)]
    insecure: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let overrides = launch::Overrides { host: args.host.clone(), port: args.port, ..context.common.overrides()? };
    let mut file = launch::read(context.common.config.as_deref(), &overrides, &context.environment)?;
    file.server.insecure |= args.insecure;
    logs::start(context, &file, Talk::Server)?;
    let telemetry = context.environment.telemetry.clone().map_err(LaunchError::Option)?;
    let addresses = addresses(&file)?;
    let tracer = telemetry.map(Tracer::start);
    let (keys, certificate) = (launch::keys(&file, &context.environment)?, Certificate::read(&file)?);
    let door = Door { keys, certificate, tracer };
    door.check(&file, &addresses)?;
    let mut loaded = super::run::load(context, file)?;
    let config = context.common.config.clone();
    let reloader = Arc::new(Reloader::new(config, overrides, context.environment.clone(), &mut loaded));
    actix_rt::System::new().block_on(serve(context, (&loaded, reloader), (addresses, door)))
}

/// Who is let in, and how.
struct Door {
    keys: Keys,
    certificate: Option<Arc<Certificate>>,
    /// Who is told what goes on inside.
    tracer: Option<Tracer>,
}

impl Door {
    /// Other machines are let in only with keys, or when the user says that they need none.
    fn check(&self, file: &LaunchFile, addresses: &[SocketAddr]) -> Result<(), LaunchError> {
        let abroad = addresses.iter().find(|address| !address.ip().to_canonical().is_loopback());
        match abroad {
            Some(address) if !self.keys.guard_api() && !file.server.insecure => {
                let message = format!(
                    "{} lets other machines in and there are no API keys; set server.api_keys_file or \
                     TOKENROUTER_API_KEYS, or server.insecure = true (--insecure) if everybody may ask",
                    address.ip()
                );
                Err(file.error_at("server.host", message).into())
            }
            _ => Ok(()),
        }
    }

    fn open(&self, app: App, listen: &Listen) -> Result<(Server, Vec<SocketAddr>), LaunchError> {
        let app = app.with_keys(self.keys.clone()).with_tracer(self.tracer.clone());
        let opened = match &self.certificate {
            Some(certificate) => http::secure_server(app, listen, certificate.config()?),
            None => http::server(app, listen),
        };
        opened.map_err(|error| {
            let places: Vec<String> = listen.addresses.iter().map(SocketAddr::to_string).collect();
            LaunchError::Server(format!(
                "cannot listen on {}: {error}; choose another server.port or --port",
                places.join(" and ")
            ))
        })
    }

    /// Reads keys and certificate again and says in the log what came of it.
    fn reload(&self, file: &LaunchFile, environment: &launch::Environment) {
        match launch::reload_keys(file, environment, &self.keys) {
            Ok(()) if self.keys.guard_api() || self.keys.guard_admin() => {
                tracing::info!("reloaded: clients need the keys as they are now");
            }
            Ok(()) => {}
            Err(error) => tracing::error!(%error, "not reloaded: the keys are as before"),
        }
        match self.certificate.as_ref().map(|certificate| certificate.reload()) {
            Some(Ok(())) => tracing::info!("reloaded: new connections get the certificate as it is now"),
            Some(Err(error)) => tracing::error!(%error, "not reloaded: the certificate is as before"),
            None => {}
        }
    }
}

fn addresses(file: &LaunchFile) -> Result<Vec<SocketAddr>, LaunchError> {
    let (host, port) = (file.server.host.as_str(), file.server.port);
    let found = (host, port).to_socket_addrs().map_err(|error| {
        file.error_at("server.host", format!("server.host = \"{host}\" is no address here: {error}; try \"127.0.0.1\""))
    })?;
    // A name may stand for several addresses; with port 0 only one of them could be told to the user.
    Ok(found.take(if port == 0 { 1 } else { usize::MAX }).collect())
}

async fn serve(
    context: &Context,
    (loaded, reloader): (&Loaded, Arc<Reloader>),
    (addresses, door): (Vec<SocketAddr>, Door),
) -> Result<(), CliError> {
    let runtime = loaded.start()?;
    let asked = Arc::clone(&reloader);
    let app = launch::app(loaded, runtime.clone())?.with_reload(Arc::new(move || reload(&asked)));
    let workers = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4));
    let listen = Listen { addresses, workers };
    // Before anybody is told that the server is there: a signal that comes at once is no sudden death.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hangup = signal(SignalKind::hangup())?;
    context.interrupts.are_mine();
    let (server, bound) = door.open(app, &listen)?;
    let door = Arc::new(door);
    if !context.common.quiet {
        io::stdout().write_all(banner((loaded, &runtime), &bound).as_bytes())?;
        io::stdout().flush()?;
    }
    let handle = server.handle();
    let mut running = actix_rt::spawn(server);
    loop {
        tokio::select! {
            ended = &mut running => return ended.map_err(io::Error::other)?.map_err(CliError::Io),
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = hangup.recv() => {
                let (reloader, door) = (Arc::clone(&reloader), Arc::clone(&door));
                let (file, environment) = (loaded.file.clone(), context.environment.clone());
                // What came of it is in the log.
                tokio::task::spawn_blocking(move || {
                    door.reload(&file, &environment);
                    reload(&reloader).is_ok()
                });
            }
        }
    }
    let limit = Duration::from_millis(loaded.file.server.drain_ms);
    tracing::info!(limit_ms = limit.as_millis() as u64, "stopping: no new requests; a second signal stops at once");
    let second = tokio::select! {
        () = wind_down(&runtime, &handle, limit) => false,
        _ = interrupt.recv() => true,
        _ = terminate.recv() => true,
    };
    let at_once = wind_down(&runtime, &handle, Duration::ZERO);
    if second && tokio::time::timeout(CLOSE_MAX, at_once).await.is_err() {
        tracing::warn!("stopped before all clients were told");
    }
    if let Some(tracer) = &door.tracer {
        tracer.stop(CLOSE_MAX);
    }
    Ok(())
}

/// Lets requests end for at most `limit`, then closes the connections. What is still open afterwards (a request that is
/// not sent to its end, a client that does not read) ends with the process.
async fn wind_down(runtime: &Runtime, handle: &ServerHandle, limit: Duration) {
    runtime.drain(limit).await;
    if tokio::time::timeout(CLOSE_MAX, handle.stop(true)).await.is_err() {
        tracing::info!("connections that did not end are cut");
    }
}

/// Reads the routing algorithm again and says in the log what came of it.
fn reload(reloader: &Reloader) -> Result<String, String> {
    match reloader.reload() {
        Ok(algorithm) => {
            tracing::info!(%algorithm, "reloaded: new requests follow the files as they are now");
            Ok(algorithm)
        }
        Err(error) => {
            tracing::error!(%error, "not reloaded: the routing algorithm is as before");
            Err(error.to_string())
        }
    }
}

/// What is served, in a few aligned lines; the last ones are the addresses, for a program the last of all.
fn banner((loaded, runtime): (&Loaded, &Runtime), bound: &[SocketAddr]) -> String {
    let width = loaded.members.iter().map(|member| member.name.len()).max().unwrap_or(0);
    let mut text = format!("tokenrouter {}\n", env!("CARGO_PKG_VERSION"));
    for (member, model) in loaded.members.iter().zip(&loaded.file.models) {
        let (info, limits) = (member.model.info(), member.model.limits());
        let kv_tokens = u64::from(limits.pages) * PAGE_TOKENS as u64;
        text.push_str(&format!(
            "model     {:width$}  {} {}  weights {}  context {}  KV {} tokens ({}){}\n",
            member.name,
            info.architecture,
            parameters(info.parameters),
            Bytes(info.weight_bytes),
            limits.context_len,
            kv_tokens,
            Bytes(kv_tokens * info.kv_bytes_per_token),
            if model.device == Device::Cpu { String::new() } else { format!("  on {}", model.device) },
        ));
    }
    let router = &loaded.file.router;
    let params: Vec<String> = router.params.iter().map(|(name, value)| format!("  {name} {value}")).collect();
    text.push_str(&format!("router    {}  {}{}\n", router.name, router.algorithm, params.concat()));
    let (batching, live_max) = (&loaded.file.batching, loaded.file.server.live_max);
    let thresholds = router.models.iter().zip(runtime.thresholds(live_max));
    let thresholds: Vec<String> = thresholds.map(|(name, threshold)| format!("{name} {threshold}")).collect();
    text.push_str(&format!(
        "batching  {}  waits at most {} ms  thresholds with {live_max} requests (the most): {}\n",
        batching.policy.name(),
        batching.max_wait_ms,
        thresholds.join(", "),
    ));
    let scheme = if loaded.file.server.tls.is_some() { "https" } else { "http" };
    for address in bound {
        text.push_str(&format!("dashboard {scheme}://{address}/dashboard\n"));
    }
    for address in bound {
        text.push_str(&format!("serving   {scheme}://{address}/v1\n"));
    }
    text
}

/// `137.5 K`, `8.2 B`: a number of parameters as people say it.
fn parameters(count: u64) -> String {
    let (value, unit) = match count {
        0..1_000_000 => (count as f64 / 1e3, "K"),
        1_000_000..1_000_000_000 => (count as f64 / 1e6, "M"),
        _ => (count as f64 / 1e9, "B"),
    };
    format!("{value:.1} {unit}")
}
