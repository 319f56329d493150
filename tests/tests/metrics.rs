//! `/metrics`, and what is made of it: Prometheus' Python parser and `promtool` read it, docs/metrics.md lists exactly what is
//! there, a real Prometheus evaluates every expression of the dashboard and of the alert rules. Needs Debian's `prometheus`.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tokenrouter_tests::clients::{Venv, run, scratch};
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{Connection, TEXT, get, post, request};

const REMEDY: &str = "install promtool and prometheus (Debian: apt-get install prometheus)";
/// Longest wait for Prometheus.
const PATIENCE: Duration = Duration::from_secs(60);

#[allow(clippy::disallowed_methods, reason = "another process is waited for, which sends no message")]
fn nap() {
    std::thread::sleep(Duration::from_millis(50));
}

fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn ask(address: SocketAddr, body: &Value) {
    let answer = post(address, TEXT, body);
    assert_eq!(answer.status, 200, "{}", answer.text);
}

/// A server that has answered, and what it tells then.
fn live() -> (Server, String) {
    let server = Server::start(Setup::default());
    let answer = |model: &str| ask(server.address, &json!({"model": model, "prompt": "w1 w2", "max_tokens": 8}));
    ["pair", "small", "large"].into_iter().for_each(answer);
    get(server.address, "/metrics");
    let text = get(server.address, "/metrics").text;
    (server, text)
}

/// What is known of a family.
#[derive(Debug, Default, PartialEq, Eq)]
struct Family {
    kind: String,
    labels: BTreeSet<String>,
    help: String,
}

impl Family {
    /// Its row in the list.
    fn row(&self, name: &str) -> String {
        let labels: Vec<String> = self.labels.iter().map(|label| format!("`{label}`")).collect();
        format!("| `{name}` | {} | {} | {} |", self.kind, labels.join(", "), self.help)
    }
}

/// The families of a text in Prometheus' format.
fn families(text: &str) -> BTreeMap<String, Family> {
    let mut found: BTreeMap<String, Family> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            found.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            found.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else {
            let (series, _) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let name =
                family_of(name, |name| found.contains_key(name)).unwrap_or_else(|| panic!("{line}: not declared"));
            let family = found.get_mut(&name).expect("it is there");
            let keys = labels.split("=\"").map(|part| part.rsplit([',', ' ', '"']).next().unwrap_or_default());
            let keys = keys.filter(|key| !matches!(*key, "" | "le" | "}"));
            family.labels.extend(keys.map(str::to_owned));
        }
    }
    found
}

/// The family of a series, which may be a part of a histogram.
fn family_of(name: &str, is_family: impl Fn(&str) -> bool) -> Option<String> {
    let parts = ["_bucket", "_sum", "_count"].iter().filter_map(|part| name.strip_suffix(part));
    [name].into_iter().chain(parts).find(|name| is_family(name)).map(str::to_owned)
}

#[test]
fn prometheus_parser_reads_it_and_the_numbers_add_up() {
    let server = Server::start(Setup::default());
    Venv::of("requirements.txt").suite("metrics_suite.py", server.address, &["--prompt", "w1 w2 w3"]);
    server.stop();
}

/// Runs promtool to its end, whatever comes of it.
fn promtool(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new("promtool");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("promtool cannot run: {error}; {REMEDY}"));
    child.stdin.take().expect("it is piped").write_all(input.as_bytes()).expect("promtool reads");
    child.wait_with_output().expect("promtool ends")
}

#[test]
fn promtool_complains_of_nothing_but_vllms_names() {
    let (server, text) = live();
    server.stop();
    let lint = |text: &str| -> Vec<String> {
        let output = promtool(&["check", "metrics"], text);
        let said = String::from_utf8_lossy(&output.stderr);
        let known = |line: &&str| {
            line.ends_with("metric names should not contain ':'")
                || *line == "vllm:iteration_tokens_total non-counter metrics should not have \"_total\" suffix"
        };
        said.lines().filter(|line| !known(line)).map(str::to_owned).collect()
    };
    assert_eq!(lint(&text), Vec::<String>::new());
    for (bad, complaint) in [
        ("x_seconds 1\n", "no help text"),
        ("# HELP x_ms Time.\n# TYPE x_ms gauge\nx_ms 1\n", "abbreviated unit"),
        ("# HELP x Time.\n# TYPE x counter\nx 1\n", "_total"),
        ("# HELP x Time.\n# TYPE x gauge\nx{a=1} 1\n", "error"),
    ] {
        let said = lint(&format!("{text}{bad}")).join("\n");
        assert!(said.contains(complaint), "{bad} gives: {said}");
    }
}

