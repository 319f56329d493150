//! The program `gpu-check`: options, parts in the order of their worth, one table. Owner: its `main`. Invariant: it ends in
//! time: a part starts only if there is time for it, and what did not run is said.

use super::measure::{Measured, Sizes, Subject, measure};
use super::pair::{Load, Pair};
use super::report::{Report, Target, guarded};
use super::{Finding, activation, attention, facts, head, matmul, norm, rope, sanitize, text, whole};
use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokenrouter_gpu::cuda::random::{QWEN3_8B, QWEN3_32B, qwen3};
use tokenrouter_gpu::weights::synth::Shape;
use tokenrouter_kernels::cuda::{Devices, DevicesConfig, Gpu, compile_cached, sources};
use tokenrouter_kernels::quant::Format;

/// Checks and measures TokenRouter on an NVIDIA GPU
#[derive(Debug, Parser)]
#[command(name = "gpu-check")]
pub struct Options {
    /// Number of the device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Only checks, of few sizes and small models: what compute-sanitizer runs
    #[arg(long, conflicts_with = "rehearse")]
    small: bool,
    /// Measures tiny models instead of large ones, to see that everything runs
    #[arg(long)]
    rehearse: bool,
    /// Folder of kernels that were compiled ahead; what is not there is compiled and put there
    #[arg(long, value_name = "FOLDER")]
    cubins: Option<PathBuf>,
    /// Compiles all kernels for an architecture like sm_90 into a folder, without a device, and ends
    #[arg(long, num_args = 2, value_names = ["ARCH", "FOLDER"])]
    compile_ahead: Option<Vec<String>>,
    /// Seconds that a run takes at most
    #[arg(long, default_value_t = 460)]
    limit: u64,
    /// Draws inputs from this; the time of day otherwise
    #[arg(long)]
    seed: Option<u64>,
    /// Folder for gpu-check.json and the words of compute-sanitizer; $OUT otherwise
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// What is checked and measured.
struct Plan {
    seeds: u64,
    demo: bool,
    formats: &'static [Format],
    subjects: Vec<Subject>,
    /// Measured if there is time in the end.
    more: Vec<Subject>,
    sizes: Sizes,
    load: Load,
}

/// What every part needs.
struct Bench {
    devices: Arc<Devices>,
    gpu: Gpu,
    folder: PathBuf,
    seed: u64,
}

/// Runs the program; the exit status is 1 when a check fails, 2 when it could not start.
pub fn main() -> ExitCode {
    let mut options = Options::parse();
    options.out = options.out.or_else(|| std::env::var_os("OUT").filter(|out| !out.is_empty()).map(PathBuf::from));
    let outcome = match &options.compile_ahead {
        Some(words) => compile_ahead(&words[0], Path::new(&words[1])),
        None => check(&options),
    };
    match outcome {
        Ok((said, good)) => {
            println!("{}", said.trim_end());
            if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::from(2)
        }
    }
}

/// Compiles every source into a folder where [`DevicesConfig::cache`] finds it.
fn compile_ahead(arch: &str, folder: &Path) -> Result<(String, bool), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut bytes = 0;
    let mut count = 0;
    for source in sources() {
        bytes += compile_cached(source, arch, Some(folder)).map_err(text)?.image.len();
        count += 1;
    }
    Ok((format!("{count} sources for {arch}, {:.1} MiB, in {}", bytes as f64 / 1048576.0, folder.display()), true))
}

/// Runs all parts; the table, and whether every check holds.
fn check(options: &Options) -> Result<(String, bool), String> {
    let devices = Arc::new(Devices::new(DevicesConfig { cache: options.cubins.clone() }));
    let gpu = devices.open(options.device).map_err(text)?;
    let folder = match &options.out {
        Some(folder) => folder.clone(),
        None => std::env::temp_dir().join(format!("gpu-check-{}", std::process::id())),
    };
    let files = folder.join(format!("models-{}", std::process::id()));
    std::fs::create_dir_all(&files).map_err(|error| format!("{}: {error}", files.display()))?;
    let seed = options.seed.unwrap_or_else(|| SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_secs()));
    let bench = Bench { devices, gpu, folder: files, seed };
    let mut report = Report::new(Duration::from_secs(options.limit));
    if bench.gpu.facts().name.starts_with("Software Device") {
        report.without_hardware();
    }
    report.part("machine");
    report.fact("seed", seed.to_string());
    report.run("facts", |report| facts::tell(&bench.gpu, report));
    parts(options, &bench, (&folder, &mut report));
    // Weights of small models: nothing is lost if they stay.
    let _left_over = std::fs::remove_dir_all(&bench.folder);
    if options.out.is_some() {
        let path = folder.join("gpu-check.json");
        std::fs::write(&path, format!("{:#}\n", report.json())).map_err(|e| format!("{}: {e}", path.display()))?;
    } else {
        let _not_empty_if_a_tool_wrote_there = std::fs::remove_dir(&folder);
    }
    Ok((report.text(), !report.has_failed()))
}

