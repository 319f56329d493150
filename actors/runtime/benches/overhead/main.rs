//! Everything that is not the model: `cargo bench -p tokenrouter-actors --bench overhead`. The executors of these
//! runtimes answer at once, or after a millisecond, and note when, so what lies between two steps is the runtime's own work, all threads included.
//! Owner: nobody waits for these numbers; docs/ablation.md quotes them. Prints Markdown tables of medians.

mod memory;
mod stage;

use stage::{Load, Routing, play};
use std::time::Duration;
use tokenrouter_core::execution::Execution;

/// Live requests of the tables.
const ROWS: [usize; 4] = [1, 8, 64, 512];
/// What a step takes: nothing, or about as little as that of a model.
const STEPS: [Duration; 2] = [Duration::ZERO, Duration::from_millis(1)];
/// Tokens of the prompt of a request that hops.
const CONTEXTS: [usize; 4] = [100, 1_000, 10_000, 100_000];
/// Tokens of the answers that are compared.
const OUTPUTS: [usize; 2] = [2_048, 8_192];
/// Steps at the end of an answer that its speed is taken from.
const BAND: usize = 1_024;
/// How often each is measured, one after the other.
const ROUNDS: usize = 5;

fn main() {
    steps();
    hops();
    returns();
    long_output();
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The value below which `part` of them lie.
fn quantile(mut times: Vec<Duration>, part: f64) -> f64 {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    times.get((part * last as f64).round() as usize).map_or(f64::NAN, |time| micros(*time))
}

/// From a step's output to the next step's start, and what that is for each request in it.
fn steps() {
    for step in STEPS {
        println!("\n## A step's output to the next step's start; a step takes {} ms\n", step.as_millis());
        println!("| requests | median, us | p99, us | median per request, us | a request handed in and accepted, us |");
        println!("| ---: | ---: | ---: | ---: | ---: |");
        for requests in ROWS {
            let tokens = if step.is_zero() { (40_000 / requests).clamp(1_000, 4_000) } else { 1_000 };
            let seen = play(Load { requests, tokens, step, ..Load::default() });
            let gaps = seen.gaps(0, requests);
            let median = quantile(gaps.clone(), 0.5);
            let (slow, each) = (quantile(gaps, 0.99), median / requests as f64);
            let accepted = quantile(seen.accepted.clone(), 0.5);
            println!("| {requests} | {median:.1} | {slow:.1} | {each:.2} | {accepted:.1} |");
        }
    }
}

/// Small to large to small, one request.
fn hops() {
    println!("\n## Hops of one request\n");
    println!("| way | median, us | p99, us |\n| --- | ---: | ---: |");
    let seen = play(Load { tokens: 4_000, routing: Routing::EveryStep, ..Load::default() });
    let (there, back) = (seen.hops(0, 1), seen.hops(1, 0));
    let round: Vec<_> = there.iter().zip(&back).map(|(there, back)| *there + *back).collect();
    for (name, times) in [("small to large", there), ("large to small", back), ("there and back", round)] {
        println!("| {name} | {:.1} | {:.1} |", quantile(times.clone(), 0.5), quantile(times, 0.99));
    }
}

/// Control comes back to a request whose context has this many tokens.
fn returns() {
    println!("\n## Large's output to small's next step, by context\n");
    println!("| tokens | async, us | consumed | std_serving, us | consumed |\n| ---: | ---: | ---: | ---: | ---: |");
    for prompt in CONTEXTS {
        let at = |execution| {
            let tokens = if prompt > 50_000 { 500 } else { 1_000 };
            let load = Load { prompt, tokens, routing: Routing::EveryStep, execution, ..Load::default() };
            let seen = play(load);
            (quantile(seen.hops(1, 0), 0.5), seen.consumed(0))
        };
        let ((kept, one), (fresh, more)) = (at(Execution::Async), at(Execution::StdServing));
        println!("| {prompt} | {kept:.1} | {one:.1} | {fresh:.1} | {more:.1} |");
    }
}

/// The end of a long answer against the end of a shorter one, and the memory that a token costs.
fn long_output() {
    println!("\n## Long answers, 8 requests\n");
    println!("| tokens each | tokens/s over the last {BAND} steps | live bytes per token |\n| ---: | ---: | ---: |");
    let rounds: Vec<_> = (0..ROUNDS)
        .map(|_| OUTPUTS.map(|tokens| play(Load { requests: 8, tokens, ..Load::default() })))
        .map(|both| both.map(|seen| (quantile(seen.last_periods(0, BAND), 0.5), seen.bytes_per_token)))
        .collect();
    let speeds = [0, 1].map(|at| {
        let (periods, bytes): (Vec<f64>, Vec<f64>) = rounds.iter().map(|round| round[at]).unzip();
        let speed = 8e6 / middle(periods);
        println!("| {} | {speed:.0} | {:.2} |", OUTPUTS[at], middle(bytes));
        speed
    });
    println!("\nSpeed at {} over that at {}: {:.1} %", OUTPUTS[1], OUTPUTS[0], 100.0 * speeds[1] / speeds[0]);
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
