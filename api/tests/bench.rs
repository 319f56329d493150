//! `tokenrouter bench ablate` as a user runs it. Nothing here depends on how fast anything is.

mod support;

use serde_json::Value;
use support::{Folder, run};

/// Every row made all its tokens, and those of the rows with one model came from that model.
#[track_caller]
fn check(out: &str, (workers, tokens): (&[u64], u64)) {
    let object: Value = serde_json::from_str(out).expect("one JSON object");
    let cells = object["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 7 * workers.len());
    for (at, cell) in cells.iter().enumerate() {
        assert_eq!(cell["workers"].as_u64(), Some(workers[at / 7]), "{cell}");
        let by_model: Vec<u64> = serde_json::from_value(cell["tokens_by_model"].clone()).expect("two numbers");
        assert!(by_model.iter().sum::<u64>() >= workers[at / 7] * tokens, "lengths are exact: {cell}");
        assert_eq!(by_model.iter().sum::<u64>() % tokens, 0, "{cell}");
        assert!(cell["tokens_per_second"]["mean"].as_f64().expect("a number") > 0.0, "{cell}");
        let (small, large) = (by_model[0], by_model[1]);
        match cell["row"].as_str().expect("a name") {
            "large only" => assert_eq!((small, cell["hops"].as_u64()), (0, Some(0)), "{cell}"),
            "small only" => assert_eq!((large, cell["hops"].as_u64()), (0, Some(0)), "{cell}"),
            _ => assert!(small > 0 && large > 0 && cell["hops"].as_u64() > Some(0), "{cell}"),
        }
    }
    let ratio = |at: usize| cells[at]["ratio"]["mean"].as_f64().expect("a ratio");
    assert!((ratio(0) - 1.0).abs() < 1e-12 && ratio(1) > 0.0);
}

#[test]
fn simulated_models_play_every_row_and_the_files_are_written() {
    let folder = Folder::new();
    let common = ["bench", "ablate", "--simulated", "--scale", "0.01", "--repeat", "1", "--json"];
    let (code, out, err) = run(&folder, &[&common[..], &["--workers", "1,3", "--out", "found/here"]].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    check(&out, (&[1, 3], 20));
    let object: Value = serde_json::from_str(&out).expect("checked before");
    assert!(object["cells"][0]["predicted_tokens_per_second"].as_f64() > Some(1.0));
    let read = |name: &str| std::fs::read_to_string(folder.path.join("found/here").join(name)).expect(name);
    assert_eq!(read("ablation.json"), out);
    assert_eq!(read("ablation.md").matches("| step_sync |").count(), 3 + 2);
    assert!(read("ablation.svg").contains("N = 3"));
}

#[test]
fn the_embedded_pair_plays_every_row() {
    let folder = Folder::new();
    let common = ["bench", "ablate", "--scale", "0.02", "--repeat", "1", "--workers", "2", "--json"];
    let (code, out, err) = run(&folder, &[&common[..], &["--algorithm", "bernoulli", "--params", "p=0.5"]].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    check(&out, (&[2], 41));
}

#[test]
fn turns_find_what_was_said_before() {
    let folder = Folder::new();
    let common = ["bench", "ablate", "--simulated", "--scale", "0.02", "--repeat", "1", "--workers", "1", "--json"];
    let (code, out, _) = run(&folder, &[&common[..], &["--shape", "agentic", "--rows", "small-only"]].concat());
    assert_eq!(code, 0);
    let object: Value = serde_json::from_str(&out).expect("one JSON object");
    let cell = &object["cells"][0];
    // 41, 82, 123 and 164 tokens in: of the last three the part that fills pages was there.
    assert_eq!(cell["prompt_tokens"].as_u64(), Some(410));
    assert!(cell["cached_tokens"].as_u64() >= Some(150), "{cell}");
}

#[test]
fn wrong_benches_end_with_code_2_and_one_line() {
    let folder = Folder::new();
    let cases: [(&[&str], &str); 5] = [
        (&["--shape", "high-effort"], "lower --scale"),
        (&["--simulated", "--params", "p=2"], "p = 2"),
        (&["--simulated", "--config", "x.toml"], "--config"),
        (&["--scale", "0"], "a number above 0"),
        (&["--algorithm", "bernouli"], "did you mean `bernoulli`"),
    ];
    for (arguments, expected) in cases {
        let (code, out, err) = run(&folder, &[&["bench", "ablate"], arguments].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}
