//! From problems to a served head as a user goes: `label`, `train-router`, `sweep`, on the embedded pair.

mod support;

use serde_json::Value;
use support::{Folder, root, run};

/// Runs a command that prints one JSON object.
fn object(folder: &Folder, arguments: &[&str]) -> Value {
    let (code, out, err) = run(folder, arguments);
    assert_eq!((code, err.as_str()), (0, ""), "{arguments:?}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {out}"))
}

#[test]
fn label_train_and_sweep() {
    let folder = Folder::new();
    let problems = root().join("config/demo/problems.jsonl").display().to_string();
    let labelled = object(&folder, &["label", &problems, "--output", "shards", "--limit", "60", "--json"]);
    let rows = labelled["counts"]["rows"].as_u64().expect("rows");
    for (family, layers, below) in [("r2r", "32,32", 2.0), ("citer", "48,24", 0.0)] {
        let head = format!("heads/{family}");
        let quick = ["--layers", layers, "--epochs", "12", "--batch", "64", "--rate", "0.003", "--json"];
        let train = ["train-router", "shards", "--family", family, "--out", &head, "--recall", "0.9"];
        let trained = object(&folder, &[&train[..], &quick].concat());
        let count = |side: &str, what: &str| trained[side][what].as_u64().expect("a count");
        assert_eq!(count("training", "rows") + count("validation", "rows"), rows);
        let number = |key: &str| trained[key].as_f64().expect("a number");
        // A twentieth of the tokens diverges; chance has an area of a half and routes nine in ten for this recall.
        assert!(number("auroc") > 0.9 && number("recall") >= 0.9 && number("routed") < 0.3, "{family}: {trained}");
        let file = std::fs::read(folder.path.join(&head).join("head.json")).expect("the description");
        let file: Value = serde_json::from_slice(&file).expect("JSON");
        assert_eq!((&file["threshold"], &file["model"]), (&trained["threshold"], &Value::from("small")));

        // The sweep meets the folder from where the launch file is, so the path is absolute here.
        let algorithm = format!("{family}:head={}", folder.path.join(&head).display());
        let values = format!("{},{below}", number("threshold"));
        let axis = ["--algorithm", &algorithm, "--param", "threshold", "--values", &values];
        let swept = object(&folder, &[&["sweep", "--limit", "20", "--json", "--query", "0.5"], &axis[..]].concat());
        let rows = swept["rows"].as_array().expect("rows");
        let row = |name: &str| {
            let found = rows.iter().find(|row| row["run"].as_str().is_some_and(|run| run.starts_with(name)));
            found.unwrap_or_else(|| panic!("no row {name} in {swept}"))
        };
        let share = |row: &Value| row["share"]["large"].as_f64().expect("a share");
        let routed = row(&format!("{family} threshold={}", trained["threshold"]));
        assert!(share(routed) > 0.01 && share(routed) < 0.4, "{family}: {routed}");
        assert!(routed["right"].as_u64() > row("small alone")["right"].as_u64(), "{family}: {routed}");
        assert_eq!(routed["failed"], 0);
        // Past the end of the scale no score goes to the large model: r2r above 1, citer at 0.
        assert_eq!(rows.last().expect("a row")["by_model"], row("small alone")["by_model"]);
    }
    let again = ["train-router", "shards", "--family", "r2r", "--out", "heads/r2r"];
    let (code, out, err) = run(&folder, &again);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    assert!(err.contains("heads/r2r") && err.contains("--force"), "{err}");
}
