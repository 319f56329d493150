//! `tokenrouter bench step` and `bench prefill` as a user runs them. Nothing here depends on how fast anything is.

mod support;

use serde_json::Value;
use support::{Folder, root, run};

/// One of the embedded pair: a folder in Hugging Face layout.
fn demo(which: &str) -> String {
    root().join("config/demo").join(which).display().to_string()
}

fn number(of: &Value, key: &str) -> f64 {
    of[key].as_f64().unwrap_or_else(|| panic!("{key} is no number: {of}"))
}

#[track_caller]
fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{found} is not {expected}");
}

fn json(arguments: &[&str]) -> Value {
    let folder = Folder::new();
    let (code, out, err) = run(&folder, arguments);
    assert_eq!((code, err.as_str()), (0, ""), "{arguments:?}");
    assert_eq!(out.lines().count(), 1);
    serde_json::from_str(&out).expect("one JSON object")
}

/// Times are in order, and rates are what they say of the median.
#[track_caller]
fn check_rates(of: &Value, (rate, tokens): (&str, f64)) {
    let (median, min, p90) = (number(of, "median_ms"), number(of, "min_ms"), number(of, "p90_ms"));
    assert!(0.0 < min && min <= median && median <= p90, "{of}");
    near(number(of, rate), tokens / median * 1e3);
    near(number(of, "weight_gb_per_s"), number(of, "weight_bytes") / median / 1e6);
    near(number(of, "int8_gmac_per_s"), number(of, "int8_macs") / median / 1e6);
}

#[test]
fn steps_are_timed_by_shape() {
    let model = demo("small");
    let common = ["bench", "step", "--model", &model, "--threads", "2", "--context", "20", "--repeat", "5", "--json"];
    let found = json(&[&common[..], &["--steps", "4:2,1:1,3:1"]].concat());
    assert_eq!((&found["threads"], &found["context"], &found["repeat"]), (&2.into(), &20.into(), &5.into()));
    assert_eq!(found["model"], *model);
    let steps = found["steps"].as_object().expect("an object");
    assert_eq!(steps.keys().collect::<Vec<_>>(), ["4:2", "1:1", "3:1"], "in the order asked for");
    for (name, tokens) in [("4:2", 8.0), ("1:1", 1.0), ("3:1", 3.0)] {
        check_rates(&steps[name], ("tokens_per_s", tokens));
    }
    // The weights are the same for all; the work is that of the shape.
    let (one, three, eight) = (&steps["1:1"], &steps["3:1"], &steps["4:2"]);
    let (layers, head) = (&found["work"]["layers"], &found["work"]["head"]);
    let macs = |of: &Value| number(of, "int8_macs") + number(of, "float_macs");
    let attention = number(&found["work"], "attention_macs_per_position");
    assert_eq!(number(one, "weight_bytes"), number(layers, "weight_bytes") + number(head, "weight_bytes"));
    assert_eq!(number(eight, "weight_bytes"), number(one, "weight_bytes"));
    assert_eq!(macs(one), macs(layers) + macs(head) + 21.0 * attention);
    assert_eq!(macs(three), 3.0 * macs(one));
    assert_eq!(macs(eight), 8.0 * macs(layers) + 4.0 * macs(head) + 4.0 * (21.0 + 22.0) * attention);
    assert_eq!(number(eight, "kv_bytes"), 4.0 * 22.0 * number(&found["work"], "kv_bytes_per_token"));
    assert!(found.get("roofline").is_none() && one.get("floor_ms").is_none(), "not asked for");
}

#[test]
fn signals_are_asked_of_every_row() {
    let model = demo("small");
    let common = ["bench", "step", "--model", &model, "--steps", "2:1", "--repeat", "2", "--context", "9", "--json"];
    let found = json(&[&common[..], &["--signals", "entropy,top:20"]].concat());
    assert_eq!(found["signals"], "entropy,top:20");
    check_rates(&found["steps"]["2:1"], ("tokens_per_s", 2.0));
}

/// What the demo's shape implies, counted here from its configuration.
#[test]
fn work_is_that_of_the_models_matrices() {
    let text = std::fs::read_to_string(root().join("config/demo/small/config.json")).expect("the demo's configuration");
    let shape: Value = serde_json::from_str(&text).expect("JSON");
    let of = |key: &str| number(&shape, key);
    let head_dim = shape["head_dim"].as_f64().unwrap_or_else(|| of("hidden_size") / of("num_attention_heads"));
    let (hidden, ffn, layers) = (of("hidden_size"), of("intermediate_size"), of("num_hidden_layers"));
    let (q, kv) = (of("num_attention_heads") * head_dim, of("num_key_value_heads") * head_dim);
    let model = demo("small");
    let found =
        json(&["bench", "step", "--model", &model, "--steps", "1:1", "--repeat", "1", "--context", "0", "--json"]);
    let found = &found["work"];
    let macs = |of: &Value| number(of, "int8_macs") + number(of, "float_macs");
    assert_eq!(macs(&found["layers"]), layers * (2.0 * hidden * q + 2.0 * hidden * kv + 3.0 * hidden * ffn));
    assert_eq!(macs(&found["head"]), hidden * of("vocab_size"));
    assert_eq!(number(found, "attention_macs_per_position"), 2.0 * layers * q);
}