#[test]
fn the_list_of_metrics_has_what_is_there_and_nothing_else() {
    let (server, text) = live();
    server.stop();
    let document = read("docs/metrics.md");
    let (document, _) = document.split_once("\n## Traces").expect("the end of the lists");
    let listed: BTreeSet<&str> = document.lines().filter(|line| line.starts_with("| `")).collect();
    let there: BTreeSet<String> = families(&text).iter().map(|(name, family)| family.row(name)).collect();
    let there: BTreeSet<&str> = there.iter().map(String::as_str).collect();
    let lacks: Vec<&&str> = there.difference(&listed).collect();
    let invents: Vec<&&str> = listed.difference(&there).collect();
    assert!(lacks.is_empty() && invents.is_empty(), "docs/metrics.md lacks {lacks:#?}\nand has {invents:#?}");
    assert_eq!(document.matches("\n| `").count(), there.len(), "each once");
    assert!(there.iter().any(|row| row.starts_with("| `tokenrouter:hops_total` | counter | `from`, `to` |")));
}

/// A real Prometheus that looks at the server; it ends with its owner.
struct Prometheus {
    child: Child,
    address: SocketAddr,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It has nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(of: SocketAddr) -> Prometheus {
        let folder = scratch("prometheus");
        let config = json!({
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "scrape_configs": [{"job_name": "tokenrouter", "static_configs": [{"targets": [of.to_string()]}]}],
            "rule_files": [fs::canonicalize(file("docs/grafana/alerts.yml")).expect("the rules are there")],
        });
        // JSON is YAML.
        fs::write(folder.join("prometheus.yml"), config.to_string()).expect("the target folder can be written");
        // Earlier runs are over.
        let _ = fs::remove_dir_all(folder.join("data"));
        (0..3).find_map(|_| Prometheus::listen(&folder)).expect("prometheus starts; see its log in the target folder")
    }

    /// At a free port; none when somebody else took it first.
    fn listen(folder: &Path) -> Option<Prometheus> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
        let log = fs::File::create(folder.join("log")).expect("the target folder can be written");
        let mut command = Command::new("prometheus");
        command.arg(format!("--web.listen-address={free}")).arg("--config.file=prometheus.yml");
        command.arg("--storage.tsdb.path=data").current_dir(folder).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| panic!("prometheus cannot run: {error}; {REMEDY}"));
        let mut prometheus = Prometheus { child, address: free };
        let began = Instant::now();
        while TcpStream::connect(free).is_err() || get(free, "/-/ready").status != 200 {
            if prometheus.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return None;
            }
            assert!(began.elapsed() < PATIENCE, "prometheus is not ready");
            nap();
        }
        Some(prometheus)
    }

    /// What an expression gives now: one value a series.
    fn query(&self, expression: &str) -> Result<Vec<f64>, String> {
        let coded = expression.bytes().fold(String::new(), |mut coded, byte| {
            let _ = write!(coded, "%{byte:02X}");
            coded
        });
        let answer = get(self.address, &format!("/api/v1/query?query={coded}"));
        let body: Value = serde_json::from_str(&answer.text).map_err(|error| error.to_string())?;
        let result = body["data"]["result"].as_array().ok_or_else(|| answer.text.clone())?;
        Ok(result.iter().filter_map(|series| series["value"][1].as_str()?.parse().ok()).collect())
    }

    /// Waits until an expression gives something.
    fn wait_for(&self, expression: &str) -> Result<(), String> {
        let began = Instant::now();
        while self.query(expression)?.is_empty() {
            if began.elapsed() > PATIENCE {
                return Err("it gives nothing".to_owned());
            }
            nap();
        }
        Ok(())
    }
}

/// Every expression of a dashboard with its title, variables replaced as Grafana does.
fn expressions(dashboard: &str) -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(dashboard).expect("JSON");
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let title = panel["title"].as_str().expect("a title");
            assert_eq!(target["datasource"], json!({"type": "prometheus", "uid": "${datasource}"}), "{title}");
            let mut expression = target["expr"].as_str().expect("an expression").replace("$__rate_interval", "10s");
            for variable in variables {
                let name = format!("${}", variable["name"].as_str().expect("a name"));
                expression = expression.replace(&name, variable["allValue"].as_str().unwrap_or_default());
            }
            assert!(!expression.contains('$'), "{title}: an unknown variable in {expression}");
            found.push((title.to_owned(), expression));
        }
    }
    for variable in variables.iter().filter(|variable| variable["type"] == "query") {
        let query = variable["query"]["query"].as_str().expect("a query");
        let series = query.strip_prefix("label_values(").and_then(|rest| rest.split(',').next());
        found.push((query.to_owned(), series.expect("label_values").to_owned()));
    }
    found
}

