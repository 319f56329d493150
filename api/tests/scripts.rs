//! The program itself with a scripted router: mistakes in the script at the start, at a reload and in a request. Owner:
//! the serve command.

mod support;

use serde_json::{Value, json};
use support::{Folder, Serving, finish, program, root};

/// A folder with a launch file for the demo pair and a script.
struct Site(Folder);

impl Site {
    fn new(script: &str) -> Site {
        let folder = Folder::new();
        let model = |name: &str| {
            let path = root().join("config/demo").join(name);
            format!("[[models]]\nname = {name:?}\npath = {path:?}\nthreads = 1\nkv_memory = \"8 MiB\"\n")
        };
        let launch = format!(
            "[router]\nname = \"pair\"\nalgorithm = \"script\"\nmodels = [\"small\", \"large\"]\n\
             [router.params]\nfile = \"mine.rhai\"\nlate = 3\n{}{}",
            model("small"),
            model("large")
        );
        folder.write("launch.toml", &launch);
        let site = Site(folder);
        site.write(script);
        site
    }

    fn write(&self, script: &str) {
        self.0.write("mine.rhai", script);
    }

    /// What a command that ends says: exit code and stderr.
    fn run(&self, verb: &str) -> (i32, String) {
        let output = program(&self.0, &["--config", "launch.toml", verb]).output().expect("the program starts");
        let (code, _, errors) = finish(output);
        (code, errors)
    }

    fn serve(&self) -> Serving {
        Serving::start(program(&self.0, &["--config", "launch.toml", "--log-level", "info"]))
    }
}

