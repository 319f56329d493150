//! The program as a user runs it: the embedded pair, wrong launch files, exit codes.

mod support;

use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use support::{Folder, Serving, finish, program, root, run};

const QUESTION: &str = "Max has 495 apples and Ida has 12 fewer. How many apples do they have together?";

fn generated(folder: &Folder, more: &[&str]) -> Value {
    let (code, out, err) =
        run(folder, &[&["generate", QUESTION, "--json", "-n", "60", "--temperature", "0"], more].concat());
    assert_eq!(code, 0, "{more:?}: {err}");
    assert_eq!(out.lines().count(), 1);
    serde_json::from_str(&out).expect("one JSON object")
}

#[test]
fn generate_describes_every_token() {
    let object = generated(&Folder::new(), &[]);
    let tokens = object["token_ids"].as_array().expect("token_ids").len();
    assert_eq!(object["token_models"].as_array().expect("token_models").len(), tokens);
    assert_eq!(object["entropies"].as_array().expect("entropies").len(), tokens);
    assert_eq!(object["usage"]["completion_tokens"].as_u64(), Some(tokens as u64));
    assert_eq!(object["model"], "demo");
    let count = |name: &str| {
        let models = object["token_models"].as_array().into_iter().flatten();
        models.filter(|model| *model == name).count() as u64
    };
    for name in ["small", "large"] {
        assert!(count(name) > 0, "{name} wrote nothing");
        assert_eq!(object["usage"]["by_model"][name].as_u64(), Some(count(name)));
    }
    let changes =
        object["token_models"].as_array().map_or(0, |models| models.windows(2).filter(|two| two[0] != two[1]).count());
    assert!(object["hops"].as_u64() >= Some(changes as u64), "{}", object["hops"]);
    assert!(object["timings"]["tokens_per_s"].as_f64() > Some(0.0));
}

/// R-Stitch at both ends of its threshold is one of the models, token for token.
#[test]
fn threshold_ends_are_the_single_models() {
    let folder = Folder::new();
    for (threshold, model) in [("threshold=1", "small"), ("threshold=-0.5", "large")] {
        let (routed, alone) = (generated(&folder, &["--params", threshold]), generated(&folder, &["--model", model]));
        assert_eq!(routed["token_ids"], alone["token_ids"], "{threshold}");
        assert_eq!(routed["text"], alone["text"], "{threshold}");
    }
}

#[test]
fn generate_colours_without_changing_the_text() {
    let folder = Folder::new();
    let line = |color: &str| {
        let (code, out, err) = run(&folder, &["generate", QUESTION, "--color", color, "--temperature", "0"]);
        assert_eq!(code, 0, "{err}");
        assert!(err.contains("small") && err.contains("large") && err.contains("tokens/s"), "{err}");
        out
    };
    let (plain, painted) = (line("never"), line("always"));
    assert!(painted.contains("\x1b[1;38;5;163m") && !plain.contains('\x1b'));
    assert_eq!(painted.replace("\x1b[1;38;5;163m", "").replace("\x1b[0m", ""), plain);
    assert_eq!(line("auto"), plain, "stdout is no terminal here");
}

