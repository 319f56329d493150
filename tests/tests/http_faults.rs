//! What clients see of faults inside the server: every kind of step and of message that goes wrong, under a mixed load.
//! Requests are right, or end with an error; none hangs, none says anything wrong, what they held becomes free, and the
//! server goes on. Owner: runtime and HTTP layer together.

use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokenrouter::launch::{self, Environment, Overrides};
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_core::faults::{Fault, FaultPlan, LinkFault, LinkFaults};
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{Answer, TEXT, get, post};
use tokenrouter_tests::scripted::script;

/// Time for what happens within a second or two, on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// More than a step of a scripted model takes.
const STEP_MAX: Duration = Duration::from_millis(1500);

/// Text and model of a user.
struct User {
    text: String,
    model: &'static str,
    stream: bool,
}

impl User {
    fn crowd() -> Vec<User> {
        let user = |at: usize| User {
            text: format!("user {at} says {}", "so and so ".repeat(1 + at % 4)),
            model: ["pair", "small", "large"][at % 3],
            stream: at.is_multiple_of(2),
        };
        (0..18).map(user).collect()
    }

    fn body(&self) -> Value {
        json!({"model": self.model, "prompt": script(&self.text), "max_tokens": 200, "stream": self.stream})
    }

    /// Whether the answer is right; else it is an error that says nothing wrong.
    #[track_caller]
    fn check(&self, answer: &Answer) -> bool {
        if answer.status != 200 {
            assert_eq!((answer.status, &answer.error()["type"]), (500, &json!("server_error")), "{}", answer.text);
            return false;
        }
        if !self.stream {
            assert_eq!(answer.said().text, self.text);
            return true;
        }
        let events = answer.events();
        let said: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        let failed = events.last().is_some_and(|event| event["error"].is_object());
        assert!(self.text.starts_with(&said), "{said:?} of {:?}", self.text);
        assert!(failed || said == self.text, "{said:?} of {:?}", self.text);
        !failed
    }
}

/// All ask at the same time; who of them got the right answer.
fn ask_all(address: SocketAddr, users: &[User]) -> Vec<bool> {
    std::thread::scope(|scope| {
        let ask = |user: &User| post(address, TEXT, &user.body());
        let asking: Vec<_> = users.iter().map(|user| scope.spawn(move || ask(user))).collect();
        asking.into_iter().zip(users).map(|(answer, user)| user.check(&answer.join().expect("an answer"))).collect()
    })
}

/// Everything is free, the server calls itself healthy, and serves.
async fn recovered(server: &Server, after: &str) {
    server.idle_within(SOON, after).await;
    let health = get(server.address, "/health");
    assert_eq!(health.status, 200, "{after}: {}", health.text);
    for series in ["vllm:num_requests_running", "vllm:num_requests_waiting", "tokenrouter:kv_pages_used"] {
        for model in ["small", "large"] {
            assert_eq!(server.metric(&format!("{series}{{model_name=\"{model}\"}}")).await, 0.0, "{after}: {series}");
        }
    }
}

#[actix_rt::test]
async fn requests_survive_or_fail_cleanly_whatever_happens_to_a_step() {
    for fault in
        [Fault::Error, Fault::Lost, Fault::Panic, Fault::BadRows, Fault::Slow(Duration::from_millis(150)), Fault::Stuck]
    {
        let after = &format!("{fault:?}");
        let bounds = Bounds { step: Some(STEP_MAX), ..Bounds::default() };
        let plan = FaultPlan::new(vec![(4, fault), (30, fault)]);
        let server = Server::start(Setup {
            bounds,
            faults: [plan, FaultPlan::default()],
            step: Duration::from_millis(1),
            ..Setup::parrots()
        });
        let users = User::crowd();
        let right = ask_all(server.address, &users);
        for (user, right) in users.iter().zip(&right) {
            // A step that fails as a whole is tried again; rows that fail are not.
            let may_fail = fault == Fault::BadRows && user.model != "large";
            assert!(*right || may_fail, "{after}: {} failed", user.text);
        }
        let failed = right.iter().filter(|right| !**right).count();
        assert_eq!(failed > 0, fault == Fault::BadRows, "{after}: {failed} failed");
        recovered(&server, after).await;
        let of_small = |series: &str| format!("tokenrouter:{series}{{model_name=\"small\"}}");
        let is_lost = matches!(fault, Fault::Lost | Fault::Panic | Fault::Stuck);
        assert_eq!(
            server.metric(&of_small("executor_restarts_total")).await,
            if is_lost { 2.0 } else { 0.0 },
            "{after}"
        );
        if fault == Fault::Stuck {
            assert_eq!(server.metric(&of_small("executors")).await, 3.0, "two steps have not ended");
            server.free(0);
            server.until("their executors are gone", |snapshot| snapshot.models[0].executors == 1).await;
        }
        assert!(ask_all(server.address, &users).iter().all(|right| *right), "{after}: nothing is left of it");
        recovered(&server, after).await;
        server.stop();
    }
}

