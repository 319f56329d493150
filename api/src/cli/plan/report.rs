//! A plan as a table with a chart, and as JSON. Pure.

use serde::Serialize;
use tokenrouter_core::theory::search::{Method, Optimality, Plan, Row};

/// Width of the longest bar.
pub(super) const BAR: usize = 40;
/// Rows of a printed table; the best ones are kept.
const ROWS: usize = 24;

/// JSON with a line at its end.
pub fn json(value: &impl Serialize) -> String {
    // Plans are numbers, lists and names: nothing that JSON cannot hold.
    serde_json::to_string_pretty(value).map_or_else(|error| format!("{{\"error\": \"{error}\"}}\n"), |text| text + "\n")
}

/// One plan: what is best, how sure that is, and T(B) as bars.
pub fn one(plan: &Plan) -> String {
    let mut text = format!(
        "N = {}: B* = {:?}, {:.6} tokens per tick, {} over starting eagerly ({:.6})\n",
        plan.requests,
        plan.best,
        plan.tokens_per_tick,
        percent(gain(plan)),
        plan.eager_tokens_per_tick,
    );
    text += &format!("method: {}\noptimality: {}\n\n", method(plan), optimality(plan));
    text + chart(plan).as_str()
}

/// T(B) of the best thresholds and the eager ones, in the order of B.
fn chart(plan: &Plan) -> String {
    let mut rows: Vec<&Row> = plan.table.iter().collect();
    rows.sort_by(|a, b| b.tokens_per_tick.total_cmp(&a.tokens_per_tick));
    let left_out = rows.len().saturating_sub(ROWS);
    let eager = rows.iter().position(|row| row.thresholds.iter().all(|&b| b == 1)).filter(|&at| at >= ROWS);
    let eager = eager.map(|at| rows[at]);
    rows.truncate(ROWS);
    rows.extend(eager);
    rows.sort_by(|a, b| a.thresholds.cmp(&b.thresholds));
    let names: Vec<String> = rows.iter().map(|row| format!("{:?}", row.thresholds)).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let mut text = format!("{:<width$}  tokens per tick\n", "B");
    for (name, row) in names.iter().zip(&rows) {
        let share = row.tokens_per_tick / plan.tokens_per_tick;
        let bar = "#".repeat((share * BAR as f64).round() as usize);
        let error = row.error.map(|error| format!(" +- {error:.6}")).unwrap_or_default();
        let mark = if row.thresholds == plan.best { "  <- B*" } else { "" };
        text += &format!("{name:<width$}  {:<10.6}{error} {bar}{mark}\n", row.tokens_per_tick);
    }
    match left_out {
        0 => text,
        _ => format!("{text}(the best {ROWS} of {} evaluated; --json has all)\n", plan.table.len()),
    }
}

/// A line per N.
pub fn many(plans: &[Plan]) -> String {
    let width = plans.iter().map(|plan| format!("{:?}", plan.best).len()).max().unwrap_or(0).max(2);
    let mut text =
        format!("{:>4}  {:<width$}  {:>12}  {:>12}  {:>7}  how\n", "N", "B*", "tokens/tick", "eager", "gain");
    for plan in plans {
        text += &format!(
            "{:>4}  {:<width$}  {:>12.6}  {:>12.6}  {:>7}  {}; {}\n",
            plan.requests,
            format!("{:?}", plan.best),
            plan.tokens_per_tick,
            plan.eager_tokens_per_tick,
            percent(gain(plan)),
            method(plan),
            optimality(plan),
        );
    }
    text
}

fn gain(plan: &Plan) -> f64 {
    plan.tokens_per_tick / plan.eager_tokens_per_tick - 1.0
}

pub(super) fn percent(ratio: f64) -> String {
    format!("{:+.1} %", 100.0 * ratio)
}

fn method(plan: &Plan) -> String {
    match (plan.method, plan.states) {
        (Method::Chain, Some(states)) => format!("exact chain of {states} states"),
        _ => "simulation, beyond the reach of the chain".to_owned(),
    }
}

fn optimality(plan: &Plan) -> String {
    match plan.optimality {
        Optimality::AllPolicies => "no start-or-wait policy of any kind is better".to_owned(),
        Optimality::Gap { ratio, searched: false } => {
            format!("best of all thresholds; no policy of any kind is better by more than {:.3} %", 100.0 * ratio)
        }
        Optimality::Gap { ratio, searched: true } => {
            format!(
                "best of {} searched; no policy of any kind is better by more than {:.3} %",
                plan.table.len(),
                100.0 * ratio
            )
        }
        Optimality::AllThresholds => "best of all thresholds; other policies were too many to compare".to_owned(),
        Optimality::Searched => format!("best of {} searched; nothing is known about the others", plan.table.len()),
    }
}
