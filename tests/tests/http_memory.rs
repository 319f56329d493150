//! Far too little KV memory, over HTTP: everybody reads what a server with room for all says, or is refused at arrival.
//! Owner: runtime and HTTP layer together.

use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::kv::LOSSES_FREE;
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{Answer, Said, TEXT, post};
use tokenrouter_tests::scripted::script;

/// Time in which all becomes free, on a busy machine.
const SOON: Duration = Duration::from_secs(30);

fn ask_all(address: SocketAddr, bodies: &[Value]) -> Vec<Answer> {
    std::thread::scope(|scope| {
        let asking: Vec<_> = bodies.iter().map(|body| scope.spawn(move || post(address, TEXT, body))).collect();
        asking.into_iter().map(|answer| answer.join().expect("an answer")).collect()
    })
}

fn said(answers: &[Answer]) -> Vec<Said> {
    answers.iter().map(|answer| answer.said().comparable()).collect()
}

/// Times requests lost their KV at both models, after a look at the histogram of it.
async fn losses(server: &Server, (names, users): ([&str; 2], u32)) -> f64 {
    let mut all = 0.0;
    for name in names {
        let of = |series: &str, more: &str| format!("{series}{{model_name=\"{name}\"{more}}}");
        let lost = server.metric(&of("vllm:num_preemptions_total", "")).await;
        let histogram = "vllm:request_num_preemptions";
        assert_eq!(server.metric(&of(&format!("{histogram}_sum"), "")).await, lost, "{name}: all have ended");
        let ended = server.metric(&of(&format!("{histogram}_count"), "")).await;
        assert!(ended <= f64::from(users), "{name}: {ended} requests ended");
        assert_eq!(server.metric(&of(&format!("{histogram}_bucket"), ",le=\"+Inf\"")).await, ended);
        all += lost;
    }
    all
}

#[actix_rt::test]
async fn a_third_of_the_memory_is_enough_with_and_without_hits_of_the_prefix_cache() {
    // 12 users of at most 16 pages each.
    let pages = 12 * 16;
    let setup = |pages| Setup { limits: ExecutorLimits { pages, ..Setup::default().limits }, ..Setup::parrots() };
    let alike = |at: usize| format!("{}{at:02}", "all of us begin with the very same words; ".repeat(2));
    let different = |at: usize| format!("{at:02} goes on as nobody else does {}", format!("{at} ").repeat(25 + at % 3));
    for text in [&alike as &dyn Fn(usize) -> String, &different] {
        let body = |at: usize| {
            let models = ["pair", "pair", "small", "large"];
            json!({"model": models[at % 4], "prompt": script(text(at)), "max_tokens": 120, "seed": at})
        };
        let bodies: Vec<Value> = (0..12).map(body).collect();
        let roomy = Server::start(setup(2 * pages));
        let expected = said(&ask_all(roomy.address, &bodies));
        for (at, said) in expected.iter().enumerate() {
            assert!(text(at).starts_with(&said.text) && !said.text.is_empty(), "{said:?}");
        }
        roomy.idle_within(SOON, "roomy").await;
        assert_eq!(losses(&roomy, (["small", "large"], 12)).await, 0.0, "nothing is short");
        roomy.stop();
        let cramped = Server::start(setup(pages / 3 / 2));
        assert_eq!(said(&ask_all(cramped.address, &bodies)), expected);
        cramped.idle_within(SOON, "cramped").await;
        assert!(losses(&cramped, (["small", "large"], 12)).await > 0.0, "it was too small");
        cramped
            .until("losses are bounded", |snapshot| {
                let most = |bound: u32| move |model: usize| snapshot.models[model].kv.losses_most <= bound;
                most(LOSSES_FREE + 11)(0) && most(LOSSES_FREE + 11)(1)
            })
            .await;
        let never = json!({"model": "pair", "prompt": script(text(0)), "max_tokens": 1500});
        let refused = post(cramped.address, TEXT, &never);
        assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("kv_memory_exceeded")), "{}", refused.text);
        cramped.stop();
    }
}

#[actix_rt::test]
async fn the_demo_pair_says_the_same_with_a_third_of_the_memory() {
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
    let path = std::env::temp_dir().join(format!("tokenrouter-cramped-{}.toml", std::process::id()));
    let start = |tokens: u32| {
        let model = |name: &str| {
            let folder = demo.join(name);
            format!(
                "[[models]]\nname = \"{name}\"\npath = \"{}\"\nthreads = 1\nkv_tokens = {tokens}\n",
                folder.display()
            )
        };
        let router = "[router]\nname = \"demo\"\nalgorithm = \"r_stitch\"\n[router.params]\nthreshold = 0.05\n";
        std::fs::write(&path, format!("{router}{}{}", model("small"), model("large"))).expect("written");
        Server::launch(path.clone())
    };
    let body = |at: usize| {
        let prompt = format!("Question: Tom has {} apples and buys {} more. How many has he now?", 3 + at, 40 - at);
        json!({"model": "demo", "prompt": prompt, "max_tokens": 60, "seed": at, "temperature": 0, "ignore_eos": true})
    };
    let bodies: Vec<Value> = (0..9).map(body).collect();
    let roomy = start(4096);
    let expected = said(&ask_all(roomy.address, &bodies));
    let longest = expected.iter().filter_map(|said| said.usage["total_tokens"].as_u64()).max().expect("usage") as u32;
    roomy.stop();
    let cramped = start(3 * longest.next_multiple_of(16));
    assert_eq!(said(&ask_all(cramped.address, &bodies)), expected);
    cramped.idle_within(SOON, "cramped").await;
    assert!(losses(&cramped, (["small", "large"], 9)).await > 0.0, "it was too small");
    let mut long = body(0);
    long["max_tokens"] = json!(400);
    let refused = post(cramped.address, TEXT, &long);
    assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("kv_memory_exceeded")), "{}", refused.text);
    cramped.stop();
    std::fs::remove_file(path).expect("it was there");
}
