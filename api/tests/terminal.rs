//! The program on a terminal: bars, colours, Ctrl-C, files that are whole or not there. Nothing here depends on how fast
//! anything is. A terminal is made by `script` of util-linux.

mod support;

use serde_json::Value;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Folder, Serving, finish, program, root, run};

const QUESTION: &str = "Max has 495 apples and Ida has 12 fewer. How many apples do they have together?";

/// How long something is waited for that takes moments.
const WAIT: Duration = Duration::from_secs(120);

/// The program on a terminal of its own; what is typed is piped in, what both streams show is piped out.
fn on_a_terminal(folder: &Folder, arguments: &str, no_color: bool) -> Child {
    let line = format!("'{}' {arguments}", env!("CARGO_BIN_EXE_tokenrouter"));
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).current_dir(&folder.path);
    command.env("XDG_CACHE_HOME", folder.path.join("cache")).env("TERM", "xterm-256color").env_remove("NO_COLOR");
    if no_color {
        command.env("NO_COLOR", "1");
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("script of util-linux")
}

fn shown(folder: &Folder, arguments: &str, no_color: bool) -> String {
    let child = on_a_terminal(folder, arguments, no_color);
    let (code, out, err) = finish(child.wait_with_output().expect("it ends"));
    assert_eq!(code, 0, "{arguments}: {out}{err}");
    out
}

#[test]
fn a_terminal_sees_bars_and_colours_unless_they_are_not_wanted() {
    let folder = Folder::new();
    let arguments = format!("generate --temperature 0 '{QUESTION}'");
    let colourful = shown(&folder, &arguments, false);
    assert!(colourful.contains("load small") && colourful.contains("load large"), "{colourful:?}");
    assert!(colourful.contains("\x1b[1;38;5;163m") && colourful.contains("tokens/s"), "{colourful:?}");
    let plain = shown(&folder, &arguments, true);
    assert!(!plain.contains("\x1b[1;38") && !plain.contains("\x1b[3"), "{plain:?}");
    let quiet = shown(&folder, &format!("-q {arguments}"), true);
    assert!(!quiet.contains("load small") && !quiet.contains("tokens/s") && quiet.contains("####"), "{quiet:?}");
    // Bars are gone when the answer comes: it starts on a line of its own, after the line was cleared.
    let answer = plain.find(quiet.trim_end().lines().next().expect("an answer")).expect("the same answer");
    let before = plain[..answer].trim_end_matches(['\r', '\n']);
    assert!(before.ends_with("\x1b[2K") || before.ends_with("\x1b[J") || before.ends_with('K'), "{before:?}");
}

