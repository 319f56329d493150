//! `tokenrouter sweep` as a user runs it, on the embedded pair.

mod support;

use serde_json::Value;
use support::{Folder, root, run};

/// Thresholds at both ends, the oracle and whole requests: each row is what its definition says.
#[test]
fn sweep_holds_every_row_and_writes_its_files() {
    let folder = Folder::new();
    let r_stitch = ["--algorithm", "r_stitch", "--param", "threshold", "--values", "-0.5,0.05,1"];
    let bernoulli = ["--algorithm", "bernoulli", "--param", "p", "--values", "0:1:3", "--query", "0,1"];
    let common = ["sweep", "--limit", "10", "--json", "--out", "found/here"];
    let (code, out, err) = run(&folder, &[&common[..], &r_stitch, &bernoulli].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    let object: Value = serde_json::from_str(&out).expect("one JSON object");
    let rows = object["rows"].as_array().expect("rows");
    let runs: Vec<&str> = rows.iter().filter_map(|row| row["run"].as_str()).collect();
    let expected = [
        "small alone",
        "large alone",
        "oracle",
        "query at random share=0",
        "query at random share=1",
        "query by classifier share=0",
        "query by classifier share=1",
        "r_stitch threshold=-0.5",
        "r_stitch threshold=0.05",
        "r_stitch threshold=1",
        "bernoulli p=0",
        "bernoulli p=0.5",
        "bernoulli p=1",
    ];
    assert_eq!(runs, expected);
    for row in rows {
        assert_eq!((row["total"].as_u64(), row["failed"].as_u64()), (Some(10), Some(0)), "{row}");
    }
    let same = |a: usize, b: usize| {
        for key in ["right", "tokens"] {
            assert_eq!(rows[a][key], rows[b][key], "{}: {} and {}", key, rows[a], rows[b]);
        }
    };
    for (row, alone) in [(3, 0), (5, 0), (9, 0), (10, 0), (2, 1), (4, 1), (6, 1), (7, 1), (12, 1)] {
        same(row, alone);
    }
    let share = |row: usize| rows[row]["share"]["large"].as_f64().expect("share");
    assert!(share(2) > 0.0 && share(2) < share(8) && share(8) < share(11), "{} {} {}", share(2), share(8), share(11));
    assert_eq!((rows[8]["algorithm"].as_str(), rows[8]["value"].as_f64()), (Some("r_stitch"), Some(0.05)));

    let read = |name: &str| std::fs::read_to_string(folder.path.join("found/here").join(name)).expect(name);
    assert_eq!(read("sweep.json"), out);
    assert_eq!(read("sweep.csv").lines().count(), 1 + rows.len());
    assert_eq!(read("sweep.svg").matches("<polyline").count(), 4);
}

#[test]
fn wrong_sweeps_end_with_code_2_and_one_line() {
    let folder = Folder::new();
    folder.write("taken", "a file");
    let one = |param: &'static str, values: &'static str| {
        vec!["--algorithm", "r_stitch", "--param", param, "--values", values]
    };
    for (arguments, parts) in [
        (one("treshold", "0.1"), ["--algorithm r_stitch with treshold = 0.1", "did you mean `threshold`?"]),
        (one("threshold", "0.1,7"), ["threshold = 7", "within -1 and 2"]),
        (vec!["--algorithm", "r_stitch"], ["1 --algorithm, 0 --param and 0 --values", "same order"]),
        (vec!["--algorithm", "r2r:head=absent", "--param", "threshold", "--values", "0.5"], ["r2r", "absent"]),
        (vec!["--query", "2"], ["--query 2", "within 0 and 1"]),
        (vec!["--params", "threshold=1"], ["--params", "NAME:KEY=VALUE"]),
        (vec!["--out", "taken"], ["taken", "--out"]),
    ] {
        let (code, out, err) = run(&folder, &[&["sweep", "--limit", "1"], &arguments[..]].concat());
        assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{arguments:?}: {err}");
        for part in parts {
            assert!(err.contains(part), "{arguments:?}: `{err}` lacks `{part}`");
        }
    }
}

/// Models are loaded again for an algorithm with a learned head, and its rows stand beside those without one.
#[test]
fn algorithms_with_a_head_of_their_own_join() {
    let folder = Folder::new();
    let fixture = |name: &str| root().join("tests/fixtures").join(name).display().to_string();
    let head = folder.path.join("heads/small").display().to_string();
    let (code, _, err) = run(&folder, &["convert-router", &fixture("heads/r2r-logits.pt"), &head]);
    assert_eq!(code, 0, "{err}");
    let model = |name: &str, path: &str| {
        format!("[[models]]\nname = \"{name}\"\npath = \"{}\"\nkv_tokens = 1024\nthreads = 1\n", fixture(path))
    };
    let models = model("one", "tiny/llama-f32") + &model("two", "tiny/qwen2-f32");
    let config = folder.write("launch.toml", &format!("{models}[router]\nalgorithm = \"r_stitch\"\n"));
    let problems = folder.write(
        "problems.jsonl",
        "{\"question\": \"some words\", \"answer\": 1}\n{\"question\": \"other words\", \"answer\": 2}\n",
    );
    let (config, problems) = (config.display().to_string(), problems.display().to_string());
    let common = ["sweep", &problems, "--config", &config, "--raw", "-n", "12", "--json", "--query", "0.5"];
    let plain = ["--algorithm", "r_stitch", "--param", "threshold", "--values", "-0.5,1"];
    let headed = ["--algorithm", "r2r:head=heads/small", "--param", "threshold", "--values", "0,0.25,1.5"];
    let (code, out, err) = run(&folder, &[&common[..], &plain, &headed].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    let object: Value = serde_json::from_str(&out).expect("one JSON object");
    let rows = object["rows"].as_array().expect("rows");
    assert_eq!((rows.len(), rows[8]["run"].as_str()), (10, Some("r2r threshold=0.25")));
    assert!(rows.iter().all(|row| row["failed"] == 0), "{out}");
    // The ends of both scales are the models alone; r2r at 0 reaches for the large model at every token.
    for (row, alone) in [(5, 1), (6, 0), (7, 1), (9, 0)] {
        assert_eq!(rows[row]["by_model"], rows[alone]["by_model"], "{} and {}", rows[row], rows[alone]);
    }
}
