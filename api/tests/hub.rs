//! The hub client against a hub of our own on the loopback interface.

mod support;

use std::net::TcpListener;
use std::path::Path;
use support::{FakeHub, Folder, files};
use tokenrouter::hub::{Hub, HubSettings};
use tokenrouter::progress::Progress;
use tokenrouter_config::{HubSource, Source};

fn hub(fake: &FakeHub, folder: &Folder) -> Hub {
    let settings = HubSettings { endpoint: fake.endpoint.clone(), cache: folder.path.join("hub"), token: None };
    Hub::new(settings).expect("a client")
}

fn source(text: &str) -> HubSource {
    match Source::parse(text, Path::new("")) {
        Ok(Source::Hub(hub)) => hub,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn a_sharded_model_arrives_whole_and_is_then_found_without_the_network() {
    let fake = FakeHub::start(files(&[
        (
            "/api/models/o/sharded/revision/main",
            r#"{"sha":"abc123","siblings":[{"rfilename":"config.json"},{"rfilename":"tokenizer.json"},{"rfilename":"generation_config.json"},
                {"rfilename":"model.safetensors.index.json"},{"rfilename":"model-00001-of-00002.safetensors"},{"rfilename":"pytorch_model.bin"},
                {"rfilename":"model-00002-of-00002.safetensors"}]}"#,
        ),
        ("/o/sharded/resolve/main/config.json", "{}"),
        ("/o/sharded/resolve/main/tokenizer.json", "{\"t\":1}"),
        ("/o/sharded/resolve/main/generation_config.json", "{\"g\":1}"),
        (
            "/o/sharded/resolve/main/model.safetensors.index.json",
            r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors","c":"model-00001-of-00002.safetensors"}}"#,
        ),
        ("/o/sharded/resolve/main/model-00001-of-00002.safetensors", "first shard"),
        ("/o/sharded/resolve/main/model-00002-of-00002.safetensors", "second shard"),
    ]));
    let folder = Folder::new();
    let hub = hub(&fake, &folder);
    let wanted = source("hf:o/sharded");
    assert_eq!(hub.cached(&wanted), None);
    let path = hub.fetch(&wanted, &Progress::hidden()).expect("a download");
    for (name, text) in [
        ("config.json", "{}"),
        ("generation_config.json", "{\"g\":1}"),
        ("model-00001-of-00002.safetensors", "first shard"),
        ("model-00002-of-00002.safetensors", "second shard"),
    ] {
        assert_eq!(std::fs::read_to_string(path.join(name)).expect(name), text);
    }
    assert!(!path.join("pytorch_model.bin").exists());
    let requests = fake.requests();
    assert_eq!(hub.cached(&wanted), Some(path.clone()));
    assert_eq!(hub.fetch(&wanted, &Progress::hidden()).expect("the cache"), path);
    assert_eq!(fake.requests(), requests, "the second time nothing is asked");
    std::fs::remove_file(path.join("model-00002-of-00002.safetensors")).expect("removed");
    assert_eq!(hub.cached(&wanted), None, "a missing shard is noticed");
}

#[test]
fn one_gguf_file_of_a_revision() {
    let fake = FakeHub::start(files(&[("/o/quant/resolve/v2/q4.gguf", "GGUF bytes")]));
    let folder = Folder::new();
    let path = hub(&fake, &folder).fetch(&source("hf:o/quant@v2:q4.gguf"), &Progress::hidden()).expect("a download");
    assert_eq!(std::fs::read_to_string(path).expect("the file"), "GGUF bytes");
}

#[test]
fn faults_name_the_repository_the_file_and_the_remedy() {
    let fake = FakeHub::start(files(&[
        ("/api/models/o/gated/revision/main", "GATED"),
        (
            "/api/models/o/gguf/revision/main",
            r#"{"sha":"abc123","siblings":[{"rfilename":"README.md"},{"rfilename":"a-q4.gguf"},{"rfilename":"a-q8.gguf"}]}"#,
        ),
        ("/api/models/o/empty/revision/main", r#"{"sha":"abc123","siblings":[{"rfilename":"README.md"}]}"#),
        (
            "/api/models/o/torn/revision/main",
            r#"{"sha":"abc123","siblings":[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]}"#,
        ),
        ("/o/torn/resolve/main/config.json", "{}"),
        (
            "/api/models/o/escape/revision/main",
            r#"{"sha":"abc123","siblings":[{"rfilename":"model.safetensors.index.json"}]}"#,
        ),
        ("/o/escape/resolve/main/config.json", "{}"),
        ("/o/escape/resolve/main/tokenizer.json", "{ }"),
        ("/o/escape/resolve/main/model.safetensors.index.json", r#"{"weight_map":{"a":"../../x.safetensors"}}"#),
    ]));
    let folder = Folder::new();
    let hub = hub(&fake, &folder);
    for (name, parts) in [
        ("hf:o/absent", ["hf:o/absent", "does not have the repository", "check the name"]),
        ("hf:o/gated", ["hf:o/gated", "401", "set HF_TOKEN"]),
        ("hf:o/gguf", ["no model.safetensors but 2 GGUF files", "name one of them", "hf:o/gguf:a-q4.gguf"]),
        ("hf:o/empty", ["hf:o/empty", "neither model.safetensors nor a GGUF file", "name a repository"]),
        ("hf:o/torn", ["hf:o/torn", "does not have tokenizer.json", "404"]),
        ("hf:o/escape", ["hf:o/escape", "`../../x.safetensors`", "not a safetensors file beside it"]),
        ("hf:o/quant:absent.gguf", ["hf:o/quant:absent.gguf", "does not have absent.gguf", "404"]),
    ] {
        let error = hub.fetch(&source(name), &Progress::hidden()).expect_err(name).to_string();
        for part in parts {
            assert!(error.contains(part), "{name}: `{error}` lacks `{part}`");
        }
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn a_hub_that_is_not_there() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    let folder = Folder::new();
    let settings =
        HubSettings { endpoint: format!("http://127.0.0.1:{port}"), cache: folder.path.join("hub"), token: None };
    let hub = Hub::new(settings).expect("a client");
    let error = hub.fetch(&source("hf:o/n"), &Progress::hidden()).expect_err("no hub").to_string();
    for part in ["hf:o/n", "cannot download", "HF_ENDPOINT", "give the folder as path"] {
        assert!(error.contains(part), "`{error}` lacks `{part}`");
    }
}
