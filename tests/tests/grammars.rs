//! Answers in a form: a simulated pair that wants to say something else, over HTTP and over sockets between processes, and
//! the demo pair. What is said is what the definition says: at each place what the model wants if the form allows it, or
//! what the form allows instead. Owner: the HTTP layer. Invariant: the same text at every threshold, after any hop, in any
//! company, preempted or not.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::Address;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Runtime, RuntimeSpec, start};
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::constraint::ConstraintSpec;
use tokenrouter_core::executor::{Executor, ExecutorLimits};
use tokenrouter_core::faults::{Fault, FaultPlan};
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::job::{Event, FinishReason, Job, Prompt, StopRules, Target};
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing;
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::text::TextCodec;
use tokenrouter_tests::conformance::demo;
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::processes::{is_connected, unrest};
use tokenrouter_tests::raw_client::{CHAT, Connection, TEXT, post, request};
use tokenrouter_tests::scripted::{self, Bytes, EOS, Scripted, instead, parrot, script};

/// Whatever is waited for must have come by then.
const DEADLINE: Duration = Duration::from_secs(60);

/// Numbers by chance from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 8) % limit
    }
}

/// A schema of few levels, all of whose values are short.
fn any_schema(dice: &mut Dice, depth: u32) -> Value {
    match dice.below(if depth == 0 { 6 } else { 9 }) {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 => {
            let least = dice.below(200) as i64 - 100;
            json!({"type": "integer", "minimum": least, "maximum": least + dice.below(300) as i64})
        }
        3 => json!({"type": "string", "minLength": dice.below(2), "maxLength": 1 + dice.below(6)}),
        4 => json!({"enum": ["red", "blue", dice.below(9), null, [1, "two"]]}),
        5 => json!({"const": {"at": dice.below(9)}}),
        6 => {
            let least = dice.below(3);
            let items = any_schema(dice, depth - 1);
            json!({"type": "array", "items": items, "minItems": least, "maxItems": least + dice.below(3)})
        }
        7 => json!({"anyOf": [any_schema(dice, depth - 1), {"type": "array", "maxItems": 0}]}),
        _ => {
            let names = ["a", "name", "värde"];
            let properties: Map<String, Value> =
                names.iter().map(|name| ((*name).to_owned(), any_schema(dice, depth - 1))).collect();
            let required: Vec<&str> = names.into_iter().filter(|_| dice.below(3) > 0).collect();
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    }
}

/// Whether a value follows a schema of those that [`any_schema`] makes.
fn follows(value: &Value, schema: &Value) -> bool {
    let bound = |key: &str, open: i64| schema.get(key).and_then(Value::as_i64).unwrap_or(open);
    let within = |size: i64, least: &str, most: &str| (bound(least, 0)..=bound(most, i64::MAX)).contains(&size);
    if let Some(one) = schema["anyOf"].as_array() {
        return one.iter().any(|schema| follows(value, schema));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    if let Some(only) = schema.get("const") {
        return only == value;
    }
    match (schema["type"].as_str().expect("a type"), value) {
        ("null", Value::Null) | ("boolean", Value::Bool(_)) => true,
        ("integer", Value::Number(number)) => number
            .as_i64()
            .is_some_and(|number| (bound("minimum", i64::MIN)..=bound("maximum", i64::MAX)).contains(&number)),
        ("string", Value::String(text)) => within(text.chars().count() as i64, "minLength", "maxLength"),
        ("array", Value::Array(items)) => {
            within(items.len() as i64, "minItems", "maxItems")
                && items.iter().all(|item| follows(item, &schema["items"]))
        }
        ("object", Value::Object(members)) => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let fits = |(name, value): (&String, &Value)| {
                schema["properties"].get(name).is_some_and(|schema| follows(value, schema))
            };
            required.into_iter().all(|name| members.contains_key(name)) && members.iter().all(fits)
        }
        _ => false,
    }
}

#[test]
fn the_validator_tells_right_from_wrong() {
    let schema = json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "maximum": 3},
        "b": {"type": "array", "maxItems": 1, "items": {"type": "string", "maxLength": 2}}}});
    for (value, right) in [
        (json!({"a": 3}), true),
        (json!({"a": 3, "b": ["åå"]}), true),
        (json!({"a": 4}), false),
        (json!({"a": 1.5}), false),
        (json!({"b": []}), false),
        (json!({"a": 3, "b": ["x", "y"]}), false),
        (json!({"a": 3, "b": ["xyz"]}), false),
        (json!({"a": 3, "c": 1}), false),
        (json!([3]), false),
    ] {
        assert_eq!(follows(&value, &schema), right, "{value}");
    }
}

