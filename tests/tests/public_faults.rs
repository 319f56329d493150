//! The kinds of faults that servers of language models were reported for in public, one test a row of the table: what each
//! must not do, asked over HTTP. Rows that another test holds already are named in [`HELD_ELSEWHERE`].
//! Owner: the HTTP layer. Invariant: no row without a test.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokenrouter::text::ModelText;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::text::TextCodec;
use tokenrouter_tests::conformance::{demo, fixture, open};
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{CHAT, Connection, Said, TEXT, get, post, request};
use tokenrouter_tests::scripted::script;

/// File and function of a test.
type Test = (&'static str, &'static str);

/// Row, kind, and the tests that hold it.
const HELD_ELSEWHERE: [(u8, &str, &[Test]); 8] = [
    (
        11,
        "abort of a stream on which no token is due",
        &[("tests/tests/http_disconnect.rs", "a_client_that_leaves_a_batch_or_a_peer_frees_both_models")],
    ),
    (13, "prefix cache", &[("tests/tests/identities.rs", "prefix_hits_change_nothing")]),
    (
        17,
        "features of the template engine",
        &[
            ("tests/tests/chat_templates.rs", "real_templates_render_as_jinja_renders_them"),
            ("api/src/text/template_tests.rs", "tool_arguments_are_values"),
            ("api/src/text/template_tests.rs", "refusals_carry_the_templates_words"),
        ],
    ),
    (
        19,
        "tied and additional heads",
        &[("gpu/src/weights/tests.rs", "heads_are_tied_untied_or_ignored_as_the_configuration_says")],
    ),
    (
        20,
        "truncated files and unknown architectures",
        &[
            ("gpu/src/weights/tests.rs", "every_truncation_of_a_gguf_is_refused"),
            ("gpu/src/weights/tests.rs", "an_unknown_architecture_is_not_called_truncated"),
        ],
    ),
    (23, "misspelt settings", &[("api/tests/cli.rs", "wrong_launch_files_end_with_code_2_and_one_line")]),
    (
        24,
        "shutdown with open connections",
        &[
            ("api/tests/drain.rs", "open_connections_do_not_hold_a_stopped_server"),
            ("api/tests/drain.rs", "a_second_signal_ends_everything"),
        ],
    ),
    (
        28,
        "KV of a pair of models",
        &[("tests/tests/identities.rs", "after_every_hop_the_logits_are_those_of_a_fresh_prefill")],
    ),
];

/// A text completion of a script.
fn wish(model: &str, said: impl AsRef<[u8]>, more: Value) -> Value {
    merged(json!({"model": model, "prompt": script(said), "max_tokens": 1000, "temperature": 0}), more)
}

