//! Soak: thousands of requests of all kinds against `tokenrouter serve` in a process of its own, and what must be the same
//! afterwards: memory, KV pages, and every request in exactly one counter.
//! Owner: `tests/src/bin/soak.rs` and `tests/tests/soak_http.rs`. Invariant: everything is compared at rest, with no request
//! alive and the prefix cache full.

pub mod request;
pub mod server;

use request::{Ledger, Wish};
use server::Server;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// KV memory of both models in tokens: few, so that the prefix cache is full early and requests lose memory to others.
const KV_TOKENS: u32 = 2560;
/// Requests that fill all that is bounded before anything is compared: the prefix cache, and the ids of ended requests that
/// are remembered.
const WARM_UP: u64 = 5000;
/// Time after which an idle server has given back what it gives back.
const REST: Duration = Duration::from_secs(2);

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Soak {
    /// The program and its arguments in front of `--config FILE serve`.
    pub program: Vec<String>,
    /// Requests after the warm-up.
    pub requests: u64,
    /// Requests before anything is compared.
    pub warm_up: u64,
    /// Clients at the same time.
    pub clients: usize,
    /// Decides every request.
    pub seed: u64,
    /// A folder for launch file and log.
    pub folder: PathBuf,
}

impl Soak {
    /// As `just soak` runs it.
    pub fn new(program: Vec<String>, folder: PathBuf) -> Self {
        Soak { program, requests: 2000, warm_up: WARM_UP, clients: 12, seed: 1, folder }
    }

    /// Runs it.
    ///
    /// # Panics
    /// When the server does not start or does not come to rest: a failed test.
    pub fn run(&self) -> Report {
        let server = Server::start(&self.program, &self.folder, KV_TOKENS);
        let started = Instant::now();
        self.play(&server, 0..self.warm_up);
        server.rest(REST);
        let (before, mut readings) = (server.counters(), vec![Reading::of(&server, 0)]);
        let mut ledger = Ledger::default();
        let block = self.requests.div_ceil(8).max(1);
        for from in (0..self.requests).step_by(block as usize) {
            let to = (from + block).min(self.requests);
            ledger.add(self.play(&server, self.warm_up + from..self.warm_up + to));
            server.rest(REST);
            readings.push(Reading::of(&server, to));
        }
        let counters = server.counters().since(&before);
        Report { soak: self.clone(), readings, ledger, counters, seconds: started.elapsed().as_secs() }
    }

    /// Sends the requests of these numbers, several at a time.
    fn play(&self, server: &Server, numbers: std::ops::Range<u64>) -> Ledger {
        let (next, ledger) = (AtomicU64::new(numbers.start), Mutex::new(Ledger::default()));
        std::thread::scope(|scope| {
            for _ in 0..self.clients {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= numbers.end {
                            return;
                        }
                        let entry = Wish::number(self.seed, number).play(server.address);
                        ledger.lock().expect("no client panics").add(entry);
                    }
                });
            }
        });
        ledger.into_inner().expect("no client panics")
    }
}

/// The server at rest.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Requests sent since the first reading.
    pub requests: u64,
    /// Resident memory, KiB.
    pub memory_kib: u64,
    /// Threads.
    pub threads: u64,
    /// Open files and sockets.
    pub files: u64,
    /// KV pages held by requests, both models.
    pub pages_used: f64,
    /// KV pages kept for prefix hits, both models.
    pub pages_cached: f64,
    /// KV pages in all.
    pub pages: f64,
}

