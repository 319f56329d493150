//! `tokenrouter bench serve`: load for any OpenAI endpoint, and what came of it. Owner: the process. Invariant: nothing is
//! prepared or computed while requests are measured; what was measured is told even when the run is ended early.

mod arrivals;
mod client;
mod compare;
mod drive;
mod html;
mod options;
mod prompts;
mod report;
mod stream;
mod summary;

use super::super::files;
use super::super::{CliError, Context};
use arrivals::Arrivals;
use client::Client;
use drive::{Block, Pace, Stop, Work, block};
use hyper::body::Bytes;
use indicatif::ProgressBar;
pub use options::Args;
use options::Settings;
use prompts::{Asked, Questions, path};
use report::{Report, Side};
use std::io::{self, Write};
use std::time::Duration;
use summary::Measured;

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let settings = args.settings(context)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (sides, stopped) = runtime.block_on(measure(context, (args, &settings)))?;
    let report = Report::new(args, &settings, (&sides, stopped));
    let text = blocks(&report);
    let json = serde_json::to_string(&report).map_err(io::Error::other)? + "\n";
    if let Some(file) = &args.html {
        let measured: Vec<Measured> = sides.iter().map(|side| side.measured.clone()).collect();
        files::write(file, html::page(&report, &measured, &text).as_bytes(), "--html")?;
    }
    match &args.json {
        Some(_) if args.wants_json() => io::stdout().write_all(json.as_bytes())?,
        file => {
            if let Some(file) = file {
                files::write(file, json.as_bytes(), "--json")?;
            }
            io::stdout().write_all(text.as_bytes())?;
        }
    }
    if stopped {
        return Err(CliError::Interrupted);
    }
    match report.servers.iter().find(|server| server.summary.completed == 0) {
        Some(server) => Err(CliError::Failed(format!("{} answered no request", server.url))),
        None => Ok(()),
    }
}

/// The figures of all servers for people.
fn blocks(report: &Report) -> String {
    let mut text = String::new();
    for server in &report.servers {
        let title = if report.servers.len() > 1 { server.title() } else { "Serving Benchmark Result".to_owned() };
        text += &summary::block(&server.summary, &report.settings, &title);
    }
    if let Some(ratios) = &report.ratios {
        text += &compare::text(ratios);
    }
    text
}

/// One server, ready to be asked.
struct Ready {
    url: String,
    model: String,
    client: Client,
    bodies: Vec<Bytes>,
    path: String,
    /// Requests that were sent so far: where the next block goes on.
    sent: usize,
    measured: Measured,
}

async fn measure(context: &Context, (args, settings): (&Args, &Settings)) -> Result<(Vec<Side>, bool), CliError> {
    let mut stop = Stop::listen()?;
    context.interrupts.are_mine();
    let mut servers = tokio::select! {
        servers = prepare(context, (args, settings)) => servers?,
        () = stop.asked() => return Err(CliError::Interrupted),
    };
    for server in &mut servers {
        warm_up(server, settings, &mut stop).await?;
    }
    let blocks = if servers.len() > 1 { args.blocks.min(settings.requests.unwrap_or(u32::MAX)) } else { 1 };
    let total = u64::from(settings.requests.unwrap_or(0)) * servers.len() as u64;
    let bar = if total > 0 { context.progress.count("requests", total) } else { context.progress.busy("requests") };
    let turns: Vec<usize> = if servers.len() > 1 { compare::turns(blocks).collect() } else { vec![0] };
    for turn in turns {
        let server = &mut servers[turn];
        let pace = pace(settings, (server.measured.blocks.len() as u32, blocks));
        let found = server.block(&pace, (&mut stop, &bar)).await;
        server.measured.blocks.push(found);
        if stop.came {
            break;
        }
    }
    bar.finish_and_clear();
    let side = |ready: Ready| Side { url: ready.url, model: ready.model, measured: ready.measured };
    Ok((servers.into_iter().map(side).collect(), stop.came))
}

impl Ready {
    async fn block(&mut self, pace: &Pace, (stop, bar): (&mut Stop, &ProgressBar)) -> Block {
        let work = Work { client: &self.client, path: &self.path, bodies: &self.bodies, first: self.sent };
        let found = block(&work, pace, (stop, bar)).await;
        self.sent += found.sent.len();
        found
    }
}