/// What the definition says: the output, end-of-text included.
fn defined(codec: &Bytes, form: &ConstraintSpec, prompt: &[TokenId], max: usize) -> Vec<TokenId> {
    let mut constraint = codec.constraint(form, &[EOS]).expect("a form");
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + max && tokens[prompt.len()..].last() != Some(&EOS) {
        let mask = constraint.allowed();
        let token = instead(parrot(&tokens), &tokens, |id| mask.allows(id)).expect("a token that may come");
        constraint.commit(token);
        tokens.push(token);
    }
    tokens.split_off(prompt.len())
}

/// The text of an output, and whether it ended by itself.
fn shown(output: &[TokenId]) -> (String, &'static str) {
    let bytes: Vec<u8> = output.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
    let finish = if output.last() == Some(&EOS) { "stop" } else { "length" };
    (String::from_utf8_lossy(&bytes).into_owned(), finish)
}

/// A request and what must be said.
#[derive(Clone)]
struct Case {
    schema: Value,
    body: Value,
    text: String,
    finish: &'static str,
}

/// A prompt of noise, so that the model wants something else than the form at most places.
fn noise(seed: u64, length: u64) -> Vec<TokenId> {
    let byte = |at: u64| 1 + (mix(seed ^ (at << 32)) % 126) as TokenId;
    (0..length).map(byte).chain([0]).collect()
}

fn case(codec: &Bytes, seed: u64, max: usize) -> Case {
    let schema = any_schema(&mut Dice(seed), 3);
    let prompt = noise(seed, 5 + seed % 70);
    let form = ConstraintSpec::Json(schema.to_string());
    let output = defined(codec, &form, &prompt, max);
    let (text, finish) = shown(&output);
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let model = ["pair", "pair", "small", "large"][seed as usize % 4];
    let body = json!({"model": model, "prompt": prompt,
        "max_tokens": max, "response_format": format});
    Case { schema, body, text, finish }
}

/// Asks all at once, streamed or not.
fn ask_all(address: SocketAddr, cases: &[Case]) {
    std::thread::scope(|scope| {
        for (at, case) in cases.iter().enumerate() {
            scope.spawn(move || {
                let mut body = case.body.clone();
                body["stream"] = at.is_multiple_of(2).into();
                let said = post(address, TEXT, &body).said();
                assert_eq!((said.text.as_str(), said.finish.as_str()), (case.text.as_str(), case.finish), "{body}");
            });
        }
    });
}

#[test]
fn answers_follow_their_schemas_at_every_threshold() {
    let codec = Bytes::default();
    let cases: Vec<Case> = (0..48).map(|seed| case(&codec, seed, 1000)).collect();
    for case in &cases {
        assert_eq!(case.finish, "stop", "{} is short: {:?}", case.schema, case.text);
        let value = serde_json::from_str(&case.text).unwrap_or_else(|error| panic!("{error}: {}", case.text));
        assert!(follows(&value, &case.schema), "{value} does not follow {}", case.schema);
    }
    let texts: BTreeMap<&str, usize> = cases.iter().map(|case| (case.text.as_str(), 1)).collect();
    assert!(texts.len() > 24, "the schemas have something to say: {texts:?}");
    for thresholds in [None, Some(vec![1, 3]), Some(vec![4, 2])] {
        let server = Server::start(Setup { thresholds, step: Duration::ZERO, ..Setup::parrots() });
        ask_all(server.address, &cases);
        server.stop();
    }
}

#[test]
fn an_answer_that_is_cut_is_the_beginning_of_the_whole() {
    let codec = Bytes::default();
    let server = Server::start(Setup::parrots());
    let whole: Vec<Case> = (100..130).map(|seed| case(&codec, seed, 1000)).filter(|case| case.text.len() > 3).collect();
    let cut = whole.iter().enumerate().map(|(at, case)| {
        let mut case = case.clone();
        let max = case.text.len() - [0, 1, 2][at % 3];
        case.body["max_tokens"] = max.into();
        case.text = String::from_utf8_lossy(&case.text.as_bytes()[..max]).into_owned();
        // The text is all there, but not that it is.
        case.finish = "length";
        case
    });
    let cut: Vec<Case> = cut.collect();
    assert!(cut.len() > 8, "there is something to cut");
    ask_all(server.address, &cut);
    server.stop();
}

