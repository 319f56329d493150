//! The program itself with a scripted router: mistakes in the script at the start, at a reload and in a request. Owner:
//! the serve command.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
/// Lines of the log that may wait to be read.
const LOG_LINES: usize = 4096;

/// A folder with a launch file for the demo pair and a script.
struct Site(PathBuf);

impl Site {
    fn new(name: &str, script: &str) -> Site {
        let folder = std::env::temp_dir().join(format!("tokenrouter-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
        let model = |name: &str| {
            format!("[[models]]\nname = {name:?}\npath = {:?}\nthreads = 1\nkv_memory = \"8 MiB\"\n", demo.join(name))
        };
        let launch = format!(
            "[server]\nport = 0\n[router]\nname = \"pair\"\nalgorithm = \"script\"\nmodels = [\"small\", \"large\"]\n\
             [router.params]\nfile = \"mine.rhai\"\nlate = 3\n{}{}",
            model("small"),
            model("large")
        );
        std::fs::write(folder.join("launch.toml"), launch).unwrap();
        let site = Site(folder);
        site.write(script);
        site
    }

    fn write(&self, script: &str) {
        std::fs::write(self.0.join("mine.rhai"), script).unwrap();
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
        command.arg(verb).arg("--config").arg(self.0.join("launch.toml")).args(["--log-level", "info"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Serving {
    child: Child,
    address: String,
    log: Receiver<String>,
}

impl Serving {
    fn start(site: &Site) -> Serving {
        let mut child = site.command("serve").spawn().unwrap();
        let (send, log) = sync_channel(LOG_LINES);
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).all(|line| send.send(line).is_ok()));
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let line = stdout.lines().map_while(Result::ok).find(|line| line.starts_with("serving"));
        let line = line.unwrap_or_else(|| panic!("{:?}", log.iter().collect::<Vec<_>>()));
        let address = line.split("http://").nth(1).unwrap().trim_end_matches("/v1").to_owned();
        Serving { child, address, log }
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let body = body.to_string();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let status = text.split(' ').nth(1).unwrap().parse().unwrap();
        let body = text.split_once("\r\n\r\n").unwrap().1;
        (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    /// Who wrote each of the tokens, or the status and the message.
    fn ask(&self, routing: Option<Value>) -> Result<Vec<String>, (u16, String)> {
        let mut body = json!({ "model": "pair", "prompt": "Question: 2 + 3\nAnswer:", "max_tokens": 6,
            "ignore_eos": true, "return_token_models": true });
        if let Some(routing) = routing {
            body["routing"] = routing;
        }
        match self.post("/v1/completions", &body) {
            (200, answer) => Ok(serde_json::from_value(answer["choices"][0]["token_models"].clone()).unwrap()),
            (status, answer) => Err((status, answer["error"]["message"].as_str().unwrap().to_owned())),
        }
    }

    fn logged(&self, words: &str) -> String {
        loop {
            let line =
                self.log.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("no line with {words:?}: {error}"));
            if line.contains(words) {
                return line;
            }
        }
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SMALL: &str = "fn route(step) { 0 }";
const LATE: &str = "fn route(step) { if step.position - step.prompt_len + 1 >= params().late { #{ to: 1, keep: true } } \
                    else { 0 } }";

#[test]
fn a_script_that_does_not_compile_ends_the_start_with_code_2() {
    let site = Site::new("broken", "fn needs() { #{ entropy: true } }\nfn route(step) { step. }\n");
    for verb in ["serve", "check"] {
        let output = site.command(verb).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        let place = format!("error: {}:2:24: ", site.0.join("mine.rhai").display());
        assert!(errors.contains(&place), "{errors}");
    }
    std::fs::remove_file(site.0.join("mine.rhai")).unwrap();
    let output = site.command("serve").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("launch.toml:8:") && errors.contains("cannot read the script"), "{errors}");
}

#[test]
fn a_running_server_reads_its_script_again() {
    let site = Site::new("reload", SMALL);
    let server = Serving::start(&site);
    let small = vec!["small".to_owned(); 6];
    let late = |at: usize| {
        let mut makers = small.clone();
        makers[at..].fill("large".to_owned());
        makers
    };
    assert_eq!(server.ask(None), Ok(small.clone()));
    assert_eq!(server.post("/admin/reload", &Value::Null).0, 200, "nothing has changed");

    site.write(LATE);
    assert_eq!(server.ask(None), Ok(small.clone()), "not read before it is asked for");
    let (status, answer) = server.post("/admin/reload", &Value::Null);
    assert_eq!((status, &answer["algorithm"]), (200, &json!("script")), "{answer}");
    assert_eq!(server.ask(None), Ok(late(3)));
    assert_eq!(server.ask(Some(json!({ "late": 5 }))), Ok(late(5)), "a parameter of one request");

    site.write("fn route(step) {\n  nonsense(\n}");
    let (status, answer) = server.post("/admin/reload", &Value::Null);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("mine.rhai:"), "{status} {answer}");
    assert_eq!(server.ask(None), Ok(late(3)), "the old script goes on");
    server.signal("-HUP");
    assert!(server.logged("not reloaded").contains("mine.rhai:"));

    site.write(SMALL);
    server.signal("-HUP");
    server.logged("reloaded: new requests");
    assert_eq!(server.ask(None), Ok(small));
}

#[test]
fn a_script_that_fails_costs_the_request_and_not_the_server() {
    let site = Site::new("fails", "fn route(step) {\n  if params().late > 3 { throw \"no idea\"; }\n  0\n}");
    let server = Serving::start(&site);
    let refused = server.ask(Some(json!({ "late": 4 }))).unwrap_err();
    assert_eq!(refused, (500, "the routing algorithm failed while generating".to_owned()));
    assert!(server.logged("an answer failed").contains("mine.rhai:2:26: no idea"));
    assert_eq!(server.ask(None), Ok(vec!["small".to_owned(); 6]));
}