fn merged(mut body: Value, more: Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

/// The same request whole and streamed, with one seed; what both say.
fn both_ways(server: &Server, path: &str, body: &Value) -> (Said, Said) {
    let body = &merged(body.clone(), json!({"seed": 7}));
    let streaming = json!({"stream": true, "stream_options": {"include_usage": true}});
    let whole = post(server.address, path, body).said();
    let streamed = post(server.address, path, &merged(body.clone(), streaming)).said();
    assert_eq!(streamed.clone().comparable(), whole.clone().comparable(), "{body}");
    (whole, streamed)
}

/// A folder of a test's own, removed when it ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = format!("public-faults-{}-{name}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        std::fs::create_dir_all(&path).expect("the target folder can be written");
        Folder(path)
    }

    /// A server over the models of this launch file.
    fn launch(&self, text: &str) -> Server {
        let path = self.0.join("launch.toml");
        std::fs::write(&path, text).expect("the target folder can be written");
        Server::launch(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is found in the target folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server over one model, served as "m".
fn serving(name: &str, model: &Path) -> Server {
    let text = format!("[[models]]\nname = \"m\"\npath = \"{}\"\nthreads = 1\n", model.display());
    Folder::new(name).launch(&text)
}

#[test]
fn kind_01_characters_of_several_tokens_come_whole() {
    let server = Server::start(Setup::parrots());
    let text = "기😀é 한 🧑‍🚀.";
    for (path, body) in [
        (TEXT, wish("pair", text, json!({"logprobs": 0}))),
        (
            CHAT,
            json!({"model": "pair", "messages": [{"role": "user", "content": format!("{text}\0")}], "logprobs": true}),
        ),
    ] {
        let (whole, streamed) = both_ways(&server, path, &body);
        assert_eq!(whole.text, text);
        let whole_characters = |part: &String| !part.contains(char::REPLACEMENT_CHARACTER);
        assert!(streamed.parts.len() > 3 && streamed.parts.iter().all(whole_characters), "{:?}", streamed.parts);
        assert_eq!(whole.entries.len(), text.len() + 1, "an entry for each token");
        assert_eq!(whole.finish, "stop");
    }
    let bytes = json!({"model": "small", "messages": [{"role": "user", "content": "😀\0"}], "logprobs": true});
    let said = post(server.address, CHAT, &bytes).said();
    let entries: Vec<&Value> = said.entries.iter().map(|entry| &entry["bytes"]).collect();
    assert_eq!(entries[..4], [&json!([0xF0]), &json!([0x9F]), &json!([0x98]), &json!([0x80])]);
    server.stop();
}

#[test]
fn kind_02_metaspace_tokens_keep_their_spaces() {
    let model = fixture("tiny-spm.gguf");
    let text = ModelText::load(&open(&model)).unwrap_or_else(|error| panic!("{error}"));
    let codec = &text.tokenizer;
    assert!(codec.strips_leading_space());
    let spells = |id: &u32| codec.token_bytes(*id).and_then(|bytes| std::str::from_utf8(bytes).ok());
    let is_word =
        |id: &u32| spells(id).is_some_and(|text| text.len() > 2 && text.starts_with(' ') && !codec.is_special(*id));
    let id = (0..codec.vocab_size()).find(is_word).expect("a token with a space in front");
    let word = spells(&id).expect("it has a text").trim_start().to_owned();
    let server = serving("metaspace", &model);
    let body =
        json!({"model": "m", "prompt": [id], "max_tokens": 3, "temperature": 0, "logit_bias": {id.to_string(): 100}});
    assert_eq!(both_ways(&server, TEXT, &body).0.text, format!("{word} {word} {word}"));
    let echoed = merged(body, json!({"echo": true}));
    assert_eq!(both_ways(&server, TEXT, &echoed).0.text, format!("{word} {word} {word} {word}"));
    server.stop();
}

#[test]
fn kind_03_no_part_of_a_stop_string_is_sent() {
    let server = Server::start(Setup::parrots());
    let stopped = both_ways(&server, TEXT, &wish("pair", "abcDEFG tail", json!({"stop": ["DEFG"]}))).1;
    assert_eq!((stopped.text.as_str(), stopped.finish.as_str(), &stopped.stop), ("abc", "stop", &json!("DEFG")));
    assert!(!stopped.parts.concat().contains('D'));
    let passed = both_ways(&server, TEXT, &wish("pair", "abDEFx", json!({"stop": ["DEFG"]}))).1;
    assert_eq!((passed.text.as_str(), &passed.stop), ("abDEFx", &Value::Null));
    let held = passed.parts.iter().find(|part| part.contains('D')).expect("it is sent in the end");
    assert!(held.contains("DEFx"), "held back while it could become the stop string: {:?}", passed.parts);
    server.stop();
}

/// Models go on until they hear of the end, so tokens after the stop string come, several in one message when many users
/// are served; they count nowhere.
#[test]
fn kind_04_nothing_is_reported_after_a_stop_string() {
    let server = Server::start(Setup::parrots());
    let address = server.address;
    let count = |user: usize, round: usize| {
        let streams = round.is_multiple_of(2);
        let said = "x".repeat(1 + (user + round) % 5) + "STOP and so on and on";
        let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
        let more = if streams { stream } else { json!({}) };
        let body = wish("pair", &said, merged(json!({"stop": "OP", "logprobs": 2}), more));
        let answer = post(address, TEXT, &body).said();
        let due = said.find("OP").expect("it is in there") + 2;
        assert_eq!(answer.text, said[..due - 2]);
        assert_eq!((answer.entries.len(), answer.completion_tokens()), (due, due as u64), "{answer:?}");
        let by_model = answer.usage["completion_tokens_details"]["by_model"].as_object().expect("counts");
        assert_eq!(by_model.values().filter_map(Value::as_u64).sum::<u64>(), due as u64);
    };
    std::thread::scope(|scope| {
        for user in 0..12 {
            scope.spawn(move || (0..40).for_each(|round| count(user, round)));
        }
    });
    server.stop();
}

#[test]
fn kind_05_the_reason_of_the_end_is_true() {
    let server = Server::start(Setup::parrots());
    for (max_tokens, finish, text, tokens) in [
        (1, "length", "a", 1),
        (2, "length", "ab", 2),
        (3, "length", "abc", 3),
        (4, "stop", "abc", 4),
        (5, "stop", "abc", 4),
    ] {
        for model in ["pair", "large"] {
            let said = both_ways(&server, TEXT, &wish(model, "abc", json!({"max_tokens": max_tokens}))).0;
            assert_eq!((said.finish.as_str(), said.text.as_str()), (finish, text), "max_tokens {max_tokens}");
            assert_eq!(said.completion_tokens(), tokens, "end-of-text counts where it was generated");
        }
    }
    server.stop();
}

#[test]
fn kind_06_impossible_tokens_have_a_number() {
    let server = Server::start(Setup::parrots());
    let chat =
        json!({"model": "pair", "messages": [{"role": "user", "content": "a\0"}], "logprobs": true, "top_logprobs": 5});
    let said = both_ways(&server, CHAT, &chat).0;
    let top = said.entries[0]["top_logprobs"].as_array().expect("a list").clone();
    let numbers: Vec<f64> = top.iter().filter_map(|token| token["logprob"].as_f64()).collect();
    assert_eq!(numbers, [0.0, -9999.0, -9999.0, -9999.0, -9999.0]);
    let text = post(server.address, TEXT, &wish("pair", "a", json!({"logprobs": 5}))).json();
    let top = text["choices"][0]["logprobs"]["top_logprobs"][0].as_object().expect("an object").clone();
    assert!(top.values().all(Value::is_number) && top.len() == 5, "{top:?}");
    server.stop();
    // Tokens that the form of an answer forbids have the numbers that the model gives them.
    let server = Server::launch(demo("launch.toml"));
    let schema = json!({"type": "object", "required": ["sum"], "additionalProperties": false,
        "properties": {"sum": {"type": "integer", "minimum": 10, "maximum": 99}}});
    let chat = json!({"model": "demo", "messages": [{"role": "user", "content": "12+30="}], "logprobs": true,
        "top_logprobs": 20, "temperature": 0, "max_tokens": 60, "logit_bias": {"5": -100},
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}});
    let said = both_ways(&server, CHAT, &chat).0;
    assert_eq!(said.finish, "stop", "{said:?}");
    assert!(said.entries.len() > 5, "{said:?}");
    for entry in &said.entries {
        let own = entry["logprob"].as_f64().expect("a number");
        let top: Vec<f64> =
            entry["top_logprobs"].as_array().expect("a list").iter().filter_map(|t| t["logprob"].as_f64()).collect();
        assert!(
            own <= top[0] && top.len() == 20 && top.iter().all(|number| (-9999.0..=0.0).contains(number)),
            "{entry}"
        );
    }
    let forced = |entry: &Value| entry["logprob"].as_f64() < entry["top_logprobs"][0]["logprob"].as_f64();
    assert!(said.entries.iter().any(forced), "the form has changed nothing");
    server.stop();
}

#[test]
fn kind_07_an_echo_has_the_log_probabilities_of_the_prompt() {
    let server = Server::start(Setup::parrots());
    let body = json!({"model": "small", "prompt": script("abc"), "echo": true, "logprobs": 1, "max_tokens": 1});
    let answer = post(server.address, TEXT, &body).json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "abc\0a");
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(choice["logprobs"][list].as_array().map(Vec::len), Some(5), "{list}: {answer}");
    }
    for list in ["token_logprobs", "top_logprobs"] {
        let null: Vec<bool> = choice["logprobs"][list].as_array().expect("a list").iter().map(Value::is_null).collect();
        assert_eq!(null, [true, false, false, false, false], "{list}: nothing comes before the first token");
    }
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2, 3, 4]));
    server.stop();
}

