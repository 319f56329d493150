//! `tokenrouter bench ablate` and `bench long` as a user runs them. Nothing here depends on how fast anything is.

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
    let cases: [(&[&str], &str); 7] = [
        (&["--shape", "high-effort"], "lower --scale"),
        (&["--simulated", "--params", "p=2"], "p = 2"),
        (&["--simulated", "--config", "x.toml"], "--config"),
        (&["--scale", "0"], "a number above 0"),
        (&["--algorithm", "bernouli"], "did you mean `bernoulli`"),
        (&["--prompts", "none.jsonl"], "none.jsonl: cannot read"),
        (&["--prompts", "none.jsonl", "--shape", "agentic"], "choose another --shape"),
    ];
    for (arguments, expected) in cases {
        let (code, out, err) = run(&folder, &[&["bench", "ablate"], arguments].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}

/// One JSON object on stdout.
#[track_caller]
fn object(folder: &Folder, arguments: &[&str]) -> Value {
    let (code, out, err) = run(folder, arguments);
    assert_eq!((code, err.as_str()), (0, ""), "{arguments:?}");
    serde_json::from_str(&out).expect("one JSON object")
}

#[test]
fn prefill_ahead_is_measured_on_long_prompts() {
    let folder = Folder::new();
    let shape = ["bench", "ablate", "--shape", "long-prompt", "--scale", "0.05", "--repeat", "1", "--workers", "2"];
    let routing = ["--algorithm", "bernoulli", "--params", "p=0.3", "--rows", "full,prefill-ahead", "--json"];
    let found = object(&folder, &[&shape[..], &routing].concat());
    assert_eq!((&found["sizes"]["prompt"], &found["sizes"]["output"]), (&410.into(), &13.into()));
    let cells = found["cells"].as_array().expect("cells");
    assert_eq!(cells.iter().map(|cell| &cell["row"]).collect::<Vec<_>>(), ["full", "+ prefill ahead"]);
    for cell in cells {
        let [first, hop] = ["ttft_ms", "first_hop_ms"].map(|name| cell[name]["count"].as_u64().expect("a number"));
        assert!(hop <= first && first >= 2, "{cell}");
        assert!(hop == 0 || cell["first_hop_ms"]["mean"].as_f64() > Some(0.0), "{cell}");
    }
}

#[test]
fn questions_of_a_file_are_prompts_as_they_are() {
    let folder = Folder::new();
    folder.write("asked.jsonl", "{\"question\": \"What is 2 + 3?\", \"answer\": \"5\"}\n");
    let common = ["bench", "ablate", "--scale", "0.01", "--repeat", "1", "--workers", "2", "--rows", "small-only"];
    let found = object(&folder, &[&common[..], &["--prompts", "asked.jsonl", "--json"]].concat());
    let longest = found["sizes"]["prompt"].as_u64().expect("a number");
    assert_eq!((&found["prompts"], &found["sizes"]["output"]), (&"asked.jsonl".into(), &20.into()));
    let (prompts, cell) = (found["cells"][0]["prompt_tokens"].as_u64(), &found["cells"][0]);
    assert!(longest > 5 && prompts >= Some(2 * longest) && prompts.map(|all| all % longest) == Some(0), "{cell}");
}

#[test]
fn long_answers_are_the_bare_executors_own() {
    let folder = Folder::new();
    let common = ["bench", "long", "--tokens", "24,96", "--prompt", "21", "--repeat", "2", "--json"];
    for (workers, model) in [("1", "small"), ("3", "large")] {
        let found = object(&folder, &[&common[..], &["--workers", workers, "--model", model]].concat());
        assert_eq!((&found["model"], &found["prompt_tokens"]), (&model.into(), &21.into()));
        assert!(found["kv_bytes_per_token"].as_u64() > Some(0));
        let lengths = found["lengths"].as_array().expect("lengths");
        assert_eq!(lengths.iter().map(|length| length["tokens"].as_u64()).collect::<Vec<_>>(), [Some(24), Some(96)]);
        for length in lengths {
            assert_eq!(length["same_answers"], true, "the same steps give the same tokens: {length}");
            let mean = |name: &str| length[name]["mean"].as_f64().expect("a mean");
            let speeds = [mean("runtime_tokens_per_second"), mean("executor_tokens_per_second"), mean("ratio")];
            assert!(speeds.iter().all(|speed| *speed > 0.0), "{length}");
            assert_eq!(length["ratio"]["rounds"].as_array().map(Vec::len), Some(2));
        }
        let rounds = |of: &Value| serde_json::from_value::<Vec<f64>>(of["rounds"].clone()).expect("numbers");
        let compared = &found["last_over_first"];
        let runtime = |at: usize| rounds(&lengths[at]["runtime_tokens_per_second"]);
        let expected = [0, 1].map(|round| runtime(1)[round] / runtime(0)[round]);
        let found = rounds(&compared["runtime"]);
        assert!((0..2).all(|round| (found[round] - expected[round]).abs() < 1e-9), "{found:?} {expected:?}");
        let apart = rounds(&compared["apart_from_attention"]);
        let parts = (rounds(&compared["runtime"]), rounds(&compared["executor"]));
        assert!((0..2).all(|round| (apart[round] - parts.0[round] / parts.1[round]).abs() < 1e-9), "{compared}");
    }
    let single = object(&folder, &["bench", "long", "--tokens", "8", "--json"]);
    assert!(single["last_over_first"].is_null());
    let (code, table, _) = run(&folder, &["bench", "long", "--tokens", "8,16", "-q"]);
    assert!(code == 0 && table.contains("| 16 |") && table.contains("Speed at 16 tokens over that at 8"), "{table}");
}

#[test]
fn impossible_long_answers_end_with_code_2_and_one_line() {
    let folder = Folder::new();
    let cases: [(&[&str], &str); 4] = [
        (&["--model", "medium"], "--model medium: no such model; the launch file has small, large"),
        (
            &["--tokens", "64,2048"],
            "--tokens 2048: model small holds 512 tokens with the prompt's 16; ask for at most 496",
        ),
        (&["--tokens", "8", "--workers", "1000"], "lower --workers"),
        (&["--tokens", "0"], "--tokens"),
    ];
    for (arguments, expected) in cases {
        let (code, out, err) = run(&folder, &[&["bench", "long"], arguments].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}