/// Asks for the files to be read again.
fn reload(server: &Serving) -> (u16, Value) {
    let (status, body) = server.ask("POST", "/admin/reload", "");
    (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

/// Who wrote each of six tokens, or the status and the message.
fn ask(server: &Serving, routing: Option<Value>) -> Result<Vec<String>, (u16, String)> {
    let mut body = json!({ "model": "pair", "prompt": "Question: 2 + 3\nAnswer:", "max_tokens": 6,
        "ignore_eos": true, "return_token_models": true });
    if let Some(routing) = routing {
        body["routing"] = routing;
    }
    let (status, answer) = server.ask("POST", "/v1/completions", &body.to_string());
    let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"));
    match status {
        200 => Ok(serde_json::from_value(answer["choices"][0]["token_models"].clone()).expect("a list of names")),
        _ => Err((status, answer["error"]["message"].as_str().unwrap_or_default().to_owned())),
    }
}

const SMALL: &str = "fn route(step) { 0 }";
const LATE: &str = "fn route(step) { if step.position - step.prompt_len + 1 >= params().late { #{ to: 1, keep: true } } \
                    else { 0 } }";

#[test]
fn a_script_that_does_not_compile_ends_the_start_with_code_2() {
    let site = Site::new("fn needs() { #{ entropy: true } }\nfn route(step) { step. }\n");
    for verb in ["serve", "check"] {
        let (code, errors) = site.run(verb);
        assert!(code == 2 && errors.starts_with("error: mine.rhai:2:24: "), "{code}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
    std::fs::remove_file(site.0.path.join("mine.rhai")).expect("it was written");
    let (code, errors) = site.run("serve");
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("launch.toml:6:") && errors.contains("cannot read the script"), "{errors}");
}

#[test]
fn a_running_server_reads_its_script_again() {
    let site = Site::new(SMALL);
    let server = site.serve();
    let small = vec!["small".to_owned(); 6];
    let late = |at: usize| {
        let mut makers = small.clone();
        makers[at..].fill("large".to_owned());
        makers
    };
    assert_eq!(ask(&server, None), Ok(small.clone()));
    assert_eq!(reload(&server).0, 200, "nothing has changed");

    site.write(LATE);
    assert_eq!(ask(&server, None), Ok(small.clone()), "not read before it is asked for");
    let (status, answer) = reload(&server);
    assert_eq!((status, &answer["algorithm"]), (200, &json!("script")), "{answer}");
    assert_eq!(ask(&server, None), Ok(late(3)));
    assert_eq!(ask(&server, Some(json!({ "late": 5 }))), Ok(late(5)), "a parameter of one request");

    site.write("fn route(step) {\n  nonsense(\n}");
    let (status, answer) = reload(&server);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("mine.rhai:"), "{status} {answer}");
    assert_eq!(ask(&server, None), Ok(late(3)), "the old script goes on");
    server.signal("HUP");
    assert!(server.logged("not reloaded").contains("mine.rhai:"));

    site.write(SMALL);
    server.signal("HUP");
    server.logged("reloaded: new requests");
    assert_eq!(ask(&server, None), Ok(small));
}

#[test]
fn a_script_that_fails_costs_the_request_and_not_the_server() {
    let site = Site::new("fn route(step) {\n  if params().late > 3 { throw \"no idea\"; }\n  0\n}");
    let server = site.serve();
    let refused = ask(&server, Some(json!({ "late": 4 }))).unwrap_err();
    assert_eq!(refused, (500, "the routing algorithm failed while generating".to_owned()));
    assert!(server.logged("an answer failed").contains("mine.rhai:2:26: no idea"));
    assert_eq!(ask(&server, None), Ok(vec!["small".to_owned(); 6]));
}

/// Whatever a script does without end costs the request it does it for; others are answered meanwhile and afterwards.
#[test]
fn a_script_without_bounds_costs_its_request() {
    let site = Site::new(
        "fn down(n) { down(n + 1) }\nfn route(step) {\n  let way = params().late;\n  if way == 4 { loop { } }\n  \
         if way == 5 { down(0); }\n  if way == 6 { let s = \"x\"; loop { s += s; } }\n  \
         if way == 7 { let a = [1]; loop { a += a; } }\n  if way == 8 { loop { this[`k${this.len()}`] = step; } }\n  \
         if way == 9 { return 7; }\n  0\n}",
    );
    let server = site.serve();
    let small = vec!["small".to_owned(); 6];
    for (way, words) in [
        (4, "mine.rhai:2:1: route: Too many operations"),
        (5, "Stack overflow"),
        (6, "mine.rhai:2:1: route: Length of string too large"),
        (7, "mine.rhai:2:1: route: Size of array/BLOB too large"),
        (8, "mine.rhai:"),
        (9, "mine.rhai:2:1: route(step): 7 is no model"),
    ] {
        std::thread::scope(|scope| {
            let bad = scope.spawn(|| ask(&server, Some(json!({ "late": way }))));
            assert_eq!(ask(&server, None), Ok(small.clone()), "beside way {way}");
            assert_eq!(bad.join().expect("an answer").map_err(|refused| refused.0), Err(500), "way {way}");
        });
        let line = server.logged("an answer failed");
        assert!(line.contains("mine.rhai:") && line.contains(words), "way {way}: {line}");
    }
    assert_eq!(ask(&server, None), Ok(small));
}

/// A reload while answers are being written: each is finished by the script it began with.
#[test]
fn a_reload_does_not_touch_running_requests() {
    let large = "fn entry(seed) { 1 }\nfn route(step) { let n = 0; for i in 0..10000 { n += i; } 1 }";
    let site = Site::new(large);
    let server = site.serve();
    let long = |server: &Serving| {
        let body = json!({ "model": "pair", "prompt": "Question: 2 + 3\nAnswer:", "max_tokens": 400,
            "ignore_eos": true, "return_token_models": true, "temperature": 0 });
        let (status, answer) = server.ask("POST", "/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        serde_json::from_value::<Vec<String>>(answer["choices"][0]["token_models"].clone()).expect("names")
    };
    let made_by = |makers: &[String], name: &str| makers.iter().all(|maker| maker == name);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..4).map(|_| scope.spawn(|| long(&server))).collect();
        // Until the first tokens are there, and long before the last ones.
        loop {
            let (_, metrics) = server.ask("GET", "/metrics", "");
            let written =
                metrics.lines().filter(|line| !line.starts_with('#') && line.contains("committed_tokens_total"));
            if written.filter_map(|line| line.split(' ').next_back()?.parse::<f64>().ok()).any(|count| count > 20.0) {
                break;
            }
        }
        site.write(SMALL);
        assert_eq!(reload(&server).0, 200);
        let during = running.iter().filter(|request| !request.is_finished()).count();
        assert!(made_by(&long(&server), "small"), "a new request follows the new script");
        for request in running {
            assert!(made_by(&request.join().expect("an answer"), "large"), "an old one the old script");
        }
        assert!(during > 0, "nothing was running when the script changed");
    });
}