/// A model that says what the form wants is left alone, and the end comes by itself.
#[test]
fn what_follows_the_form_anyway_is_not_changed() {
    let server = Server::start(Setup::parrots());
    let said = "{\"name\": \"Ada\", \"born\": 1815}";
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "born": {"type": "integer"}}});
    for format in
        [json!({"type": "json_object"}), json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})]
    {
        for (path, more) in [
            (TEXT, json!({"prompt": script(said)})),
            (CHAT, json!({"messages": [{"role": "user", "content": format!("{said}\0")}]})),
        ] {
            let mut body = json!({"model": "pair", "response_format": format, "n": 1, "max_tokens": 500});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            let answer = post(server.address, path, &body).said();
            assert_eq!((answer.text.as_str(), answer.finish.as_str()), (said, "stop"), "{path} {format}");
            assert_eq!(answer.completion_tokens(), said.len() as u64 + 1, "end-of-text counts");
        }
    }
    let body = json!({"model": "pair", "prompt": script("no JSON at all"), "n": 5, "temperature": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, "max_tokens": 900});
    let answer = post(server.address, TEXT, &body).json();
    for choice in answer["choices"].as_array().expect("choices") {
        let value: Value = serde_json::from_str(choice["text"].as_str().expect("a text")).expect("JSON");
        assert!(value.is_object(), "{value}");
    }
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(5));
    server.stop();
}

/// Memory for less than half of those who ask, so that some lose theirs on the way; and some leave.
#[actix_rt::test]
async fn preempted_answers_are_the_same_and_abandoned_ones_leave_nothing() {
    let codec = Bytes::default();
    let limits = ExecutorLimits { pages: 24, ..Setup::default().limits };
    let server = Server::start(Setup { limits, ..Setup::parrots() });
    let long = json!({"type": "array", "minItems": 24, "maxItems": 24, "items": {"type": "integer", "minimum": 1000, "maximum": 9999}});
    let cases = (0..16u64).map(|seed| {
        let prompt = noise(seed, 30);
        let output = defined(&codec, &ConstraintSpec::Json(long.to_string()), &prompt, 200);
        let (text, finish) = shown(&output);
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": long}});
        let body = json!({"model": "pair", "prompt": prompt, "max_tokens": 200, "response_format": format});
        Case { schema: long.clone(), body, text, finish }
    });
    let cases: Vec<Case> = cases.collect();
    let address = server.address;
    std::thread::scope(|scope| {
        for case in &cases[..4] {
            scope.spawn(move || {
                let mut body = case.body.clone();
                body["stream"] = true.into();
                let mut connection = Connection::open(address);
                connection.send(&request("POST", TEXT, &body.to_string()));
                connection.read_until("data: ");
            });
        }
        scope.spawn(|| ask_all(address, &cases));
    });
    let preempted = server.metric("vllm:num_preemptions_total{model_name=\"small\"}").await
        + server.metric("vllm:num_preemptions_total{model_name=\"large\"}").await;
    assert!(preempted > 0.0, "memory was short");
    server.idle_within(DEADLINE, "after all have ended").await;
    server.stop();
}

/// A server of two processes, a model in each, that sees every fourth step of a model fail.
fn spec(me: usize, addresses: &[Address]) -> RuntimeSpec {
    let limits =
        ExecutorLimits { pages: 60, rows_max: 8, step_tokens_max: 64, context_len: 1024, vocab_width: scripted::VOCAB };
    let device = move || {
        let faults = FaultPlan::new((0..200).map(|at| (5 + 40 * at, Fault::Error)).collect());
        Ok(Box::new(Scripted::failing(limits, parrot, faults)) as Box<dyn Executor>)
    };
    let models = (0..2).map(|index| ModelSpec {
        name: format!("model-{index}"),
        limits,
        eos: vec![EOS],
        site: match index == me {
            true => Site::Here(Seat::Thread(Arc::new(device))),
            false => Site::Peer(addresses[index].clone()),
        },
    });
    // Half of the steps of the first model give control away without what they drew.
    let chances = json!({"p": [[0.4, 0.6], [0.5, 0.5]], "keep": [[true, false], [true, true]]});
    RuntimeSpec {
        models: models.collect(),
        codec: Arc::new(Bytes::default()),
        algorithm: routing::build("bernoulli", &chances, 2).expect("the parameters are right"),
        batching: Batching {
            policy: PolicySpec::Fixed(vec![2, 3]),
            max_wait: Duration::from_millis(5),
            prefill_ahead: true,
            ..Batching::default()
        },
        live_max: 64,
        bounds: Bounds::default(),
        placement: Placement::OwnArbiter,
        process: Process::among_peers(addresses[me].clone()),
    }
}