/// Asks for names, makes prompts: everything that is needed before anything is measured.
async fn prepare(context: &Context, (args, settings): (&Args, &Settings)) -> Result<Vec<Ready>, CliError> {
    let environment = context.environment.openai_api_key.as_ref().map(|key| key.reveal());
    let key = args.api_key.as_deref().or(environment);
    let wanted = [(Some(&args.url), &args.model), (args.compare.as_ref(), &args.compare_model)];
    let mut servers = Vec::new();
    let mut questions: Option<Questions> = None;
    for (url, model) in wanted {
        let Some(url) = url else { continue };
        let client = Client::new(url, (key, args.ca.as_deref()), settings.patience())?;
        let model = match model {
            Some(model) => model.clone(),
            None => first_model(&client, url).await?,
        };
        let asked = Asked { client: &client, model: &model, settings };
        if questions.is_none() {
            questions = Some(Questions::prepare(&asked, &args.prompts).await?);
        }
        let bodies = questions.as_ref().map(|questions| questions.bodies(&asked)).unwrap_or_default();
        let path = path(&asked);
        servers.push(Ready { url: url.clone(), model, client, bodies, path, sent: 0, measured: Measured::default() });
    }
    Ok(servers)
}

async fn first_model(client: &Client, url: &str) -> Result<String, CliError> {
    let failed = |reason: String, remedy: &str| CliError::Failed(format!("{url}: {reason}; {remedy}"));
    let answer = client.whole(&client.address.api("/models"), None).await;
    let absent = "check that the server runs there (with a certificate of its own: --ca)";
    let (status, models) = answer.map_err(|trouble| failed(trouble.to_string(), absent))?;
    let first = models["data"][0]["id"].as_str().map(str::to_owned);
    let remedy = match status {
        401 | 403 => "give its key with --api-key or OPENAI_API_KEY",
        _ => "name the model with --model",
    };
    first.ok_or_else(|| failed(format!("/models names no model (HTTP {status})"), remedy))
}

/// Requests that are not measured; they open the connections.
async fn warm_up(server: &mut Ready, settings: &Settings, stop: &mut Stop) -> Result<(), CliError> {
    let at_once = settings.max_concurrency.unwrap_or(1) as usize;
    let pace = Pace { at_once, requests: settings.warmup as usize, until: None, times: None };
    let hidden = ProgressBar::hidden();
    // From the end of the list: what is measured is not in the server's cache yet.
    server.sent = server.bodies.len() - settings.warmup as usize % server.bodies.len();
    let found = server.block(&pace, (stop, &hidden)).await;
    server.sent = 0;
    let trouble = found.sent.iter().find_map(|sent| sent.outcome.as_ref()?.as_ref().err());
    match trouble {
        _ if stop.came => Err(CliError::Interrupted),
        Some(trouble) => Err(CliError::Failed(format!(
            "{} did not answer a request before the measured ones: {trouble}",
            server.url
        ))),
        None => Ok(()),
    }
}

/// When block `index` of so many sends; together they are the run.
fn pace(settings: &Settings, (index, blocks): (u32, u32)) -> Pace {
    let share = |whole: u32| whole / blocks + u32::from(index < whole % blocks);
    let requests = settings.requests.map(share);
    let seconds = settings.seconds.map(|seconds| seconds / f64::from(blocks));
    let times = settings.request_rate.map(|rate| {
        let seed = settings.seed.wrapping_add(u64::from(index) << 32);
        let arrivals = Arrivals { rate, burstiness: settings.burstiness.unwrap_or(1.0), seed };
        match (requests, seconds) {
            (Some(requests), _) => arrivals.of(requests),
            (None, seconds) => arrivals.within(seconds.unwrap_or(0.0)),
        }
    });
    Pace {
        at_once: settings.max_concurrency.map_or(usize::MAX, |most| most as usize),
        requests: requests.map_or(usize::MAX, |requests| requests as usize),
        until: seconds.map(Duration::from_secs_f64),
        times,
    }
}