#[test]
fn kind_08_ids_outside_the_vocabulary_hurt_nobody() {
    let server = Server::start(Setup::parrots());
    for (field, bad) in [
        ("stop_token_ids", json!([257])),
        ("stop_token_ids", json!([-1])),
        ("logit_bias", json!({"999999": 1})),
        ("logit_bias", json!({"257": 1})),
        ("prompt", json!([-1])),
        ("prompt", json!([257])),
        ("prompt", json!([[1], [4_294_967_296_u64]])),
    ] {
        let answer = post(server.address, TEXT, &wish("pair", "abc", json!({ field: bad })));
        assert_eq!(answer.status, 400, "{field}: {}", answer.text);
        let param = answer.error()["param"].as_str().expect("a field").to_owned();
        assert!(param.starts_with(field), "{param} instead of {field}");
        assert_eq!(post(server.address, TEXT, &wish("pair", "abc", json!({}))).said().text, "abc", "after {field}");
    }
    server.stop();
}

#[test]
fn kind_09_a_prompt_over_the_context_is_refused_before_any_header() {
    let context_len = Setup::default().limits.context_len as usize;
    let server = Server::start(Setup::parrots());
    for stream in [false, true] {
        for (prompt, counted) in [
            (json!(vec![97; context_len + 1]), context_len + 1),
            (json!("a".repeat(context_len + 1)), context_len + 1),
            // So long that it is not even tokenised.
            (json!("a".repeat(4_000_000)), 0),
        ] {
            for model in ["pair", "small"] {
                let answer = post(server.address, TEXT, &json!({"model": model, "prompt": prompt, "stream": stream}));
                assert_eq!(answer.status, 400, "{}", answer.text);
                let error = answer.error();
                assert_eq!(error["code"], "context_length_exceeded");
                assert_eq!(error["n_ctx"], context_len);
                let tokens = error["n_prompt_tokens"].as_u64().expect("a count") as usize;
                assert!(if counted == 0 { tokens > context_len } else { tokens == counted }, "{tokens}");
            }
        }
        let chat =
            json!({"model": "pair", "messages": [{"role": "user", "content": "a".repeat(5000)}], "stream": stream});
        assert_eq!(post(server.address, CHAT, &chat).error()["code"], "context_length_exceeded");
    }
    server.stop();
}