#[test]
fn chat_answers_and_obeys_its_commands() {
    let mut child = program(&Folder::new(), &["chat", "--temperature", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let typed = format!("{QUESTION}\n/reset\n{QUESTION}\n/nonsense\n/quit\nnever answered\n");
    child.stdin.take().expect("stdin is piped").write_all(typed.as_bytes()).expect("typed");
    let (code, out, err) = finish(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 0, "{err}");
    assert_eq!(out.matches("####").count(), 2, "{out}");
    let half = out.len() / 2;
    assert_eq!(out[..half], out[half..], "after /reset the same question has the same answer");
    assert!(err.contains("/nonsense is unknown"), "{err}");
}

#[test]
fn eval_reports_every_row() {
    let folder = Folder::new();
    let arguments = ["eval", "--limit", "12", "--json", "--params", "threshold=1", "--params", "threshold=-1"];
    let (code, out, err) = run(&folder, &arguments);
    assert_eq!(code, 0, "{err}");
    let object: Value = serde_json::from_str(&out).expect("one JSON object");
    let rows = object["rows"].as_array().expect("rows");
    let runs: Vec<&str> = rows.iter().filter_map(|row| row["run"].as_str()).collect();
    assert_eq!(runs, ["small alone", "large alone", "r_stitch threshold=1", "r_stitch threshold=-1"]);
    for row in rows {
        assert_eq!((row["total"].as_u64(), row["failed"].as_u64()), (Some(12), Some(0)), "{row}");
    }
    assert_eq!(rows[0]["right"], rows[2]["right"]);
    assert_eq!(rows[1]["right"], rows[3]["right"]);
    assert!(rows[1]["accuracy"].as_f64() > rows[0]["accuracy"].as_f64(), "the large model computes better");
    let (code, out, _) = run(&folder, &["eval", "--limit", "2", "--model", "small"]);
    assert_eq!((code, out.lines().count()), (0, 2), "{out}");
}

/// The demo pair keeps what routing promises: nearly the large model's accuracy for a fraction of its tokens.
#[test]
fn the_embedded_pair_shows_what_routing_is_for() {
    let (code, out, err) = run(&Folder::new(), &["eval", "--json"]);
    assert_eq!(code, 0, "{err}");
    let object: Value = serde_json::from_str(&out).expect("one JSON object");
    let row = |index: usize| &object["rows"][index];
    let accuracy = |index: usize| row(index)["accuracy"].as_f64().expect("accuracy");
    assert_eq!(row(0)["total"], 200);
    assert!(accuracy(0) <= 0.20, "small alone: {}", accuracy(0));
    assert!(accuracy(1) >= 0.94, "large alone: {}", accuracy(1));
    assert!(accuracy(2) >= accuracy(1) - 0.01, "routed {}, large alone {}", accuracy(2), accuracy(1));
    let share = row(2)["share"]["large"].as_f64().expect("share");
    assert!(share <= 0.12, "share of the large model: {share}");
}

#[test]
fn check_prints_a_file_that_checks_again() {
    let folder = Folder::new();
    let (code, out, err) = run(&folder, &["check"]);
    assert_eq!(code, 0, "{err}");
    for part in ["algorithm = \"r_stitch\"", "context_length = ", "port = 8080", "# small: llama"] {
        assert!(out.contains(part), "{out}");
    }
    let again = folder.write("again.toml", &out);
    let (code, second, err) = run(&folder, &["check", "--config", &again.display().to_string()]);
    assert_eq!((code, second), (0, out), "{err}");
}

fn tiny(name: &str) -> PathBuf {
    root().join("tests/fixtures/tiny").join(name)
}

/// A launch file of two models, written into the folder.
fn pair(folder: &Folder, first: &str, second: &str, more: &str) -> String {
    let text = format!(
        "[[models]]\nname = \"a\"\npath = \"{first}\"\n[[models]]\nname = \"b\"\npath = \"{second}\"\n\
         [router]\nalgorithm = \"r_stitch\"\n{more}"
    );
    folder.write("launch.toml", &text).display().to_string()
}

/// Both `check` and `serve` end with code 2 and exactly one line that names the place and says these things.
fn refused(folder: &Folder, config: &str, place: &str, parts: &[&str]) {
    for command in ["check", "serve"] {
        let (code, out, err) = run(folder, &[command, "--config", config]);
        assert_eq!((code, out.as_str()), (2, ""), "{command}: {err}");
        assert_eq!(err.lines().count(), 1, "{err}");
        for part in [&[&format!("error: {config}{place}: ")[..]], parts].concat() {
            assert!(err.contains(part), "`{err}` lacks `{part}`");
        }
    }
}

#[test]
fn wrong_launch_files_end_with_code_2_and_one_line() {
    let folder = Folder::new();
    let llama = tiny("llama-f32").display().to_string();
    let demo = root().join("config/demo/small").display().to_string();
    let broken = folder.write("broken.gguf", "GGUF\u{3}\0\0\0").display().to_string();
    let unknown = folder.path.join("unknown");
    std::fs::create_dir(&unknown).expect("a folder");
    for name in ["tokenizer.json", "model.safetensors"] {
        std::fs::copy(tiny("llama-f32").join(name), unknown.join(name)).expect("copied");
    }
    let config = std::fs::read_to_string(tiny("llama-f32").join("config.json")).expect("config.json");
    folder.write(
        "unknown/config.json",
        &config.replace("LlamaForCausalLM", "MambaForCausalLM").replace("\"llama\"", "\"mamba\""),
    );
    let unknown = unknown.display().to_string();
    for (first, second, more, place, parts) in [
        (llama.as_str(), "absent", "", ":6:8", ["absent does not exist", "hf:owner/name"]),
        (&llama, &demo, "", ":6:8", ["token table of model `b` differs from that of `a`", "models of one tokenizer"]),
        (&broken, &llama, "", ":3:8", ["broken.gguf", "truncated"]),
        (&unknown, &llama, "", ":3:8", ["Mamba", "llama"]),
        (&llama, &llama, "params = { treshold = 1 }", ":9:23", ["treshold", "did you mean `threshold`?"]),
        (&llama, &llama, "params = { threshold = \"x\" }", ":9:24", ["router.params.threshold", "invalid type"]),
        (&llama, &llama, "model = []", ":9:1", ["unknown key `model` in [router]", "did you mean `models`?"]),
    ] {
        refused(&folder, &pair(&folder, first, second, more), place, &parts);
    }
    let single = |more: &str| {
        let text = format!("[[models]]\nname = \"a\"\npath = \"{llama}\"\n{more}\n");
        folder.write("launch.toml", &text).display().to_string()
    };
    for (more, place, parts) in [
        ("kv_memory = 100", ":4:13", ["holds no page", "give at least"]),
        ("kv_memory = \"900 TiB\"", ":4:13", ["available", "lower the kv memory"]),
        ("context_length = 100000", ":4:18", ["100000", "lower it"]),
        ("cores = [4000]", ":4:9", ["4000", "core"]),
        (
            "[router]\nalgorithm = \"r_stich\"",
            ":5:13",
            ["unknown routing algorithm `r_stich`", "did you mean `r_stitch`?"],
        ),
        ("[router]\nalgorithm = \"r_stitch\"", ":4:1", ["r_stitch", "models"]),
    ] {
        refused(&folder, &single(more), place, &parts);
    }
}

#[test]
fn wrong_options_end_with_code_2_too() {
    let folder = Folder::new();
    for (arguments, parts) in [
        (vec!["generate", "x", "--model", "smal"], ["--model smal is not served", "did you mean `small`?"]),
        (vec!["generate", "x", "--params", "treshold=1"], ["--params", "did you mean `threshold`?"]),
        (vec!["generate", "x", "--log-level", "tokenrouter=loud"], ["--log-level", "no log filter"]),
        (vec!["eval", "absent.jsonl"], ["absent.jsonl", "cannot read the problems"]),
        (vec!["serve", "--host", "no.such.host.invalid"], ["server.host", "no.such.host.invalid"]),
    ] {
        let (code, out, err) = run(&folder, &arguments);
        assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{arguments:?}: {err}");
        for part in parts {
            assert!(err.contains(part), "{arguments:?}: `{err}` lacks `{part}`");
        }
    }
    let (code, _, err) = run(&folder, &["generate", &"word ".repeat(4000)]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("the prompt is refused") && err.contains("512"), "{err}");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let folder = Folder::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let (code, _, err) = run(&folder, &["serve", "--port", &port, "--log-level", "error"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains(&port) && err.contains("--port"), "{err}");
}

#[test]
fn serve_answers_and_stops_on_a_signal() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &["--log-format", "json"]));
    assert!(serving.banner.contains("router    demo  r_stitch"), "{}", serving.banner);
    let (status, body) = serving.ask("GET", "/health", "");
    assert_eq!(status, 200, "{body}");
    assert_eq!(serving.stop(), 0);
}
