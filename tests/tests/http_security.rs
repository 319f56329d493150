//! Keys over HTTP: without one nothing answers but `/health`, `/ready` and the files of the dashboard, each of several opens, and what is refused is
//! counted and has an id. And no answer lets pages of other sites in.

use serde_json::json;
use tokenrouter::http::keys::Keys;
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{Answer, CHAT, Connection, TEXT, get};

const FIRST: &str = "first-key-of-two";
const SECOND: &str = "second-key-of-two";
const ADMIN: &str = "the-admin-key";

/// Every route, with a body for those that want one.
fn routes() -> Vec<(&'static str, &'static str, String)> {
    let text = json!({"model": "pair", "prompt": [1, 2, 3], "max_tokens": 2});
    let stream = json!({"model": "pair", "prompt": [1, 2, 3], "max_tokens": 2, "stream": true});
    let chat = json!({"model": "pair", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 2});
    vec![
        ("POST", TEXT, text.to_string()),
        ("POST", TEXT, stream.to_string()),
        ("POST", CHAT, chat.to_string()),
        ("GET", "/v1/models", String::new()),
        ("GET", "/v1/models/pair", String::new()),
        ("GET", "/v1/routers", String::new()),
        ("GET", "/metrics", String::new()),
        ("GET", "/actors", String::new()),
    ]
}

fn ask(server: &Server, (method, path, body): (&str, &str, &str), headers: &str) -> Answer {
    let mut connection = Connection::open(server.address);
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}");
    connection.send(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes());
    connection.answer()
}

#[actix_rt::test]
async fn without_a_key_nothing_answers_but_health_and_the_page() {
    let server = Server::start(Setup { keys: Keys::new([FIRST, SECOND], Some(ADMIN)), ..Setup::default() });
    for (method, path, body) in &routes() {
        let parts = (*method, *path, body.as_str());
        for wrong in [
            String::new(),
            "authorization: Bearer first-key-of-tw\r\n".to_owned(),
            format!("authorization: Bearer {FIRST}x\r\n"),
            format!("authorization: Basic {FIRST}\r\n"),
            format!("authorization: Bearer wrong-key-of-two\r\nx-api-key: {FIRST}\r\n"),
            "x-api-key: \r\n".to_owned(),
        ] {
            let answer = ask(&server, parts, &format!("x-request-id: mine\r\n{wrong}"));
            assert_eq!(answer.status, 401, "{method} {path} with {wrong:?}: {}", answer.text);
            assert_eq!(answer.error()["code"], "invalid_api_key");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            assert_eq!(answer.header("x-request-id"), Some("mine"));
            assert!(!answer.text.contains(FIRST) && !answer.text.contains(SECOND), "{}", answer.text);
        }
        for right in [
            format!("authorization: Bearer {FIRST}\r\n"),
            format!("authorization: bearer {SECOND}\r\n"),
            format!("x-api-key: {SECOND}\r\n"),
            format!("x-api-key: {ADMIN}\r\n"),
        ] {
            let answer = ask(&server, parts, &right);
            assert_eq!(answer.status, 200, "{method} {path} with {right:?}: {}", answer.text);
        }
    }
    assert_eq!(ask(&server, ("GET", "/nothing", ""), "").status, 401, "nobody learns which routes there are");
    for open in ["/health", "/ready", "/dashboard/", "/dashboard/assets/app.js", "/dashboard/assets/app.css"] {
        assert_eq!(get(server.address, open).status, 200, "{open}");
    }
    assert_eq!(ask(&server, ("GET", "/dashboard/events", ""), "").status, 401, "the data of the page needs one");
    let counted = ask(&server, ("GET", "/metrics", ""), &format!("x-api-key: {FIRST}\r\n")).text;
    let series = format!("tokenrouter:http_requests_total{{method=\"POST\",route=\"{TEXT}\",status=\"401\"}} 12");
    assert!(counted.contains(&series), "{counted}");
    server.stop();
}