/// 64 pages: one lost with each request would be noticed soon.
#[actix_rt::test]
async fn kind_10_memory_is_back_when_requests_have_ended() {
    let limits = ExecutorLimits { pages: 64, ..Setup::default().limits };
    let server = Server::start(Setup { limits, ..Setup::parrots() });
    let address = server.address;
    std::thread::scope(|scope| {
        for user in 0..6 {
            scope.spawn(move || {
                for round in 0..60 {
                    let said = format!("{user} says {round}");
                    let model = ["pair", "small", "large"][round % 3];
                    match round % 5 {
                        0 => assert_eq!(post(address, TEXT, &wish(model, &said, json!({"prompt": [999]}))).status, 400),
                        1 => {
                            let mut connection = Connection::open(address);
                            let body = wish(model, "on and on ".repeat(30), json!({"stream": true, "max_tokens": 300}));
                            connection.send(&request("POST", TEXT, &body.to_string()));
                            connection.read_until("data: ");
                        }
                        _ => assert_eq!(post(address, TEXT, &wish(model, &said, json!({}))).said().text, said),
                    }
                }
            });
        }
    });
    server.idle_within(Duration::from_secs(2), "after 360 requests").await;
    for model in ["small", "large"] {
        assert_eq!(server.metric(&format!("tokenrouter:kv_pages_used{{model_name=\"{model}\"}}")).await, 0.0);
    }
    server.stop();
}

#[actix_rt::test]
async fn kind_12_a_request_larger_than_the_memory_blocks_nobody() {
    let limits = ExecutorLimits { pages: 4, ..Setup::default().limits };
    let server = Server::start(Setup { limits, ..Setup::parrots() });
    server.hold(0);
    let mut running = Connection::open(server.address);
    running.send(&request("POST", TEXT, &wish("small", "runs", json!({"max_tokens": 8})).to_string()));
    server.until("one runs", |snapshot| snapshot.models[0].decode.running == 1).await;
    for stream in [false, true] {
        let answer =
            post(server.address, TEXT, &wish("small", "x".repeat(64), json!({"max_tokens": 1, "stream": stream})));
        assert_eq!(answer.status, 400, "{}", answer.text);
        let error = answer.error();
        assert_eq!((&error["code"], &error["capacity_tokens"]), (&json!("kv_memory_exceeded"), &json!(64)));
    }
    server.release(0);
    assert_eq!(post(server.address, TEXT, &wish("small", "short", json!({"max_tokens": 8}))).said().text, "short");
    assert_eq!(running.answer().said().text, "runs");
    server.idle_within(Duration::from_secs(2), "after a refusal").await;
    server.stop();
}