fn parts(options: &Options, bench: &Bench, (folder, report): (&Path, &mut Report)) {
    let plan = if options.small {
        small()
    } else if options.rehearse {
        rehearsal()
    } else {
        full()
    };
    report.part("kernels against their references");
    for seed in bench.seed..bench.seed + plan.seeds {
        if report.has_time(&format!("seed {seed}"), 20) {
            kernels(bench, seed, report);
        }
    }
    report.part("models against the processor");
    if report.has_time("models", 20) {
        models(bench, &plan, report);
    }
    if options.small {
        return;
    }
    report.part("steps, random weights");
    let bandwidth = report.run("copy within the device", |report| {
        let bandwidth = facts::copy_bandwidth(&bench.gpu).map_err(text)?;
        report.measured("copy within the device", (bandwidth / 1e9, "GB/s"), None);
        Ok(bandwidth)
    });
    let Some(bandwidth) = bandwidth else { return };
    let steps = |subject: &Subject, report: &mut Report| {
        if !report.has_time(subject.name, 30) {
            return None;
        }
        let fits = report.run(subject.name, |report| fits(&bench.gpu, (subject, &plan.sizes), report))?;
        if !fits {
            return None;
        }
        report.run(subject.name, |report| measure(&bench.gpu, (subject, &plan.sizes), (bandwidth, report)))
    };
    let measured: Vec<Measured> = plan.subjects.iter().filter_map(|subject| steps(subject, report)).collect();
    report.part("two models on one device, bernoulli routing, p = 0.35");
    if let [small, large] = &measured[..] {
        let most = plan.load.workers.iter().map(|&(workers, _)| workers).max().unwrap_or(1);
        report
            .run("pair", |report| Pair::new(bench.gpu.facts().ordinal, [small, large], most)?.run(&plan.load, report));
    } else {
        report.skip("pair", "needs both models");
    }
    drop(measured);
    report.part("steps, quantised weights");
    for subject in &plan.more {
        steps(subject, report);
    }
    report.part("compute-sanitizer");
    if options.rehearse {
        report.skip("compute-sanitizer", "not part of a rehearsal");
        return;
    }
    let mut arguments = vec!["--small".to_owned(), "--device".into(), options.device.to_string()];
    if let Some(cubins) = &options.cubins {
        arguments.extend(["--cubins".into(), cubins.display().to_string()]);
    }
    sanitize::run(&arguments, folder, report);
}

/// Whether a model fits into the memory that is free; if not, a row says so.
fn fits(gpu: &Gpu, (subject, sizes): (&Subject, &Sizes), report: &mut Report) -> Result<bool, String> {
    let (free, _) = gpu.memory().map_err(text)?;
    let needed = subject.bytes(sizes)?;
    let fits = needed <= free;
    if !fits {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        report.skip(subject.name, &format!("needs {:.1} GiB, {:.1} GiB are free", gib(needed), gib(free)));
    }
    Ok(fits)
}

/// A check of a kernel.
type Check = fn(&Gpu, u64) -> Result<Vec<Finding>, String>;

fn kernels(bench: &Bench, seed: u64, report: &mut Report) {
    let checks: [(&str, Check); 6] = [
        ("norm", norm::check),
        ("rope", rope::check),
        ("attention", attention::check),
        ("activation", activation::check),
        ("matmul", matmul::check),
        ("head", head::check),
    ];
    for (name, check) in checks {
        found(&format!("{name}, seed {seed}"), || check(&bench.gpu, seed), report);
    }
}

fn models(bench: &Bench, plan: &Plan, report: &mut Report) {
    let all = guarded(|| {
        let mut all = whole::synthetic(&bench.folder, (plan.formats, bench.seed))?;
        if plan.demo {
            all.extend(whole::demo_pair(&bench.folder)?);
        }
        Ok(all)
    });
    match all {
        Err(reason) => report.check("models", Err(reason)),
        Ok(all) => {
            for model in all.chunks(1) {
                let place = (&bench.devices, bench.gpu.facts().ordinal);
                found(model[0].name(), || whole::check(place, model), report);
            }
        }
    }
}