/// 8-bit keys and values have 2 bytes of scale for 16 of them, and their bytes are what a step counts.
#[test]
fn keys_and_values_have_the_format_asked_for() {
    let model = demo("small");
    let common = ["bench", "step", "--model", &model, "--steps", "1:1", "--repeat", "1", "--context", "9", "--json"];
    let bytes = |format: &str| {
        let found = json(&[&common[..], &["--kv-format", format]].concat());
        let token = number(&found["work"], "kv_bytes_per_token");
        assert_eq!(number(&found["steps"]["1:1"], "kv_bytes"), 10.0 * token, "{format}");
        token
    };
    let half = bytes("f16");
    assert_eq!([bytes("bf16"), bytes("f32"), bytes("q8")], [half, 2.0 * half, half * 18.0 / 32.0]);
}

#[test]
fn the_roofline_is_measured_and_shares_are_of_it() {
    let model = demo("large");
    let common = ["bench", "step", "--model", &model, "--threads", "2", "--repeat", "3", "--roofline"];
    let found = json(&[&common[..], &["--steps", "1:1,2:4", "--json"]].concat());
    let ceilings = found["roofline"]["ceilings"].as_array().expect("a list");
    assert_eq!(ceilings.iter().map(|of| number(of, "threads")).collect::<Vec<_>>(), [1.0, 2.0]);
    let last = &ceilings[1];
    for step in [&found["steps"]["1:1"], &found["steps"]["2:4"]] {
        let bytes = number(step, "weight_bytes") + number(step, "kv_bytes");
        let bandwidth = number(last, if bytes <= 8e6 { "cache_gb_per_s" } else { "memory_gb_per_s" });
        let median = number(step, "median_ms");
        near(number(step, "bandwidth_share"), bytes / bandwidth / 1e6 / median);
        near(number(step, "int8_share"), number(step, "int8_gmac_per_s") / number(last, "int8_gmac_per_s"));
        near(number(step, "times_floor"), median / number(step, "floor_ms"));
        let larger = number(step, "bandwidth_share").max(number(step, "compute_share"));
        near(number(step, "times_floor"), 1.0 / larger);
    }
    let folder = Folder::new();
    let (code, out, _) = run(&folder, &[&common[..], &["--steps", "1:1"]].concat());
    assert_eq!(code, 0);
    for expected in ["million int8", "tokens/s", "x floor", "memory GB/s"] {
        assert!(out.contains(expected), "{expected:?} is missing: {out}");
    }
}

#[test]
fn prefills_are_timed_in_chunks() {
    let model = demo("small");
    let common = ["bench", "prefill", "--model", &model, "--tokens", "50", "--repeat", "3", "--json"];
    let whole = json(&common);
    let cut = json(&[&common[..], &["--chunk", "20"]].concat());
    for found in [&whole, &cut] {
        check_rates(found, ("prefill_tokens_per_s", 50.0));
        assert_eq!(found["tokens"], 50);
    }
    let (layers, head) =
        (number(&whole["work"]["layers"], "weight_bytes"), number(&whole["work"]["head"], "weight_bytes"));
    assert_eq!(number(&whole, "weight_bytes"), layers + head);
    assert_eq!(number(&cut, "weight_bytes"), 3.0 * layers + head, "each of three chunks reads the layers");
    assert_eq!(
        number(&cut, "float_macs") + number(&cut, "int8_macs"),
        number(&whole, "float_macs") + number(&whole, "int8_macs")
    );
}

#[test]
fn wrong_options_end_with_code_2_and_one_line() {
    let folder = Folder::new();
    let damaged = folder.write("damaged.gguf", "GGUF and nothing else").display().to_string();
    let model = demo("small");
    let cases: [(&[&str], &[&str]); 12] = [
        (&["step", "--model", "missing.gguf"], &["--model missing.gguf", "does not exist", "name a .gguf file"]),
        (&["prefill", "--model", "missing.gguf"], &["--model missing.gguf", "does not exist"]),
        (&["step", "--model", &damaged], &["--model ", "damaged.gguf"]),
        (&["step", "--model", &model, "--steps", "4"], &["--steps 4", "as in 1:1"]),
        (&["step", "--model", &model, "--steps", "1:1,0:4"], &["--steps 1:1,0:4", "\"0:4\""]),
        (&["step", "--model", &model, "--steps", "5000:1"], &["--steps 5000:1", "at most 4096 sequences"]),
        (&["step", "--model", &model, "--context", "100000"], &["--context 100000", "give at most"]),
        (&["step", "--model", &model, "--steps", "1:60000"], &["--steps", "ask for less"]),
        (&["step", "--model", &model, "--signals", "top"], &["--signals top", "write entropy, top:20 or hidden"]),
        (&["prefill", "--model", &model, "--tokens", "100000"], &["--tokens 100000", "give at most"]),
        (&["step", "--model", &model, "--config", "x.toml"], &["--config", "no launch file"]),
        (&["prefill", "--model", &model, "--params", "p=1"], &["--params", "no router"]),
    ];
    for (arguments, expected) in cases {
        let (code, out, err) = run(&folder, &[&["bench"], arguments].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert_eq!(err.lines().count(), 1, "{arguments:?}: {err}");
        for part in expected {
            assert!(err.contains(part), "{arguments:?}: {part:?} is missing in {err}");
        }
    }
}