/// The names of series in an expression.
fn names(expression: &str) -> BTreeSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = expression.split(|c: char| !is_name(c));
    words
        .filter(|word| {
            word.trim_end_matches(':').contains(':') || word.starts_with("process_") || word.starts_with("http_")
        })
        .collect()
}

/// What dashboards for vLLM ask for.
const OF_VLLM: [&str; 14] = [
    r#"histogram_quantile(0.99, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="pair"}[10s])))"#,
    r#"histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="pair"}[10s])))"#,
    r#"histogram_quantile(0.99, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket{model_name="pair"}[10s])))"#,
    r#"rate(vllm:e2e_request_latency_seconds_sum{model_name="pair"}[10s]) / rate(vllm:e2e_request_latency_seconds_count{model_name="pair"}[10s])"#,
    r#"rate(vllm:prompt_tokens_total{model_name="pair"}[10s])"#,
    r#"rate(vllm:generation_tokens_total{model_name="pair"}[10s])"#,
    r#"sum by (finished_reason) (increase(vllm:request_success_total{model_name="pair"}[10s]))"#,
    r#"rate(vllm:request_queue_time_seconds_sum{model_name="pair", engine="0"}[10s])"#,
    r#"rate(vllm:request_prefill_time_seconds_sum{model_name="pair"}[10s])"#,
    r#"rate(vllm:request_decode_time_seconds_sum{model_name="pair"}[10s])"#,
    r#"sum by (le) (increase(vllm:request_prompt_tokens_bucket{model_name="pair"}[10s]))"#,
    r#"rate(vllm:request_max_num_generation_tokens_sum{model_name="pair"}[10s])"#,
    r#"vllm:num_requests_running{model_name="small"} + vllm:num_requests_waiting{model_name="small"}"#,
    r#"vllm:kv_cache_usage_perc{model_name="large"}"#,
];

#[test]
fn prometheus_evaluates_the_dashboard_and_the_rules() {
    let (server, text) = live();
    let address = server.address;
    let families = families(&text);
    let rules = read("docs/grafana/alerts.yml");
    let dashboard = expressions(&read("docs/grafana/dashboard.json"));
    let known = |expression: &str| {
        let unknown = |name: &&str| family_of(name, |name| families.contains_key(name)).is_none();
        names(expression).into_iter().filter(unknown).map(str::to_owned).collect::<Vec<_>>()
    };
    let code: String = rules.lines().filter(|line| !line.contains("summary:") && !line.contains("remedy:")).collect();
    for (title, expression) in dashboard.iter().chain([&("alerts.yml".to_owned(), code.clone())]) {
        assert_eq!(known(expression), Vec::<String>::new(), "{title}: {expression}");
    }
    assert!(names(&code).len() > 10 && dashboard.len() > 60, "expressions are found");

    let prometheus = Prometheus::start(address);
    prometheus.wait_for("tokenrouter:ready").expect("the server is seen");
    let body = json!({"model": "pair", "prompt": "w1 w2 w3", "max_tokens": 8});
    (0..5).for_each(|_| ask(address, &body));
    // What the answers have changed was seen, and seen again.
    let seen = r#"increase(vllm:request_success_total{model_name="pair", finished_reason="length"}[20s]) > 0"#;
    prometheus.wait_for(seen).expect("what the answers have changed is seen");
    let ours = dashboard.iter().map(|(title, expression)| (title.as_str(), expression.as_str()));
    for (title, expression) in ours.chain(OF_VLLM.iter().map(|expression| ("a dashboard for vLLM", *expression))) {
        prometheus.wait_for(expression).unwrap_or_else(|error| panic!("{title}: {expression}: {error}"));
    }
    assert_eq!(prometheus.query("tokenrouter:ready"), Ok(vec![1.0]));
    assert!(prometheus.query("rate(").is_err(), "what is no expression is told");

    let began = Instant::now();
    let evaluated = loop {
        let answer = get(prometheus.address, "/api/v1/rules").json();
        let rules = answer["data"]["groups"][0]["rules"].as_array().cloned().unwrap_or_default();
        if !rules.is_empty() && rules.iter().all(|rule| rule["health"] != "unknown") {
            break rules;
        }
        assert!(began.elapsed() < PATIENCE, "{answer}");
        nap();
    };
    assert_eq!(evaluated.len(), rules.matches("- alert:").count());
    for rule in evaluated {
        assert_eq!((&rule["health"], &rule["state"]), (&json!("ok"), &json!("inactive")), "{rule}");
    }
    drop(prometheus);
    server.stop();
}