/// On the demo pair, whose arithmetic would show it.
#[test]
fn kind_14_answers_do_not_depend_on_the_company() {
    let server = Server::launch(demo("launch.toml"));
    let address = server.address;
    let file = std::fs::read_to_string(demo("problems.jsonl")).expect("the problems are there");
    let problems = file.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    let prompts: Vec<Value> = problems.map(|problem| problem["question"].clone()).take(21).collect();
    assert_eq!(prompts.len(), 21);
    let ask = |prompt: &Value, seed: u64| {
        let body =
            json!({"model": "demo", "prompt": prompt, "max_tokens": 20, "temperature": seed.min(1), "seed": seed});
        post(address, TEXT, &body).said().text
    };
    let (five, noise) = prompts.split_at(5);
    // Seed 0 is greedy here.
    let five: Vec<(&Value, u64)> = five.iter().zip([0, 0, 0, 3, 4]).collect();
    let alone: Vec<String> = five.iter().map(|&(prompt, seed)| ask(prompt, seed)).collect();
    for _ in 0..4 {
        assert_eq!(five.iter().map(|&(prompt, seed)| ask(prompt, seed)).collect::<Vec<_>>(), alone);
    }
    let ask = &ask;
    let together: Vec<String> = std::thread::scope(|scope| {
        let noise: Vec<_> = noise.iter().map(|prompt| scope.spawn(move || ask(prompt, 9))).collect();
        let five: Vec<_> = five.iter().map(|&(prompt, seed)| scope.spawn(move || ask(prompt, seed))).collect();
        let five = five.into_iter().map(|thread| thread.join().expect("an answer")).collect();
        noise.into_iter().for_each(|thread| assert!(thread.join().is_ok()));
        five
    });
    assert_eq!(together, alone);
    server.stop();
}

#[test]
fn kind_15_answers_hold_nothing_of_others() {
    let server = Server::start(Setup { thresholds: Some(vec![4, 2]), ..Setup::parrots() });
    let address = server.address;
    std::thread::scope(|scope| {
        for user in 0..16 {
            scope.spawn(move || {
                for round in 0..6 {
                    let said = format!("WORD{user} ").repeat(3 + (user + round) % 7);
                    let stream = json!({"stream": (user + round) % 2 == 0});
                    let answer = post(address, TEXT, &wish("pair", &said, stream)).said();
                    assert_eq!((answer.text, answer.finish.as_str()), (said, "stop"));
                }
            });
        }
    });
    server.stop();
}

#[test]
fn kind_16_what_a_template_refuses_is_the_clients_fault() {
    let folder = Folder::new("strict-model");
    let model = folder.0.join("model");
    copy_model(&fixture("tiny/llama-f32"), &model);
    let template = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
                    {{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}";
    std::fs::write(model.join("chat_template.jinja"), template).expect("the target folder can be written");
    let server = serving("strict", &model);
    let turn = |role: &str| json!({"role": role, "content": "12"});
    for stream in [false, true] {
        let chat = |turns: &[&str]| {
            let messages: Vec<Value> = turns.iter().map(|role| turn(role)).collect();
            post(server.address, CHAT, &json!({"model": "m", "messages": messages, "max_tokens": 2, "stream": stream}))
        };
        let refused = chat(&["user", "user"]);
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("messages")), "{}", refused.text);
        assert!(refused.text.contains("roles must alternate"), "{}", refused.text);
        assert_eq!(chat(&["user", "assistant", "user"]).status, 200);
    }
    server.stop();
}

