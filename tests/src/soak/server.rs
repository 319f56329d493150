//! `tokenrouter serve` in a process of its own, its counters and what the kernel says of it. Owner: the soak. Invariant: it
//! ends with its owner.

use crate::raw_client::get;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time to come to rest on a busy machine.
const REST_MAX: Duration = Duration::from_secs(60);

/// The process.
pub struct Server {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Server {
    /// Starts it with the demo pair and so much KV memory for each model; launch file and log lie in the folder.
    ///
    /// # Panics
    /// When it does not start: a failed test.
    pub fn start(program: &[String], folder: &Path, kv_tokens: u32) -> Server {
        let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).with_file_name("config").join("demo");
        let model = |name: &str| {
            let path = demo.join(name);
            format!(
                "[[models]]\nname = \"{name}\"\npath = {:?}\nthreads = 1\nkv_tokens = {kv_tokens}\n",
                path.display().to_string()
            )
        };
        let router = "[router]\nname = \"demo\"\nalgorithm = \"r_stitch\"\nmodels = [\"small\", \"large\"]\n[router.params]\nthreshold = 0.05\n";
        // What the C library keeps for each thread would hide a leak of a percent.
        let one_arena = [("MALLOC_ARENA_MAX", "1")];
        Server::launch(program, folder, &[router, &model("small"), &model("large")].concat(), &one_arena)
    }

    /// Starts it with a launch file and variables of the environment.
    ///
    /// # Panics
    /// When it does not start: a failed test.
    pub fn launch(program: &[String], folder: &Path, launch_file: &str, variables: &[(&str, &str)]) -> Server {
        let config = folder.join("launch.toml");
        std::fs::write(&config, launch_file).expect("a launch file");
        let log = File::create(folder.join("server.log")).expect("a log file");
        let (program, arguments) = program.split_first().expect("a program");
        let mut command = Command::new(program);
        command.args(arguments).arg("--config").arg(&config).args(["--log-level", "warn", "serve", "--port", "0"]);
        command.envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{program}: {error}"));
        let said = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut lines = said.lines().map_while(Result::ok);
        let named = |line: String| {
            line.strip_prefix("serving")?.trim().strip_prefix("http://")?.strip_suffix("/v1")?.parse().ok()
        };
        let address = lines.find_map(named);
        let address = address.unwrap_or_else(|| panic!("no address; see {}", folder.join("server.log").display()));
        Server { child, address }
    }

    /// Asks it to stop and waits until it has: its exit code.
    ///
    /// # Panics
    /// When it was killed: a failed test.
    pub fn stop(mut self) -> i32 {
        // The shell's own kill: the program of that name is not on every machine.
        let asked = Command::new("sh").args(["-c", &format!("kill -TERM {}", self.child.id())]).status();
        assert!(asked.expect("a shell runs").success());
        self.child.wait().expect("it ends").code().expect("an exit code")
    }

    /// A number that the kernel has in `/proc/PID/status`, such as `VmRSS:` in KiB.
    ///
    /// # Panics
    /// When there is none: a failed test.
    pub fn status(&self, name: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
    }

    /// Open files and sockets.
    ///
    /// # Panics
    /// When the process is gone: a failed test.
    pub fn files(&self) -> u64 {
        let path = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(&path).unwrap_or_else(|error| panic!("{path}: {error}")).count() as u64
    }

    /// Its counters now.
    pub fn counters(&self) -> Counters {
        let text = get(self.address, "/metrics").text;
        let series = text.lines().filter(|line| !line.starts_with('#'));
        Counters(
            series
                .filter_map(|line| line.rsplit_once(' '))
                .map(|(name, value)| (name.to_owned(), value.parse().unwrap_or(0.0)))
                .collect(),
        )
    }

    /// Waits until no request is alive, no page held and no connection of a client open, and for so long again.
    ///
    /// # Panics
    /// When that does not come: a failed test.
    #[allow(clippy::disallowed_methods, reason = "another process is waited for, which sends no message")]
    pub fn rest(&self, long: Duration) {
        const GAUGES: [&str; 5] = [
            "tokenrouter:live_requests",
            "tokenrouter:kv_pages_used",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "tokenrouter:pending_requests",
        ];
        let began = Instant::now();
        loop {
            let counters = self.counters();
            let busy: Vec<_> = GAUGES.iter().filter(|gauge| counters.sum(gauge) != 0.0).collect();
            if busy.is_empty() {
                break;
            }
            assert!(began.elapsed() < REST_MAX, "not at rest: {busy:?}: {counters:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        std::thread::sleep(long);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It is gone already, or it goes now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Series of `/metrics` by name and labels.
#[derive(Clone, Debug, Default)]
pub struct Counters(BTreeMap<String, f64>);

impl Counters {
    /// The sum over all series that begin so.
    pub fn sum(&self, name: &str) -> f64 {
        self.sum_where(name, "")
    }

    /// The sum over those with this label.
    pub fn sum_where(&self, name: &str, label: &str) -> f64 {
        let exact = |series: &str| {
            series
                .strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('{') || name.ends_with('{'))
        };
        self.0
            .iter()
            .filter(|(series, _)| exact(series) && series.contains(label))
            .map(|(_, value)| value)
            .fold(0.0, |sum, value| sum + value)
    }

    /// How far each went.
    pub fn since(&self, before: &Counters) -> Counters {
        let moved = |(name, value): (&String, &f64)| (name.clone(), value - before.0.get(name).copied().unwrap_or(0.0));
        Counters(self.0.iter().map(moved).collect())
    }
}