#[test]
fn alert_rules_fire_when_something_is_wrong_and_only_then() {
    run(Command::new("promtool").args(["check", "rules"]).arg(file("docs/grafana/alerts.yml")), REMEDY);
    let tests = file("tests/alerts/alerts_test.yml");
    let folder = tests.parent().map(Path::to_owned).expect("a folder");
    let output =
        run(Command::new("promtool").args(["test", "rules"]).arg("alerts_test.yml").current_dir(folder), REMEDY);
    assert!(String::from_utf8_lossy(&output.stdout).contains("SUCCESS"), "{output:?}");
    let (rules, tests) = (read("docs/grafana/alerts.yml"), read("tests/alerts/alerts_test.yml"));
    for name in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let fires = format!("- alertname: {name}\n");
        let quiet = format!("{{alertname: {name}, ");
        assert!(tests.contains(&fires) && tests.matches(&quiet).count() >= 3, "{name} is not tested");
    }
}

#[test]
fn the_configuration_that_the_documentation_shows_is_one() {
    let page = read("docs/metrics.md");
    let shown = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a configuration");
    let folder = scratch("prometheus-config");
    fs::write(folder.join("prometheus.yml"), shown).expect("the target folder can be written");
    fs::write(folder.join("alerts.yml"), read("docs/grafana/alerts.yml")).expect("the target folder can be written");
    run(Command::new("promtool").args(["check", "config", "prometheus.yml"]).current_dir(folder), REMEDY);
}

#[test]
fn the_dashboard_loads_as_it_is() {
    let dashboard: Value = serde_json::from_str(&read("docs/grafana/dashboard.json")).expect("JSON");
    assert!(dashboard.get("__inputs").is_none() && dashboard["id"].is_null(), "Grafana asks for nothing");
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    assert_eq!((&variables[0]["name"], &variables[0]["type"]), (&json!("datasource"), &json!("datasource")));
    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().expect("an id")).collect();
    assert_eq!(ids.len(), panels.len(), "each id once");
    let mut taken = BTreeSet::new();
    for panel in panels {
        let place = |key: &str| panel["gridPos"][key].as_u64().expect("a place");
        for cell in (place("x")..place("x") + place("w"))
            .flat_map(|x| (place("y")..place("y") + place("h")).map(move |y| (x, y)))
        {
            assert!(cell.0 < 24 && taken.insert(cell), "{} lies on another panel", panel["title"]);
        }
    }
}

#[actix_rt::test]
async fn http_requests_are_counted_once_whatever_their_clients_do() {
    let server = Server::start(Setup { step: Duration::from_millis(20), ..Setup::default() });
    let of = |status: u16| format!("tokenrouter:http_requests_total{{route=\"{TEXT}\",status=\"{status}\"}}");
    let body =
        |stream: bool| json!({"model": "pair", "prompt": "w1 w2 w3", "max_tokens": 200, "stream": stream}).to_string();
    server.hold(0);
    for _ in 0..5 {
        let mut connection = Connection::open(server.address);
        connection.send(&request("POST", TEXT, &body(false)));
        server.until("the request is there", |snapshot| snapshot.live == 1).await;
        drop(connection);
        let began = Instant::now();
        while server.metric("tokenrouter:http_requests_in_flight").await > 1.0 {
            assert!(began.elapsed() < PATIENCE, "nobody notices that the client is gone");
        }
        server.until("the client went", |snapshot| snapshot.live == 0).await;
    }
    assert_eq!(server.metric(&of(499)).await, 5.0);
    server.release(0);
    for _ in 0..5 {
        let mut connection = Connection::open(server.address);
        connection.send(&request("POST", TEXT, &body(true)));
        connection.read_until("data: {");
    }
    server.idle_within(PATIENCE, "after streams were cut").await;
    assert_eq!((server.metric(&of(200)).await, server.metric(&of(499)).await), (5.0, 5.0), "those were answered");
    let began = Instant::now();
    while server.metric("tokenrouter:http_requests_in_flight").await > 1.0 {
        assert!(began.elapsed() < PATIENCE, "the gauge does not come down");
    }
    let timed = format!("http_request_duration_seconds_count{{handler=\"{TEXT}\"}}");
    assert_eq!(server.metric(&timed).await, 10.0);
    server.stop();
}