fn copy_model(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the target folder can be written");
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn kind_18_a_prompt_has_one_start_token() {
    let model = fixture("tiny-spm.gguf");
    let text = ModelText::load(&open(&model)).unwrap_or_else(|error| panic!("{error}"));
    let start = text.tokenizer.bos().expect("the vocabulary wants a start token");
    let name = String::from_utf8_lossy(text.tokenizer.token_bytes(start).expect("it has a name")).into_owned();
    let server = serving("start-token", &model);
    let count = |prompt: &str| {
        let said = post(server.address, TEXT, &json!({"model": "m", "prompt": prompt, "max_tokens": 1})).said();
        said.usage["prompt_tokens"].as_u64().expect("a count")
    };
    assert_eq!(count(&name), 1);
    assert_eq!(count(&format!("{name}{name}")), 2, "what is written twice is meant twice");
    let own =
        text.tokenizer.encode("hello", tokenrouter_core::text::SpecialTokens::Parse).expect("a text").len() as u64;
    assert_eq!(count("hello"), 1 + own);
    server.stop();
}

/// Two models of one tokenizer, 300 tokens, whose rows are padded to 304 and to 384. The padding of both is made the most
/// probable at every position: of each two rows one has an enormous logit.
#[test]
fn kind_21_padding_is_never_said_and_pairs_may_differ_in_it() {
    let folder = Folder::new("padded");
    let original = fixture("tiny/llama-f32");
    for width in [304, 384] {
        padded(&original, &folder.0.join(width.to_string()), width);
    }
    let text = format!(
        "[[models]]\nname = \"narrow\"\npath = \"{0}/304\"\nthreads = 1\n[[models]]\nname = \"wide\"\npath = \"{0}/384\"\n\
         threads = 1\n[router]\nname = \"both\"\nalgorithm = \"bernoulli\"\nparams = {{ p = 0.5 }}\n",
        folder.0.display()
    );
    let (pair, alone) = (folder.launch(&text), serving("unpadded", &original));
    for temperature in [0.0, 1.0] {
        let ask = |server: &Server, model: &str| {
            let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": true, "seed": 4,
                "temperature": temperature});
            let said = post(server.address, TEXT, &body).said();
            (said.text.clone(), said.completion_tokens())
        };
        let expected = ask(&alone, "m");
        assert_eq!(expected.1, 60);
        for model in ["narrow", "wide", "both"] {
            assert_eq!(ask(&pair, model), expected, "{model} at temperature {temperature}");
        }
    }
    let refused = post(pair.address, TEXT, &json!({"model": "wide", "prompt": [302]}));
    assert_eq!(refused.status, 400, "a padded id is no prompt: {}", refused.text);
    pair.stop();
    alone.stop();
}

/// A copy of a tied model with another number of rows; those beyond the 300 tokens are ±1000 times a real one.
fn padded(original: &Path, folder: &Path, width: usize) {
    use safetensors::tensor::{SafeTensors, TensorView, serialize_to_file};
    copy_model(original, folder);
    let bytes = std::fs::read(original.join("model.safetensors")).expect("the model is there");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let name = "model.embed_tokens.weight";
    let table = tensors.tensor(name).expect("the embedding");
    let cols = table.shape()[1];
    let row = |index: usize| &table.data()[index * cols * 4..(index + 1) * cols * 4];
    let mut rows: Vec<u8> = (0..300).flat_map(row).copied().collect();
    for index in 300..width {
        let scale = if index % 2 == 0 { 1000.0 } else { -1000.0 };
        let (values, _) = row(5).as_chunks::<4>();
        rows.extend(values.iter().flat_map(|value| (f32::from_le_bytes(*value) * scale).to_le_bytes()));
    }
    let table = TensorView::new(table.dtype(), vec![width, cols], &rows).expect("the right number of bytes");
    let all =
        tensors.tensors().into_iter().map(|(key, view)| if key == name { (key, table.clone()) } else { (key, view) });
    serialize_to_file(all, None, &folder.join("model.safetensors")).expect("the target folder can be written");
    let config = std::fs::read_to_string(original.join("config.json")).expect("a configuration");
    let config = config.replace("\"vocab_size\": 320", &format!("\"vocab_size\": {width}"));
    assert!(config.contains(&format!("\"vocab_size\": {width}")), "the original has 320 rows");
    std::fs::write(folder.join("config.json"), config).expect("the target folder can be written");
}

#[actix_rt::test]
async fn kind_22_streams_that_are_cut_are_counted() {
    let server = Server::start(Setup { step: Duration::from_millis(1), ..Setup::parrots() });
    for _ in 0..50 {
        let mut connection = Connection::open(server.address);
        let body = wish("pair", "on and on ".repeat(90), json!({"stream": true}));
        connection.send(&request("POST", TEXT, &body.to_string()));
        connection.read_until("data: {");
    }
    server.idle_within(Duration::from_secs(5), "after 50 cuts").await;
    let ended =
        |reason: &str| format!("vllm:request_success_total{{finished_reason=\"{reason}\",model_name=\"pair\"}}");
    assert_eq!(server.metric(&ended("abort")).await, 50.0);
    assert_eq!(server.metric(&ended("stop")).await + server.metric(&ended("length")).await, 0.0);
    for gauge in ["tokenrouter:live_requests", "vllm:num_requests_running{engine=\"0\",model_name=\"small\"}"] {
        assert!(get(server.address, "/metrics").text.contains(&format!("\n{gauge} 0\n")), "{gauge}");
    }
    server.stop();
}

