//! What tests of the whole program share: folders that clean up, a hub on the loopback interface, the program itself.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Log lines that are kept for the test; later ones are lost.
const LOG_LINES_MAX: usize = 100_000;

/// How long a log line is waited for.
const LOG_WAIT: Duration = Duration::from_secs(60);

static FOLDERS: AtomicU32 = AtomicU32::new(0);

/// A folder of its own for each test, removed afterwards.
pub struct Folder {
    /// Where it is.
    pub path: PathBuf,
}

impl Folder {
    /// A new one.
    pub fn new() -> Folder {
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tokenrouter-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Folder { path }
    }

    /// Writes a file in it.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path.join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(&path, text).expect("written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// The root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// Files of a hub by request path.
pub type Files = HashMap<String, Vec<u8>>;

/// Texts as files of a hub; the text `GATED` is answered with 401.
pub fn files(texts: &[(&str, &str)]) -> Files {
    texts.iter().map(|(path, text)| ((*path).to_owned(), text.as_bytes().to_owned())).collect()
}

/// A hub on the loopback interface; serves until the test process ends.
pub struct FakeHub {
    /// Its address.
    pub endpoint: String,
    seen: Arc<AtomicUsize>,
}

impl FakeHub {
    /// Starts it; every connection carries one request.
    pub fn start(files: Files) -> FakeHub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let seen = Arc::new(AtomicUsize::new(0));
        let counter = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counter.fetch_add(1, Ordering::SeqCst);
                answer(stream, &files);
            }
        });
        FakeHub { endpoint, seen }
    }

    /// Requests so far.
    pub fn requests(&self) -> usize {
        self.seen.load(Ordering::SeqCst)
    }
}

fn answer(mut stream: TcpStream, files: &Files) {
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
    let path = request.split_whitespace().nth(1).unwrap_or_default();
    let empty =
        |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").into_bytes();
    let response = match files.get(path) {
        None => empty("404 Not Found"),
        Some(body) if body == b"GATED" => empty("401 Unauthorized"),
        Some(body) => {
            let (from, to) = range.unwrap_or_default();
            let from: usize = from.parse().unwrap_or(0);
            let to: usize = to.parse().map_or(body.len(), |to: usize| (to + 1).min(body.len()));
            let part = &body[from.min(to)..to];
            let head = format!(
                "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\nETag: \"{}\"\r\n\
                 X-Repo-Commit: abc123\r\nConnection: close\r\n\r\n",
                part.len(),
                to.saturating_sub(1),
                body.len(),
                path.replace('/', "-"),
            );
            [head.as_bytes(), part].concat()
        }
    };
    // A client that went away is its own affair.
    let _ = stream.write_all(&response);
}

/// The program with a clean environment and a cache of its own.
pub fn program(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.args(arguments).current_dir(&folder.path).stdin(Stdio::null());
    command.env("XDG_CACHE_HOME", folder.path.join("cache"));
    for variable in [
        "RUST_LOG",
        "HF_HOME",
        "HF_ENDPOINT",
        "HF_TOKEN",
        "NO_COLOR",
        "TOKENROUTER_API_KEYS",
        "TOKENROUTER_ADMIN_KEY",
        "TOKENROUTER_FAULTS",
    ] {
        command.env_remove(variable);
    }
    command
}

/// Runs the program to its end: exit code, stdout, stderr.
pub fn run(folder: &Folder, arguments: &[&str]) -> (i32, String, String) {
    finish(program(folder, arguments).output().expect("the program starts"))
}

/// What a finished program said.
pub fn finish(output: Output) -> (i32, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    (output.status.code().expect("an exit code"), text(output.stdout), text(output.stderr))
}

/// A server that was started as a program; killed if it is still there when dropped.
pub struct Serving {
    child: Child,
    /// `127.0.0.1:PORT`
    pub address: String,
    /// The lines it printed until it was ready.
    pub banner: String,
    log: Mutex<Receiver<String>>,
}

impl Serving {
    /// Starts `serve --port 0` with these options and waits until it says its address.
    pub fn start(mut command: Command) -> Serving {
        command.args(["serve", "--port", "0"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut banner = String::new();
        let address = loop {
            let mut line = String::new();
            if lines.read_line(&mut line).expect("stdout is UTF-8") == 0 {
                let mut errors = String::new();
                let stderr = child.stderr.as_mut().expect("stderr is piped");
                stderr.read_to_string(&mut errors).expect("stderr is UTF-8");
                panic!("the server ended before it was ready: {banner}{errors}");
            }
            banner.push_str(&line);
            let url = line.strip_prefix("serving").map(str::trim);
            let url = url.and_then(|url| url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")));
            if let Some(url) = url {
                break url.trim().trim_end_matches("/v1").to_owned();
            }
        };
        // Its log lines are read whether anybody wants them or not, so that they do not fill a pipe.
        let (line, log) = sync_channel(LOG_LINES_MAX);
        let stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
        std::thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .all(|text| !matches!(line.try_send(text), Err(TrySendError::Disconnected(_))))
        });
        Serving { child, address, banner, log: Mutex::new(log) }
    }

    /// The next log line with these words; waits for it.
    pub fn logged(&self, words: &str) -> String {
        let log = self.log.lock().expect("no test panics while it waits");
        loop {
            let line = log.recv_timeout(LOG_WAIT);
            let line = line.unwrap_or_else(|error| panic!("no log line with {words:?}: {error}"));
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Sends it a signal by its name, such as `TERM`.
    pub fn signal(&self, name: &str) {
        // The shell's own kill: the program of that name is not on every machine.
        let line = format!("kill -{name} {}", self.child.id());
        let asked = Command::new("sh").args(["-c", &line]).status().expect("a shell runs");
        assert!(asked.success());
    }

    /// Sends a request and returns status and body.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("the server listens");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.address,
            body.len(),
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("a response");
        let (head, body) = response.split_once("\r\n\r\n").expect("head and body");
        let status = head.split_whitespace().nth(1).and_then(|code| code.parse().ok()).expect("a status");
        (status, body.to_owned())
    }

    /// Asks it to stop and returns its exit code.
    pub fn stop(self) -> i32 {
        self.signal("TERM");
        self.wait()
    }

    /// Asks it to stop and returns the log lines that nobody has read.
    pub fn stop_and_read(mut self) -> String {
        self.signal("TERM");
        self.child.wait().expect("it ends");
        let log = self.log.lock().expect("no test panics while it waits");
        log.iter().map(|line| line + "\n").collect()
    }

    /// Waits until it ends and returns its exit code.
    pub fn wait(mut self) -> i32 {
        self.child.wait().expect("it ends").code().expect("an exit code")
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
