//! Routing as clients see it: thresholds of their own, refusals, the list of algorithms. On the demo pair, behind the real
//! HTTP server. Owner: the HTTP layer and the routing port.

use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use tokenrouter_tests::http_server::Server;

/// Sends one request and reads the answer to its end: status and body.
fn exchange(address: SocketAddr, head: &str, body: &str) -> (u16, Value) {
    let mut socket = TcpStream::connect(address).expect("the server listens");
    let fields = "host: x\r\nconnection: close\r\ncontent-type: application/json";
    write!(socket, "{head} HTTP/1.1\r\n{fields}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("it is sent");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("an answer");
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let body = text.split_once("\r\n\r\n").expect("a body").1;
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

fn complete(address: SocketAddr, model: &str, routing: &Value) -> (u16, Value) {
    let body = json!({
        "model": model,
        "prompt": "Question: What is 3 + 4?\nAnswer:",
        "max_tokens": 24,
        "temperature": 0,
        "routing": routing,
    });
    exchange(address, "POST /v1/completions", &body.to_string())
}

fn by_model(answer: &Value) -> &Value {
    &answer["usage"]["completion_tokens_details"]["by_model"]
}

#[test]
fn a_client_may_move_the_threshold_of_its_request() {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../config/demo/launch.toml");
    let server = Server::launch(demo);
    let models = exchange(server.address, "GET /v1/models", "").1;
    let name = |index: usize| models["data"][index]["id"].as_str().expect("a name").to_owned();
    let (routed, small, large) = (name(0), name(1), name(2));

    // Where the large model takes over, its user is told what the small one was not sure of.
    let ask = json!({"model": routed, "prompt": "Question: What is 3 + 4?\nAnswer:", "max_tokens": 60,
                     "temperature": 0, "return_token_details": true, "routing": {"threshold": 0.1}});
    let (status, answer) = exchange(server.address, "POST /v1/completions", &ask.to_string());
    let details = answer["choices"][0]["token_details"].as_array().unwrap_or_else(|| panic!("{status} {answer}"));
    let took_over = |pair: &[Value]| pair[0]["model"] == small && pair[1]["model"] == large;
    assert!(details.windows(2).any(took_over), "{answer}");
    for pair in details.windows(2).filter(|pair| took_over(pair)) {
        assert!(pair[1]["dropped"].is_object(), "{answer}");
    }
    for detail in details {
        if let Some(dropped) = detail.get("dropped") {
            assert_eq!((&detail["model"], &dropped["model"]), (&json!(large), &json!(small)), "{answer}");
            assert!(dropped["entropy"].as_f64() > Some(0.1) && dropped["score"].is_null(), "{dropped}");
        }
    }

    for (threshold, model) in [(2.0, &small), (-1.0, &large)] {
        let (status, answer) = complete(server.address, &routed, &json!({ "threshold": threshold }));
        assert_eq!(status, 200, "{answer}");
        let made = by_model(&answer).as_object().expect("counts");
        assert_eq!(made.keys().collect::<Vec<_>>(), [model], "at {threshold}: {answer}");
        let alone = complete(server.address, model, &Value::Null).1;
        assert_eq!(answer["choices"][0]["text"], alone["choices"][0]["text"], "at {threshold}");
    }

    for (model, wish) in [
        (&routed, json!({"threshold": 3})),
        (&routed, json!({"treshold": 0.1})),
        (&routed, json!("high")),
        (&small, json!({"threshold": 0.1})),
    ] {
        let (status, answer) = complete(server.address, model, &wish);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("routing")), "{wish}: {answer}");
    }

    let (status, list) = exchange(server.address, "GET /v1/routers", "");
    assert_eq!(status, 200);
    let cards = list["data"].as_array().expect("a list");
    let active: Vec<&Value> = cards.iter().filter(|card| card["active"] == true).map(|card| &card["name"]).collect();
    assert_eq!(active, [&json!("r_stitch")]);
    assert_eq!(cards.len(), tokenrouter_core::routing::list().count());
    server.stop();
}
