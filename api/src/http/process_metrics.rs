//! What the operating system says of this process, under the names that Prometheus' own clients use, and which program it
//! is. Owner: one answer to `GET /metrics`. Invariant: what the system does not tell is left out.

use super::exposition::Text;
use super::version::Version;
use std::fs;

/// Unit of the times in `/proc`: Linux has shown them in hundredths of a second on every platform for decades.
const TICKS_PER_SECOND: f64 = 100.0;

/// One number: name, type, help, value.
type Fact = (&'static str, &'static str, &'static str, fn(&Proc) -> Option<f64>);

const FACTS: [Fact; 7] = [
    ("process_cpu_seconds_total", "counter", "Time on processors, user and system.", |proc| {
        Some((proc.stat(13)? + proc.stat(14)?) / TICKS_PER_SECOND)
    }),
    ("process_resident_memory_bytes", "gauge", "Memory that is resident.", |proc| proc.status("VmRSS:")),
    ("process_virtual_memory_bytes", "gauge", "Memory that is mapped.", |proc| proc.status("VmSize:")),
    ("process_threads", "gauge", "Threads.", |proc| proc.stat(19)),
    ("process_open_fds", "gauge", "Open files and sockets.", |_| {
        // One of them is the folder that is being read.
        fs::read_dir("/proc/self/fd").ok().map(|files| files.count().saturating_sub(1) as f64)
    }),
    ("process_max_fds", "gauge", "Files and sockets that may be open.", |_| max_fds(&read("/proc/self/limits")?)),
    ("process_start_time_seconds", "gauge", "Unix time at which the process began.", |proc| {
        Some(boot(&read("/proc/stat")?)? + proc.stat(21)? / TICKS_PER_SECOND)
    }),
];

/// All of it.
pub fn render(out: &mut Text) {
    out.family("tokenrouter:build_info", "gauge", "Always 1; the label says which version this is.");
    out.line("tokenrouter:build_info", &[("version", Version::THIS.version)], 1.0);
    let Some(proc) = Proc::read() else { return };
    for (name, kind, help, value) in FACTS {
        if let Some(value) = value(&proc) {
            out.family(name, kind, help);
            out.line(name, &[], value);
        }
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Two files of the kernel about this process.
struct Proc {
    stat: String,
    status: String,
}

impl Proc {
    fn read() -> Option<Proc> {
        Some(Proc { stat: read("/proc/self/stat")?, status: read("/proc/self/status")? })
    }

    /// A field of `stat`, counted from 0; the second is the name, in parentheses, and may hold anything.
    fn stat(&self, field: usize) -> Option<f64> {
        let (_, after) = self.stat.rsplit_once(')')?;
        after.split_whitespace().nth(field.checked_sub(2)?)?.parse().ok()
    }

    /// A size of `status`, which has it in KiB, in bytes.
    fn status(&self, key: &str) -> Option<f64> {
        let value = self.status.lines().find_map(|line| line.strip_prefix(key))?;
        Some(value.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
    }
}

/// The soft limit; none where there is no limit.
fn max_fds(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Unix time at which the system started.
fn boot(stat: &str) -> Option<f64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_whatever_the_name_of_the_program_is() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 250 150 13 14 20 0 33 0 12345 0".to_owned();
        let proc = Proc { stat, status: "VmSize:\t  2048 kB\nVmRSS:\t    10 kB\n".to_owned() };
        let value = |name: &str| FACTS.iter().find(|fact| fact.0 == name).and_then(|fact| fact.3(&proc));
        assert_eq!(value("process_cpu_seconds_total"), Some(4.0));
        assert_eq!(value("process_threads"), Some(33.0));
        assert_eq!(value("process_resident_memory_bytes"), Some(10240.0));
        assert_eq!(value("process_virtual_memory_bytes"), Some(2_097_152.0));
        assert_eq!(proc.stat(21), Some(12345.0));
        assert_eq!(max_fds("Limit Soft Hard\nMax open files   1024   4096   files\n"), Some(1024.0));
        assert_eq!(max_fds("Max open files   unlimited   unlimited   files\n"), None);
        assert_eq!(boot("cpu 1 2\nbtime 1700000000\n"), Some(1.7e9));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_is_described() {
        let proc = Proc::read().expect("Linux tells it");
        let values: Vec<f64> = FACTS.iter().map(|fact| fact.3(&proc).unwrap_or_else(|| panic!("{}", fact.0))).collect();
        let [_, resident, mapped, threads, open, most, began] = values[..] else { unreachable!() };
        assert!(0.0 < resident && resident < mapped && threads >= 1.0, "{values:?}");
        assert!(open >= 3.0 && open < most, "{values:?}");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now - 86_400.0..=now + 1.0).contains(&began), "{began} {now}");
    }
}
