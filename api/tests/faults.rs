//! `tokenrouter serve` with faults on order. Owner: the launcher. Invariant: only whoever sets TOKENROUTER_FAULTS gets them,
//! and a step that never ends holds up neither the requests nor the end of the process.

mod support;

use support::{Folder, Serving, program, root, run};

fn launch_file(folder: &Folder) -> String {
    let demo = root().join("config/demo");
    let text = std::fs::read_to_string(demo.join("launch.toml")).expect("the launch file of the demo pair");
    let models = text.replace("path = \"", &format!("path = \"{}/", demo.display()));
    let faults = "[[faults.steps]]\nmodel = \"small\"\nkind = \"stuck\"\nat = 2\n";
    let path = folder.write("launch.toml", &format!("[server]\nstep_timeout_ms = 2000\n{models}\n{faults}"));
    path.display().to_string()
}

#[test]
fn faults_are_obeyed_by_who_asks_for_them_and_refused_to_all_others() {
    let folder = Folder::new();
    let config = launch_file(&folder);
    let (code, _, errors) = run(&folder, &["serve", "--config", &config, "--port", "0"]);
    assert_eq!(code, 2, "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(
        errors.contains("[faults] makes the server fail on purpose; remove the table, or set TOKENROUTER_FAULTS=1"),
        "{errors}"
    );
    let mut command = program(&folder, &["--config", &config]);
    command.env("TOKENROUTER_FAULTS", "1");
    let serving = Serving::start(command);
    let body = r#"{"model": "demo", "prompt": "Tom has 12 apples.", "max_tokens": 40, "temperature": 0}"#;
    for _ in 0..2 {
        let (status, answer) = serving.ask("POST", "/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
    }
    let (_, metrics) = serving.ask("GET", "/metrics", "");
    for line in [
        "tokenrouter:executor_restarts_total{model_name=\"small\"} 1",
        "tokenrouter:executors{model_name=\"small\"} 2",
        "tokenrouter:executors{model_name=\"large\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is missing in {metrics}");
    }
    assert_eq!(serving.ask("GET", "/health", "").0, 200);
    assert_eq!(serving.stop(), 0, "the stuck thread does not hold the process");
}
