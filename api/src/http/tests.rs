//! The routes against scripted engines: statuses, shapes, framing.

use super::testing::{ByteCodec, Script, ScriptedEngine, app, delta, delta_by, finished};
use super::*;
use actix_web::http::header;
use actix_web::test::{TestRequest, call_service, init_service, read_body};
use serde_json::{Value, json};
use tokenrouter_core::job::{Event, Failure, Load, Refusal};

/// Status, headers and body of one request to a fresh server.
struct Answered {
    status: u16,
    headers: header::HeaderMap,
    text: String,
}

impl Answered {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        for member in ["message", "type", "param", "code"] {
            assert!(error.get(member).is_some(), "{member} is missing in {error}");
        }
        error
    }

    /// The events of a stream, checked for their framing; `[DONE]` must be the last and is not among them.
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert!(self.text.ends_with("\n\n"), "{:?}", self.text);
        let mut data: Vec<&str> = self.text.trim_end_matches("\n\n").split("\n\n").collect();
        assert_eq!(data.pop(), Some("data: [DONE]"));
        data.into_iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

async fn send(engine: &Arc<ScriptedEngine>, request: TestRequest) -> Answered {
    let service = actix_web::App::new()
        .app_data(web::Data::new(app(Arc::clone(engine))))
        .wrap(middleware::from_fn(observe::observe))
        .configure(routes);
    let service = init_service(service).await;
    let response = call_service(&service, request.to_request()).await;
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let text = String::from_utf8(read_body(response).await.to_vec()).unwrap();
    Answered { status, headers, text }
}

async fn post(path: &str, scripts: Vec<Script>, body: Value) -> Answered {
    send(&ScriptedEngine::new(scripts), TestRequest::post().uri(path).set_json(body)).await
}

fn hello() -> Script {
    Ok(vec![delta_by("Hel", 0), delta_by("lo", 1), finished("stop")])
}

fn chat(extra: Value) -> Value {
    merged(json!({"model": "pair", "messages": [{"role": "user", "content": "hi"}]}), extra)
}

fn text(extra: Value) -> Value {
    merged(json!({"model": "pair", "prompt": "hi"}), extra)
}

fn merged(mut body: Value, extra: Value) -> Value {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

#[actix_web::test]
async fn a_chat_answer_has_openais_shape_and_ours_beside_it() {
    let answered = post(CHAT, vec![hello()], chat(json!({"return_token_models": true}))).await;
    let json = answered.json();
    assert_eq!(answered.status, 200);
    assert_eq!(json["object"], "chat.completion");
    assert!(json["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &json["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "Hello", "refusal": null}));
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["logprobs"].is_null());
    assert_eq!(choice["token_models"], json!(["small", "small", "small", "large", "large"]));
    assert_eq!(json["usage"]["completion_tokens"], 2);
    assert_eq!(json["usage"]["total_tokens"], 5);
    assert_eq!(json["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
    assert_eq!(json["usage"]["completion_tokens_details"]["by_model"], json!({"small": 1, "large": 1}));
}

#[actix_web::test]
async fn a_chat_stream_follows_the_order_of_the_contract() {
    let options = json!({"stream": true, "stream_options": {"include_usage": true}, "n": 2});
    let answered = post(CHAT, vec![hello(), hello()], chat(options)).await;
    assert_eq!(answered.header("cache-control"), Some("no-cache"));
    assert_eq!(answered.header("x-accel-buffering"), Some("no"));
    let events = answered.events();
    let same = |member: &str| events.iter().all(|event| event[member] == events[0][member]);
    assert!(same("id") && same("created") && same("model") && same("object"));
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 4);
    assert_eq!(usage["usage"]["prompt_tokens"], 3);
    for index in 0..2 {
        let own: Vec<&Value> =
            chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|c| c["index"] == index).collect();
        assert_eq!(own[0]["delta"], json!({"role": "assistant", "content": ""}));
        let said: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(said, "Hello");
        let (last, before) = own.split_last().unwrap();
        assert_eq!((&last["finish_reason"], &last["delta"]), (&json!("stop"), &json!({})));
        assert!(before.iter().all(|choice| choice["finish_reason"].is_null()));
        assert!(before[1..].iter().all(|choice| choice["delta"].get("role").is_none()));
    }
    assert!(chunks.iter().all(|chunk| chunk["choices"].as_array().unwrap().len() == 1 && chunk["usage"].is_null()));
}