/// A request that meets a fault at every try is given up.
#[actix_rt::test]
async fn a_model_that_never_answers_fails_its_requests_and_no_others() {
    let bounds = Bounds { step: Some(Duration::from_millis(300)), ..Bounds::default() };
    let plan = FaultPlan::default().and_every(1, Fault::Stuck);
    let server = Server::start(Setup { bounds, faults: [FaultPlan::default(), plan], ..Setup::parrots() });
    let user = |model| User { text: "hello".into(), model, stream: false };
    let begin = Instant::now();
    assert_eq!(ask_all(server.address, &[user("large"), user("small"), user("pair")]), [false, true, false]);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    let answer = post(server.address, TEXT, &user("large").body());
    let message = answer.error()["message"].to_string();
    assert!(!message.contains("300 ms"), "the inside is not told: {message}");
    recovered(&server, "given up").await;
    server.stop();
}

#[actix_rt::test]
async fn requests_survive_or_fail_cleanly_whatever_happens_to_a_message() {
    for fault in [LinkFault::Lost, LinkFault::Duplicate, LinkFault::Reordered] {
        let after = &format!("{fault:?}");
        let link_faults = vec![LinkFaults { fault, every: 60, seed: 5 }];
        let server = Server::start(Setup { link_faults, ..Setup::parrots() });
        let users = User::crowd();
        let begin = Instant::now();
        let right = ask_all(server.address, &users);
        // There is no bound on the time of a request: what was lost is missed within about a second.
        assert!(begin.elapsed() < SOON, "{after}: {:?}", begin.elapsed());
        for (user, right) in users.iter().zip(&right) {
            assert!(*right || (fault != LinkFault::Duplicate && user.model == "pair"), "{after}: {}", user.text);
        }
        recovered(&server, after).await;
        let of_both = |series: &str| ["small", "large"].map(|model| format!("{series}{{model_name=\"{model}\"}}"));
        let mut found = 0.0;
        for series in of_both("tokenrouter:peer_gaps_total") {
            found += server.metric(&series).await;
        }
        assert_eq!(found > 0.0, fault != LinkFault::Duplicate, "{after}: {found} gaps");
        let mut tries = 0..40;
        let short = User { text: "hi".into(), model: "pair", stream: false };
        assert!(tries.any(|_| short.check(&post(server.address, TEXT, &short.body()))), "{after}: nobody is served");
        server.stop();
    }
}

/// The demo pair with real weights, as `serve` starts it: the table is refused unless it is meant, and obeyed if it is.
#[actix_rt::test]
async fn a_launch_file_orders_faults_if_the_environment_lets_it() {
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
    let text = std::fs::read_to_string(demo.join("launch.toml")).expect("the launch file of the demo pair");
    let models = |text: &str| text.replace("path = \"", &format!("path = \"{}/", demo.display()));
    let faults = "[[faults.steps]]\nmodel = \"small\"\nkind = \"panic\"\nat = 3\n\
                  [[faults.steps]]\nmodel = \"large\"\nkind = \"stuck\"\nat = 1\n\
                  [[faults.messages]]\nkind = \"duplicate\"\nevery = 2\n";
    let path = std::env::temp_dir().join(format!("tokenrouter-faults-{}.toml", std::process::id()));
    std::fs::write(&path, format!("[server]\nstep_timeout_ms = 2000\n{}\n{faults}", models(&text))).expect("written");
    let unmeant = Environment { faults: false, ..Environment::read() };
    let error = launch::read(Some(&path), &Overrides::default(), &unmeant).expect_err("faults nobody means");
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("[faults] makes the server fail on purpose"), "{error}");
    assert!(error.to_string().ends_with("or set TOKENROUTER_FAULTS=1 to test with it"), "{error}");
    let body = json!({"model": "demo", "prompt": "Tom has 12 apples.", "max_tokens": 60, "temperature": 0});
    let failing = Server::launch(path.clone());
    let answer = post(failing.address, TEXT, &body).said();
    for model in ["small", "large"] {
        let series = format!("tokenrouter:executor_restarts_total{{model_name=\"{model}\"}}");
        assert_eq!(failing.metric(&series).await, 1.0, "{model}");
    }
    failing.stop();
    std::fs::write(&path, models(&text)).expect("written");
    let sound = Server::launch(path.clone());
    assert_eq!(post(sound.address, TEXT, &body).said().comparable(), answer.comparable());
    sound.stop();
    std::fs::remove_file(path).expect("it was there");
}