/// A folder for sockets, removed at the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is found in the temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < DEADLINE, "{what}");
        actix_rt::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn told(runtime: Runtime, job: Job) -> (Vec<TokenId>, FinishReason) {
    let mut events = runtime.submit(job).await.unwrap_or_else(|refusal| panic!("{refusal}")).events;
    let mut output = Vec::new();
    loop {
        match events.recv().await.expect("an end") {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => output.extend(tokens.iter().map(|token| token.id)),
            Event::Finished { reason, .. } => return (output, reason),
            Event::Failed(failure) => panic!("{failure}"),
        }
    }
}

/// The form crosses processes as text, and its state as the tokens; steps that fail and tokens that are dropped on the way
/// change nothing.
#[test]
fn a_remote_peer_keeps_the_form_too() {
    actix_rt::System::new().block_on(async {
        let folder = Folder(std::env::temp_dir().join(format!("tr-{}-form", std::process::id())));
        std::fs::create_dir_all(&folder.0).expect("a folder for sockets");
        let addresses: Vec<Address> = ["0", "1"].iter().map(|name| Address::Unix(folder.0.join(name))).collect();
        let runtimes: Vec<Runtime> = (0..2).map(|me| start(spec(me, &addresses)).expect("it starts")).collect();
        until("peers are connected", || runtimes.iter().all(is_connected)).await;
        let codec = Bytes::default();
        let tasks: Vec<_> = (200..230u64)
            .map(|seed| {
                let prompt = noise(seed, 5 + seed % 60);
                let form = ConstraintSpec::Json(any_schema(&mut Dice(seed), 3).to_string());
                let expected = defined(&codec, &form, &prompt, 300);
                let job = Job {
                    prompt: Prompt::Ids(prompt),
                    target: if seed.is_multiple_of(6) { Target::Only(ModelIdx(0)) } else { Target::Routed },
                    routing: None,
                    sampling: SamplingParams { seed, ..SamplingParams::default() },
                    stop: StopRules { max_tokens: Some(300), ..StopRules::default() },
                    constraint: Some(form),
                    logprobs: None,
                    prompt_logprobs: None,
                    entropy: false,
                };
                (actix_rt::spawn(told(runtimes[0].clone(), job)), expected)
            })
            .collect();
        for (task, expected) in tasks {
            let (output, reason) = tokio::time::timeout(DEADLINE, task).await.expect("an end").expect("no panic");
            assert_eq!(output, expected);
            assert_eq!(
                reason,
                if output.last() == Some(&EOS) { FinishReason::EndOfText } else { FinishReason::Length }
            );
        }
        let snapshot = runtimes[0].snapshot();
        assert!(snapshot.models[0].inter_model.hops[1] > 20, "{snapshot:?}");
        assert!(snapshot.models[0].decode.steps_failed > 0, "{snapshot:?}");
        until("all is at rest", || runtimes.iter().all(|runtime| unrest(runtime).is_none())).await;
        for runtime in &runtimes {
            runtime.drain(Duration::ZERO).await;
        }
    });
}

/// Real models, which know no JSON at all: what they draw follows the schema, and is the same alone and in company.
#[test]
fn the_demo_pair_follows_schemas() {
    let server = Server::launch(demo("launch.toml"));
    let address = server.address;
    let schema = json!({"type": "object", "required": ["sum", "steps", "right"], "additionalProperties": false,
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}, "right": {"type": "boolean"},
            "steps": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "maxLength": 8}}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "sum", "strict": true, "schema": schema}});
    let ask = |seed: u64| {
        let kind = seed as usize % 3;
        let (model, temperature) = (["demo", "small", "large"][kind], [0.0, 1.0, 1.5][kind]);
        let mut body = json!({"model": model, "max_tokens": 200, "seed": seed, "temperature": temperature,
            "response_format": format, "stream": seed % 4 == 1});
        let question = format!("{}+{}=", 10 + seed, 27);
        match seed % 2 {
            0 => body["prompt"] = question.into(),
            _ => body["messages"] = json!([{"role": "user", "content": question}]),
        }
        let said = post(address, if seed.is_multiple_of(2) { TEXT } else { CHAT }, &body).said();
        assert_eq!(said.finish, "stop", "{said:?}");
        let value: Value = serde_json::from_str(&said.text).unwrap_or_else(|error| panic!("{error}: {}", said.text));
        assert!(follows(&value, &schema), "{value}");
        said.text
    };
    let alone: Vec<String> = (0..12).map(ask).collect();
    let ask = &ask;
    let together: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..12).map(|seed| scope.spawn(move || ask(seed))).collect();
        threads.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    });
    assert_eq!(together, alone);
    server.stop();
}