#[actix_web::test]
async fn without_options_chunks_have_no_usage_member() {
    let events = post(CHAT, vec![hello()], chat(json!({"stream": true}))).await.events();
    assert_eq!(events.len(), 4);
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[actix_web::test]
async fn continuous_usage_counts_the_tokens_so_far() {
    let options = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
    let events = post(CHAT, vec![hello()], chat(options)).await.events();
    let counts: Vec<u64> = events.iter().map(|e| e["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, vec![0, 3, 5, 2], "counted while it runs, then the engine's total");
}

#[actix_web::test]
async fn stream_and_whole_say_the_same_and_empty_answers_keep_their_form() {
    let script =
        || Ok(vec![delta("a"), Event::Delta { text: String::new(), tokens: vec![] }, delta("é"), finished("length")]);
    let whole = post(TEXT, vec![script()], text(json!({}))).await.json();
    let events = post(TEXT, vec![script()], text(json!({"stream": true}))).await.events();
    let streamed: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(whole["choices"][0]["text"], streamed);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    let empty = post(CHAT, vec![Ok(vec![finished("stop")])], chat(json!({"stream": true}))).await.events();
    assert_eq!(empty.len(), 2, "role chunk and finish chunk");
}

#[actix_web::test]
async fn a_held_back_token_with_logprobs_gets_its_chunk() {
    let held = Event::Delta { text: String::new(), tokens: vec![super::testing::report(0xF0, 1, -1.0)] };
    let script = || Ok(vec![held.clone(), finished("stop")]);
    let silent = post(CHAT, vec![script()], chat(json!({"stream": true}))).await.events();
    assert_eq!(silent.len(), 2);
    let options = json!({"stream": true, "logprobs": true, "top_logprobs": 1, "return_token_models": true});
    let events = post(CHAT, vec![script()], chat(options)).await.events();
    assert_eq!(events.len(), 3);
    assert_eq!(events[1]["choices"][0]["logprobs"]["content"][0]["bytes"], json!([0xF0]));
    assert_eq!(events[1]["choices"][0]["token_models"], json!(["large"]));
}

#[actix_web::test]
async fn details_of_tokens_are_the_same_whole_and_streamed() {
    let script = || {
        let mut event = delta_by("hé", 1);
        if let Event::Delta { tokens, .. } = &mut event {
            tokens[0].entropy = Some(0.5);
        }
        let held = Event::Delta { text: String::new(), tokens: vec![super::testing::report(0xF0, 0, -1.0)] };
        Ok(vec![event, held, finished("stop")])
    };
    let without_ms = |details: &Value| -> Vec<Value> {
        let mut details = details.as_array().cloned().unwrap_or_default();
        for detail in &mut details {
            let ms = detail.as_object_mut().unwrap().remove("ms").unwrap();
            assert!(ms.as_f64().is_some_and(|ms| (0.0..60_000.0).contains(&ms)), "{ms}");
        }
        details
    };
    let detail =
        |text: &str, model: &str, entropy: Option<f32>| json!({"text": text, "model": model, "entropy": entropy});
    let expected = [
        detail("h", "large", Some(0.5)),
        detail("\u{FFFD}", "large", None),
        detail("\u{FFFD}", "large", None),
        detail("\u{FFFD}", "small", None),
    ];
    for (route, body) in [(CHAT, chat(json!({}))), (TEXT, text(json!({"echo": true})))] {
        let engine = ScriptedEngine::new([script(), script(), script()]);
        let ask = |extra: Value| {
            let body = merged(body.clone(), extra);
            let engine = Arc::clone(&engine);
            async move { send(&engine, TestRequest::post().uri(route).set_json(body)).await }
        };
        let whole = ask(json!({"return_token_details": true})).await.json();
        assert_eq!(without_ms(&whole["choices"][0]["token_details"]), expected, "{whole}");
        let events = ask(json!({"return_token_details": true, "stream": true})).await.events();
        let streamed: Vec<Value> =
            events.iter().flat_map(|event| without_ms(&event["choices"][0]["token_details"])).collect();
        assert_eq!(streamed, expected);
        let silent = ask(json!({})).await.json();
        assert!(silent["choices"][0].get("token_details").is_none());
        assert_eq!(engine.jobs().iter().map(|job| job.entropy).collect::<Vec<_>>(), [true, true, false], "{route}");
    }
}

#[actix_web::test]
async fn legacy_logprobs_offsets_run_on_across_chunks_and_echo() {
    let body = text(json!({"logprobs": 1, "stream": true}));
    let events = post(TEXT, vec![Ok(vec![delta("ab"), delta("c"), finished("stop")])], body).await.events();
    assert_eq!(events[0]["choices"][0]["logprobs"]["text_offset"], json!([0, 1]));
    assert_eq!(events[1]["choices"][0]["logprobs"]["text_offset"], json!([2]));
    let echoed = post(TEXT, vec![hello()], text(json!({"echo": true, "prompt": [104, 105, 32]}))).await.json();
    assert_eq!(echoed["choices"][0]["text"], "hi Hello");
    let events = post(TEXT, vec![hello()], text(json!({"echo": true, "stream": true}))).await.events();
    let streamed: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(streamed, "hiHello");
}

#[actix_web::test]
async fn an_echo_with_logprobs_begins_with_those_of_the_prompt() {
    let prompt = || {
        let mut tokens: Vec<_> = "hi".bytes().map(|byte| super::testing::report(byte.into(), 0, -0.5)).collect();
        tokens[0].logprobs = None;
        Event::Prompt(tokens)
    };
    let script = || Ok(vec![prompt(), delta("!"), finished("length")]);
    let body = json!({"prompt": "hi", "echo": true, "logprobs": 1, "return_token_models": true});
    let engine = ScriptedEngine::new([script()]);
    let whole = send(&engine, TestRequest::post().uri(TEXT).set_json(text(body.clone()))).await.json();
    assert_eq!(engine.jobs()[0].prompt_logprobs, Some(1));
    let (choice, lists) = (&whole["choices"][0], &whole["choices"][0]["logprobs"]);
    assert_eq!((&choice["text"], &lists["tokens"]), (&json!("hi!"), &json!(["h", "i", "!"])));
    assert_eq!(lists["token_logprobs"], json!([null, -0.5, -0.25]));
    assert_eq!(lists["top_logprobs"], json!([null, {"i": -0.5}, {"!": -0.25}]));
    assert_eq!(lists["text_offset"], json!([0, 1, 2]));
    assert_eq!(choice["token_models"], json!(["small"]), "of the tokens that were made");

    let mut body = text(body);
    body["stream"] = json!(true);
    let events = post(TEXT, vec![script()], body).await.events();
    let parts: Vec<_> = events.iter().map(|event| event["choices"][0].clone()).collect();
    assert_eq!((&parts[0]["text"], &parts[1]["text"]), (&json!("hi"), &json!("!")));
    assert_eq!(parts[0]["logprobs"]["token_logprobs"], json!([null, -0.5]));
    assert_eq!((&parts[1]["logprobs"]["text_offset"], events.len()), (&json!([2]), 3));
    let engine = ScriptedEngine::new([hello()]);
    send(&engine, TestRequest::post().uri(TEXT).set_json(text(json!({"logprobs": 1})))).await.json();
    assert_eq!(engine.jobs()[0].prompt_logprobs, None);
}

#[actix_web::test]
async fn lists_of_prompts_number_their_choices_and_seeds() {
    let engine = ScriptedEngine::new((0..4).map(|_| hello()));
    let body = text(json!({"prompt": ["a", "b"], "n": 2, "seed": 5}));
    let json = send(&engine, TestRequest::post().uri(TEXT).set_json(body)).await.json();
    let indices: Vec<u64> = json["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, vec![0, 1, 2, 3]);
    assert_eq!(json["usage"]["prompt_tokens"], 6, "each prompt once");
    assert_eq!(json["usage"]["completion_tokens"], 8);
    let seeds: Vec<u64> = engine.jobs().iter().map(|job| job.sampling.seed).collect();
    assert_eq!(seeds, vec![5, 6, 5, 6]);
}

#[actix_web::test]
async fn a_stop_string_is_named() {
    let script = Ok(vec![delta("x"), finished("END")]);
    let json = post(CHAT, vec![script], chat(json!({"stop": "END"}))).await.json();
    assert_eq!(json["choices"][0]["finish_reason"], "stop");
    assert_eq!(json["choices"][0]["stop_reason"], "END");
}

#[actix_web::test]
async fn refusals_are_statuses_also_when_streaming() {
    let refusals = [
        (Refusal::ContextOverflow { prompt_tokens: 70, output_tokens: 1, context_len: 64 }, 400),
        (Refusal::Overloaded { load: Load::Requests, now: 1, limit: 1, retry_after: Duration::from_secs(2) }, 429),
        (Refusal::Unavailable("draining".to_owned()), 503),
    ];
    for (refusal, status) in refusals {
        for stream in [false, true] {
            let answered =
                post(CHAT, vec![hello(), Err(refusal.clone())], chat(json!({"stream": stream, "n": 2}))).await;
            assert_eq!(answered.status, status);
            assert_eq!(answered.header("retry-after").is_some(), status != 400);
            answered.error();
        }
    }
}

#[actix_web::test]
async fn a_failure_before_the_first_event_is_a_status_and_a_later_one_an_event() {
    let failure = || Event::Failed(Failure::Executor { model: "large".to_owned(), reason: "secret".to_owned() });
    let early = post(CHAT, vec![Ok(vec![failure()])], chat(json!({"stream": true}))).await;
    assert_eq!(early.status, 500);
    assert!(!early.text.contains("secret"));
    let late = post(CHAT, vec![Ok(vec![delta("a"), failure()])], chat(json!({"stream": true}))).await;
    assert_eq!(late.status, 200);
    let events = late.events();
    assert!(events.last().unwrap()["error"]["message"].as_str().unwrap().contains("large"));
    assert!(events.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    let whole = post(CHAT, vec![Ok(vec![delta("a"), failure()])], chat(json!({}))).await;
    assert_eq!(whole.status, 500);
}

#[actix_web::test]
async fn bad_requests_have_the_error_object_and_their_status() {
    let raw = |body: String| {
        TestRequest::post().uri(CHAT).insert_header((header::CONTENT_TYPE, "application/json")).set_payload(body)
    };
    let engine = ScriptedEngine::new([]);
    let cases = [
        (raw("{".into()), 400),
        (raw("[1]".into()), 400),
        (raw(String::new()), 400),
        (raw("[".repeat(9_000)), 400),
        (raw("x".repeat(10_001)), 413),
        (TestRequest::post().uri(CHAT).insert_header((header::CONTENT_TYPE, "text/plain")).set_payload("{}"), 415),
        (TestRequest::get().uri(CHAT), 405),
        (TestRequest::delete().uri("/v1/models"), 405),
        (TestRequest::get().uri("/v1/nothing"), 404),
        (TestRequest::get().uri("/v1/models/none/such"), 404),
        (TestRequest::post().uri(CHAT).set_json(chat(json!({"model": "gpt-9"}))), 404),
        (TestRequest::post().uri(CHAT).set_json(chat(json!({"model": "large"}))), 400),
        (TestRequest::post().uri(CHAT).set_json(chat(json!({"logit_bias": {"257": 1}}))), 400),
        (
            TestRequest::post().uri(CHAT).set_json(chat(json!({"messages": [{"role": "assistant", "content": "x"}]}))),
            400,
        ),
    ];
    for (request, status) in cases {
        let answered = send(&engine, request).await;
        assert_eq!(answered.status, status, "{}", answered.text);
        answered.error();
        assert!(answered.header("x-request-id").is_some());
    }
    assert!(engine.jobs().is_empty());
}

#[actix_web::test]
async fn an_unknown_model_names_the_valid_ones() {
    let error = post(TEXT, vec![], text(json!({"model": "gpt-9"}))).await.error();
    assert_eq!(error["code"], "model_not_found");
    let message = error["message"].as_str().unwrap();
    assert!(["pair", "small", "large"].iter().all(|name| message.contains(name)), "{message}");
}

#[actix_web::test]
async fn the_routed_name_is_listed_first() {
    let engine = ScriptedEngine::new([]);
    let list = send(&engine, TestRequest::get().uri("/v1/models")).await.json();
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, vec!["pair", "small", "large"]);
    assert_eq!(send(&engine, TestRequest::get().uri("/v1/models/small")).await.json()["object"], "model");
}

#[actix_web::test]
async fn routers_are_listed_with_their_parameters() {
    let engine = ScriptedEngine::new([]);
    let list = send(&engine, TestRequest::get().uri("/v1/routers")).await.json();
    let cards = list["data"].as_array().unwrap();
    let names: Vec<&str> = cards.iter().map(|card| card["name"].as_str().unwrap()).collect();
    assert_eq!(names, tokenrouter_core::routing::list().map(|entry| entry.name).collect::<Vec<_>>());
    let active: Vec<&Value> = cards.iter().filter(|card| card["active"] == true).collect();
    assert_eq!(active.len(), 1);
    assert_eq!(active[0]["name"], "r_stitch");
    assert_eq!(active[0]["models"], json!({"least": 2, "most": 2}));
    let entropy = json!({"entropy": true, "top_k": 0, "hidden": false, "score": false});
    assert_eq!(active[0]["needs"], json!([entropy, entropy]));
    assert_eq!(active[0]["params"][0]["name"], "threshold");
    assert_eq!(active[0]["params"][0]["default"], "0.03");
    let card = |name: &str| cards.iter().find(|card| card["name"] == name).unwrap();
    assert_eq!(card("co_llm")["needs"][0]["score"], true);
    assert_eq!(card("co_llm")["needs"][1]["score"], false);
    for name in ["r2r", "citer"] {
        assert_eq!(card(name)["needs"][0]["score"], true, "{name}, though it has no checkpoint");
    }
    let params = |name: &str| card(name)["params"].as_array().unwrap().clone();
    let schema = json!({"type": "number", "minimum": -1.0, "maximum": 2.0});
    assert_eq!((&params("r2r")[1]["kind"], &params("r2r")[1]["per_request"]), (&schema, &json!(true)));
    assert_eq!(params("token_trigger")[1]["kind"], json!({"type": "array", "items": "string"}));
    assert_eq!(card("script")["needs"], Value::Null, "only its file says");
    let known = cards.iter().filter(|card| card["needs"].is_array()).count();
    assert_eq!(known, cards.len() - 1);
    assert_eq!(send(&engine, TestRequest::post().uri("/v1/routers")).await.status, 405);
}

#[actix_web::test]
async fn routing_parameters_reach_the_job_and_refusals_name_the_field() {
    let refused = Err(Refusal::Invalid { field: "routing", message: "threshold is out of range".into() });
    let engine = ScriptedEngine::new([hello(), hello(), hello(), refused]);
    let wishes = [json!({"threshold": 0.2}), json!({}), Value::Null];
    for (path, wish) in [TEXT, CHAT, TEXT].into_iter().zip(&wishes) {
        let body = if path == TEXT { text(json!({ "routing": wish })) } else { chat(json!({ "routing": wish })) };
        assert_eq!(send(&engine, TestRequest::post().uri(path).set_json(body)).await.status, 200);
    }
    let jobs: Vec<Option<Value>> = engine.jobs().iter().map(|job| job.routing.clone()).collect();
    assert_eq!(jobs, [Some(wishes[0].clone()), Some(wishes[1].clone()), None]);
    for wish in [json!(9), json!([0.2]), json!("r2r"), json!({"threshold": 9})] {
        let body = text(json!({ "routing": wish }));
        let answered = send(&engine, TestRequest::post().uri(TEXT).set_json(body)).await;
        assert_eq!(answered.status, 400, "{}", answered.text);
        assert_eq!(answered.error()["param"], "routing");
    }
}

#[actix_web::test]
async fn the_target_follows_the_model_name() {
    let engine = ScriptedEngine::new([hello(), hello()]);
    for model in ["pair", "large"] {
        send(&engine, TestRequest::post().uri(TEXT).set_json(text(json!({ "model": model })))).await;
    }
    let targets: Vec<Target> = engine.jobs().iter().map(|job| job.target).collect();
    assert_eq!(targets, vec![Target::Routed, Target::Only(tokenrouter_core::ids::ModelIdx(1))]);
}

#[actix_web::test]
async fn request_ids_are_echoed_or_made() {
    let engine = ScriptedEngine::new([]);
    let own = TestRequest::get().uri("/health").insert_header(("x-request-id", "abc"));
    assert_eq!(send(&engine, own).await.header("x-request-id"), Some("abc"));
    let long = TestRequest::get().uri("/health").insert_header(("x-request-id", "a".repeat(129)));
    assert_eq!(send(&engine, long).await.header("x-request-id").unwrap().len(), 36);
}

#[actix_web::test]
async fn every_body_metric_parses_and_counts_the_route_pattern() {
    let engine = ScriptedEngine::new([hello()]);
    let service = actix_web::App::new()
        .app_data(web::Data::new(app(engine)))
        .wrap(middleware::from_fn(observe::observe))
        .configure(routes);
    let service = init_service(service).await;
    call_service(&service, TestRequest::post().uri(CHAT).set_json(chat(json!({}))).to_request()).await;
    call_service(&service, TestRequest::get().uri("/v1/models/nope").to_request()).await;
    let response = call_service(&service, TestRequest::get().uri("/metrics").to_request()).await;
    let text = String::from_utf8(read_body(response).await.to_vec()).unwrap();
    let has = |line: &str| assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    has("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"pair\"} 1");
    has("tokenrouter:http_requests_total{method=\"POST\",route=\"/v1/chat/completions\",status=\"200\"} 1");
    has("tokenrouter:http_requests_total{method=\"GET\",route=\"/v1/models/{id:.+}\",status=\"404\"} 1");
}

#[actix_web::test]
async fn health_turns_red_when_waiting_work_does_not_move_and_metrics_show_it() {
    let engine = ScriptedEngine::new([]);
    let service = actix_web::App::new().app_data(web::Data::new(app(Arc::clone(&engine)))).configure(routes);
    let service = init_service(service).await;
    let mut model = tokenrouter_actors::runtime::ModelSnapshot { name: "small".to_owned(), ..Default::default() };
    (model.batcher.waiting, model.batcher.oldest) = (3, Some(tokenrouter_core::ids::Time(10_000_000_000)));
    for (seconds, status) in [(10, 200), (69, 200), (70, 503)] {
        engine.say(tokenrouter_core::ids::Time(seconds * 1_000_000_000), vec![model.clone()]);
        let response = call_service(&service, TestRequest::get().uri("/health").to_request()).await;
        assert_eq!(response.status().as_u16(), status, "at {seconds} s");
    }
    let response = call_service(&service, TestRequest::get().uri("/metrics").to_request()).await;
    let text = String::from_utf8(read_body(response).await.to_vec()).unwrap();
    assert!(text.contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"small\"} 3\n"), "{text}");
}

#[actix_web::test]
async fn random_streams_equal_their_whole_answers() {
    let mut seed = u64::from_le_bytes(uuid::Uuid::new_v4().as_bytes()[..8].try_into().unwrap());
    println!("seed {seed}");
    let mut random = |below: u64| {
        seed = tokenrouter_core::rng::mix(seed);
        seed % below
    };
    for _ in 0..50 {
        let mut events = Vec::new();
        for _ in 0..random(12) {
            let said: String =
                (0..random(5)).map(|_| ["a", "é", "😀", "\"\n", "\u{2028}"][random(5) as usize]).collect();
            events.push(delta_by(&said, random(2) as u8));
        }
        events.push(finished(["stop", "length", "END"][random(3) as usize]));
        let extra = json!({"logprobs": true, "return_token_models": true});
        let whole = post(CHAT, vec![Ok(events.clone())], chat(extra.clone())).await.json();
        let streamed = post(CHAT, vec![Ok(events)], chat(merged(extra, json!({"stream": true})))).await.events();
        let whole = &whole["choices"][0];
        let choices: Vec<&Value> = streamed.iter().map(|event| &event["choices"][0]).collect();
        let said: String = choices.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(whole["message"]["content"], said);
        let joined = |path: fn(&Value) -> &Value| -> Vec<Value> {
            choices.iter().flat_map(|choice| path(choice).as_array().cloned().unwrap_or_default()).collect()
        };
        assert_eq!(whole["logprobs"]["content"], Value::from(joined(|choice| &choice["logprobs"]["content"])));
        assert_eq!(whole["token_models"], Value::from(joined(|choice| &choice["token_models"])));
        assert_eq!(&whole["finish_reason"], &choices.last().unwrap()["finish_reason"]);
    }
    assert_eq!(ByteCodec.vocab_size(), 257);
}

#[actix_web::test]
async fn a_silent_stream_sends_comments() {
    let engine = ScriptedEngine::new([Ok(vec![delta("a")])]);
    let service = actix_web::App::new().app_data(web::Data::new(app(Arc::clone(&engine)))).configure(routes);
    let service = init_service(service).await;
    let request = TestRequest::post().uri(TEXT).set_json(text(json!({"stream": true}))).to_request();
    let mut body = Box::pin(call_service(&service, request).await.into_body());
    let mut frames = Vec::new();
    for _ in 0..3 {
        let next = std::future::poll_fn(|cx| actix_web::body::MessageBody::poll_next(body.as_mut(), cx));
        frames.push(String::from_utf8(next.await.unwrap().unwrap().to_vec()).unwrap());
    }
    assert!(frames[0].starts_with("data: {"), "{frames:?}");
    assert_eq!(frames[1..], [": keep-alive\n\n", ": keep-alive\n\n"]);
    drop(body);
    assert_eq!(engine.aborted(), 1);
}

#[actix_web::test]
async fn a_dropped_stream_aborts_its_jobs() {
    let engine = ScriptedEngine::new([Ok(vec![delta("a")]), Ok(vec![])]);
    let service = actix_web::App::new()
        .app_data(web::Data::new(app(Arc::clone(&engine))))
        .wrap(middleware::from_fn(observe::observe))
        .configure(routes);
    let service = init_service(service).await;
    let body = chat(json!({"stream": true, "n": 2}));
    let response = call_service(&service, TestRequest::post().uri(CHAT).set_json(body).to_request()).await;
    assert_eq!((response.status().as_u16(), engine.aborted()), (200, 0));
    drop(response);
    assert_eq!(engine.aborted(), 2);
}