/// Runs a check; a row that says how near the worst finding came to its limit, or one for each that is not good.
fn found(name: &str, check: impl FnOnce() -> Result<Vec<Finding>, String>, report: &mut Report) {
    let began = Instant::now();
    let findings = match guarded(check) {
        Ok(findings) => findings,
        Err(reason) => return report.check(name, Err(reason)),
    };
    let words =
        |finding: &Finding| format!("{}: {:.1e}, may be {:.0e}", finding.name, finding.max_error, finding.tolerance);
    let bad: Vec<&Finding> = findings.iter().filter(|finding| !finding.is_good()).collect();
    if bad.is_empty() {
        let share = findings.iter().map(|finding| finding.max_error / finding.tolerance).fold(0.0, f64::max);
        let outcome = match findings.len() {
            0 => Err("nothing was compared".to_owned()),
            count => {
                let seconds = began.elapsed().as_secs_f64();
                Ok(format!("{count} comparisons, worst at {share:.2} of its tolerance, {seconds:.1} s"))
            }
        };
        return report.check(name, outcome);
    }
    for finding in bad {
        report.check(name, Err(words(finding)));
    }
}

fn subject(name: &'static str, (shape, tied): (Shape, bool), format: Format) -> Subject {
    let config = qwen3(shape, tied);
    let (decode_ms, bandwidth, many, extend, overhead_us) = (None, None, None, None, None);
    Subject { name, config, format, decode_ms, bandwidth, many, extend, overhead_us }
}

/// Targets are for an H200.
fn full() -> Plan {
    let sizes = Sizes { context: 1024, extend: 3, prefill: 2048, rows: vec![1, 2, 4, 8], longest: 4096, repeats: 30 };
    let graphs = sizes.graphs();
    Plan {
        seeds: 3,
        demo: true,
        formats: &[Format::BF16, Format::Q8_0, Format::Q4_0],
        subjects: vec![
            Subject {
                decode_ms: Some(1.2),
                extend: Some(1.1),
                overhead_us: Some(60.0),
                ..subject("Qwen3-0.6B BF16", (Shape::QWEN3_0_6B, true), Format::BF16)
            },
            Subject {
                decode_ms: Some(18.0),
                bandwidth: Some(0.85),
                many: Some(1.15),
                extend: Some(1.1),
                overhead_us: Some(60.0),
                ..subject("Qwen3-32B BF16", (QWEN3_32B, false), Format::BF16)
            },
        ],
        more: vec![
            subject("Qwen3-8B Q8_0", (QWEN3_8B, false), Format::Q8_0),
            subject("Qwen3-8B Q4_0", (QWEN3_8B, false), Format::Q4_0),
        ],
        sizes,
        load: Load {
            workers: vec![(1, Some(140.0)), (4, Some(450.0)), (8, Some(850.0))],
            lengths: (100, 2048),
            seconds: (2.0, 10.0),
            graphs,
            prediction: Some(Target::Within(0.9, 1.1)),
        },
    }
}

/// Every kind of check once.
fn small() -> Plan {
    Plan { seeds: 1, demo: false, formats: &[Format::BF16], ..rehearsal() }
}

/// The same parts with tiny models.
fn rehearsal() -> Plan {
    let shape = Shape { hidden: 64, layers: 1, heads: 2, kv_heads: 1, head_dim: 32, ffn: 128, vocab: 64, context: 128 };
    let larger = Shape { layers: 2, ..shape };
    let sizes = Sizes { context: 20, extend: 3, prefill: 32, rows: vec![1, 2], longest: 64, repeats: 2 };
    let graphs = sizes.graphs();
    Plan {
        seeds: 0,
        demo: false,
        formats: &[Format::Q4_0],
        subjects: vec![
            Subject { decode_ms: Some(1.2), ..subject("tiny BF16", (shape, true), Format::BF16) },
            subject("less tiny BF16", (larger, false), Format::BF16),
        ],
        more: vec![
            subject("tiny Q8_0", (shape, true), Format::Q8_0),
            subject("tiny Q4_0", (shape, false), Format::Q4_0),
        ],
        sizes,
        load: Load {
            workers: vec![(1, None), (2, None)],
            lengths: (10, 20),
            seconds: (0.5, 2.0),
            graphs,
            prediction: None,
        },
    }
}
