//! `token_trigger` by text, from the launch file to the answer: the text becomes the token it is, and one that is not a
//! token is an error at its key. Owner: the launcher.

mod support;

use serde_json::{Value, json};
use support::{Folder, Serving, program, root, run};

const PROMPT: &str = "The library has 82 visitors on Friday, 14 on Saturday and 646 on Sunday. \
                      How many visitors come in all?";

/// A launch file for the demo pair with these triggers, written as in TOML.
fn launch(folder: &Folder, triggers: &str) -> String {
    let model = |name: &str| {
        let path = root().join("config/demo").join(name);
        format!("[[models]]\nname = {name:?}\npath = {path:?}\nthreads = 1\nkv_memory = \"8 MiB\"\n")
    };
    let router = format!(
        "[router]\nname = \"pair\"\nalgorithm = \"token_trigger\"\nmodels = [\"small\", \"large\"]\n\
         [router.params]\nspan = 3\n{triggers}\n"
    );
    folder.write("launch.toml", &format!("{router}{}{}", model("small"), model("large"))).display().to_string()
}

/// Ids and makers of the tokens of an answer.
fn generated(folder: &Folder, triggers: &str) -> Vec<(u64, String)> {
    let config = launch(folder, triggers);
    let fixed = ["generate", PROMPT, "--json", "-n", "40", "--temperature", "0", "--config", &config];
    let (code, out, err) = run(folder, &fixed);
    assert_eq!(code, 0, "{err}");
    let answer: Value = serde_json::from_str(&out).expect("one JSON object");
    let ids: Vec<u64> = serde_json::from_value(answer["token_ids"].clone()).expect("ids");
    let makers: Vec<String> = serde_json::from_value(answer["token_models"].clone()).expect("names");
    ids.into_iter().zip(makers).collect()
}

/// The id of a text of the demo vocabulary, whose byte-level pieces write a space as U+0120.
fn id_of(text: &str) -> u64 {
    let path = root().join("config/demo/small/tokenizer.json");
    let tokenizer: Value = serde_json::from_slice(&std::fs::read(path).expect("a tokenizer")).expect("JSON");
    tokenizer["model"]["vocab"][text.replace(' ', "\u{120}")].as_u64().unwrap_or_else(|| panic!("{text:?} is no token"))
}

#[test]
fn a_text_triggers_as_its_token_does() {
    let folder = Folder::new();
    let told = generated(&folder, "texts = [\" +\", \" =\"]");
    let triggers = [id_of(" +"), id_of(" =")];
    assert_eq!(told, generated(&folder, &format!("tokens = {triggers:?}")));
    assert_eq!(told, generated(&folder, &format!("tokens = [{}]\ntexts = [\" =\"]", triggers[0])));
    let mut left = 0;
    for (id, maker) in &told {
        let expected = if left > 0 { "large" } else { "small" };
        assert_eq!(maker, expected, "{told:?}");
        left = if left > 0 { left - 1 } else { 3 * usize::from(triggers.contains(id)) };
    }
    let large = told.iter().filter(|(_, maker)| maker == "large").count();
    assert!(large >= 6 && large < told.len() / 2, "{large} of {told:?}");
}

#[test]
fn a_text_that_is_not_one_token_is_an_error_at_its_key() {
    let folder = Folder::new();
    for (triggers, words) in [
        ("texts = [\" =\", \"+ 1\"]", ["router.params.texts: \"+ 1\" is not one token but", "or list ids as tokens"]),
        ("texts = [\"\"]", ["router.params.texts: \"\" is not one token but 0 ([])", "give a text that is one token"]),
        ("texts = []", ["tokens and texts are missing or empty", "list the ids or the texts"]),
        ("texts = \"wait\"", ["router.params", "expected a sequence"]),
    ] {
        let config = launch(&folder, triggers);
        for verb in ["check", "serve"] {
            let (code, _, err) = run(&folder, &["--config", &config, verb]);
            assert_eq!(code, 2, "{err}");
            assert!(words.iter().all(|word| err.contains(word)) && err.contains("launch.toml:"), "{err}");
            assert_eq!(err.lines().count(), 1, "{err}");
        }
    }
}

#[test]
fn texts_are_read_again_by_a_running_server() {
    let folder = Folder::new();
    let config = launch(&folder, "texts = [\" +\"]");
    let server = Serving::start(program(&folder, &["--config", &config]));
    let ask = |routing: Value| {
        let body = json!({ "model": "pair", "prompt": format!("Question: {PROMPT}\nAnswer:"), "max_tokens": 30, "ignore_eos": true, "temperature": 0,
            "return_token_models": true, "routing": routing });
        let (status, answer) = server.ask("POST", "/v1/completions", &body.to_string());
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        match status {
            200 => Ok(answer["choices"][0]["token_models"].as_array().expect("names").clone()),
            _ => Err((status, answer["error"]["message"].as_str().unwrap_or_default().to_owned())),
        }
    };
    let first = ask(json!({})).expect("an answer");
    let longer = ask(json!({ "span": 100 })).expect("an answer");
    let from = longer.iter().position(|maker| maker == "large").expect("a trigger");
    assert!(longer[from..].iter().all(|maker| maker == "large"), "{longer:?}");
    assert_eq!(first[..from + 3], longer[..from + 3]);
    for wrong in [json!({ "span": 0 }), json!({ "texts": ["+ 1"] }), json!({ "tokens": [1] })] {
        assert_eq!(ask(wrong.clone()).map_err(|refusal| refusal.0), Err(400), "{wrong}");
    }
    let reload = || server.ask("POST", "/admin/reload", "");
    launch(&folder, "texts = [\"+ 1\"]");
    let (status, answer) = reload();
    assert!(status == 400 && answer.contains("router.params.texts"), "{answer}");
    assert_eq!(ask(json!({})), Ok(first.clone()), "the triggers are as before");
    launch(&folder, "texts = [\"Never written \"]");
    assert_eq!(reload().0, 400, "not a token either");
    launch(&folder, "texts = [\"<|endoftext|>\"]");
    assert_eq!(reload().0, 200, "a control token is a token");
    assert!(ask(json!({})).expect("an answer").iter().all(|maker| maker == "small"), "nothing calls");
    let (_, routers) = server.ask("GET", "/v1/routers", "");
    let routers: Value = serde_json::from_str(&routers).expect("JSON");
    let card = routers["data"].as_array().and_then(|cards| cards.iter().find(|card| card["active"] == true));
    let params = card.expect("an active algorithm")["params"].as_array().expect("parameters");
    assert!(params.iter().any(|param| param["name"] == "texts"), "{params:?}");
}