/// A running request advances at least once in four steps, whatever prompts come.
#[test]
fn kind_25_long_prompts_do_not_starve_a_running_request() {
    let server = Server::start(Setup { step: Duration::from_millis(1), ..Setup::parrots() });
    let address = server.address;
    let said = "z".repeat(800);
    let mut long = Connection::open(address);
    long.send(&request("POST", TEXT, &wish("small", &said, json!({"stream": true})).to_string()));
    long.read_until("data: {");
    let prompts: usize = std::thread::scope(|scope| {
        let feeders: Vec<_> = (0..3)
            .map(|user: usize| {
                scope.spawn(move || {
                    for round in 0..8 {
                        let prompt = format!("{user} {round} ").repeat(400);
                        let body = wish("small", &prompt[..1500], json!({"max_tokens": 1}));
                        assert_eq!(post(address, TEXT, &body).said().finish, "length");
                    }
                    8
                })
            })
            .collect();
        feeders.into_iter().map(|feeder| feeder.join().expect("every prompt is answered")).sum()
    });
    assert_eq!(prompts, 24);
    assert!(long.rest_of_stream().contains("\"finish_reason\":\"stop\""));
    let steps = server.steps(0);
    let id = steps[0][0];
    let took_part: Vec<usize> = (0..steps.len()).filter(|&step| steps[step].contains(&id)).collect();
    let shared = took_part.iter().filter(|&&step| steps[step].len() > 1).count();
    assert!(shared > 100, "only {shared} of its steps had company");
    let longest = took_part.windows(2).map(|pair| pair[1] - pair[0]).max();
    assert!(longest.is_some_and(|gap| gap <= 4), "{longest:?} steps without the running request");
    server.stop();
}

/// Batches of four: one, three and five users all end, and none of them by the time-out of a minute.
#[actix_rt::test]
async fn kind_26_batches_that_cannot_fill_are_sent() {
    let server = Server::start(Setup { thresholds: Some(vec![4, 4]), ..Setup::parrots() });
    let address = server.address;
    for users in [1, 3, 5] {
        std::thread::scope(|scope| {
            for user in 0..users {
                scope.spawn(move || {
                    let said = format!("user {user} of {users}");
                    assert_eq!(post(address, TEXT, &wish("pair", &said, json!({}))).said().text, said);
                });
            }
        });
    }
    for model in ["small", "large"] {
        let series = format!("tokenrouter:batch_flush_total{{model_name=\"{model}\",reason=\"timeout\"}}");
        assert_eq!(server.metric(&series).await, 0.0, "{model}");
    }
    server.stop();
}

/// One row a step: requests for both models take turns and all of them move.
#[test]
fn kind_27_requests_for_two_models_do_not_evict_each_other() {
    let limits = ExecutorLimits { rows_max: 1, ..Setup::default().limits };
    let server = Server::start(Setup { limits, step: Duration::from_millis(1), ..Setup::parrots() });
    let said = "long ".repeat(120);
    let mut long = Connection::open(server.address);
    long.send(&request("POST", TEXT, &wish("small", &said, json!({"stream": true})).to_string()));
    long.read_until("data: {");
    for round in 0..20 {
        for model in ["large", "small"] {
            let short = format!("{round} of {model}");
            assert_eq!(post(server.address, TEXT, &wish(model, &short, json!({}))).said().text, short);
        }
    }
    assert!(long.rest_of_stream().contains("\"finish_reason\":\"stop\""));
    server.stop();
}

/// Every row has a test here or names one that exists.
#[test]
fn every_kind_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let own = include_str!("public_faults.rs");
    for row in 1..=28 {
        let here = own.contains(&format!("\nfn kind_{row:02}_")) || own.contains(&format!("\nasync fn kind_{row:02}_"));
        let elsewhere = HELD_ELSEWHERE.iter().find(|&&(held, ..)| held == row);
        assert!(here != elsewhere.is_some(), "row {row}: one test, here or elsewhere");
        for (file, test) in elsewhere.iter().flat_map(|(_, _, tests)| tests.iter()) {
            let source = std::fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert!(source.contains(&format!("fn {test}(")), "row {row}: {file} has no test {test}");
        }
    }
}
