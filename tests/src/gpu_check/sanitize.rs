//! The small checks once more under NVIDIA's compute-sanitizer. Owner: the program. Invariant: a tool that finds something
//! or crashes is a check that fails; one that is not there or out of time is a row that says so.

use super::report::Report;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Exit status of a run in which a tool found something.
const FOUND: &str = "99";
/// Tools, the most useful first.
const TOOLS: [&str; 3] = ["memcheck", "racecheck", "initcheck"];
/// Time that a tool needs at least, seconds.
const LEAST: u64 = 20;
/// How often a running tool is looked at.
const POLL: Duration = Duration::from_millis(100);

/// Where compute-sanitizer is, `None` where it is not.
fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(usual)
        .map(|folder| folder.join("compute-sanitizer"))
        .find(|program| program.is_file())
}

/// Runs this program with `arguments` under every tool; output goes to files in `folder`.
pub fn run(arguments: &[String], folder: &Path, report: &mut Report) {
    let Some(sanitizer) = find() else {
        return report.skip("compute-sanitizer", "not found on this machine");
    };
    for tool in TOOLS {
        if report.has_time(tool, LEAST) {
            let left = report.left();
            match under(tool, (&sanitizer, arguments), (folder, left)) {
                Ok(Some(text)) => report.check(tool, Ok(text)),
                Ok(None) => report.skip(tool, &format!("stopped after {} s", left.as_secs())),
                Err(reason) => report.check(tool, Err(reason)),
            }
        }
    }
}

/// What the tool says at its end; `None` if there was not enough time.
fn under(
    tool: &str,
    (sanitizer, arguments): (&Path, &[String]),
    (folder, left): (&Path, Duration),
) -> Result<Option<String>, String> {
    let log = folder.join(format!("{tool}.txt"));
    let failed = |error: std::io::Error| format!("{}: {error}", log.display());
    let file = File::create(&log).map_err(failed)?;
    let program = std::env::current_exe().map_err(failed)?;
    let mut child = Command::new(sanitizer)
        .args(["--tool", tool, "--error-exitcode", FOUND])
        .arg(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(file.try_clone().map_err(failed)?)
        .stdout(file)
        .spawn()
        .map_err(|error| format!("{}: {error}", sanitizer.display()))?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break status,
            None if began.elapsed() >= left => {
                child.kill().map_err(failed)?;
                child.wait().map_err(failed)?;
                return Ok(None);
            }
            None => std::thread::park_timeout(POLL),
        }
    };
    let said = fs::read_to_string(&log).map_err(failed)?;
    let own = said.lines().rfind(|line| line.starts_with("=========")).unwrap_or("says nothing");
    let own = own.trim_start_matches('=').trim();
    if status.success() { Ok(Some(own.to_owned())) } else { Err(format!("{status}: {own}; see {}", log.display())) }
}