/// On connections that are open, too; who is being answered is answered.
#[actix_rt::test]
async fn keys_are_replaced_while_clients_ask() {
    let keys = Keys::new([FIRST], Some(ADMIN));
    let server = Server::start(Setup { keys: keys.clone(), ..Setup::default() });
    let list = |key: &str| format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n").into_bytes();
    let mut kept = Connection::open(server.address);
    kept.send(&list(FIRST));
    assert_eq!(kept.answer().status, 200);
    server.hold(0);
    let body = json!({"model": "pair", "prompt": [1, 2, 3], "max_tokens": 5, "stream": true}).to_string();
    let head = format!("POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: {FIRST}\r\n");
    let mut running = Connection::open(server.address);
    running.send(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes());
    server.until("it runs", |snapshot| snapshot.live == 1).await;
    keys.replace(&Keys::new([SECOND], Some(ADMIN)));
    for (key, status) in [(FIRST, 401), (SECOND, 200), (ADMIN, 200)] {
        kept.send(&list(key));
        assert_eq!(kept.answer().status, status, "{key} on a connection that was open");
        assert_eq!(ask(&server, ("GET", "/v1/models", ""), &format!("x-api-key: {key}\r\n")).status, status, "{key}");
    }
    server.release(0);
    assert_eq!(running.answer().said().finish, "length", "what was let in is answered");
    server.stop();
}

#[actix_rt::test]
async fn without_keys_everybody_may_ask() {
    let server = Server::start(Setup::default());
    for (method, path, body) in &routes() {
        let answer = ask(&server, (method, path, body), "authorization: Bearer anything\r\n");
        assert_eq!(answer.status, 200, "{method} {path}: {}", answer.text);
    }
    server.stop();
}

/// The limits on heads are the HTTP library's: 96 headers and 128 KiB; beyond them the connection ends.
#[actix_rt::test]
async fn heads_are_bounded() {
    const HEAD_BYTES_MAX: usize = 128 << 10;
    let server = Server::start(Setup::default());
    let head = |headers: usize, bytes: usize| {
        let lines: String = (2..headers).map(|number| format!("h{number}: x\r\n")).collect();
        let mut head = format!("GET /health HTTP/1.1\r\nhost: x\r\n{lines}long: ");
        head.push_str(&"x".repeat(bytes.saturating_sub(head.len() + 4)));
        head + "\r\n\r\n"
    };
    for (what, head, status) in [
        ("96 headers", head(96, 0), 200),
        ("97 headers", head(97, 0), 431),
        ("almost 128 KiB", head(3, HEAD_BYTES_MAX - 1), 200),
        // Without its end, so that all of it is read before it is refused.
        ("128 KiB and no end", head(3, HEAD_BYTES_MAX + 4)[..HEAD_BYTES_MAX].to_owned(), 431),
    ] {
        let mut connection = Connection::open(server.address);
        connection.send(head.as_bytes());
        assert_eq!(connection.answer().status, status, "{what}");
        if status == 431 {
            connection.expect_closed();
        }
    }
    server.stop();
}

#[actix_rt::test]
async fn no_answer_lets_pages_of_other_sites_in() {
    let server = Server::start(Setup::default());
    let foreign = "origin: https://elsewhere.example\r\naccess-control-request-method: POST\r\n";
    let preflight = ask(&server, ("OPTIONS", CHAT, ""), foreign);
    assert_eq!(preflight.status, 405, "{}", preflight.text);
    let mut answers = vec![preflight, ask(&server, ("GET", "/nothing", ""), foreign)];
    answers.extend(routes().iter().map(|(method, path, body)| ask(&server, (method, path, body), foreign)));
    for answer in answers {
        for header in
            ["access-control-allow-origin", "access-control-allow-credentials", "access-control-allow-methods"]
        {
            assert_eq!(answer.header(header), None, "{}", answer.text);
        }
    }
    server.stop();
}