/// Reads what a terminal shows up to these words.
fn read_until(child: &mut Child, words: &str) -> String {
    let (begin, mut seen, mut byte) = (Instant::now(), Vec::new(), [0; 1]);
    let stdout = child.stdout.as_mut().expect("stdout is piped");
    while !String::from_utf8_lossy(&seen).contains(words) {
        let read = stdout.read(&mut byte).expect("a terminal");
        let text = String::from_utf8_lossy(&seen);
        assert!(read > 0 && begin.elapsed() < WAIT, "no {words} in {text}");
        seen.extend_from_slice(&byte[..read]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}

#[test]
fn ctrl_c_leaves_a_clean_line_and_code_130() {
    let folder = Folder::new();
    for (arguments, words) in
        [("eval", "small alone"), ("sweep", "small alone"), ("bench long --tokens 400 --repeat 900", "tokens")]
    {
        let mut child = on_a_terminal(&folder, arguments, false);
        read_until(&mut child, words);
        child.stdin.as_mut().expect("stdin is piped").write_all(b"\x03").expect("typed");
        let (code, rest, err) = finish(child.wait_with_output().expect("it ends"));
        assert_eq!(code, 130, "{arguments}: {rest}{err}");
        assert!(rest.ends_with("\x1b[0m\r\n"), "{arguments}: {rest:?}");
        assert!(!rest.contains("error") && !rest.contains("panic"), "{arguments}: {rest:?}");
    }
}

fn interrupt(child: &Child) {
    let line = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &line]).status().expect("a shell").success());
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn an_interrupted_command_leaves_no_half_written_file() {
    let folder = Folder::new();
    let made = folder.path.join("made");
    let mut command = program(&folder, &["synth-model", "--size", "4b", "--out", "made"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let begin = Instant::now();
    while names(&made).is_empty() {
        assert!(begin.elapsed() < WAIT, "nothing is written");
        std::thread::yield_now();
    }
    assert!(names(&made)[0].starts_with('.'), "no model yet: {:?}", names(&made));
    interrupt(&child);
    let (code, out, err) = finish(child.wait_with_output().expect("it ends"));
    assert_eq!((code, out.as_str(), err.as_str()), (130, "", ""));
    assert_eq!(names(&made), Vec::<String>::new());
}

#[test]
fn a_server_says_where_everything_is() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    let address = &serving.address;
    for line in [
        "batching  eager  waits at most 50 ms  thresholds with 64 requests (the most): small 1, large 1".to_owned(),
        "router    demo  r_stitch  threshold 0.05".to_owned(),
        format!("dashboard http://{address}/dashboard"),
        format!("serving   http://{address}/v1"),
    ] {
        assert!(serving.banner.lines().any(|found| found == line), "{line} in {}", serving.banner);
    }
    let (status, page) = serving.ask("GET", "/dashboard", "");
    assert!((200..400).contains(&status), "{status} {page}");
    // Every line has its value in the same column.
    let aligned = serving.banner.lines().skip(1).all(|line| line.as_bytes()[9] == b' ' && line.as_bytes()[10] != b' ');
    assert!(aligned, "{}", serving.banner);
    assert_eq!(serving.stop(), 0);
}

#[test]
fn results_are_json_where_that_is_asked_for() {
    let folder = Folder::new();
    let object = |arguments: &[&str]| -> Value {
        let (code, out, err) = run(&folder, arguments);
        assert_eq!((code, err.as_str()), (0, ""), "{arguments:?}");
        serde_json::from_str(&out).expect("one JSON object")
    };
    let checked = object(&["check", "--json"]);
    assert!(checked["launch_file"].as_str().is_some_and(|text| text.contains("algorithm = \"r_stitch\"")), "{checked}");
    assert_eq!((checked["models"][1]["name"].as_str(), &checked["missing"]), (Some("large"), &serde_json::json!([])));
    assert!(checked["models"][0]["weight_bytes"].as_u64() > Some(100_000));
    let head = root().join("tests/fixtures/heads/r2r-default.pt").display().to_string();
    let converted = object(&["convert-router", &head, "head", "--json"]);
    assert_eq!(
        (converted["head"]["family"].as_str(), converted["weights"].is_u64()),
        (Some("r2r"), true),
        "{converted}"
    );
}

#[test]
fn shells_read_the_completions() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, out, err) = run(&folder, &["completions", shell]);
        assert_eq!((code, err.as_str()), (0, ""), "{shell}");
        assert!(out.contains("train-router") && out.contains("goodput"), "{shell}");
        if shell == "bash" {
            let script = folder.write("completions.bash", &out).display().to_string();
            // The shell completes a command of the program from the script.
            let line = format!(
                ". '{script}'; COMP_WORDS=(tokenrouter tra); COMP_CWORD=1; _tokenrouter tokenrouter tra; echo \"${{COMPREPLY[@]}}\""
            );
            let asked = Command::new("bash").args(["-c", &line]).output().expect("bash runs");
            assert_eq!(String::from_utf8_lossy(&asked.stdout).trim(), "train-router");
        }
    }
}

/// What a command does not read is refused, before anything is done.
#[test]
fn launch_files_are_refused_where_none_is_read() {
    let folder = Folder::new();
    for command in [
        &["completions", "bash"][..],
        &["convert-router", "in", "out"],
        &["synth-model", "--size", "0.6b", "--out", "out"],
        &["bench", "serve", "--url", "http://127.0.0.1:1"],
    ] {
        for option in ["--config", "--params"] {
            let (code, out, err) = run(&folder, &[command, &[option, "a=1"]].concat());
            assert_eq!((code, out.as_str()), (2, ""), "{command:?}");
            assert!(err.contains("--config and --params have no meaning here"), "{command:?}: {err}");
        }
    }
    assert!(!folder.path.join("out").exists());
    for command in
        [&["train-router", "shards", "--family", "r2r", "--out", "out"][..], &["label", "in", "--output", "out"]]
    {
        let (code, _, err) = run(&folder, &[command, &["--params", "a=1"]].concat());
        assert!(code == 2 && err.contains("nothing is routed while"), "{command:?}: {err}");
    }
}

/// The picture holds the answer's own text, line by line.
#[test]
fn an_answer_becomes_a_picture() {
    let folder = Folder::new();
    let arguments = ["generate", QUESTION, "--temperature", "0", "--color", "never", "--svg", "answer.svg"];
    let (code, out, err) = run(&folder, &arguments);
    assert_eq!(code, 0, "{err}");
    let svg = std::fs::read_to_string(folder.path.join("answer.svg")).expect("a picture");
    let text: String = svg
        .split("<text")
        .skip(1)
        .filter_map(|part| part.split_once('>')?.1.split_once("</text>"))
        .map(|(text, _)| text)
        .collect();
    let bare = |text: &str| text.replace([' ', '\n'], "");
    let text = bare(&text.replace("&quot;", "\"").replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"));
    assert!(text.contains(&bare(out.trim())), "{text} {out}");
    assert!(
        text.contains(&bare(QUESTION)) && svg.contains("class=\"m1\"") && svg.contains("prefers-color-scheme:dark")
    );
}
