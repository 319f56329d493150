//! The hub client against a hub of our own on the loopback interface.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use tokenrouter_config::Source;

static FOLDERS: AtomicU32 = AtomicU32::new(0);

/// A folder of its own for each test, removed afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tokenrouter-hub-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Files of the hub by path, and the requests it saw.
struct FakeHub {
    endpoint: String,
    seen: Arc<Mutex<Vec<String>>>,
}

impl FakeHub {
    /// Serves until the test process ends; every connection carries one request.
    fn start(files: &'static [(&'static str, &'static str)]) -> FakeHub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, files, &log);
            }
        });
        FakeHub { endpoint, seen }
    }

    fn hub(&self, folder: &Folder) -> Hub {
        let settings = HubSettings { endpoint: self.endpoint.clone(), cache: folder.0.join("hub"), token: None };
        Hub::new(settings).expect("a client")
    }
}

fn answer(mut stream: TcpStream, files: &[(&str, &str)], log: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut request = String::new();
    reader.read_line(&mut request).expect("a request line");
    let mut range = None;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a header");
        if let Some(value) = line.to_lowercase().strip_prefix("range: bytes=") {
            range = value.trim().split_once('-').map(|(from, to)| (from.to_owned(), to.to_owned()));
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let path = request.split_whitespace().nth(1).unwrap_or_default().to_owned();
    log.lock().expect("the log").push(path.clone());
    let head = match files.iter().find(|(name, _)| *name == path) {
        None => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned(),
        Some((_, "GATED")) => "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned(),
        Some((_, body)) => {
            let (from, to) = range.unwrap_or_default();
            let from: usize = from.parse().unwrap_or(0);
            let to: usize = to.parse().map_or(body.len(), |to: usize| (to + 1).min(body.len()));
            let part = &body[from.min(to)..to];
            format!(
                "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\nETag: \"{}\"\r\n\
                 X-Repo-Commit: abc123\r\nConnection: close\r\n\r\n{part}",
                part.len(),
                to.saturating_sub(1),
                body.len(),
                path.replace('/', "-"),
            )
        }
    };
    let _ = stream.write_all(head.as_bytes());
}

fn source(text: &str) -> HubSource {
    match Source::parse(text, Path::new("")) {
        Ok(Source::Hub(hub)) => hub,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn a_sharded_model_arrives_whole_and_is_then_found_without_the_network() {
    let fake = FakeHub::start(&[
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
    ]);
    let folder = Folder::new();
    let hub = fake.hub(&folder);
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
    let requests = fake.seen.lock().expect("the log").len();
    assert_eq!(hub.cached(&wanted), Some(path.clone()));
    assert_eq!(hub.fetch(&wanted, &Progress::hidden()).expect("the cache"), path);
    assert_eq!(fake.seen.lock().expect("the log").len(), requests, "the second time nothing is asked");
    std::fs::remove_file(path.join("model-00002-of-00002.safetensors")).expect("removed");
    assert_eq!(hub.cached(&wanted), None, "a missing shard is noticed");
}

#[test]
fn one_gguf_file_of_a_revision() {
    let fake = FakeHub::start(&[("/o/quant/resolve/v2/q4.gguf", "GGUF bytes")]);
    let folder = Folder::new();
    let path = fake.hub(&folder).fetch(&source("hf:o/quant@v2:q4.gguf"), &Progress::hidden()).expect("a download");
    assert_eq!(std::fs::read_to_string(path).expect("the file"), "GGUF bytes");
}

#[test]
fn faults_name_the_repository_the_file_and_the_remedy() {
    let fake = FakeHub::start(&[
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
    ]);
    let folder = Folder::new();
    let hub = fake.hub(&folder);
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
        HubSettings { endpoint: format!("http://127.0.0.1:{port}"), cache: folder.0.join("hub"), token: None };
    let hub = Hub::new(settings).expect("a client");
    let error = hub.fetch(&source("hf:o/n"), &Progress::hidden()).expect_err("no hub").to_string();
    for part in ["hf:o/n", "cannot download", "HF_ENDPOINT", "give the folder as path"] {
        assert!(error.contains(part), "`{error}` lacks `{part}`");
    }
}