impl Reading {
    fn of(server: &Server, requests: u64) -> Self {
        let counters = server.counters();
        Reading {
            requests,
            memory_kib: server.status("VmRSS:"),
            threads: server.status("Threads:"),
            files: server.files(),
            pages_used: counters.sum("tokenrouter:kv_pages_used"),
            pages_cached: counters.sum("tokenrouter:kv_pages_cached"),
            pages: counters.sum("tokenrouter:kv_pages{"),
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    /// What was done.
    pub soak: Soak,
    /// The server at rest, first after the warm-up.
    pub readings: Vec<Reading>,
    /// What the clients saw.
    pub ledger: Ledger,
    /// How far the server's counters went.
    pub counters: server::Counters,
    /// Time of everything.
    pub seconds: u64,
}

impl Report {
    /// What is wrong; `share` is how much larger memory may be at the end than after the warm-up.
    pub fn faults(&self, share: f64) -> Vec<String> {
        let mut faults = self.ledger.faults.clone();
        let (first, last) = (&self.readings[0], &self.readings[self.readings.len() - 1]);
        let mut check = |holds: bool, what: String| {
            if !holds {
                faults.push(what);
            }
        };
        let grown = self.growth();
        check(grown <= share, format!("memory grew by {:.2} %: {first:?}, {last:?}", grown * 100.0));
        for reading in &self.readings {
            check(reading.pages_used == 0.0, format!("pages are held at rest: {reading:?}"));
            // Threads of a pool and sockets that are closing are no more than there are clients.
            let clients = self.soak.clients as u64;
            check(reading.threads <= first.threads + clients, format!("more threads than before: {reading:?}"));
            check(reading.files <= first.files + clients, format!("more open files than before: {reading:?}"));
        }
        let used = [first, last].iter().all(|reading| reading.pages_cached > 0.0 && reading.pages == first.pages);
        check(used, format!("the prefix cache is not in use, or pages are missing: {first:?}, {last:?}"));
        let (ledger, counters) = (&self.ledger, &self.counters);
        for (status, &seen) in &ledger.statuses {
            let label = format!("status=\"{status}\"");
            let own = counters.sum_where("tokenrouter:http_requests_total", &format!("route=\"/metrics\",{label}"));
            let counted = counters.sum_where("tokenrouter:http_requests_total", &label) - own;
            let most = seen + ledger.cut;
            let fits = counted >= seen as f64 && counted <= most as f64;
            check(fits, format!("status {status} came {seen} times with {} cut, {counted} are counted", ledger.cut));
        }
        let ended =
            |reason: &str| counters.sum_where("vllm:request_success_total", &format!("finished_reason=\"{reason}\""));
        for reason in ["stop", "length"] {
            let seen = ledger.finished.get(reason).copied().unwrap_or(0);
            let fits = ended(reason) >= seen as f64 && ended(reason) <= (seen + ledger.cut_choices) as f64;
            check(fits, format!("{reason}: {seen} choices seen, {} counted", ended(reason)));
        }
        let (all, seen) = (counters.sum("vllm:request_success_total"), ledger.finished.values().sum::<u64>());
        let fits = all >= seen as f64 && all <= (seen + ledger.cut_choices) as f64;
        check(fits, format!("{seen} choices seen to their end and {} cut, {all} counted", ledger.cut_choices));
        check(ended("error") == 0.0, format!("{} choices failed", ended("error")));
        let once = counters.sum("vllm:e2e_request_latency_seconds_count");
        check(once == all, format!("{all} choices ended and {once} were timed"));
        for restarts in ["tokenrouter:executor_restarts_total", "tokenrouter:actor_restarts_total"] {
            check(counters.sum(restarts) == 0.0, format!("{restarts}: {}", counters.sum(restarts)));
        }
        faults
    }

    /// How much larger memory was at the end than after the warm-up, as a share.
    pub fn growth(&self) -> f64 {
        let (first, last) =
            (self.readings[0].memory_kib as f64, self.readings[self.readings.len() - 1].memory_kib as f64);
        last / first - 1.0
    }

    /// The report as a page of the documentation.
    pub fn page(&self, command: &str) -> String {
        let (ledger, counters) = (&self.ledger, &self.counters);
        let mut page = format!(
            "# Soak\n\nWritten by `{command}` on {}, commit {}, {}.\n\n\
             {} requests of {} clients at once against `tokenrouter serve` with the demo pair ({} tokens of KV memory per model),\n\
             after {} requests of the same kinds that fill prefix cache and all that is remembered of ended requests; {} s in all.\n\
             The server runs with MALLOC_ARENA_MAX=1: what the C library keeps for each thread would hide a leak of a percent.\n\
             Kinds: chat and text, streamed and whole, 1 to 3 choices, log-probabilities, stop strings, echo, JSON schemas, readers\n\
             that read slowly, requests that are wrong in many ways, and clients that leave: in the middle of the body, of a stream\n\
             or before a whole answer, by close, reset or half-close. All readings are taken with no request alive.\n\n\
             | requests | resident memory, KiB | threads | open files | KV pages held | KV pages cached |\n\
             |--:|--:|--:|--:|--:|--:|\n",
            shell("date -u +%F"),
            shell("git rev-parse --short HEAD"),
            machine(),
            self.soak.requests,
            self.soak.clients,
            KV_TOKENS,
            self.soak.warm_up,
            self.seconds,
        );
        for reading in &self.readings {
            let Reading { requests, memory_kib, threads, files, pages_used, pages_cached, pages } = reading;
            let line = format!(
                "| {requests} | {memory_kib} | {threads} | {files} | {pages_used} | {pages_cached} of {pages} |"
            );
            page.push_str(&line);
            page.push('\n');
        }
        let statuses: Vec<String> =
            ledger.statuses.iter().map(|(status, count)| format!("{count} x {status}")).collect();
        let reasons: Vec<String> = ["stop", "length", "abort", "error"]
            .iter()
            .map(|reason| {
                let label = format!("finished_reason=\"{reason}\"");
                format!("{} {reason}", counters.sum_where("vllm:request_success_total", &label))
            })
            .collect();
        let seen: u64 = ledger.finished.values().sum();
        // Writing to a String does not fail.
        let _ = write!(
            page,
            "\nMemory at the end: {:+.2} % of what it was after the warm-up.\n\n\
             Clients saw {} and left {} requests early.\nThey saw {seen} choices to their end; the server counts {},\nof which \
             at most the {} choices of those who left are not among the {seen}.\nMeanwhile {} preemptions, {} hops, {} tokens.\n",
            self.growth() * 100.0,
            statuses.join(", "),
            ledger.cut,
            reasons.join(", "),
            ledger.cut_choices,
            counters.sum("vllm:num_preemptions_total"),
            counters.sum("tokenrouter:hops_total"),
            counters.sum("vllm:generation_tokens_total"),
        );
        page
    }
}

/// What a command says, in one line.
fn shell(line: &str) -> String {
    let said = Command::new("sh").args(["-c", line]).output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&said).trim().to_owned()
}

/// The processor, its cores and the memory of this machine.
pub fn machine() -> String {
    let model = shell("sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1");
    let memory = shell("awk '/^MemTotal/ { printf \"%.0f GiB\", $2 / 1048576 }' /proc/meminfo");
    format!("{} cores of {model}, {memory}", shell("nproc"))
}
