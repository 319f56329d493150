//! `tokenrouter plan` as a user runs it.

mod support;

use serde_json::{Value, json};
use support::{Folder, run};

/// The published system of R2R with four requests: B* holds back the large model until three wait.
fn published() -> Value {
    json!({
        "N": 4,
        "latency_ticks": [{ "base": 60 }, { "base": 279 }],
        "P": [[0.65, 0.35], [1, 0]],
        "C": [[1, 0], [1, 0]],
    })
}

fn plan(system: &Value, options: &[&str]) -> (i32, String, String) {
    let folder = Folder::new();
    folder.write("system.json", &system.to_string());
    run(&folder, &[&["plan", "--system", "system.json"], options].concat())
}

#[test]
fn a_plan_says_what_is_best_and_how_sure_that_is() {
    let (code, out, err) = plan(&published(), &[]);
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "N = 4: B* = [1, 3], 0.020795 tokens per tick, +11.1 % over starting eagerly (0.018719)");
    assert_eq!(lines[1], "method: exact chain of 14 states");
    // A policy that also looks at how long the other model will still be busy is a little better.
    let gap = "optimality: best of all thresholds; no policy of any kind is better by more than 0.293 %";
    assert_eq!(lines[2], gap);
    assert_eq!(lines[4..].len(), 11, "a title and ten feasible B\n{out}");
    let marked: Vec<&&str> = lines.iter().filter(|line| line.ends_with("<- B*")).collect();
    assert!(marked.len() == 1 && marked[0].starts_with("[1, 3]"), "{out}");
}

#[test]
fn json_can_be_planned_again() {
    let (code, out, _) = plan(&published(), &["--json"]);
    let found: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((code, &found["best_B"], &found["N"]), (0, &json!([1, 3]), &json!(4)));
    assert_eq!(
        (&found["states"], &found["method"], &found["optimality"]["kind"]),
        (&json!(14), &json!("chain"), &json!("gap"))
    );
    let tokens = found["tokens_per_tick"].as_f64().expect("a number");
    assert!((tokens * 10_000.0 - 207.954).abs() < 1e-3, "{tokens}");
    let row = found["table"].as_array().and_then(|rows| rows.iter().find(|row| row["B"] == json!([1, 4])));
    let tokens = row.and_then(|row| row["tokens_per_tick"].as_f64()).expect("a row");
    assert!((tokens * 10_000.0 - 190.742).abs() < 1e-3, "{tokens}");
    let mut system = published();
    for key in ["best_B", "table"] {
        system[key] = found[key].clone();
    }
    assert_eq!(plan(&system, &["--json"]).1, out);
}

#[test]
fn latencies_may_be_lists_or_constants() {
    let mut system = published();
    system["latency_ticks"] = json!([60, [279, 279, 279, 279]]);
    assert_eq!(plan(&system, &[]).1, plan(&published(), &[]).1);
}

#[test]
fn every_n_has_a_line() {
    let (code, out, err) = plan(&published(), &["--up-to", "4"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let best: Vec<&str> = out.lines().skip(1).map(|line| line[6..12].trim()).collect();
    assert_eq!(best, ["[1, 1]", "[1, 2]", "[1, 2]", "[1, 3]"], "{out}");
    let (_, one, _) = plan(&published(), &["--requests", "2"]);
    assert!(one.starts_with("N = 2: B* = [1, 2]"), "{one}");
}

#[test]
fn what_cannot_be_planned_is_refused_in_one_line() {
    let with = |key: &str, value: Value| {
        let mut system = published();
        system[key] = value;
        system
    };
    for (system, part) in [
        (with("N", json!(0)), "N is 0"),
        (with("N", json!(100_000)), "N is 100000; at most 4096"),
        (with("N", json!("four")), "invalid type"),
        (with("P", json!([[0.65, 0.25], [1, 0]])), "P[0] is [0.65, 0.25]"),
        (with("C", json!([[1, 0]])), "C has 1 rows; there are 2 models"),
        (with("latency_ticks", json!([{ "base": -1 }, 279])), "latency_ticks[0] gives -1 ticks at batch 1"),
        (with("latency_ticks", json!([60, 0])), "latency_ticks[1] gives 0 ticks"),
        (with("latency", json!([60, 279])), "unknown field `latency`"),
    ] {
        let (code, out, err) = plan(&system, &[]);
        assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
        assert!(err.starts_with("error: system.json: ") && err.contains(part), "{part}: {err}");
    }
    let folder = Folder::new();
    let (code, _, err) = run(&folder, &["plan", "--system", "none.json"]);
    assert!(code == 2 && err.starts_with("error: none.json: "), "{err}");
}
