//! The soak as a program: `soak --server PROGRAM [--requests N] [--seed N] [--page FILE]` runs it and writes the page; it ends
//! with code 1 when something was not as before. `soak serve ...` is `tokenrouter serve ...`, and under the name `tokenrouter`
//! it is that program, for tests that have no other at hand.

use std::process::ExitCode;
use tokenrouter_tests::clients::scratch;
use tokenrouter_tests::soak::Soak;

/// How much larger memory may be at the end than after the warm-up.
const GROWTH_MAX: f64 = 0.01;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let named = arguments.first().is_some_and(|name| name.ends_with("tokenrouter"));
    if named || arguments.iter().any(|word| word == "serve") {
        return tokenrouter::cli::run(std::env::args_os());
    }
    let option = |name: &str| {
        let at = arguments.iter().position(|word| word == name)?;
        Some(arguments.get(at + 1).unwrap_or_else(|| panic!("{name} needs a value")).clone())
    };
    let number = |name: &str| option(name).map(|text| text.parse::<u64>().unwrap_or_else(|_| panic!("{name} {text}")));
    let program = option("--server").expect("--server PROGRAM");
    let mut soak = Soak::new(vec![program], scratch("soak"));
    soak.requests = number("--requests").unwrap_or(soak.requests);
    soak.seed = number("--seed").unwrap_or(soak.seed);
    let report = soak.run();
    let page = report.page("just soak");
    print!("{page}");
    if let Some(file) = option("--page") {
        std::fs::write(&file, &page).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
    let faults = report.faults(GROWTH_MAX);
    faults.iter().for_each(|fault| println!("FAULT {fault}"));
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
